import numpy as np
import pytest
import torch
from agent_envs import Masked, Script, Turns
from gymnasium import spaces

import muster
from muster.spaces.stacking import stacked_space

torchrl = pytest.importorskip("torchrl")

from torchrl.envs.utils import check_env_specs, check_marl_grouping  # noqa: E402

from muster.interop.torchrl import as_torchrl  # noqa: E402
from muster.interop.torchrl.layouts import Codec  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning:torchrl"
)
MODES = pytest.mark.parametrize("mode", ["same_step", "disabled"])


class Team(Script):
    """Its agents observe and do what a dict says; the episode ends after two steps."""

    def __init__(self):
        super().__init__(["a_0 a_1 b_0"] * 2 + [""], {(2, agent): "terminated" for agent in ("a_0", "a_1", "b_0")})

    def observation_space(self, agent):
        return spaces.Dict({"place": spaces.Box(-100, 100, (2,), np.float32), "kind": spaces.Discrete(3)})

    def action_space(self, agent):
        return spaces.Dict({"move": spaces.Box(-1, 1, (2,), np.float32), "say": spaces.MultiDiscrete([2, 3])})

    def _obs(self, agent):
        return {"place": super()._obs(agent), "kind": self._k(agent)}


def make(env, mode="same_step", num_envs=2, **options):
    return as_torchrl(muster.make_vec(env, num_envs, backend="serial", autoreset_mode=mode, state=True), **options)


@MODES
@pytest.mark.parametrize("env", [Script, Masked, Turns, Team])
@pytest.mark.parametrize("encoding", [None, False])
def test_passes_torchrls_own_check(env, mode, encoding):
    envs = make(env, mode, categorical_action_encoding=encoding)
    check_env_specs(envs)
    check_marl_grouping(envs.group_map, [agent for agents in envs.group_map.values() for agent in agents])


@MODES
def test_groups_nest_and_an_agents_end_is_its_own(mode):
    envs = make(Script, mode)
    assert envs.group_map == {"a": ["a_0", "a_1"], "b": ["b_0"]}
    rollout = envs.rollout(5, break_when_any_done=False)
    assert rollout["a"].batch_size == (2, 5, 2)
    assert rollout["a", "observation"].shape == (2, 5, 2, 2)
    assert rollout["a", "alive"][0].tolist() == [[True, False], [True, True], [True, True], [True, True], [True, False]]
    assert rollout["a", "acting"][0, 2].tolist() == [False, True]
    assert rollout["a", "observation"][0, :, 0].tolist() == [[0, 0], [1, 0], [2, 0], [3, 0], [0, 0]]
    ended = rollout["next", "a", "terminated"][0, ..., 0]
    assert ended.tolist() == [[False, False], [True, False], [False, False], [True, True], [False, False]]
    assert rollout["next", "b", "truncated"][0, :, 0, 0].tolist() == [False, False, True, False, False]
    assert rollout["next", "a", "reward"][0, 1].tolist() == [[2.0], [pytest.approx(2.1)]]
    assert rollout["next", "done"][0, :, 0].tolist() == [False, False, False, True, False]
    # The last observations of the episode, not the first of the next.
    assert rollout["next", "a", "observation"][0, 3].tolist() == [[4, 0], [4, 1]]


def test_actions_are_nested_and_count_from_0_wherever_the_space_starts():
    envs = make(Script, num_envs=1)
    state = envs.reset()
    state["a", "action"] = torch.tensor([[2, 0]])
    state["b", "action"] = torch.tensor([[1]])
    envs.step(state)
    assert envs.vector_env.get_attr("got")[0] == [{"a_0": 3, "b_0": 2}]
    assert make(Script, categorical_action_encoding=False).action_spec["a", "action"].shape == (2, 2, 3)


def test_random_actions_keep_to_the_masks():
    envs = make(Masked)
    rollout = envs.rollout(20, break_when_any_done=False)
    assert rollout["b", "action_mask"][0, 0].tolist() == [[False, True, True]]
    assert (rollout["b", "action"] > 0)[rollout["b", "acting"]].all()
    assert rollout["b", "action_mask"].any(-1).all()
    assert rollout["next", "state"][0, :2].tolist() == [[0.1, 0.5], [0.2, 0.5]]


def test_dicts_nest_in_observations_and_actions():
    envs = make(Team)
    rollout = envs.rollout(3, break_when_any_done=False)
    assert rollout["next", "a", "observation", "place"][0, :, 1].tolist() == [[1, 1], [2, 1], [1, 1]]
    assert rollout["a", "observation", "kind"][0, 0].tolist() == [[1, 0, 0], [0, 1, 0]]
    assert rollout["a", "action", "say"].shape == (2, 3, 2, 2)
    assert envs.vector_env.get_attr("got")[0][0]["b_0"].keys() == {"move", "say"}


@pytest.mark.parametrize("categorical", [True, False])
@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(4),
        spaces.Discrete(4, start=-2),
        spaces.MultiDiscrete([3, 3]),
        spaces.MultiDiscrete([2, 3], start=[1, 5]),
        spaces.MultiDiscrete([[3, 4], [3, 4]]),
        spaces.MultiBinary(3),
        spaces.MultiBinary((3,)),
        spaces.Box(-1, 1, (), np.float32),
        spaces.Box(-1, 1, (2, 3), np.float64),
        spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Dict({"c": spaces.Box(0, 9, (1,), np.int64)})}),
    ],
    ids=str,
)
def test_values_come_back_as_they_were(space, categorical):
    codec = Codec(space, (2, 3), categorical=categorical)
    values = stacked_space(space, (2, 3)).sample()
    encoded = codec.encode(values)
    if not isinstance(encoded, dict):
        assert encoded.shape == codec.spec.shape
        np.testing.assert_array_equal(codec.decode(encoded), values)
        return
    whole = codec.spec.zero().update(encoded)
    assert codec.spec.is_in(whole)
    decoded = codec.decode(whole)
    np.testing.assert_array_equal(decoded["a"], values["a"])
    np.testing.assert_array_equal(decoded["b"]["c"], values["b"]["c"])
