"""A vector env as the documentation describes it: envs stepped by hand, in a few lines. Muster's rows must be its."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from bare_loops import Agent, BareParallel, BareTurns
from drawn_envs import AgentsPlan, Planned
from drawn_spaces import Space, batch_of
from gymnasium import spaces

SEED_MASK = 0x7FFFFFFF  # of the seeds of envs that are built again
INT64 = np.iinfo(np.int64)


@dataclass
class Row:
    """The answer of one env. final: observation and info of the episode that has ended in this step (same_step)."""

    obs: Any
    reward: Any = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    final: tuple[Any, dict[str, Any]] | None = None
    restarted: bool = False


class Model:
    """N envs and their episodes. A row is an exception where the env raised and is not restarted."""

    def __init__(self, plans: Sequence[Any], mode: str, *, restarts: bool = False, state: bool = False) -> None:
        self.plans, self.mode, self.restarts = plans, mode, restarts
        self.side = AgentsSide(plans[0], state) if isinstance(plans[0], AgentsPlan) else SingleSide(plans[0])
        self.num_envs = n = len(plans)
        self.envs = [self.side.env(plan) for plan in plans]
        self.over, self.last = [False] * n, [Row(None)] * n
        self.seeds: list[int | None] = [None] * n  # that the user has passed last
        self.next_seed: list[int | None] = [None] * n  # of the next reset, after a restart
        self.restarted, self.attributes = [0] * n, [{} for _ in range(n)]
        self.env_steps = self.resets = 0
        self.returns, self.lengths = np.zeros(n), np.zeros(n, np.int64)

    def reset(self, seeds: Mapping[int, int | None], options: Any) -> dict[int, Row | Planned]:
        """Resets the envs that are keys of `seeds`."""
        return {i: self._answer(i, True, options, self._reset, seed, options) for i, seed in seeds.items()}

    def step(self, actions: Mapping[int, Any]) -> dict[int, Row | Planned]:
        """Steps the envs that are keys of `actions`."""
        resets = [self.mode == "next_step" and over for over in self.over]
        return {i: self._answer(i, resets[i], None, self._step, action) for i, action in actions.items()}

    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        for i, value in enumerate(values):
            self.attributes[i][name] = value
            setattr(self.envs[i].unwrapped, name, value)

    def _answer(self, i: int, is_first: bool, options: Any, act: Callable[..., Row], *args: Any) -> Row | Planned:
        """The row of `act`, or of a restart. is_first: env i owes the first row of an episode."""
        try:
            row = act(i, *args)
        except Planned as error:
            if not self.restarts:
                return error
            row = self._restart(i, is_first, options)
        self.last[i] = row
        return row

    def _reset(self, i: int, seed: int | None, options: Any) -> Row:
        if seed is not None:
            self.seeds[i] = seed
        seed, self.next_seed[i] = self.next_seed[i] if seed is None else seed, None
        self.resets += 1
        obs, info = self.envs[i].reset(seed=seed, options=options)
        self.over[i], self.returns[i], self.lengths[i] = False, 0, 0
        return Row(obs, self.side.no_reward, info=info)

    def _step(self, i: int, action: Any) -> Row:
        if self.over[i] and self.mode != "disabled":  # same_step: the reset after the end has raised
            return self._reset(i, None, None)
        before = self.last[i].terminated or self.last[i].truncated
        self.env_steps += 1
        obs, reward, terminated, truncated, info = self.envs[i].step(action)
        if before:
            self.returns[i] = self.lengths[i] = 0
        self.returns[i] += self.side.total(reward)
        self.lengths[i] += 1
        self.over[i] = bool(terminated or truncated)
        if not self.over[i] or self.mode != "same_step":
            return Row(obs, reward, terminated, truncated, info)
        final = obs, info
        total, steps = self.returns[i], self.lengths[i]
        new = self._reset(i, None, None)
        self.returns[i], self.lengths[i] = total, steps
        return Row(new.obs, reward, terminated, truncated, new.info, final)

    def _restart(self, i: int, is_first: bool, options: Any) -> Row:
        """Builds env i again; returns the row that says so."""
        self.restarted[i] += 1
        self.envs[i] = self.side.env(self.plans[i])
        for name, value in self.attributes[i].items():
            setattr(self.envs[i].unwrapped, name, value)
        if self.seeds[i] is not None:
            sequence = np.random.SeedSequence(self.seeds[i], spawn_key=(self.restarted[i],))
            self.next_seed[i] = int(sequence.generate_state(1)[0]) & SEED_MASK
        if is_first:
            return replace(self._reset(i, None, options), restarted=True)
        lost = self.side.cut_off(self.last[i])
        self.over[i] = True
        if self.mode != "same_step":
            return lost
        new = self._reset(i, None, None)
        return replace(lost, obs=new.obs, info=new.info, final=(lost.obs, {}))


# ---- rows as batches


def merged(infos: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
    """Infos in Gymnasium's form. None: of an env that was not reset with the others."""
    batch: dict[str, Any] = {}
    for key in dict.fromkeys(key for info in infos if info for key in info):
        values = {k: info[key] for k, info in enumerate(infos) if info and key in info}
        batch[key] = _column(values, infos)
        batch[f"_{key}"] = np.isin(np.arange(len(infos)), list(values))
    return batch


