"""Multi-agent envs behind the single-env API of the stepping loop.

An adapter's "observation" is a row: everything one step says of all agents, in the parts that `layout.AgentLayout`
describes. The core puts agents into their places, because Python would take a tenth of a small env's step for it, and
copies their arrays once, from the env's own objects into the slab.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from muster._core import FLAG_NAMES, AgentRow
from muster.envs.attributes import Adapting
from muster.envs.groups import Agent, group_agents, sorted_space
from muster.envs.layout import AgentLayout
from muster.errors import SpecMismatch
from muster.spaces.masks import MASK, mask_length, usable
from muster.spaces.tree import Space

Row = tuple[Any, ...]
Step = tuple[Row, float, bool, bool, dict[str, Any]]
Split = Callable[[Any], Sequence[Any]]
AWAY = "agents_away"
"""Key in the infos of the first step in which agents leave without an end: the agents. Users get a warning instead."""


@dataclass(frozen=True)
class AgentSpecs:
    """The specs of an env's agents: spaces by agent, and the spaces of the env's state and shared observations."""

    agents: Sequence[Agent]
    observation_spaces: Mapping[Agent, Space]
    action_spaces: Mapping[Agent, Space]
    state_space: Space | None = None
    shared_space: spaces.Dict | None = None


class _Slot(NamedTuple):
    """The place of an agent: among all agents, and in its group. mask: which of the layout's masks it has, or -1."""

    column: int
    group: int
    member: int
    keys: tuple[str, ...] | None  # the observation's own, where the env may add keys: those that all agents share
    mask: int
    unwrap: Callable[[Any], Any] | None  # the observation without its action mask


class _Slots(dict[Agent, _Slot]):
    """The slots by agent."""

    def __missing__(self, agent: Agent) -> _Slot:
        raise SpecMismatch(
            f"agent {agent!r} is not among the env's possible_agents {list(self)}; slots are fixed, so every agent "
            "that may ever appear has to be named there"
        )


