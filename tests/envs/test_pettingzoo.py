"""Real PettingZoo and mpe2 envs: every row equals what a bare loop of the same env is told, agent by agent."""

from __future__ import annotations

import functools
import textwrap
from typing import Any

import numpy as np
import pytest
from bare_loops import assert_rows_equal_a_bare_loop, make
from row_checks import sample

import muster
import programs
from muster.envs import resolve_foreign_id
from muster.errors import RecipeError

pytest.importorskip("pettingzoo", reason="pip install 'muster-rl[marl]'")
pytest.importorskip("mpe2", reason="pip install 'muster-rl[marl]'")

# Some of these envs warn while they are imported or made; that is between them and their authors.
pytestmark = pytest.mark.filterwarnings("ignore")

PARALLEL = [
    "pettingzoo.sisl.multiwalker_v9",
    "pettingzoo.sisl.pursuit_v5",
    "pettingzoo.butterfly.cooperative_pong_v6",
    "pettingzoo.butterfly.knights_archers_zombies_v11",
    "pettingzoo.classic.rps_v2",
    "mpe2.collect_treasure_v1",
    "mpe2.simple_adversary_v3",
    "mpe2.simple_crypto_v3",
    "mpe2.simple_formation_v1",
    "mpe2.simple_line_v1",
    "mpe2.simple_push_v3",
    "mpe2.simple_reference_v3",
    "mpe2.simple_speaker_listener_v4",
    "mpe2.simple_spread_v3",
    "mpe2.simple_tag_v3",
    "mpe2.simple_v3",
    "mpe2.simple_world_comm_v3",
]
TURNS = [
    "pettingzoo.sisl.multiwalker_v9",
    "pettingzoo.butterfly.knights_archers_zombies_v11",
    "pettingzoo.classic.chess_v6",
    "pettingzoo.classic.connect_four_v3",
    "pettingzoo.classic.go_v5",
    "pettingzoo.classic.leduc_holdem_v4",
    "pettingzoo.classic.rps_v2",
    "pettingzoo.classic.texas_holdem_no_limit_v6",
    "pettingzoo.classic.texas_holdem_v4",
    "pettingzoo.classic.tictactoe_v3",
    "mpe2.simple_tag_v3",
    "mpe2.simple_world_comm_v3",
]
EVERY = [(module, "parallel_env") for module in PARALLEL] + [(module, "env") for module in TURNS]


@pytest.fixture(autouse=True)
def without_a_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setenv("PYGAME_HIDE_SUPPORT_PROMPT", "1")


@pytest.mark.parametrize(
    ("module", "api"),
    [
        ("pettingzoo.sisl.multiwalker_v9", "parallel_env"),
        ("pettingzoo.butterfly.knights_archers_zombies_v11", "parallel_env"),
        ("pettingzoo.classic.tictactoe_v3", "env"),
        ("pettingzoo.classic.leduc_holdem_v4", "env"),
        ("pettingzoo.classic.rps_v2", "env"),
        ("pettingzoo.butterfly.cooperative_pong_v6", "parallel_env"),
        ("mpe2.simple_speaker_listener_v4", "parallel_env"),
        ("mpe2.simple_world_comm_v3", "parallel_env"),
        ("mpe2.simple_world_comm_v3", "env"),
    ],
)
def test_rows_equal_a_bare_loop(module: str, api: str) -> None:
    assert_rows_equal_a_bare_loop(module, api, 60)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("module", "api"), EVERY)
def test_a_thousand_rows_equal_a_bare_loop(module: str, api: str) -> None:
    assert_rows_equal_a_bare_loop(module, api, 1000)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_rows_of_pistonball_equal_a_bare_loop() -> None:
    assert_rows_equal_a_bare_loop("pettingzoo.butterfly.pistonball_v6", "parallel_env", 1000, num_envs=1, n_pistons=4)


def test_agents_that_die_before_the_others_are_masked() -> None:
    kwargs = {"module": "pettingzoo.sisl.multiwalker_v9", "api": "parallel_env", "terminate_on_fall": False}
    with muster.make_vec(make, 2, env_kwargs={**kwargs, "remove_on_fall": True}) as envs:
        envs.reset(seed=0)
        rng = np.random.default_rng(0)
        for _ in range(250):
            *_, infos = envs.step(sample(envs, None, rng))
            alive = infos["alive"]["walker"]
            if (alive.any(-1) & ~alive.all(-1)).any():
                break
        else:
            pytest.fail("no walker died before the end")
    # Walkers may stay up for hundreds of steps; the time limit ends every episode in time.
    ended = assert_rows_equal_a_bare_loop(**kwargs, steps=130, remove_on_fall=True, max_cycles=60)
    assert ended


