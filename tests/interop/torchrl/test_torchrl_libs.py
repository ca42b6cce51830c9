"""TorchRL's envs of other libraries, beside newer releases of these."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

torchrl = pytest.importorskip("torchrl")
pytest.importorskip("pettingzoo")

from torchrl.envs.libs import pettingzoo as original  # noqa: E402

from muster.interop.torchrl import ParallelEnv, PettingZooEnv  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


def test_a_walker_as_people_write_it():
    pytest.importorskip("Box2D")
    env = PettingZooEnv(task="multiwalker_v9", parallel=True, seed=42, n_walkers=3, device="cpu")
    assert isinstance(env, original.PettingZooEnv)
    assert env.task_name == "multiwalker_v9"
    assert env.rollout(3)["walker", "observation"].shape == (3, 3, 31)
    env.close()


@pytest.mark.parametrize("task", ["simple_spread_v3", "mpe/simple_spread_v3"])
def test_a_task_that_has_moved_to_a_package_of_its_own(task: str):
    pytest.importorskip("mpe2")
    env = PettingZooEnv(task, True, return_state=True, max_cycles=5)
    assert env.rollout(9, break_when_any_done=False)["agent", "observation"].shape == (9, 3, 18)
    env.close()


def test_players_that_act_in_turns():
    env = PettingZooEnv(task="tictactoe_v3", parallel=False, use_mask=True)
    assert set(env.group_map) == {"player_1", "player_2"}
    env.close()
    with pytest.raises(ValueError, match="set use_mask=True"):
        PettingZooEnv(task="tictactoe_v3", parallel=False)


@pytest.mark.parametrize("task", ["nonsense_v1", "sisl/simple_spread_v3", "classic/tictactoe_v3/x", ""])
def test_a_task_that_does_not_exist_is_told_as_torchrl_tells_it(task: str):
    with pytest.raises(RuntimeError, match="Specified task not in available environments.*classic/tictactoe_v3"):
        PettingZooEnv(task=task, parallel=True)


def test_the_tasks_can_be_listed():
    assert {"sisl/multiwalker_v9", "classic/tictactoe_v3"} <= set(PettingZooEnv.available_envs)


def test_it_steps_in_workers():
    pytest.importorskip("mpe2")
    envs = ParallelEnv(2, lambda: PettingZooEnv("simple_spread_v3", parallel=True), mp_start_method="fork")
    assert envs.rollout(3)["agent", "observation"].shape == (2, 3, 3, 18)
    envs.close()


def test_a_private_name_of_torchrl_s_is_passed_through(monkeypatch: pytest.MonkeyPatch):
    name = "_build_env"
    calls: list[Any] = []
    wrapper = original.PettingZooWrapper
    function = getattr(wrapper, name)
    assert list(inspect.signature(function).parameters) == ["self", "env"]
    assert list(inspect.signature(getattr(original.PettingZooEnv, name)).parameters)[:3] == ["self", "task", "parallel"]
    monkeypatch.setattr(wrapper, name, lambda self, env: calls.append(env) or function(self, env))
    module = pytest.importorskip("pettingzoo.classic.tictactoe_v3")
    wrapper(module.env(), use_mask=True).close()
    PettingZooEnv(task="tictactoe_v3", parallel=False, use_mask=True).close()
    assert len(calls) == 2


def test_the_arguments_are_torchrl_s():
    assert inspect.signature(PettingZooEnv) == inspect.signature(original.PettingZooEnv)
