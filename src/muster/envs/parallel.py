"""PettingZoo's parallel API: all live agents act at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.envs.agents import AgentsEnv, Row, Step
from muster.envs.groups import Agent
from muster.envs.pettingzoo import specs_of


class ParallelAgents(AgentsEnv):
    """A PettingZoo parallel env. Agents may die, return, and join late; the episode is over when nobody is left.

    An agent that is told a reward or its end, but shown nothing, keeps its last observation.
    """

    def __init__(self, env: Any, groups: Mapping[Agent, str] | None, state: bool) -> None:
        super().__init__(env, specs_of(env, state), groups)
        self._agents: list[Agent] = []
        self._last_seen: dict[Agent, Any] = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Row, dict[str, Any]]:
        observations, infos = self.env.reset(seed=seed, options=options)
        # A copy: some envs hand out the very list that they change.
        self._agents = list(self.env.agents)
        self._last_seen = dict(observations)
        self._start_episode()
        places = self._start_row()
        for agent in self._agents:
            if agent in observations:
                self._put(places, agent, observations[agent], 0.0, False, False, True)
        return self._row_and_infos(places, infos)

    def step(self, actions: dict[str, Any]) -> Step:
        before = self._agents
        observations, rewards, terminations, truncations, infos = self.env.step(self._chosen(actions, before))
        after = self._agents = list(self.env.agents)
        places = self._start_row()
        left = 0
        for agent in before if before == after else [*before, *(new for new in after if new not in before)]:
            terminated, truncated = terminations.get(agent, False), truncations.get(agent, False)
            acts = not (terminated or truncated) and agent in after
            left += acts
            if agent in observations:
                self._put(places, agent, observations[agent], rewards.get(agent, 0.0), terminated, truncated, acts)
            elif agent in rewards or terminated or truncated:
                seen = self._last_seen.get(agent)
                self._put(places, agent, seen, rewards.get(agent, 0.0), terminated, truncated, False)
        self._last_seen.update(observations)
        row, info = self._row_and_infos(places, infos)
        return self._end_of_step(row, left == 0, info)

    def _row_and_infos(self, places: list[list[Any]], infos: Mapping[Agent, Any]) -> tuple[Row, dict[str, Any]]:
        info = self._infos(infos)
        return self._row(places), info
