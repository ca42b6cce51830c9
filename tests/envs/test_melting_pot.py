"""Melting Pot's substrates: rows equal what the substrate told its players, in the worker itself or in a bare loop."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import random
import sys
import textwrap
import types
from typing import Any

import numpy as np
import pytest
from bare_loops import substrate_of_seed

import muster
import programs
from muster.envs.melting_pot import load_substrates
from muster.errors import EnvError, RecipeError

pytest.importorskip("dmlab2d", reason="python -m muster.envs.install_meltingpot")
pytest.importorskip("ml_collections", reason="python -m muster.envs.install_meltingpot")
# Melting Pot's dependencies warn while they are imported.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

SMALL = "prisoners_dilemma_in_the_matrix__repeated"
SUBSTRATES = [
    "chicken_in_the_matrix__repeated",
    "clean_up",
    "coins",
    "collaborative_cooking__ring",
    "commons_harvest__open",
    "externality_mushrooms__dense",
    "gift_refinements",
    "paintball__king_of_the_hill",
    "predator_prey__open",
    "territory__rooms",
]


class Tap:
    """Sits on the substrate, in the worker, and keeps a hash of what each player was told last."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self.hashes: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def reset(self) -> Any:
        return self._heard(self._env.reset())

    def step(self, actions: Any) -> Any:
        return self._heard(self._env.step(actions))

    def _heard(self, timestep: Any) -> Any:
        self.hashes = [hashed(obs) for obs in timestep.observation]
        return timestep


def hashed(obs: dict[str, Any]) -> str:
    parts = (part for key in sorted(obs) for part in (key.encode(), np.ascontiguousarray(obs[key]).tobytes()))
    return hashlib.sha256(b"|".join(parts)).hexdigest()


def row(obs: dict[str, Any], i: int, a: int) -> dict[str, Any]:
    """What player `a` of env `i` observed, shared observations included."""
    own = {key: one[i, a] for key, one in obs["player"].items()}
    return own | {key: one[i] for key, one in obs["shared"].items()}


def assert_rows_match_the_tap(substrate: str, steps: int, **options: Any) -> None:
    with muster.make_vec(f"meltingpot/{substrate}", 2, wrappers=[Tap], num_workers=2, **options) as envs:
        envs.action_space.seed(0)
        obs, _ = envs.reset(seed=0)
        for _ in range(steps):
            assert list(obs["player"]) == sorted(obs["player"])
            players = range(len(envs.groups["player"]))
            told = tuple([hashed(row(obs, i, a)) for a in players] for i in range(2))
            assert told == envs.get_attr("hashes")
            obs, *_ = envs.step(envs.action_space.sample())


def test_rows_are_what_the_substrate_told_in_workers_of_other_hash_seeds() -> None:
    assert_rows_match_the_tap(SMALL, 10, context="spawn")


@pytest.mark.slow
@pytest.mark.parametrize("substrate", SUBSTRATES)
def test_rows_of_ten_substrates_are_what_they_told(substrate: str) -> None:
    assert_rows_match_the_tap(substrate, 30)


def bare(substrate: str, seed: int) -> Any:
    return substrate_of_seed(functools.partial(build, substrate), seed)


def bare_loop(build_bare: Any, seed: int, first: list[str]) -> tuple[Any, Any]:
    """A bare loop whose episode starts as told: who spawns where is not for any seed to decide, even without Muster."""
    for _ in range(20):
        env = build_bare(seed)
        timestep = env.reset()
        if [hashed(obs) for obs in timestep.observation] == first:
            return env, timestep
        env.close()
    raise AssertionError(f"20 bare episodes of seed {seed} all start otherwise")


@pytest.mark.slow
@pytest.mark.parametrize("substrate", [SMALL, "coins"])
def test_episodes_equal_a_bare_loop_of_the_same_draws(substrate: str) -> None:
    with muster.make_vec(functools.partial(build_with_seed, substrate), 2) as envs:
        assert_replays(envs, None, functools.partial(build_with_seed, substrate), 100)


def test_episodes_of_a_seed_equal_a_bare_loop_of_that_seed() -> None:
    with muster.make_vec(f"meltingpot/{SMALL}", 2) as envs:
        assert_replays(envs, 11, functools.partial(bare, SMALL), 30)


def build_with_seed(substrate: str, seed: int | None = None) -> Any:
    """coins draws its map and colours from `random` while it is built. In a worker, env i takes seed 11 + i."""
    info = muster.get_worker_info()
    random.seed(11 + info.env_index if info is not None and info.env_index is not None else seed)
    return build(substrate)