def _column(values: dict[int, Any], infos: Sequence[dict[str, Any] | None]) -> Any:
    if all(isinstance(one, dict) for one in values.values()):
        return merged([values.get(k, None if info is None else {}) for k, info in enumerate(infos)])
    arrays = [_as_array(one) for one in values.values()]
    dtype = functools.reduce(_common, [one and one[0] for one in arrays])
    if dtype is None or len({one and one[1] for one in arrays}) > 1:
        column = np.full(len(infos), None, object)
    else:
        column = np.zeros((len(infos), *arrays[0][1]), dtype)
        if dtype.kind == "O":
            column[[info is None for info in infos]] = None
    for k, value in values.items():
        column[k] = value
    return column


def _as_array(value: Any) -> Any:
    """The dtype and the shape of a number of Python's or NumPy's types, or of an array; None for other values."""
    if type(value) is int and not INT64.min <= value <= INT64.max:
        return None
    if type(value) not in (bool, int, float) and not isinstance(value, (np.number, np.bool_, np.ndarray)):
        return None
    array = np.asarray(value)
    return array.dtype, array.shape


def _common(one: Any, other: Any) -> Any:
    """The dtype of a column for two dtypes; None for objects: beside other values, and where integers became floats."""
    if one is None or other is None or any((one.kind == kind) != (other.kind == kind) for kind in "UO"):
        return None
    common = np.result_type(one, other)
    return None if one.kind in "iu" and other.kind in "iu" and common.kind == "f" else common


class SingleSide:
    """Rows of one agent."""

    no_reward: Any = 0.0
    total = staticmethod(float)

    def __init__(self, plan: Any) -> None:
        self.space, self.action_space = plan.observation_space, plan.action_space

    def env(self, plan: Any) -> Any:
        return plan.env(alone=True)

    def cut_off(self, row: Row) -> Row:
        return Row(row.obs, 0.0, False, True, restarted=True)

    def batch(self, rows: Sequence[Row]) -> tuple[Any, ...]:
        """What `step` returns for these rows."""
        obs = batch_of(self.space, [row.obs for row in rows])
        return obs, np.array([row.reward for row in rows], np.float64), *_flags(rows), self.infos(rows)

    def infos(self, rows: Sequence[Row]) -> dict[str, Any]:
        infos = merged([row.info for row in rows])
        if any(row.final for row in rows):
            infos["final_obs"] = np.full(len(rows), None, object)
            for k, row in enumerate(rows):
                infos["final_obs"][k] = row.final and row.final[0]
            infos["_final_obs"] = np.array([row.final is not None for row in rows])
            infos |= merged([{"final_info": row.final[1]} if row.final else {} for row in rows])
        return infos

    def first(self, rows: Sequence[Row], fresh: set[int]) -> tuple[Any, Any]:
        """What `reset` returns where the envs `fresh` were reset."""
        obs = batch_of(self.space, [row.obs for row in rows])
        return obs, merged([row.info if k in fresh else None for k, row in enumerate(rows)])