class AgentsEnv(Adapting, ABC):
    """A multi-agent env as the stepping loop sees it: `reset` and `step` return rows of `layout`."""

    def __init__(self, env: Any, specs: AgentSpecs, groups: Mapping[Agent, str] | None) -> None:
        self.env = env
        self.metadata = dict(getattr(env, "metadata", None) or {})
        self.render_mode = getattr(env, "render_mode", None)
        self.layout, unwraps = _layout_of(specs, groups)
        self.observation_space = self.layout.observation_space()
        self.action_space = self.layout.action_space()
        self._slots = _slots_of(self.layout, unwraps, shows_more=specs.shared_space is not None)
        self._masked = bool(unwraps)
        self._splits = [(name, _splitter(space)) for name, space in self.layout.action_spaces.items()]
        self._rewards = np.zeros(self.layout.num_agents, np.float32)
        self._flags = np.zeros((len(FLAG_NAMES), self.layout.num_agents), np.bool_)
        sizes = [len(agents) for agents in self.layout.groups.values()]
        self._agents_row = AgentRow(self._slots, sizes, self._rewards, self._flags)
        agents_by_mask = [(len(self.layout.groups[name]), shape) for name, shape in self.layout.mask_shapes.items()]
        self._masks = tuple(np.ones((count, *shape), np.bool_) for count, shape in agents_by_mask)
        self._mask_spaces = [self.layout.action_spaces[name] for name in self.layout.mask_shapes]
        self._has_masks = np.zeros(1, np.bool_)
        self._agents: list[Agent] = []  # that are present
        self._away: list[Agent] = []  # that have left without an end, and may return
        self._told_away = False
        self._last_masks: dict[Agent, Any] = {}
        self._last_state: Any = None

    # ---- what each API does in its own way

    @abstractmethod
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Row, dict[str, Any]]:
        """The first row of an episode, and infos."""

    @abstractmethod
    def step(self, actions: dict[str, Any]) -> Step:
        """Row, sum of the agents' rewards, terminated, truncated, infos. actions: ``[A, ...]`` by group."""

    # ---- the rest of an env's API

    def render(self) -> Any:
        return self.env.render()

    # ---- making rows

    def _chosen(self, actions: dict[str, Any], agents: list[Agent]) -> dict[Agent, Any]:
        by_group = [split(actions[name]) if split else actions[name] for name, split in self._splits]
        return self._agents_row.choose(by_group, agents)

    def _start_episode(self) -> None:
        self._agents_row.start_episode()
        self._away = []
        self._last_masks.clear()
        self._last_state = None

    def _start_row(self) -> None:
        """Starts a row in which no agent is there yet."""
        self._agents_row.start()
        if self._has_masks[0]:
            for mask in self._masks:
                mask.fill(True)
        self._has_masks[0] = self._masked  # where spaces announce masks, even while no agent that has one is there

    def _put(self, agent: Agent, obs: Any, reward: float, terminated: bool, truncated: bool, acts: bool) -> None:
        """Puts one agent that is there into the row. obs: None for zeros.  acts: its action counts in the next step."""
        if self._masked:
            obs = self._unmasked({agent: obs})[agent]
        self._agents_row.put(agent, obs, reward, bool(terminated), bool(truncated), acts)

    def _put_all(
        self,
        before: list[Agent],
        after: list[Agent],
        observations: Mapping[Agent, Any],
        rewards: Mapping[Agent, Any],
        terminations: Mapping[Agent, Any],
        truncations: Mapping[Agent, Any],
    ) -> int:
        """Puts the agents of a step into the row. before, after: those that acted, and those there for the next step.

        An agent that ends without an observation keeps its last one; one that no dict names pauses. Returns the number
        of agents that go on. Raises SpecMismatch for keys that are no agents; for a reward, except 0, of an agent that
        is not there; for an agent that acted and has no reward, that goes on and has a reward without an observation,
        or that leaves without an end as all others; and where no agent that goes on has an observation.
        """
        if self._masked:
            there = dict.fromkeys([*before, *after])
            observations = self._all_unmasked(there, observations)
            for agent in there.keys() - observations.keys():
                if agent in self._last_masks and (
                    agent in rewards or terminations.get(agent) or truncations.get(agent)
                ):
                    self._put_mask(agent, self._slots[agent], self._last_masks[agent])
        return self._agents_row.put_all(before, after, observations, rewards, terminations, truncations)

    def _all_unmasked(self, there: Iterable[Agent], observations: Mapping[Agent, Any]) -> Mapping[Agent, Any]:
        """The observations, those of the agents `there` without the action masks in them."""
        if not self._masked:
            return observations
        return {**observations, **self._unmasked({one: observations[one] for one in there if one in observations})}

    def _unmasked(self, observations: Mapping[Agent, Any]) -> dict[Agent, Any]:
        """The observations without the action masks in them, which become part of the row."""
        rest = dict(observations)
        for agent, obs in observations.items():
            slot = self._slots.get(agent)
            if slot is not None and slot.unwrap is not None and obs is not None:
                mask = self._last_masks[agent] = np.array(obs[MASK])
                self._put_mask(agent, slot, mask)
                rest[agent] = slot.unwrap(obs)
        return rest

    def _put_mask(self, agent: Agent, slot: _Slot, mask: Any) -> None:
        row, space = self._masks[slot.mask][slot.member], self._mask_spaces[slot.mask]
        # Another thing of that name, which the observation space announces, keeps its place.
        is_other = slot.unwrap is not None and row.shape != (mask_length(space),) and row.shape == np.shape(mask)
        row[...] = mask if is_other else usable(mask, space, of=f"the action mask of {agent!r}")
        self._has_masks[0] = True

    def _row(self, shared: Mapping[str, Any] | None = None) -> Row:
        places, state = self._agents_row.take_places(), self._state()
        return (places, self._rewards, self._flags, self._masks, self._has_masks, state, shared or {})

    def _state(self) -> Any:
        if self.layout.state_space is None:
            return ()
        try:
            self._last_state = np.array(self.env.state())
        except Exception:
            # Some envs, such as multiwalker, destroy their world with the last agent. Then the last state is kept.
            if self.env.agents or self._last_state is None:
                raise
        return self._last_state

    def _infos(self, infos: Mapping[Agent, Any]) -> dict[str, Any]:
        """The infos of all agents in one dict; action masks in them become part of the row.

        Other keys than the agents' are kept, as envs have them for what concerns all agents. Raises SpecMismatch for
        one with an action mask, which would be lost.
        """
        if not any(infos.values()):
            return {}
        kept = {}
        for agent, info in infos.items():
            if not info:
                continue
            slot = self._slots.get(agent)
            if slot is None and isinstance(info, Mapping) and MASK in info and self.layout.mask_shapes:
                raise SpecMismatch(
                    f"the infos have an action mask for {agent!r}, which is none of the env's possible_agents: "
                    f"expected keys among {list(self._slots)}, got {list(infos)}. Give each agent's entry the agent's "
                    "own name"
                )
            if slot is not None and slot.mask >= 0 and slot.unwrap is None and MASK in info:
                self._put_mask(agent, slot, info[MASK])
                info = {key: value for key, value in info.items() if key != MASK}
            if info:
                kept[str(agent)] = info
        return {"agent_infos": kept} if kept else {}

    def _note_away(self, infos: dict[str, Any]) -> None:
        """Notes which agents are away; the first time the infos say so, for a warning in the caller."""
        self._away = [agent for agent in self._agents_row.unended() if agent not in self._agents]
        if self._away and not self._told_away:
            self._told_away = True
            infos[AWAY] = self._away

    def _end_of_step(self, row: Row, over: bool, infos: dict[str, Any]) -> Step:
        return row, *self._agents_row.end_of_step(over), infos


