"""Real PettingZoo and mpe2 envs: every row equals what a bare loop of the same env is told, agent by agent."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from bare_loops import assert_rows_equal_a_bare_loop

import muster
from muster.envs import resolve_foreign_id
from muster.errors import RecipeError

pytest.importorskip("pettingzoo", reason="pip install 'muster-rl[marl]'")
pytest.importorskip("mpe2", reason="pip install 'muster-rl[marl]'")

# Some of these envs warn while they are imported or made; that is between them and their authors.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def without_a_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setenv("PYGAME_HIDE_SUPPORT_PROMPT", "1")


@pytest.mark.parametrize(
    ("module", "api"),
    [
        ("pettingzoo.butterfly.knights_archers_zombies_v11", "parallel_env"),
        ("pettingzoo.classic.leduc_holdem_v4", "env"),
        ("pettingzoo.butterfly.cooperative_pong_v6", "parallel_env"),
        ("mpe2.simple_world_comm_v3", "parallel_env"),
        ("mpe2.simple_world_comm_v3", "env"),
    ],
)
def test_rows_equal_a_bare_loop(module: str, api: str) -> None:
    assert_rows_equal_a_bare_loop(module, api, 60)


def test_agents_that_die_before_the_others_leave_the_rows_right() -> None:
    # Walkers may stay up for hundreds of steps; the time limit ends every episode in time.
    kwargs = {"terminate_on_fall": False, "remove_on_fall": True, "max_cycles": 60}
    assert assert_rows_equal_a_bare_loop("pettingzoo.sisl.multiwalker_v9", "parallel_env", 130, **kwargs)


def test_ids_that_do_not_exist_are_refused_with_those_that_do() -> None:
    with pytest.raises(RecipeError, match=r"no env 'sisl/multiwalker_v1'. It has: multiwalker_v9, pursuit_v5"):
        muster.make_vec("pettingzoo/sisl/multiwalker_v1")
    for wrong in ("pettingzoo/", "pettingzoo/nothing/at_all", "pettingzoo/../sisl/multiwalker_v9"):
        with pytest.raises(RecipeError, match="pettingzoo/sisl/multiwalker_v9"):
            resolve_foreign_id(wrong)


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

    def observe(self, agent: str) -> Any:
        """A method that envs with turns have, too; this one has no turns."""
