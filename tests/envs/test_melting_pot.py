"""Melting Pot's substrates: how they are named, imported and built. Their rows: tests/conformance."""

from __future__ import annotations

import dataclasses
import functools
import sys
import textwrap
import types
from typing import Any

import numpy as np
import pytest

import muster
import programs
from muster.envs.melting_pot import load_substrates
from muster.errors import EnvError, RecipeError

pytest.importorskip("dmlab2d", reason="python -m muster.envs.install_meltingpot")
pytest.importorskip("ml_collections", reason="python -m muster.envs.install_meltingpot")
# Melting Pot's dependencies warn while they are imported.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

SMALL = "prisoners_dilemma_in_the_matrix__repeated"


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


def build(name: str) -> Any:
    substrates = load_substrates()
    return substrates.build(name, roles=substrates.get_config(name).default_player_roles)


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
