"""Random envs of one agent and of several. Each return follows from the plan, the seed, the episode and its actions."""

from __future__ import annotations

import copy
import os
import signal
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from drawn_spaces import (
    DRESSES,
    WILD_DRESSES,
    Rng,
    Space,
    digest,
    draw_info_plan,
    draw_space,
    dressed,
    info_of,
    value_of,
)
from gymnasium import spaces

WRITABLE = (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)


class Planned(RuntimeError):
    """The exception that envs raise by plan."""


class Killed(Planned):
    """Raised by the model's env where a worker's env kills its process."""


@dataclass(frozen=True)
class EnvPlan:
    """What an env's returns follow from. dress: the form of what it returns.  rewards: the numbers in a reward.

    writes: whether it writes into its actions.
    raises, kills: the share of resets and steps that raise, and that kill the env's process.
    """

    seed: int
    observation_space: Space
    action_space: Space
    lengths: tuple[int, ...] = (5,)
    infos: dict[str, Any] = field(default_factory=dict)
    dress: str = "plain"
    wild: bool = True
    rewards: int = 1
    writes: bool = True
    raises: float = 0.0
    kills: float = 0.0

    def env(self, **options: Any) -> DrawnEnv:
        return DrawnEnv(self, **options)


def draw_lengths(draw: Random) -> tuple[int, ...]:
    return tuple(draw.choice([1, 2, 3, 7, 30]) for _ in range(draw.randint(1, 3)))


def draw_plans(draw: Random, num_envs: int, dresses: list[str] | None = None, **given: Any) -> list[EnvPlan]:
    """Plans of envs with the same spaces. given: what `draw_space` takes, and fields that are not drawn."""
    drawing = {key: given.pop(key) for key in ("kinds", "depth", "size") if key in given}
    wild = draw.random() < 0.5
    about = {
        "observation_space": draw_space(draw, **drawing),
        "action_space": draw_space(draw, **{"size": 6, **drawing}),
        "infos": draw_info_plan(draw),
        "wild": wild,
        **given,
    }
    infos_differ, plans = "infos" not in given and draw.random() < 0.3, []
    for _ in range(num_envs):
        if infos_differ:
            about["infos"] = draw_info_plan(draw)
        dress = draw.choice(dresses or (WILD_DRESSES if wild else DRESSES))
        plans.append(EnvPlan(draw.getrandbits(32), lengths=draw_lengths(draw), dress=dress, **about))
    return plans


class Drawn:
    """The state of a drawn env, and what its returns are drawn from.

    alone: whether the env is the model's, stepped by hand: it returns plain values and kills nothing.
    """

    def __init__(self, plan: Any, alone: bool) -> None:
        self.plan, self.alone = plan, alone
        self.calls = self.episode = self.count = self.crc = 0
        self.last_seed = -1
        self.bonus: Any = 0.0  # for set_attr

    def start(self, seed: int | None, options: Any) -> Rng:
        if seed is not None:
            self.last_seed = seed
        self.fail()
        self.episode, self.count = self.episode + 1, 0
        self.crc = digest(options or {})
        return self.rng()

    def go_on(self, action: Any) -> Rng:
        self.fail()
        self.count += 1
        self.crc = digest(action, self.crc)
        return self.rng()

    def fail(self) -> None:
        """Raises, or kills the process, where the plan says so: never in the first two calls, so that each restart
        gets on."""
        self.calls += 1
        luck = Random(f"{self.plan.seed} {self.last_seed} {self.calls}").random()
        if self.calls <= 2 or luck >= self.plan.raises + self.plan.kills:
            return
        if luck < self.plan.raises:
            raise Planned(f"call {self.calls}")
        if self.alone:
            raise Killed
        os.kill(os.getpid(), signal.SIGKILL)

    def rng(self) -> Rng:
        return np.random.default_rng([self.plan.seed, self.last_seed + 1, self.episode, self.count, self.crc])

    def over(self) -> bool:
        return self.count >= self.plan.lengths[self.episode % len(self.plan.lengths)]

    def said(self, word: Any, *, more: Any = None) -> tuple[Any, ...]:
        """For calls."""
        return (word, more, self.count, self.crc)


