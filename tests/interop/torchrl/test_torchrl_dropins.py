import gc
import os
from functools import partial

import numpy as np
import pytest
import torch
from dropin_envs import Counter, InterruptsCaller, Structured
from gymnasium import spaces

import muster
from muster.errors import ClosedError, UsageError

torchrl = pytest.importorskip("torchrl")

from tensordict import TensorDict  # noqa: E402
from torchrl.envs import RewardSum, SerialEnv, TransformedEnv  # noqa: E402
from torchrl.envs.libs.gym import GymEnv  # noqa: E402
from torchrl.envs.utils import check_env_specs  # noqa: E402

from muster.interop.torchrl import as_torchrl  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
MODES = pytest.mark.parametrize("mode", ["same_step", "disabled"])


class Sensors(Counter):
    """Observes a dict of dicts."""

    observation_space = spaces.Dict(
        {
            "position": spaces.Box(-1, 100, (2,), np.float32),
            "inner": spaces.Dict({"key": spaces.Discrete(4), "bits": spaces.MultiBinary(3)}),
        }
    )

    def observe(self):
        inner = {"key": self.count % 4, "bits": np.array([1, 0, 1], np.int8)}
        return {"position": np.full(2, self.count, np.float32), "inner": inner}


def make(env, mode="same_step", num_envs=3):
    return as_torchrl(muster.make_vec(env, num_envs, backend="serial", autoreset_mode=mode))


@MODES
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", Counter, Sensors])
def test_passes_torchrls_own_check(env, mode):
    check_env_specs(make(env, mode))


@MODES
def test_a_rollout_chains_steps_and_keeps_final_observations(mode):
    rollout = make(partial(Counter, 2), mode).rollout(5, break_when_any_done=False)
    assert rollout.batch_size == (3, 5)
    assert rollout["observation"][0, :, 0].tolist() == [0.0, 1.0, 0.0, 1.0, 0.0]
    assert rollout["next", "observation"][0, :, 0].tolist() == [1.0, 2.0, 1.0, 2.0, 1.0]
    assert rollout["next", "reward"].shape == (3, 5, 1)
    assert rollout["next", "truncated"][1, :, 0].tolist() == [False, True, False, True, False]
    assert not rollout["next", "terminated"].any()


@pytest.mark.parametrize("static_seed", [False, True])
def test_seeds_give_torchrls_data(static_seed):
    def leaning(observation):
        return torch.nn.functional.one_hot((observation[:, 2] > 0.1).long(), 2)

    envs, rollouts = make("CartPole-v1"), []
    for one in (SerialEnv(3, lambda: GymEnv("CartPole-v1")), envs, envs):
        one.set_seed(3, static_seed=static_seed)
        rollouts.append(one.rollout(30, leaning, break_when_any_done=False))
    for name in ("observation", "terminated"):
        assert (rollouts[0]["next", name] == rollouts[1]["next", name]).all()
        assert (rollouts[0]["next", name] == rollouts[2]["next", name]).all()
    assert rollouts[0]["next", "done"].any()
    first = rollouts[0]["observation"][:, 0]
    assert (first[0] == first[1]).all() == static_seed


@pytest.mark.parametrize("wrap", [lambda envs: envs, lambda envs: TransformedEnv(envs, RewardSum())])
def test_closing_it_closes_the_vector_env_and_dropping_it_does_not(wrap):
    vector_env = muster.make_vec(Counter, 2, backend="serial", autoreset_mode="same_step")
    envs = wrap(as_torchrl(vector_env))
    envs.rollout(2)
    del envs
    gc.collect()
    assert not vector_env.closed
    envs = wrap(as_torchrl(vector_env))
    assert not envs.is_closed
    envs.close()
    assert envs.is_closed
    assert vector_env.closed
    with pytest.raises(ClosedError):
        envs.reset()
    envs.close()


@MODES
def test_resets_take_seeds_and_options(mode):
    envs = make(Counter, mode, num_envs=2)
    envs.rollout(3, break_when_any_done=False)  # all have ended
    envs.reset(seed=5, options={"low": 1})
    envs.reset(TensorDict({"_reset": torch.tensor([[False], [True]])}, [2]), seed=7)
    seen = envs.vector_env.get_attr("seeds"), envs.vector_env.get_attr("options")
    assert [seeds[-1] for seeds in seen[0]] == [5, 8]
    assert seen[1][0][-1] == {"low": 1}
    with pytest.raises(TypeError, match="list_of_kwargs"):
        envs.reset(list_of_kwargs=[{}, {}])


def test_actions_are_one_hot_or_integers():
    envs = muster.make_vec("CartPole-v1", 2, backend="serial", autoreset_mode="same_step")
    assert as_torchrl(envs).action_spec.shape == (2, 2)
    integers = as_torchrl(envs, categorical_action_encoding=True)
    assert integers.action_spec.shape == (2,)
    check_env_specs(integers)


def test_next_step_envs_and_tuple_spaces_are_refused():
    with pytest.raises(ValueError, match='autoreset_mode="same_step"'):
        make(Counter, "next_step")
    with pytest.raises(UsageError, match="Dict or Box"):
        make(Structured)
    with pytest.raises(TypeError, match=r"as_torchrl takes what muster\.make_vec returns, got Counter"):
        as_torchrl(Counter())


def test_as_torchrl_refuses_views_of_memory_that_the_next_step_overwrites():
    envs = muster.make_vec(Counter, 2, backend="serial", autoreset_mode="same_step", copy=False)
    with pytest.raises(ValueError, match="copy=True"):
        as_torchrl(envs)


def test_ctrl_c_in_a_step_leaves_an_env_that_can_be_reset():
    recipes = [partial(InterruptsCaller, os.getpid()), Counter]
    env = as_torchrl(muster.make_vec(recipes, num_workers=2, autoreset_mode="same_step"))
    try:
        with pytest.raises(KeyboardInterrupt):
            env.rand_step(env.reset())
        again = env.reset()
        assert again["observation"].tolist() == [[0.0], [0.0]]
        assert env.rand_step(again)["next", "observation"].tolist() == [[1.0], [1.0]]
    finally:
        env.close()