def test_hanabi_rows_equal_a_bare_loop_that_is_seeded_at_every_reset() -> None:
    # Its resets without a seed draw one from the operating system.
    pytest.importorskip("pyspiel")
    module = "pettingzoo.classic.hanabi_v5"
    bare = make(module, "env")
    rng = np.random.default_rng(0)
    options = {"env_kwargs": {"module": module, "api": "env"}, "autoreset_mode": "disabled"}
    with muster.make_vec(make, 1, **options) as envs:
        for seed in range(3):
            obs, infos = envs.reset(seed=seed)
            bare.reset(seed=seed)
            over = False
            while not over:
                np.testing.assert_array_equal(obs["player"][0, 0], bare.observe("player_0")["observation"])
                actions = sample(envs, infos["action_mask"], rng)
                acting = int(infos["acting"]["player"][0].argmax())
                assert envs.groups["player"][acting] == bare.agent_selection
                bare.step(int(actions["player"][0, acting]))
                obs, _, terminated, truncated, infos = envs.step(actions)
                over = bool(terminated[0] or truncated[0])
            assert all(bare.terminations.values())


def test_boards_of_boolean_masks_become_infos() -> None:
    with muster.make_vec("pettingzoo/classic/connect_four_v3", 2) as envs:
        obs, infos = envs.reset(seed=0)
        assert obs["player"].shape == (2, 2, 6, 7, 2)
        assert infos["action_mask"]["player"].shape == (2, 2, 7)
        assert infos["action_mask"]["player"].dtype == np.bool_
        assert infos["acting"]["player"].tolist() == [[True, False]] * 2


def test_states_equal_the_envs_own() -> None:
    with muster.make_vec("pettingzoo/mpe/simple_tag_v3", 2, state=True) as envs:
        _, infos = envs.reset(seed=4)
        for own, told in zip(envs.call("state"), infos["state"], strict=True):
            np.testing.assert_array_equal(own, told)
        assert envs.state_space.shape == infos["state"].shape[1:]


def test_kinds_of_agents_become_groups() -> None:
    with muster.make_vec("pettingzoo/mpe/simple_world_comm_v3", env_kwargs={"num_good": 1}, backend="serial") as envs:
        assert list(envs.groups) == ["adversary", "agent", "leadadversary"]
        assert envs.groups["agent"] == ["agent_0"]


def test_ids_that_do_not_exist_are_refused_with_those_that_do() -> None:
    with pytest.raises(RecipeError, match=r"no env 'sisl/multiwalker_v1'. It has: multiwalker_v9, pursuit_v5"):
        muster.make_vec("pettingzoo/sisl/multiwalker_v1")
    for wrong in ("pettingzoo/", "pettingzoo/nothing/at_all", "pettingzoo/../sisl/multiwalker_v9"):
        with pytest.raises(RecipeError, match="pettingzoo/sisl/multiwalker_v9"):
            resolve_foreign_id(wrong)


def test_an_env_that_exists_already_is_refused_with_a_factory_to_write() -> None:
    env = make("mpe2.simple_v3", "parallel_env")
    with pytest.raises(RecipeError, match="def make_env"):
        muster.make_vec(env)
    with pytest.raises(RecipeError, match="exists already"):
        muster.make_vec(lambda: env)


def test_the_caller_imports_none_of_it() -> None:
    code = """
        import sys, muster
        envs = muster.make_vec("pettingzoo/mpe/simple_spread_v3", 2)
        envs.reset(seed=0)
        envs.close()
        print([name for name in sys.modules if name.split(".")[0] in ("pettingzoo", "mpe2", "pygame")])
    """
    assert in_another_process(code) == "[]"


def in_another_process(code: str) -> str:
    return str(programs.run("-c", textwrap.dedent(code), check=True).stdout.strip())


def test_wrappers_are_applied_to_the_env_itself() -> None:
    supersuit_like: Any = functools.partial(_Doubling)
    with muster.make_vec("pettingzoo/mpe/simple_v3", wrappers=[supersuit_like], backend="serial") as envs:
        plain = muster.make_vec("pettingzoo/mpe/simple_v3", backend="serial")
        np.testing.assert_allclose(envs.reset(seed=0)[0]["agent"], 2 * plain.reset(seed=0)[0]["agent"])
        plain.close()


class _Doubling:
    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def reset(self, **kwargs: Any) -> Any:
        obs, infos = self.env.reset(**kwargs)
        return {agent: 2 * one for agent, one in obs.items()}, infos