class DrawnEnv(Drawn, gym.Env[Any, Any]):
    """An env of one agent."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"]}
    render_mode = "ansi"

    def __init__(self, plan: EnvPlan, alone: bool = False) -> None:
        Drawn.__init__(self, plan, alone)
        # Copies: of spaces with objects, values are drawn from the space's own generator.
        self.observation_space = copy.deepcopy(plan.observation_space)
        self.action_space = copy.deepcopy(plan.action_space)
        self._buffer: Any = None  # the last results, where it uses its objects again

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        rng = self.start(seed, options)
        return self._returned(self._obs(rng), info_of(self.plan.infos, rng))

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        rng = self.go_on(action)
        obs, reward, how = self._obs(rng), rng.normal() + self.bonus, int(rng.integers(3))
        if self.plan.rewards > 1:
            reward = np.full(self.plan.rewards, reward)
        if self.plan.writes and isinstance(action, np.ndarray) and isinstance(self.action_space, WRITABLE):
            action[...] = 0  # it is the env's own
        over = self.over()
        terminated, truncated = over and how != 1, over and how != 0
        if self.plan.dress == "wide" and not self.alone:
            reward, terminated, truncated = np.float64(reward), np.bool_(terminated), np.array(truncated)
        obs, info = self._returned(obs, info_of(self.plan.infos, rng))
        return obs, reward, terminated, truncated, info

    def render(self) -> str:
        return f"{self.last_seed}/{self.episode}/{self.count}"

    def _obs(self, rng: Rng) -> Any:
        obs = value_of(self.observation_space, rng, wild=self.plan.wild)
        return obs if self.alone else dressed(self.observation_space, obs, self.plan.dress)

    def _returned(self, obs: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if self.alone or self.plan.dress != "reused":
            return obs, info
        self._buffer = _written_over(self._buffer, (obs, info))
        return self._buffer  # type: ignore[no-any-return]


def _written_over(buffer: Any, value: Any) -> Any:
    """`value`, in the dicts, lists and arrays of `buffer` where they fit."""
    if type(buffer) is not type(value):
        return value
    if isinstance(value, dict):
        parts = {key: _written_over(buffer.get(key), one) for key, one in value.items()}
        buffer.clear()
        buffer.update(parts)
    elif isinstance(value, list):
        buffer[:] = value
    elif isinstance(value, tuple):
        if len(value) != len(buffer):
            return value
        parts = [_written_over(*pair) for pair in zip(buffer, value, strict=True)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    elif isinstance(value, np.ndarray) and (value.shape, value.dtype) == (buffer.shape, buffer.dtype):
        buffer[...] = value
    else:
        return value
    return buffer


def where(env: Any, index: int, word: Any) -> tuple[Any, ...]:
    """A function for `call`."""
    return (index, word, env.get_wrapper_attr("count"))


# ---- several agents


@dataclass(frozen=True)
class AgentsPlan:
    """What a multi-agent env's returns follow from. kinds: by the group's name its agents, and their two spaces.

    turns: whether agents act in turns (AEC), else all at once.  masks: "infos", "observations" or "".
    comes, goes, pauses: the chance of an agent to come or return, to end, and to leave for a while, in each step; those
    that have left are in the dicts all the same as often as others leave.
    """

    seed: int
    kinds: dict[str, tuple[tuple[str, ...], Space, Space]]
    lengths: tuple[int, ...] = (5,)
    infos: dict[str, Any] = field(default_factory=dict)
    turns: bool = False
    masks: str = ""
    state: Space | None = None
    comes: float = 0.2
    goes: float = 0.1
    pauses: float = 0.0
    wild: bool = True
    raises: float = 0.0
    kills: float = 0.0

    def env(self, **options: Any) -> DrawnAgents:
        return (DrawnTurns if self.turns else DrawnAgents)(self, **options)


def draw_agents_plans(draw: Random, num_envs: int, **given: Any) -> list[AgentsPlan]:
    """Plans of envs with the same agents and spaces."""
    kinds = {}
    masks = draw.choice(["", "", "infos", "observations"])
    for name in draw.sample(["walker", "b", "x y"], draw.randint(1, 3)):
        agents = tuple(f"{name}_{k}" for k in range(draw.randint(1, 3)))
        action = spaces.Discrete(3) if masks else draw_space(draw, kinds="bdmBDT", size=5, depth=1)
        kinds[name] = agents, draw_space(draw, kinds="bdmBDT", size=6, depth=1), action
    about = {
        "kinds": kinds,
        "infos": draw_info_plan(draw),
        "turns": draw.random() < 0.3,
        "masks": masks,
        "state": draw_space(draw, kinds="b", size=4) if draw.random() < 0.3 else None,
        "comes": draw.choice([0.0, 0.3]),
        "goes": draw.choice([0.0, 0.1, 0.4]),
        "pauses": draw.choice([0.0, 0.2]),
        **given,
    }
    return [AgentsPlan(draw.getrandbits(32), lengths=draw_lengths(draw), **about) for _ in range(num_envs)]


class DrawnAgents(Drawn):
    """A parallel env after PettingZoo. Agents come, end and return by chance; one of them stays until the end."""

    metadata: ClassVar[dict[str, Any]] = {"name": "drawn", "render_modes": ["ansi"]}
    render_mode = "ansi"

    def __init__(self, plan: AgentsPlan, alone: bool = False) -> None:
        super().__init__(plan, alone)
        self._spaces = {agent: kind[1:] for kind in plan.kinds.values() for agent in kind[0]}
        self.possible_agents = list(self._spaces)
        self.agents: list[str] = []
        self.away: list[str] = []  # those that have left without an end
        if plan.state is not None:
            self.state_space = plan.state

    def observation_space(self, agent: str) -> Space:
        if self.plan.masks != "observations":
            return self._spaces[agent][0]
        return spaces.Dict({"observation": self._spaces[agent][0], "action_mask": spaces.MultiBinary(3)})

    def action_space(self, agent: str) -> Space:
        return self._spaces[agent][1]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        rng = self.start(seed, options)
        first = self.possible_agents[int(rng.integers(len(self.possible_agents)))]
        self.agents, self.away = [a for a in self.possible_agents if a == first or rng.random() < 0.7], []
        return {a: self._obs(a, rng) for a in self._shuffled(self.agents, rng)}, self._infos(self.agents, rng)

    def step(self, actions: dict[str, Any]) -> Any:
        assert set(actions) == set(self.agents), (actions, self.agents)
        rng = self.go_on(actions)
        before, over = self.agents, self.over()
        named = [a for a in self.away if rng.random() < self.plan.pauses]
        ends = {a: rng.choice(["terminated", "truncated"]) for a in before if over or rng.random() < self.plan.goes}
        ends |= {a: "terminated" for a in named if rng.random() < self.plan.goes}
        others = [a for a in self.possible_agents if a not in before and a not in ends]
        comes = [a for a in others if not over and rng.random() < self.plan.comes]
        stay = [a for a in before if a not in ends]
        goes_on = stay[:1] + [a for a in stay[1:] if rng.random() >= self.plan.pauses]
        self.agents = [a for a in self.possible_agents if a in goes_on or a in comes]
        self.away = [a for a in [*self.away, *stay] if a not in self.agents and a not in ends]
        told = self._shuffled(dict.fromkeys([*before, *self.agents, *named]), rng)
        return (
            {a: self._obs(a, rng) for a in told},
            {a: float(np.float32(rng.normal())) + self.bonus for a in told},
            {a: ends.get(a) == "terminated" for a in told},
            {a: ends.get(a) == "truncated" for a in told},
            self._infos(told, rng),
        )

    def state(self) -> Any:
        return value_of(self.plan.state, self.rng())

    def render(self) -> str:
        return f"{self.last_seed}/{self.episode}/{self.count}"

    def close(self) -> None:
        pass

    def _shuffled(self, agents: Any, rng: Rng) -> list[str]:
        return [str(one) for one in rng.permutation(list(agents))]

    def _obs(self, agent: str, rng: Rng) -> Any:
        obs = value_of(self._spaces[agent][0], rng, wild=self.plan.wild)
        return obs if self.plan.masks != "observations" else {"action_mask": self._mask(rng), "observation": obs}

    def _infos(self, agents: Any, rng: Rng) -> dict[str, Any]:
        infos = {a: info_of(self.plan.infos, rng) for a in agents}
        if self.plan.masks == "infos" and rng.random() < 0.8:
            for info in infos.values():
                info["action_mask"] = self._mask(rng)
        return infos

    def _mask(self, rng: Rng) -> Any:
        return rng.integers(0, 2, 3, np.int8)  # now and then it forbids all


class DrawnTurns(DrawnAgents):
    """A turn-based env after PettingZoo's AEC API, over the same draws. All agents are there from the start."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        rng = self.start(seed, options)
        self.agents, self.away = list(self.possible_agents), []
        self.agent_selection = self.agents[0]
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self._look(rng)

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            assert action is None
            at = self.agents.index(agent)
            self.agents = [one for one in self.agents if one != agent]
            self.agent_selection = self.agents[at % len(self.agents)] if self.agents else agent
            return
        rng = self.go_on({agent: action})
        self._cumulative_rewards[agent] = 0.0
        for one in self.agents:
            self._cumulative_rewards[one] += float(rng.integers(9))
            if self.over() or rng.random() < self.plan.goes / 3:
                (self.terminations if rng.random() < 0.5 else self.truncations)[one] = True
        self.agent_selection = self.agents[(self.agents.index(agent) + 1) % len(self.agents)]
        self._come_and_leave(rng)
        self._look(rng)

    def _come_and_leave(self, rng: Rng) -> None:
        """Lets agents return, and others leave without an end; whoever is selected stays, and has not ended."""
        ended = {a for a in self.agents if self.terminations[a] or self.truncations[a]}
        if self.agent_selection in ended:
            return
        stay = [a for a in self.agents if a in (*ended, self.agent_selection) or rng.random() >= self.plan.pauses]
        back = [a for a in self.away if rng.random() < self.plan.comes]
        self.away = [a for a in [*self.away, *self.agents] if a not in stay and a not in back]
        self.agents = [a for a in self.possible_agents if a in stay or a in back]

    def observe(self, agent: str) -> Any:
        return self._seen[agent]

    def last(self, observe: bool = True) -> Any:
        agent = self.agent_selection
        ended = self.terminations[agent], self.truncations[agent]
        return self.observe(agent), self._cumulative_rewards[agent], *ended, self.infos[agent]

    def _look(self, rng: Rng) -> None:
        self._seen = {a: self._obs(a, rng) for a in [*self.agents, *self.away]}
        self.infos = self._infos(self.agents, rng)
