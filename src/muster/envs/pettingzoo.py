"""PettingZoo's parallel API, where all live agents act at once; and the ids and agents of envs of both of its APIs.

Envs are recognised by their methods: PettingZoo is not needed.
"""

from __future__ import annotations

import collections
import importlib
import importlib.util
import logging
import reprlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymnasium import spaces

from muster.envs.agents import AgentsEnv, AgentSpecs, Row, Step
from muster.errors import RecipeError, SpecMismatch
from muster.extras import missing_explained, pip_install, require
from muster.recipes.known_envs import OfKnownLibrary
from muster.spaces.tree import Space
from muster.worker_info import get_worker_info

_logger = logging.getLogger("muster")

# Families that moved to a package of their own: pettingzoo/mpe/... is found there, too.
_MOVED = {"mpe": "mpe2", "mpe2": "mpe2"}
_EXTRA = "muster-rl[marl]"
_RESET = ("reset", ("observations", "infos"))
_STEP = ("step", ("observations", "rewards", "terminations", "truncations", "infos"))


@dataclass(frozen=True)
class MakePettingZoo(OfKnownLibrary):
    """The factory behind ``pettingzoo/<family>/<name>``: the parallel env where there is one, else the turn-based."""

    module: str

    def __call__(self, **kwargs: Any) -> Any:
        module = import_env(self.module)
        make = getattr(module, "parallel_env", None) or module.env
        return make(**kwargs)


def import_env(name: str) -> Any:
    """The module of an env, such as ``"pettingzoo.sisl.multiwalker_v9"``. Raises ImportError, with pip's line."""
    # Every family has packages of its own; pip knows them as an extra of PettingZoo's.
    package, family, *_ = name.split(".")
    requirement = f"pettingzoo[{family}]" if package == "pettingzoo" else _EXTRA
    with missing_explained(f"{name} needs", pip_install(requirement)), warnings.catch_warnings():
        # About how Muster makes the env, which its user cannot change.
        warnings.filterwarnings("ignore", "The old environment creation API", DeprecationWarning)
        return importlib.import_module(name)


def check_env(name: str) -> MakePettingZoo:
    """The factory of ``pettingzoo/<name>``, name being ``<family>/<env>``. Raises RecipeError, ImportError."""
    family, _, env = name.partition("/")
    package = _MOVED.get(family, "pettingzoo")
    require(f"'pettingzoo/{name}' needs", _EXTRA, "pettingzoo", package)
    root = importlib.util.find_spec(package)
    folder = Path(next(iter((root and root.submodule_search_locations) or ("",))))
    folder = folder if package != "pettingzoo" else folder / family
    known = sorted(path.stem for path in folder.glob("*_v*.py")) if family.isidentifier() else []
    if env not in known:
        has = f"It has: {', '.join(known)}" if known else "Give an id such as 'pettingzoo/sisl/multiwalker_v9'"
        raise RecipeError(f"PettingZoo has no env {name!r}. {has}")
    return MakePettingZoo(f"{package}.{env}" if package != "pettingzoo" else f"pettingzoo.{family}.{env}")


def is_pettingzoo(env: Any) -> bool:
    """Returns whether `env` speaks one of PettingZoo's APIs."""
    return all(callable(getattr(env, name, None)) for name in ("reset", "step", "observation_space", "action_space"))


def is_turn_based(env: Any) -> bool:
    """Returns whether the agents of `env` act in turns (AEC)."""
    return callable(getattr(env, "last", None)) and callable(getattr(env, "observe", None))


def specs_of(env: Any, state: bool) -> AgentSpecs:
    """The agents of `env` and their spaces. state: whether to add the space of the env's state, where it has one.

    Raises SpecMismatch for an env that does not name each agent once.
    """
    agents = list(getattr(env, "possible_agents", ()))
    if not agents:
        raise SpecMismatch(
            f"{type(env).__name__} has no possible_agents: every agent has a fixed slot, so the env must name all that "
            "may appear"
        )
    if len(set(agents)) != len(agents):
        twice, _ = collections.Counter(agents).most_common(1)[0]
        raise SpecMismatch(f"{type(env).__name__} names {twice!r} more than once in its possible_agents {agents}")
    state_space = _state_space(env) if state else None
    own_state = getattr(getattr(env, "unwrapped", env), "state", None)
    has_state = callable(own_state) and not getattr(own_state, "__module__", "").startswith("pettingzoo.utils")
    if state and has_state and state_space is None and getattr(get_worker_info(), "env_index", 0) == 0:
        _logger.warning(
            "state=True, and %s has a state() without a state_space that is one array's: the infos have no state, and "
            "a centralised critic sees all agents' observations",
            type(env).__name__,
        )
    return AgentSpecs(
        agents,
        {agent: env.observation_space(agent) for agent in agents},
        {agent: env.action_space(agent) for agent in agents},
        state_space=state_space,
    )


def _state_space(env: Any) -> Space | None:
    try:
        space = env.state_space
    except Exception:  # envs that inherit `state_space` without having a state may raise anything
        return None
    fixed = isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary))
    return space if fixed and callable(getattr(env, "state", None)) else None


class ParallelAgents(AgentsEnv):
    """A PettingZoo parallel env. Agents may die, return, and join late; the episode is over when no agent is left.

    An agent that leaves without an end pauses until it returns; what the dicts say of it meanwhile is in its row.
    An agent with a reward or an end, but without an observation, keeps its last observation.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Row, dict[str, Any]]:
        observations, infos = _by_agent(self.env.reset(seed=seed, options=options), _RESET)
        # A copy: some envs return the very list that they change later.
        agents = self._agents = list(self.env.agents)
        self._start_episode()
        self._start_row()
        # An agent that neither dict names pauses; one with infos alone is refused, and so is a row that shows nothing.
        self._agents_row.put_first(agents, self._all_unmasked(agents, observations), infos)
        info = self._infos(infos)
        return self._row(), info

    def step(self, actions: dict[str, Any]) -> Step:
        before = self._agents
        chosen = self._chosen(actions, before)
        observations, rewards, terminations, truncations, infos = _by_agent(self.env.step(chosen), _STEP)
        after = self._agents = list(self.env.agents)
        self._start_row()
        acting = self._put_all(before + self._away, after, observations, rewards, terminations, truncations)
        info = self._infos(infos)
        if self._away or after != before:
            self._note_away(info)
        return self._end_of_step(self._row(), acting == 0, info)


def _by_agent(result: Any, expected: tuple[str, tuple[str, ...]]) -> Any:
    """`result`, if it has the expected dicts. expected: the call, and the names of its dicts. Raises SpecMismatch."""
    call, names = expected
    if isinstance(result, (tuple, list)) and len(result) == len(names) and isinstance(result[-1], Mapping):
        return result
    raise SpecMismatch(
        f"{call} must return ({', '.join(names)}), each a dict by agent, as PettingZoo's parallel API has it; got "
        f"{reprlib.repr(result)}"
    )
