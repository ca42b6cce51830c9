"""Policies that leave: traced, exported, and run by ONNX Runtime, they act as they do in Muster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from muster.algorithms import ActorCritic, head_of
from muster.algorithms.action_network import ActionNetwork, action_networks
from muster.algorithms.actor_critic import MEMORY, Network
from muster.algorithms.encoder import MEASURED, ObservationNormalizer, as_observation, kind_of
from muster.algorithms.teams import AgentsPolicy, Networks, Team
from muster.errors import UsageError

# Of torch itself, and of TensorDict, which looks at shapes.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore{one}")
    for one in ("::DeprecationWarning", "::FutureWarning", ":Converting a tensor:torch.jit.TracerWarning")
]

BOX, DISCRETE = spaces.Box(-5, 5, (4,)), spaces.Discrete(3, start=2)
MANY = spaces.Dict({"at": BOX, "of": spaces.Discrete(4, start=1), "on": spaces.MultiBinary(2)})
NESTED = spaces.Dict({"at": BOX, "deep": spaces.Tuple([spaces.Discrete(4, start=1)])})
MASKED = spaces.Dict({"observation": BOX, "action_mask": spaces.MultiBinary(5)})
CONTINUOUS = spaces.Box(np.float32([-1, -3, -np.inf]), np.float32([1, 5, np.inf]))


def network_of(seen: Any, acts: Any, **options: Any) -> Network:
    """One that has weights and statistics as if it had learnt: different observations lead to different actions."""
    rng = torch.Generator().manual_seed(0)
    policy = ActorCritic(seen, acts, rng, **options)
    last = policy.actor[-1].weight
    last.data = torch.empty_like(last).normal_(0, 1, generator=rng)
    if kind_of(seen) not in MEASURED:
        return Network(policy, None)
    statistics = ObservationNormalizer(seen)
    statistics.update(as_observation(drawn(seen, 50)))
    return Network(policy, statistics)


def drawn(space: Any, count: int, seed: int = 0) -> Any:
    """A batch of observations of the space, as tensors."""
    several = batch_space(space, count)
    several.seed(seed)
    return tree_map(torch.from_numpy, dict(s) if isinstance(s := several.sample(), dict) else s)


def left(network: ActionNetwork, road: str, folder: Path, *given: Any) -> Any:
    """What acts in the place of the network: takes as many arguments, and batches of any size."""
    if road == "trace":
        file = folder / "policy.pt"
        torch.jit.trace(network, given).save(file)
        return torch.jit.load(file)
    shapes = tree_map(lambda _: {0: torch.export.Dim.DYNAMIC}, given)
    if road == "export":
        torch.export.save(torch.export.export(network, given, dynamic_shapes=shapes), folder / "policy.pt2")
        return torch.export.load(folder / "policy.pt2").module()
    onnxruntime = pytest.importorskip("onnxruntime")
    names = dict(zip(("obs", "memory", "masks"), given, strict=False))
    by_name = dict(zip(names, shapes, strict=True))
    torch.onnx.export(network, (), folder / "policy.onnx", kwargs=names, dynamic_shapes=by_name, verbose=False)
    session = onnxruntime.InferenceSession(folder / "policy.onnx", providers=["CPUExecutionProvider"])

    def act(*given: Any) -> Any:
        feed = zip((one.name for one in session.get_inputs()), tree_leaves(given), strict=True)
        found = session.run(None, {name: one.numpy() for name, one in feed})
        return torch.from_numpy(found[0]) if len(found) == 1 else tuple(map(torch.from_numpy, found))

    return act


def same(left: Any, expected: Any) -> None:
    for one, other in zip(tree_leaves(left), tree_leaves(expected), strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


SPACES = {
    "box-discrete": (BOX, DISCRETE),
    "dict-continuous": (MANY, CONTINUOUS),
    "image-multidiscrete": (spaces.Box(0, 255, (3, 40, 40), np.uint8), spaces.MultiDiscrete([[2, 3], [4, 2]])),
    "masks-discrete": (MASKED, spaces.Discrete(5)),
    "map-multibinary": (spaces.Box(0, 255, (7, 7, 3), np.uint8), spaces.MultiBinary(3)),
    "codes-float64": (spaces.Box(0, 3, (4,), np.int64), spaces.Box(-1, 1, (2, 2), np.float64)),
    "nested-discrete": (NESTED, DISCRETE),
    "tuple-discrete": (spaces.Tuple([BOX, spaces.MultiDiscrete([3, 2])]), DISCRETE),
}
FAST = {("box-discrete", "trace"), ("box-discrete", "onnx"), ("dict-continuous", "export"), ("masks-discrete", "onnx")}
ROADS = ("trace", "export", "onnx")


@pytest.mark.parametrize(
    ("name", "road"),
    [
        pytest.param(name, road, marks=() if (name, road) in FAST else pytest.mark.slow)
        for name in SPACES
        for road in ROADS
        if (name, road) != ("nested-discrete", "trace")  # which takes dicts of tensors alone
    ],
)
def test_what_leaves_acts_as_the_policy_does(tmp_path: Path, name: str, road: str):
    seen, acts = SPACES[name]
    network = network_of(seen, acts)
    act = left(ActionNetwork([network]).eval(), road, tmp_path, drawn(seen, 2))
    for count in (1, 64):
        obs = drawn(seen, count, seed=1)
        masks = obs["action_mask"].bool() if name.startswith("masks") else None
        allowed = None if masks is None else masks | ~masks.any(-1, keepdim=True)
        expected, _ = network.act(obs, masks=allowed, sample=False, threads=1)
        same(act(obs), expected)
    assert len(expected.unique(dim=0)) > 1
    assert all(acts.contains(action) for action in expected.numpy())


@pytest.mark.parametrize("road", [pytest.param(one, marks=() if one == "onnx" else pytest.mark.slow) for one in ROADS])
def test_a_memory_goes_in_and_comes_out(tmp_path: Path, road: str):
    network = network_of(BOX, CONTINUOUS, memory_size=8)
    leaving = ActionNetwork([network]).eval()
    act = left(leaving, road, tmp_path, drawn(BOX, 2), torch.zeros(2, leaving.memory_size))
    memory, state = torch.zeros(3, 8), None
    for t in range(4):
        obs = drawn(BOX, 3, seed=t)
        expected, state = network.act(obs, state, sample=False, threads=1)
        if t == 0:
            same(leaving(obs), (expected, state[MEMORY]))  # an episode begins without one
        actions, memory = act(obs, memory)
        same((actions, memory), (expected, state[MEMORY]))


def agents_of(shares: bool, **options: Any) -> Networks:
    """Three agents of a group, with one network or one each, and one of another group."""
    places = [slice(0, 3)] if shares else [slice(i, i + 1) for i in range(3)]
    teams = [Team(f"ant{at.start}", "ant", at, at.stop - at.start, DISCRETE) for at in places]
    teams.append(Team("bee", "bee", slice(0, 1), 1, CONTINUOUS))
    statistics = network_of(BOX, DISCRETE).statistics
    networks = []
    for i, team in enumerate(teams):
        policy = network_of(BOX, team.action_space, **options).policy
        policy.actor[-1].weight.data += i
        networks.append(Network(AgentsPolicy(policy, None), statistics))
    return Networks(teams, networks)


@pytest.mark.parametrize(
    ("shares", "road", "memory_size"),
    [
        (True, "onnx", 0),
        pytest.param(True, "trace", 8, marks=pytest.mark.slow),
        *(pytest.param(False, road, size, marks=pytest.mark.slow) for road in ROADS for size in (0, 8)),
    ],
)
def test_each_group_of_agents_has_a_network(tmp_path: Path, shares: bool, road: str, memory_size: int):
    networks = agents_of(shares, memory_size=memory_size)
    leaving = action_networks(networks)
    obs = {"ant": torch.randn(5, 3, 4), "bee": torch.randn(5, 1, 4)}
    masks = {"ant": torch.rand(5, 3, 3) < 0.5}
    masks["ant"] |= ~masks["ant"].any(-1, keepdim=True)
    state = {key: torch.randn(5, *one.shape) for key, one in (networks.initial_state or {}).items()}
    expected, after = networks.act(obs, state, masks=masks, sample=False, threads=1)
    for group, one in leaving.items():
        memory = [state[(group, *MEMORY)]] if memory_size else []
        options = {"masks": masks[group]} if group in masks else {}
        same(
            one(obs[group], *memory, **options),
            (expected[group], after[(group, *MEMORY)]) if memory_size else expected[group],
        )
    before, _ = networks.act(obs, state, sample=False, threads=1)
    given = (obs["ant"], *([state["ant", *MEMORY]] if memory_size else []))
    found = left(leaving["ant"].eval(), road, tmp_path, *given)(*given)
    same(found[0] if memory_size else found, before["ant"])


def test_actions_of_a_heads_own_function_are_refused():
    class Own(type(head_of(CONTINUOUS))):
        def to_env(self, actions: Tensor) -> Any:
            return np.tanh(actions.numpy())

    policy = nn.Module()
    policy.head = Own(CONTINUOUS)
    with pytest.raises(UsageError, match=r"Own makes actions by a function of its own, to_env, which cannot be export"):
        action_networks(Network(policy, None))
