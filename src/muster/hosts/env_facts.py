"""The facts that the caller needs about an env that another process builds: its spaces, metadata and agents."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from gymnasium import spaces

from muster.envs.agents import AgentsEnv
from muster.envs.layout import AgentLayout
from muster.errors import OneEnvPerProcess, SpecMismatch
from muster.hosts.failures import about_gym
from muster.introspection import type_name
from muster.pickling import MAKE_VEC, UserCall, find_culprits, is_plain
from muster.spaces.compare import first_difference
from muster.spaces.tree import Space
from muster.transport.mail import dumps

_CULPRITS_S = 1.0


@dataclass(frozen=True)
class EnvFacts:
    """The facts about one env that the caller needs, since it may never build one itself."""

    observation_space: Space
    action_space: Space
    metadata: dict[str, Any]
    render_mode: str | None
    spec: Any
    agents: AgentLayout | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The facts for another process, without a spec that cannot go there: it may hold what lazy values became."""
        try:
            dumps(self.spec)
        except Exception:
            return {**vars(self), "spec": None}
        return vars(self)


def facts_of(env: Any) -> EnvFacts:
    """The facts of `env`. Raises AttributeError where it is no env, SpecMismatch for other spaces than Gymnasium's."""
    for name in ("observation_space", "action_space"):
        space = getattr(env, name)
        if not isinstance(space, spaces.Space):
            hint = about_gym(env) or "It comes from the package gym: use gymnasium.spaces"
            hint = f" {hint}" if type_name(space).startswith("gym.") else ""
            raise SpecMismatch(f"{type_name(env)}.{name} is {space!r:.200}, expected a gymnasium.spaces.Space.{hint}")
    metadata = getattr(env, "metadata", None) or {}
    return EnvFacts(
        env.observation_space,
        env.action_space,
        dict(metadata),
        getattr(env, "render_mode", None),
        _spec_of(env),
        env.layout if isinstance(env, AgentsEnv) else None,
    )


def _spec_of(env: Any) -> Any:
    """The env's spec; None where its arguments cannot be copied, as Gymnasium's wrappers copy them, with a warning."""
    try:
        spec = getattr(getattr(env, "unwrapped", env), "spec", None)
        if not all(map(_is_copied_safely, (getattr(spec, "kwargs", None) or {}).values())):
            return None
        copy.deepcopy(spec)
        return getattr(env, "spec", None)
    except Exception:  # copies may raise anything, and so may a property of a user's class
        return None


def _is_copied_safely(value: Any) -> bool:
    """Whether a copy of `value` leaves it intact: that of a pipe's end would close the pipe, once it is dropped."""
    return is_plain(value) or not any(one.severity == "blocks" for one in find_culprits(value, "", limit_s=_CULPRITS_S))


def check_one_per_process(env: Any, num_envs: int, call: UserCall = MAKE_VEC) -> None:
    """Raises OneEnvPerProcess if `env` must be alone in its process, but `num_envs` > 1 are to be built there."""
    if num_envs > 1 and (getattr(env, "metadata", None) or {}).get("one_per_process"):
        raise OneEnvPerProcess(
            f'{type(getattr(env, "unwrapped", env)).__qualname__} declares metadata["one_per_process"] = True, but '
            f"{num_envs} envs were to be built in one process. Give each a process of its own: {call.one_each}."
        )


def same_facts(a: EnvFacts, b: EnvFacts) -> bool:
    pairs = ((a.observation_space, b.observation_space), (a.action_space, b.action_space))
    return a.agents == b.agents and not any(first_difference(x, y, "", bounds=True) for x, y in pairs)
