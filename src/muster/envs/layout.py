"""The layout of a multi-agent env: agents in fixed slots, and the tree of everything one step says of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from muster._core import FLAG_NAMES, AgentFlag, BatchNode, Branch, ObsNode
from muster.envs.groups import Groups, slots_of
from muster.errors import SpecMismatch
from muster.spaces.stacking import stacked_space
from muster.spaces.tree import BranchNode, Leaf, Rows, Space, SpaceNode, Take, tree

# The parts of a row, in order: what `AgentsEnv` returns to the stepping loop as one env's observation.
OBS, REWARDS, FLAGS, MASKS, HAS_MASKS, STATE, SHARED = range(7)
ALIVE, ACTING, TERMINATED, TRUNCATED = AgentFlag.ALIVE, AgentFlag.ACTING, AgentFlag.TERMINATED, AgentFlag.TRUNCATED


@dataclass(frozen=True)
class AgentLayout:
    """The facts about a multi-agent env that the caller needs.

    groups: agents by group, the groups sorted.  observation_spaces, action_spaces: spaces of one agent, by group.
    mask_shapes: shape of one agent's action mask, for the groups that may have masks.
    state_space: space of the whole env's state.  shared_space: space of the observations that all agents share.
    """

    groups: Groups
    observation_spaces: dict[str, Space]
    action_spaces: dict[str, Space]
    mask_shapes: dict[str, tuple[int, ...]]
    state_space: Space | None
    shared_space: spaces.Dict

    @property
    def num_agents(self) -> int:
        return sum(len(agents) for agents in self.groups.values())

    def slots(self) -> dict[str, slice]:
        """The slice of each group's agents among all agents."""
        return slots_of(self.groups)

    def observation_space(self, *batch: int) -> spaces.Dict:
        """The observation space by group: of one agent, or ``[*batch, A, ...]``.

        The space of shared observations, ``[*batch, ...]``, is added as ``"shared"``.
        """
        by_group: dict[str, Space] = self._batched(self.observation_spaces, batch)
        if self.shared_space.spaces:
            by_group["shared"] = stacked_space(self.shared_space, batch)
        return spaces.Dict(by_group)

    def action_space(self, *batch: int) -> spaces.Dict:
        """The action space by group: of one agent, or ``[*batch, A, ...]``."""
        return spaces.Dict(self._batched(self.action_spaces, batch))

    def _batched(self, by_group: dict[str, Space], batch: tuple[int, ...]) -> dict[str, Space]:
        if not batch:
            return dict(by_group)
        return {name: stacked_space(space, (*batch, len(self.groups[name]))) for name, space in by_group.items()}

    def row_tree(self) -> BranchNode:
        """The tree of one env's row, see `OBS` and the constants next to it."""
        count = self.num_agents
        stacks = tuple(
            StackNode(self.observation_spaces[name], agents, "observation") for name, agents in self.groups.items()
        )
        masks = tuple(
            _leaf(f"action_mask[{name!r}]", (len(self.groups[name]), *shape), np.bool_)
            for name, shape in self.mask_shapes.items()
        )
        parts = (
            _branch("observation", stacks),
            _leaf("rewards", (count,), np.float32),
            _leaf("flags", (len(FLAG_NAMES), count), np.bool_),
            _branch("action_mask", masks),
            _leaf("has_masks", (1,), np.bool_),
            tree(self.state_space or spaces.Tuple(()), "state"),
            tree(self.shared_space, "observation"),
        )
        root = RowNode(self, parts)
        for index, leaf in enumerate(root.leaves):
            leaf.index = index
        return root

    def action_tree(self) -> SpaceNode:
        """The tree of one env's actions: ``[A, ...]`` by group."""
        batched = {name: stacked_space(space, (len(self.groups[name]),)) for name, space in self.action_spaces.items()}
        root = tree(spaces.Dict(batched), "action")
        if root.has_objects:
            raise SpecMismatch(f"agents' action spaces must have a fixed layout, got {self.action_spaces}")
        return root


class RowNode(BranchNode):
    """The root of a multi-agent env's row."""

    def __init__(self, layout: AgentLayout, parts: tuple[SpaceNode, ...]) -> None:
        super().__init__(spaces.Tuple(()), "row", (), parts)
        self.layout = layout


class StackNode(SpaceNode):
    """The observations of a group: one member for each agent; the slab holds ``[N, A, ...]``, each member a part of it.

    Where a member's observation is None, because the agent is not there, the member's part becomes zeros.
    """

    def __init__(self, space: Space, agents: Sequence[Any], path: str) -> None:
        super().__init__(space, path)
        self.members = tuple(tree(space, f"{path}[{agent!r}]") for agent in agents)
        self.stacked = self._stack(self.members[0])
        self.leaves = self.stacked.leaves

    def obs_node(self, rows: Rows, final: Rows) -> ObsNode:
        children = [one.obs_node(self._part(a, rows), self._part(a, final)) for a, one in enumerate(self.members)]
        return ObsNode.branch(kind=Branch.STACK, keys=(), children=children, mismatch=self.mismatch)

    def batch_node(self, rows: Rows, *, checked: bool = False) -> BatchNode | None:
        return self.stacked.batch_node(rows, checked=checked)

    def batch(self, rows: Rows, take: Take, objects: Sequence[Iterator[Any]]) -> Any:
        return self.stacked.batch(rows, take, objects)

    def _part(self, a: int, rows: Rows) -> Rows:
        """The memory in which the leaves of member `a` lie, in the member's own numbering."""
        whole = [one.index for one in self.leaves]
        offsets = [rows.offsets[i] + a * part.row_bytes for i, part in zip(whole, self.members[a].leaves, strict=True)]
        return Rows([rows.arrays[i][:, a] for i in whole], offsets, [rows.lent[i] for i in whole])

    def _stack(self, member: SpaceNode) -> SpaceNode:
        if isinstance(member, BranchNode):
            children = tuple(self._stack(child) for child in member.children)
            return BranchNode(member.space, member.path, member.keys, children)
        if not isinstance(member, Leaf):
            raise SpecMismatch(
                f"{member.path} is {member.space}; what agents observe must have a fixed shape and dtype. Wrap the env "
                "so that it is a Box, Discrete, MultiDiscrete or MultiBinary space, or a Dict or Tuple of these"
            )
        return Leaf(member.space, member.path, (len(self.members), *member.shape), member.dtype)


def layout_difference(expected: AgentLayout | None, got: AgentLayout | None) -> str | None:
    """The difference in agents that keeps two envs from sharing a slab; None without one.

    expected, got: the layouts of the two envs; None for an env of one agent.
    """
    if expected is None and got is None:
        return None
    if expected is None or got is None:
        return "only one of them has several agents"
    for name in ("groups", "mask_shapes", "state_space"):
        if getattr(expected, name) != getattr(got, name):
            return f"{name} is {getattr(got, name)}, expected {getattr(expected, name)}"
    return None


def _leaf(path: str, shape: tuple[int, ...], dtype: Any) -> Leaf:
    return Leaf(spaces.Box(0, 1, (), np.uint8), path, shape, dtype)


def _branch(path: str, children: tuple[SpaceNode, ...]) -> BranchNode:
    return BranchNode(spaces.Tuple(()), path, (), children)
