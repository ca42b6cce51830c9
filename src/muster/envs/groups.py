"""Groups of agents: a group holds the agents of one kind, with their arrays in one block ``[N, A, ...]``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Mapping, Sequence
from string import ascii_lowercase

from gymnasium import spaces

from muster.errors import ConfigError, SpecMismatch
from muster.spaces.tree import Space

Agent = Hashable
Groups = dict[str, tuple[Agent, ...]]

# Names that observations use for something other than a group.
RESERVED = ("shared", "state")
_NAME = re.compile(r"(.*?)[_\-. ]*\d+", re.DOTALL)


def slots_of(groups: Mapping[str, Sequence[Agent]]) -> dict[str, slice]:
    """The slice of each group's agents among all agents. groups: the agents of each."""
    found, at = {}, 0
    for name, agents in groups.items():
        found[name] = slice(at, at + len(agents))
        at += len(agents)
    return found


def group_agents(
    agents: Sequence[Agent],
    observation_spaces: Mapping[Agent, Space],
    action_spaces: Mapping[Agent, Space],
    override: Mapping[Agent, str] | None = None,
) -> Groups:
    """Groups by name, ordered by name, their agents in the order of `agents`.

    Without `override` agents form groups by the part of their name before the number (``walker_0`` -> ``walker``;
    ``agents`` where there is none). A group of unequal spaces is split into ``<name>_a``, ``<name>_b``, ..., without
    the names that other groups have. `override` maps every agent to its group. Raises ConfigError, SpecMismatch where
    a group of `override` has unequal spaces.
    """
    groups: dict[str, list[Agent]] = {}
    if override is None:
        for agent in agents:
            groups.setdefault(group_name(agent), []).append(agent)
        groups = _split(groups, observation_spaces, action_spaces)
    else:
        for agent in agents:
            groups.setdefault(_name_of(agent, override, agents), []).append(agent)
        for name, members in groups.items():
            _require_equal(name, members, observation_spaces, action_spaces)
    return {name: tuple(groups[name]) for name in sorted(groups)}


def group_name(agent: Agent) -> str:
    """The part of the agent's name before its number, which names its kind; ``agents`` where there is none.

    >>> group_name("walker_0"), group_name("lead_adversary_12"), group_name("7"), group_name("alice")
    ('walker', 'lead_adversary', 'agents', 'agents')
    """
    match = _NAME.fullmatch(str(agent))
    name = match.group(1) if match else ""
    return f"{name}_agents" if name in RESERVED else name or "agents"


def _name_of(agent: Agent, override: Mapping[Agent, str], agents: Sequence[Agent]) -> str:
    name = override.get(agent)
    if not isinstance(name, str) or not name or name in RESERVED:
        reason = "is not in it" if agent not in override else f"is mapped to {name!r}"
        raise ConfigError(
            f"groups must map every agent to the name of its group (not {' or '.join(map(repr, RESERVED))}): agent "
            f"{agent!r} {reason}. "
            f"The env's agents are {list(agents)}; write groups={{{agent!r}: 'a_name', ...}}"
        )
    return name


def _split(
    groups: dict[str, list[Agent]], observation_spaces: Mapping[Agent, Space], action_spaces: Mapping[Agent, Space]
) -> dict[str, list[Agent]]:
    split: dict[str, list[Agent]] = {}
    for name, members in groups.items():
        kinds: list[list[Agent]] = []
        for agent in members:
            pair = observation_spaces[agent], action_spaces[agent]
            alike = (kind for kind in kinds if (observation_spaces[kind[0]], action_spaces[kind[0]]) == pair)
            if (kind := next(alike, None)) is not None:
                kind.append(agent)
            else:
                kinds.append([agent])
        if len(kinds) == 1:
            split[name] = members
            continue
        counts = itertools.count(1)
        suffixes = itertools.chain.from_iterable(itertools.product(ascii_lowercase, repeat=count) for count in counts)
        names = (f"{name}_{''.join(letters)}" for letters in suffixes)
        free = (one for one in names if one not in groups)
        split.update(zip(free, kinds, strict=False))
    return split


def _require_equal(
    name: str,
    members: Sequence[Agent],
    observation_spaces: Mapping[Agent, Space],
    action_spaces: Mapping[Agent, Space],
) -> None:
    first = members[0]
    for agent in members[1:]:
        for kind, of in (("observation", observation_spaces), ("action", action_spaces)):
            if of[agent] != of[first]:
                raise SpecMismatch(
                    f"groups puts {first!r} and {agent!r} into group {name!r}, but their {kind} spaces differ: "
                    f"{of[first]} and {of[agent]}. Agents of one group share an array; give them groups of their own"
                )


def sorted_space(space: Space) -> Space:
    """`space` with the keys of its Dicts sorted, because their order may differ between processes."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict([(key, sorted_space(space[key])) for key in sorted(space.spaces, key=str)])
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple(tuple(sorted_space(one) for one in space.spaces))
    return space