def _layout_of(
    specs: AgentSpecs, override: Mapping[Agent, str] | None
) -> tuple[AgentLayout, dict[str, Callable[[Any], Any]]]:
    """The layout, and for each group with the action mask in its observations, a function that removes the mask."""
    observation_spaces = {agent: sorted_space(space) for agent, space in specs.observation_spaces.items()}
    groups = group_agents(specs.agents, observation_spaces, specs.action_spaces, override)
    by_group: dict[str, Space] = {}
    mask_shapes: dict[str, tuple[int, ...]] = {}
    unwraps: dict[str, Callable[[Any], Any]] = {}
    for name, agents in groups.items():
        space, action_space = observation_spaces[agents[0]], specs.action_spaces[agents[0]]
        if length := mask_length(action_space):
            mask_shapes[name] = (length,)
        if isinstance(space, spaces.Dict) and MASK in space.spaces:
            mask_shapes[name] = tuple(space[MASK].shape or ())
            rest = {key: one for key, one in space.items() if key != MASK}
            unwraps[name] = itemgetter("observation") if list(rest) == ["observation"] else _without_mask
            space = rest["observation"] if list(rest) == ["observation"] else spaces.Dict(rest)
        by_group[name] = space
    layout = AgentLayout(
        groups=groups,
        observation_spaces=by_group,
        action_spaces={name: specs.action_spaces[agents[0]] for name, agents in groups.items()},
        mask_shapes=mask_shapes,
        state_space=specs.state_space,
        shared_space=specs.shared_space or spaces.Dict({}),
    )
    return layout, unwraps


def _without_mask(obs: Any) -> Any:
    return {key: value for key, value in obs.items() if key != MASK}


def _slots_of(layout: AgentLayout, unwraps: Mapping[str, Callable[[Any], Any]], *, shows_more: bool) -> _Slots:
    slots = _Slots()
    masks = list(layout.mask_shapes)
    for g, (name, agents) in enumerate(layout.groups.items()):
        mask = masks.index(name) if name in masks else -1
        space = layout.observation_spaces[name]
        keys = tuple(space.spaces) if shows_more and isinstance(space, spaces.Dict) else None
        for member, agent in enumerate(agents):
            slots[agent] = _Slot(len(slots), g, member, keys, mask, unwraps.get(name))
    return slots


def _splitter(space: Space) -> Split | None:
    """A function that splits a group's structure into the agents' actions; None for arrays, which need no function."""
    if isinstance(space, spaces.Dict):
        by_key = {key: _splitter(one) or list for key, one in space.items()}
        return lambda actions: [
            dict(zip(by_key, one, strict=True))
            for one in zip(*(split(actions[key]) for key, split in by_key.items()), strict=True)
        ]
    if isinstance(space, spaces.Tuple):
        parts = [_splitter(one) or list for one in space.spaces]
        return lambda actions: list(
            zip(*(split(part) for split, part in zip(parts, actions, strict=True)), strict=True)
        )
    return None
