"""PettingZoo's turn-based API (AEC): one agent acts at a time."""

from __future__ import annotations

import reprlib
from typing import Any

from muster._core import copied
from muster.envs.agents import AgentsEnv, Row, Step
from muster.envs.groups import Agent
from muster.errors import SpecMismatch

_LAST_LENGTH = 5  # the number of values that `last` returns


class TurnBasedAgents(AgentsEnv):
    """A PettingZoo AEC env: a step is one agent's turn, and `acting` names the one agent that has the next turn.

    Every live agent's row holds what the agent observes now, copied, because the env may return one array for all. An
    agent's reward is reported when its turn comes, or when it ends: the sum since its last action. Others act in these
    steps, so an agent's return is the sum over all its live rows, not only over those in which it acts.

    An agent that has ended is reported when it is selected for the last time; one that is gone before, as the env's
    ``terminations`` and ``truncations`` say. One that is gone without an end pauses until it returns, or until the env
    has ended; the env keeps its reward for it.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Row, dict[str, Any]]:
        self.env.reset(seed=seed, options=options)
        self._start_episode()
        self._agents = []
        self._gone: dict[Agent, Any] = {}  # those that have ended, and the reward that the env has for each
        return self._next_turn()

    def step(self, actions: dict[str, Any]) -> Step:
        if self.env.agents:  # else all agents have ended with the reset
            agent = self.env.agent_selection
            self.env.step(self._chosen(actions, [agent])[agent])
        row, infos = self._next_turn()
        return self._end_of_step(row, not self.env.agents, infos)

    def _next_turn(self) -> tuple[Row, dict[str, Any]]:
        """Removes the agents that have ended, until it is a live agent's turn or none is left. Returns row, infos."""
        self._start_row()
        env, infos = self.env, {}
        acting: Agent | None = None
        last_rewards: dict[Agent, Any] = {}  # of agents that have ended, and may return in the same turn
        for _ in range(len(self._slots) + 1):
            if not env.agents:
                break
            agent = env.agent_selection
            last = env.last()
            if not isinstance(last, (tuple, list)) or len(last) != _LAST_LENGTH:
                raise SpecMismatch(
                    "last() must return (observation, reward, terminated, truncated, info), as PettingZoo's turn-based "
                    f"API has it; got {reprlib.repr(last)}"
                )
            obs, reward, terminated, truncated, infos[agent] = last
            ended = terminated or truncated
            if agent in last_rewards:
                reward = last_rewards[agent] + reward
            self._put(agent, copied(obs), reward, terminated, truncated, not ended)
            if not ended:
                acting = agent
                break
            last_rewards[agent] = reward
            env.step(None)
        else:
            raise SpecMismatch(f"agent {env.agent_selection!r} has ended, but is selected again after step(None)")
        before, self._agents = self._agents, list(env.agents)
        for agent in self._agents:
            if agent != acting:
                self._put(agent, copied(env.observe(agent)), last_rewards.get(agent, 0.0), False, False, False)
        for agent in before + self._away:
            if agent not in self._agents and agent not in last_rewards:
                self._put_unselected(agent)
        self._check_gone()
        info = self._infos(infos)
        if self._away or self._agents != before:
            self._note_away(info)
        return self._row(), info

    def _put_unselected(self, agent: Agent) -> None:
        """Puts an agent into the row that is gone, though it was not selected after its end; leaves out who pauses."""
        env = self.env
        terminations, truncations = getattr(env, "terminations", {}), getattr(env, "truncations", {})
        terminated, truncated = bool(terminations.get(agent)), bool(truncations.get(agent))
        if not terminated and not truncated and self._agents:
            return
        if not terminated and not truncated and agent not in self._away:
            raise SpecMismatch(
                f"{agent!r} has left env.agents, but has not ended: expected True in env.terminations or "
                f"env.truncations, got {reprlib.repr(terminations)} and {reprlib.repr(truncations)}"
            )
        self._put(agent, copied(env.observe(agent)), self._reward_of(agent), terminated, truncated, False)

    def _check_gone(self) -> None:
        """Raises SpecMismatch for an agent with a reward that came after its end, unless it has returned."""
        there = {*self._agents, *self._agents_row.unended()}
        before, self._gone = self._gone, {agent: self._reward_of(agent) for agent in self._slots if agent not in there}
        for agent, reward in self._gone.items():
            if reward and reward != before.get(agent, reward):  # the env may keep what `last` has handed over
                raise SpecMismatch(
                    f"the env's rewards give {reward!r} to {agent!r}, which is not there, as it has ended before: "
                    f"expected rewards for agents among {self._agents}, or 0. Keep an agent in env.agents until its "
                    "last reward"
                )

    def _reward_of(self, agent: Agent) -> Any:
        cumulative = getattr(self.env, "_cumulative_rewards", None) or {}
        return cumulative[agent] if agent in cumulative else getattr(self.env, "rewards", {}).get(agent, 0.0)
