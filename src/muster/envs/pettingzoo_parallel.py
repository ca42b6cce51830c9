"""PettingZoo's parallel API: all live agents act at once."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from muster.envs.agents import AgentsEnv, Row, Step
from muster.errors import SpecMismatch

_RESET = ("reset", ("observations", "infos"))
_STEP = ("step", ("observations", "rewards", "terminations", "truncations", "infos"))


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
        self._put_first(agents, observations, infos)
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