def _flags(rows: Sequence[Row]) -> tuple[Any, Any]:
    return np.array([bool(row.terminated) for row in rows]), np.array([bool(row.truncated) for row in rows])


class AgentsSide(SingleSide):
    """Rows of agents, in fixed slots by group. An observation holds all that one step says of them."""

    def __init__(self, plan: AgentsPlan, state: bool) -> None:
        self.plan = plan
        self.groups = {name: plan.kinds[name][0] for name in sorted(plan.kinds)}
        self.state = plan.state if state else None
        self.action_space = spaces.Dict({name: plan.kinds[name][2] for name in self.groups})
        self.no_reward = {name: np.zeros(len(agents), np.float32) for name, agents in self.groups.items()}

    def env(self, plan: AgentsPlan) -> Any:
        loop = (BareTurns if plan.turns else BareParallel)(plan.env(alone=True))
        return _Flat(loop, self)

    def total(self, reward: Any) -> float:  # type: ignore[override]
        return 0.0  # episodes' returns are not compared

    def cut_off(self, row: Row) -> Row:
        flags = row.obs["flags"]
        left = {
            g: flags["alive"][g] & ~flags["agent_terminated"][g] & ~flags["agent_truncated"][g] for g in self.groups
        }
        none = {g: np.zeros_like(one) for g, one in left.items()}
        cut = {"alive": left, "acting": none, "agent_terminated": none, "agent_truncated": left}
        return Row({**row.obs, "flags": cut}, self.no_reward, False, True, restarted=True)

    def row(self, loop: Any, left: Set[str] = frozenset()) -> dict[str, Any]:
        """The parts of an env's row. left: the agents that its end truncates."""
        none = Agent(None)
        obs, flags = {}, {name: {} for name in ("alive", "acting", "agent_terminated", "agent_truncated")}
        masks: dict[str, Any] = {}
        for name, agents in self.groups.items():
            told = [loop.told.get(agent) for agent in agents]
            space = self.plan.kinds[name][1]
            obs[name] = batch_of(space, [_zero(space) if one is None else self._plain(one.obs) for one in told])
            flags["alive"][name] = np.array([one is not None for one in told])
            for flag in ("acting", "terminated", "truncated"):
                key = flag if flag == "acting" else f"agent_{flag}"
                flags[key][name] = np.array([bool(getattr(one or none, flag)) for one in told])
            flags["agent_truncated"][name] |= np.isin(agents, list(left))
            if isinstance(self.plan.kinds[name][2], spaces.Discrete):
                found = [self._mask(loop, agent) for agent in agents]
                shape = (int(self.plan.kinds[name][2].n),)
                masks[name] = np.array([np.ones(shape, bool) if mask is None else mask for mask in found])
        has_masks = self.plan.masks == "observations" or any(
            "action_mask" in info for info in loop.infos.values() if info
        )
        parts = {"obs": obs, "flags": flags, "masks": masks, "has_masks": has_masks}
        return {**parts, "state": loop.env.state()} if self.state is not None else parts

    def _plain(self, obs: Any) -> Any:
        return obs["observation"] if self.plan.masks == "observations" else obs

    def _mask(self, loop: Any, agent: str) -> Any:
        source = loop.infos.get(agent) or {} if self.plan.masks == "infos" else getattr(loop.told.get(agent), "obs", {})
        mask = source.get("action_mask") if self.plan.masks and source else None
        return None if mask is None else mask.astype(bool) if mask.any() else np.ones(len(mask), bool)

    def batch(self, rows: Sequence[Row]) -> tuple[Any, ...]:
        told = [row if row.final is None else replace(row, obs=self._ended(row)) for row in rows]
        rewards = {g: np.stack([row.reward[g] for row in rows]) for g in self.groups}
        infos = self._about([row.obs for row in told])
        infos |= merged([row.info for row in rows])
        if any(row.final for row in rows):
            ended = np.array([row.final is not None for row in rows])
            finals = [row.final[0] if row.final else _zeros(rows[0].obs) for row in rows]
            infos["final_obs"] = _stacked([one["obs"] for one in finals])
            infos["_final_obs"], infos["_final_info"] = ended, ended.copy()
            infos["final_info"] = merged([row.final[1] if row.final else {} for row in rows]) | self._about(finals)
        return _stacked([row.obs["obs"] for row in rows]), rewards, *_flags(rows), infos

    def _ended(self, row: Row) -> Any:
        """The parts of the new episode's row, with the ends of the agents of the old one."""
        assert row.final is not None
        ends = {key: row.final[0]["flags"][key] for key in ("agent_terminated", "agent_truncated")}
        return {**row.obs, "flags": {**row.obs["flags"], **ends}}

    def _about(self, parts: Sequence[Any]) -> dict[str, Any]:
        infos = _stacked([one["flags"] for one in parts])
        if any(one["has_masks"] for one in parts):
            infos["action_mask"] = _stacked([one["masks"] for one in parts])
        if self.state is not None:
            infos["state"], infos["_state"] = _stacked([one["state"] for one in parts]), np.ones(len(parts), bool)
        return infos

    def first(self, rows: Sequence[Row], fresh: set[int]) -> tuple[Any, Any]:
        infos = merged([row.info if k in fresh else None for k, row in enumerate(rows)])
        return _stacked([row.obs["obs"] for row in rows]), infos | self._about([row.obs for row in rows])


