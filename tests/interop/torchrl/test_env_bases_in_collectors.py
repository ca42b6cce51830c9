"""Factories of TorchRL's envs in Muster's own collectors and its doctor; `make_vec` names what takes them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

import programs

pytest.importorskip("torchrl")
from torchrl.data import Bounded, Composite, MultiOneHot, NonTensor, Unbounded
from torchrl.envs import (
    Compose,
    EnvCreator,
    InitTracker,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from torchrl.envs.libs.gym import GymEnv
from torchrl.modules import OneHotCategorical, ProbabilisticActor
from torchrl.testing.mocking_classes import CountingEnv, MultiKeyCountingEnv, NestedCountingEnv

import muster
from muster.doctor.api_checkers import check_api, name_api
from muster.envs.adapt import from_torchrl
from muster.errors import EnvError, RecipeError, SpecMismatch
from muster.interop.torchrl import PettingZooEnv
from muster.interop.torchrl.env_bases import adapted

pytestmark = pytest.mark.filterwarnings("ignore")
SERIAL = {"backend": "serial"}


def cart_pole() -> Any:
    return GymEnv("CartPole-v1")


def with_transforms() -> Any:
    return TransformedEnv(cart_pole(), Compose(StepCounter(9), RewardSum(), InitTracker()))


def walkers() -> Any:
    pytest.importorskip("pettingzoo")
    return PettingZooEnv(task="multiwalker_v9", parallel=True, n_walkers=3, device="cpu")


def drawing() -> ProbabilisticActor:
    torch.manual_seed(0)
    module = TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"])
    return ProbabilisticActor(module, ["logits"], distribution_class=OneHotCategorical, return_log_prob=True)


def test_steps_are_those_of_the_env():
    ours, theirs = adapted(with_transforms()), with_transforms()
    theirs.set_seed(3)
    root = theirs.reset()
    obs, _ = ours.reset(seed=3)
    for _ in range(30):
        for key in ("observation", "step_count", "episode_reward"):
            np.testing.assert_array_equal(obs[key], root[key])
        root["action"] = theirs.action_spec.rand()
        obs, reward, terminated, truncated, _ = ours.step(root["action"].numpy())
        stepped, root = theirs.step_and_maybe_reset(root)
        assert (reward, terminated) == (stepped["next", "reward"].item(), stepped["next", "terminated"].item())
        assert (terminated or truncated) == stepped["next", "done"].item()
        np.testing.assert_array_equal(obs["observation"], stepped["next", "observation"])
        if terminated or truncated:
            obs, _ = ours.reset()


@pytest.mark.parametrize(
    "make_env", [cart_pole, with_transforms, EnvCreator(cart_pole)], ids=["bare", "transformed", "creator"]
)
def test_a_collector_takes_the_factory(make_env: Any):
    keys = {"observation", "action", "logits", "action_log_prob", ("next", "reward"), ("next", "done")}
    with muster.Collector(make_env, drawing(), num_envs=2, frames_per_batch=40, make_vec_options=SERIAL) as collector:
        batch = collector.rollout()
        assert collector.envs.get_attr("batch_size") == ((), ())
        collector.envs.set_attr("theta_threshold_radians", 3.0)
        assert collector.envs.call("get_wrapper_attr", "theta_threshold_radians") == (3.0, 3.0)
    assert batch.batch_size == (2, 20)
    assert keys <= set(batch.keys(True, True))
    assert ("episode_reward" in batch) == (make_env is with_transforms)
    assert batch["action"].dtype == torch.int64
    assert batch["action"].sum(-1).eq(1).all()
    follows = ~batch["next", "done"][:, :-1, 0]
    assert batch["observation"][:, 1:][follows].equal(batch["next", "observation"][:, :-1][follows])


def test_collectors_in_processes_take_lists_of_factories():
    fns = [cart_pole, lambda: cart_pole()]
    with muster.MultiCollector(fns, drawing(), num_collectors=2, frames_per_batch=40, context="fork") as collector:
        assert collector.rollout()["observation"].shape == (2, 20, 4)


def test_random_actions_are_choices():
    with muster.Collector(cart_pole, num_envs=2, frames_per_batch=400, make_vec_options=SERIAL) as collector:
        actions = collector.rollout()["action"]
    assert actions.sum(-1).eq(1).all()
    assert 120 < actions[..., 0].sum() < 280


def test_agents_keep_their_groups():
    net = TensorDictModule(nn.Linear(31, 4), [("walker", "observation")], [("walker", "action")])
    with muster.Collector(walkers, net, num_envs=2, frames_per_batch=20, seed=1, make_vec_options=SERIAL) as collector:
        assert collector.envs.groups == {"walker": ["walker_0", "walker_1", "walker_2"]}
        batch = collector.rollout()
    assert batch["walker", "observation"].shape == (2, 10, 3, 31)
    assert batch["next", "walker", "reward"].shape == (2, 10, 3, 1)


def test_steps_of_agents_are_those_of_the_env():
    ours, theirs = adapted(walkers()), walkers()
    theirs.set_seed(3)
    root, (obs, _) = theirs.reset(), ours.reset(seed=3)
    while ours.agents:
        for i, agent in enumerate(ours.possible_agents):
            np.testing.assert_array_equal(obs[agent], root["walker", "observation"][i])
        actions = theirs.rand_action(root)["walker", "action"]
        obs, rewards, terminations, _, _ = ours.step({f"walker_{i}": actions[i].numpy() for i in range(3)})
        stepped = theirs.step(root)["next"]
        assert list(rewards.values()) == stepped["walker", "reward"].flatten().tolist()
        assert list(terminations.values()) == [
            bool(stepped["terminated"] or flag) for flag in stepped["walker", "terminated"]
        ]
        root = theirs.step_mdp(root)


def test_agents_of_nested_keys_are_named_by_their_group():
    make_env = partial(NestedCountingEnv, nest_reward=True, nest_done=True, max_steps=4)
    with muster.Collector(make_env, num_envs=1, frames_per_batch=8, make_vec_options=SERIAL) as collector:
        batch = collector.rollout()
        assert collector.envs.groups == {"data": ["data_0", "data_1", "data_2"]}
    assert batch["next", "data", "reward"].shape == (1, 8, 3, 1)


class Odd(CountingEnv):
    """Observes several leaves, and takes two choices and a number."""

    def __init__(self, observes: Any = None) -> None:
        super().__init__(max_steps=4)
        self.observation_spec = Composite(
            pixels=Bounded(0, 255, (2, 2), dtype=torch.uint8), inner=Composite(odd=observes or Unbounded((3,)))
        )
        self.action_spec = Composite(choice=MultiOneHot([2, 3]), push=Bounded(-1, 1, (1,)))

    def _reset(self, tensordict: Any = None, **kwargs: Any) -> Any:
        self.steps = 0
        return self.observation_spec.zero()

    def _step(self, tensordict: Any) -> Any:
        self.steps += 1
        choice, push = tensordict["choice"], tensordict["push"]
        done = torch.tensor([self.steps == 4])
        seen = self.observation_spec.zero().set(("inner", "odd"), push.expand(3) * choice.long().argmax())
        return seen.update({"reward": push, "done": done, "terminated": done})


def test_several_leaves_keep_their_keys():
    with muster.Collector(Odd, num_envs=1, frames_per_batch=8, make_vec_options=SERIAL) as collector:
        batch = collector.rollout()
    assert batch["pixels"].dtype == torch.uint8
    assert batch["next", "inner", "odd"].shape == (1, 8, 3)
    assert batch["action", "choice"].split([2, 3], -1)[1].sum(-1).eq(1).all()
    assert batch["next", "reward"].squeeze(-1).equal(batch["action", "push"].squeeze(-1))


@pytest.mark.parametrize(
    ("make_env", "error", "words"),
    [
        (lambda: SerialEnv(2, cart_pole), RecipeError, "batch size .2.*muster.interop.torchrl.ParallelEnv"),
        (MultiKeyCountingEnv, RecipeError, "belong to none of its groups"),
        (partial(Odd, NonTensor(())), SpecMismatch, "no NumPy dtype"),
    ],
)
def test_what_does_not_fit_is_told_with_the_way_out(make_env: Any, error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        muster.Collector(make_env, num_envs=1, frames_per_batch=4, make_vec_options=SERIAL)


def test_exceptions_of_the_env_are_named_as_others():
    class Fails(CountingEnv):
        def _step(self, tensordict: Any) -> Any:
            raise LookupError("no way")

    with (
        muster.Collector(Fails, num_envs=1, frames_per_batch=4, make_vec_options=SERIAL) as collector,
        pytest.raises(EnvError, match="LookupError: no way"),
    ):
        collector.rollout()


@pytest.mark.parametrize("make_env", [cart_pole, walkers], ids=["one", "agents"])
def test_make_vec_names_what_takes_them(make_env: Any):
    with pytest.raises(RecipeError, match=r"muster\.interop\.torchrl\.ParallelEnv\(num_envs, make_env\)"):
        muster.make_vec(make_env, 1, backend="serial")


@pytest.mark.slow
def test_the_doctor_examines_them():
    diagnosis = muster.diagnose(cart_pole, seconds=0.1, num_envs=2)
    assert "it follows its API (TorchRL)" in str(diagnosis)
    assert diagnosis.recommendation is not None
    assert diagnosis.recommendation.line == "envs = ParallelEnv(2, cart_pole, num_processes=2)"
    assert "from muster.interop.torchrl import ParallelEnv" in str(diagnosis)


def test_the_doctor_knows_their_api():
    env = from_torchrl(cart_pole())
    assert name_api(env) == "TorchRL"
    assert check_api(env) == ([], [])
    assert "ParallelEnv(2, make_env)" in str(muster.diagnose(cart_pole(), num_envs=2))


def test_nothing_of_torchrl_is_imported_for_other_envs():
    code = (
        "import sys, muster\n"
        "with muster.Collector('CartPole-v1', num_envs=1, frames_per_batch=4, "
        "make_vec_options={'backend': 'serial'}) as c: c.rollout()\n"
        "assert 'torchrl' not in sys.modules"
    )
    programs.run("-c", code, check=True, imports=programs.TORCH)