def assert_replays(envs: Any, seed: int | None, build_bare: Any, steps: int) -> None:
    """Two envs of two players, against bare loops of seeds 11 and 12."""
    envs.action_space.seed(0)
    obs, _ = envs.reset(seed=seed)
    firsts = [[hashed(row(obs, i, a)) for a in range(2)] for i in range(2)]
    loops, timesteps = zip(*[bare_loop(build_bare, 11 + i, firsts[i]) for i in range(2)], strict=True)
    for _ in range(steps):
        for i, timestep in enumerate(timesteps):
            for a, told in enumerate(timestep.observation):
                assert hashed(told) == hashed(row(obs, i, a))
        actions = envs.action_space.sample()
        timesteps = [loop.step(actions["player"][i].tolist()) for i, loop in enumerate(loops)]
        obs, rewards, *_ = envs.step(actions)
        for i, timestep in enumerate(timesteps):
            assert rewards["player"][i].tolist() == [float(one) for one in timestep.reward]
    for loop in loops:
        loop.close()


def test_a_slow_reset_of_one_env_does_not_stop_the_others() -> None:
    with muster.make_vec(f"meltingpot/{SMALL}", 2, num_workers=2) as envs:
        envs.action_space.seed(0)
        envs.reset(seed=0)
        envs.reset_async(seed=1, options={"reset_mask": np.array([True, False])})  # builds the substrate anew
        actions = {"player": envs.action_space.sample()["player"][:1]}
        for _ in range(3):
            envs.send(actions, env_ids=[1])
            assert envs.recv(min_envs=1).env_ids.tolist() == [1]
        assert envs.recv().env_ids.tolist() == [0]


def test_roles_and_players_come_from_env_kwargs() -> None:
    with muster.make_vec("meltingpot/commons_harvest__open", env_kwargs={"num_players": 3}, backend="serial") as envs:
        assert envs.groups == {"player": ["player_0", "player_1", "player_2"]}
        obs, infos = envs.reset(seed=0)
        assert obs["player"]["RGB"].shape[:2] == (1, 3)
        assert infos["acting"]["player"].all()
        assert envs.render()[0].shape == obs["shared"]["WORLD.RGB"].shape[1:]


def test_substrates_that_do_not_exist_are_refused_with_those_that_do() -> None:
    with pytest.raises(RecipeError, match=r"no substrate 'commons'. It has: .*commons_harvest__open"):
        muster.make_vec("meltingpot/commons")


def test_a_substrate_that_exists_already_is_refused_by_name() -> None:
    env = bare(SMALL, 1)
    with pytest.raises(RecipeError, match="def make_env"):
        muster.make_vec(env)
    with pytest.raises(RecipeError, match=r"holds an env that exists already: .*Substrate"):
        muster.make_vec(lambda: env)
    env.close()


def build(name: str) -> Any:
    substrates = load_substrates()
    return substrates.build(name, roles=substrates.get_config(name).default_player_roles)


def test_a_factory_gives_the_same_rows_as_the_id() -> None:
    rows = []
    for how in (functools.partial(build, SMALL), f"meltingpot/{SMALL}"):
        with muster.make_vec(how, backend="serial") as envs:
            obs, _ = envs.reset(seed=3)
            rows.append(hashed(obs["shared"]))
    assert rows[0] == rows[1]


def test_importing_substrates_leaves_nothing_behind_that_is_not_real() -> None:
    code = """
        import sys
        from muster.envs.melting_pot import load_substrates
        assert load_substrates() is load_substrates()
        assert "tensorflow" not in sys.modules
        print("chex" in sys.modules and not hasattr(sys.modules["chex"], "__file__"))
    """
    done = programs.run("-c", textwrap.dedent(code), check=True)
    assert done.stdout.strip() == "False"


def test_so_it_does_where_the_import_of_tensorflow_is_blocked() -> None:
    code = """
        import sys
        sys.modules["tensorflow"] = None
        from muster.envs.light_melting_pot import import_without_bots
        import_without_bots()
        from meltingpot import substrate
    """
    programs.run("-c", textwrap.dedent(code), check=True)


def test_factories_may_refer_to_melting_pot_itself() -> None:
    substrate = load_substrates()
    roles = substrate.get_config(SMALL).default_player_roles

    def with_the_callers_module() -> Any:
        return substrate.build(SMALL, roles=roles)

    def with_its_own_import() -> Any:
        from meltingpot import substrate as imported

        return imported.build(SMALL, roles=roles)

    def with_the_import_of_older_code() -> Any:
        from meltingpot.python import substrate as imported

        return imported.build(SMALL, roles=roles)

    def with_a_chex_of_its_own() -> Any:
        sys.modules["chex"] = types.SimpleNamespace(dataclass=dataclasses.dataclass)
        return with_its_own_import()

    partial = functools.partial(substrate.build, SMALL, roles=roles)
    factories = (with_the_callers_module, with_its_own_import, with_the_import_of_older_code, with_a_chex_of_its_own)
    for how in (*factories, partial):
        with muster.make_vec(how, 1) as envs:
            assert envs.groups == {"player": ["player_0", "player_1"]}


def test_an_option_that_the_substrate_does_not_have_is_named() -> None:
    with pytest.raises(EnvError, match="has no option 'num_player'; it has: roles, num_players, action_set, "):
        muster.make_vec(f"meltingpot/{SMALL}", 1, env_kwargs={"num_player": 1})