class _Flat:
    """A multi-agent env as an env of one agent that observes rows."""

    def __init__(self, loop: Any, side: AgentsSide) -> None:
        self.loop, self.side, self.unwrapped = loop, side, loop.env
        self.unended: set[str] = set()  # agents that were there and have not ended, also those that pause

    def reset(self, *, seed: int | None, options: Any) -> tuple[Any, dict[str, Any]]:
        self.loop.reset(seed, options)
        self.unended = set(self.loop.told)
        return self.side.row(self.loop), self._infos()

    def step(self, actions: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        one = {agent: actions[g][k] for g, agents in self.side.groups.items() for k, agent in enumerate(agents)}
        self.loop.step(one)
        for agent, told in self.loop.told.items():
            (self.unended.discard if told.terminated or told.truncated else self.unended.add)(agent)
        left = self.unended if self.loop.over else set()
        self.loop.cut |= bool(left)
        rewards = {
            g: np.array([getattr(self.loop.told.get(agent), "reward", 0.0) for agent in agents], np.float32)
            for g, agents in self.side.groups.items()
        }
        return self.side.row(self.loop, left), rewards, self.loop.terminated, self.loop.truncated, self._infos()

    def _infos(self) -> dict[str, Any]:
        infos = {
            agent: {key: value for key, value in (info or {}).items() if key != "action_mask"}
            for agent, info in self.loop.infos.items()
        }
        infos = {agent: info for agent, info in infos.items() if info}
        return {"agent_infos": infos} if infos else {}


def _zero(space: Space) -> Any:
    match space:
        case spaces.Dict():
            return {key: _zero(one) for key, one in space.items()}
        case spaces.Tuple():
            return tuple(_zero(one) for one in space.spaces)
    return np.zeros(space.shape, space.dtype)


def _stacked(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], dict):
        return {key: _stacked([one[key] for one in parts]) for key in parts[0]}
    if isinstance(parts[0], tuple):
        return tuple(_stacked(one) for one in zip(*parts, strict=True))
    return np.stack(parts)


def _zeros(parts: Any) -> Any:
    if isinstance(parts, dict):
        return {key: _zeros(one) for key, one in parts.items()}
    if isinstance(parts, tuple):
        return tuple(map(_zeros, parts))
    return np.zeros_like(parts) if isinstance(parts, np.ndarray) else False
