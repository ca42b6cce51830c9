"""What single spaces become in TorchRL: where they start, which are refused, and masks that come and go."""

from functools import partial

import numpy as np
import pytest
from agent_envs import Masked
from dropin_envs import Counter
from gymnasium import spaces

import muster
from muster.errors import UsageError

torchrl = pytest.importorskip("torchrl")

from muster.interop.torchrl import as_torchrl  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


class Late(Counter):
    """Observes its number of steps, counted from 1."""

    observation_space = spaces.Discrete(4, start=1)

    def observe(self):
        return self.count + 1


class Observing(Counter):
    """Observes a space that TorchRL may not know."""

    def __init__(self, space):
        super().__init__()
        self.observation_space = space

    def observe(self):
        return np.zeros(self.observation_space.shape, self.observation_space.dtype)


class SometimesMasked(Masked):
    """Gives masks at even steps only, and has a float32 state from the second step on."""

    state_space = spaces.Box(-1, 1, (2,), np.float32)

    def _info(self, agent):
        info = super()._info(agent)
        return info if self.t % 2 == 0 else {key: value for key, value in info.items() if key != "action_mask"}


def make(env, num_envs=1, **options):
    return as_torchrl(muster.make_vec(env, num_envs, backend="serial", autoreset_mode="same_step", **options))


def test_numbers_that_start_elsewhere_survive_an_episodes_end():
    rollout = make(partial(Late, 2)).rollout(3, break_when_any_done=False)
    assert rollout["observation"].argmax(-1).tolist() == [[0, 1, 0]]
    assert rollout["next", "observation"].argmax(-1).tolist() == [[1, 2, 1]]


@pytest.mark.parametrize(
    "space",
    [
        spaces.MultiDiscrete([[3, 4], [2, 2]]),
        spaces.MultiDiscrete([[3, 4], [5, 2]]),
        spaces.MultiDiscrete([[3, 3], [2, 2]]),
        spaces.MultiBinary((2, 3)),
        spaces.Box(0, 3, (2,), np.uint16),
    ],
    ids=["ragged", "ragged_within_rows", "ragged_over_rows", "multi_binary", "uint16"],
)
def test_spaces_that_torchrl_cannot_express_are_named_with_a_remedy(space):
    name = type(space).__name__
    with pytest.raises(UsageError, match=rf"TorchRL has no tensors for {name}\(.*wrap the env"):
        make(partial(Observing, space))


def test_a_mask_that_is_no_longer_given_is_no_longer_kept_to():
    envs = make(SometimesMasked)
    state = envs.reset()
    spec = envs.action_spec["b", "action"]
    assert spec.mask.tolist() == [[[False, True, True]]]
    state = envs.step(envs.rand_action(state))["next"]
    assert state["b", "action_mask"].all()
    assert envs.action_spec["b", "action"].mask.all()


def test_the_state_has_the_spaces_dtype():
    envs = as_torchrl(muster.make_vec(SometimesMasked, 1, backend="serial", autoreset_mode="same_step", state=True))
    state = envs.reset()
    assert state["state"].dtype == envs.observation_spec["state"].dtype
