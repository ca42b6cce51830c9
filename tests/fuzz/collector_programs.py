"""Random collectors: their batches have to be those of a loop by hand, and to stay as they are once handed out."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import torch
from drawn_envs import AgentsPlan, draw_agents_plans, draw_plans
from drawn_spaces import draw_box
from gymnasium import spaces
from model import Model
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from vector_programs import Difference, Tally, draw_backend

import muster


class Policy(nn.Module):
    """Acts by the sum of what it observes, and by its one weight. counts: of actions, by group; None for one agent."""

    def __init__(self, counts: dict[str | None, int]) -> None:
        super().__init__()
        self.counts = counts
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, obs: Any) -> Any:
        if isinstance(obs, dict) and None not in self.counts:
            return {group: self.act(part, group, 2) for group, part in obs.items()}
        return self.act(obs, None, 1)

    def act(self, obs: Any, group: str | None, dims: int) -> Tensor:
        """int64 ``[N]``, or ``[N, A]``.  dims: the number of the axes that are no part of an observation."""
        parts = [obs[key] for key in sorted(obs)] if isinstance(obs, dict) else [obs]
        total = sum(part.flatten(dims).long().sum(-1) if part.dim() > dims else part.long() for part in parts)
        return (total + self.shift.long()) % self.counts[group]


def run_collector(draw: Random, tally: Tally, backends: list[str]) -> None:
    """A `Collector` or a `MultiCollector` of envs with one agent or several."""
    agents, n, multi = draw.random() < 0.4, draw.choice([1, 2, 3]), "process" in backends and draw.random() < 0.5
    plans: Any
    if agents:
        plans = draw_agents_plans(draw, n)
        kinds = {name: (who, draw_box(draw, 6), spaces.Discrete(4)) for name, (who, *_) in plans[0].kinds.items()}
        plans = [AgentsPlan(one.seed, kinds, one.lengths, one.infos, wild=False) for one in plans]
        counts: dict[str | None, int] = dict.fromkeys(kinds, 4)
    else:
        plans = draw_plans(draw, n, kinds="bdmBD", depth=1, size=6, wild=False, action_space=spaces.Discrete(5))
        counts = {None: 5}
    options: dict[str, Any] = {
        "frames_per_batch": n * draw.choice([1, 5, 12]),
        "max_frames_per_traj": draw.choice([None, None, 3]),
    }
    if options["max_frames_per_traj"] is None:
        options["reset_at_each_iter"] = draw.random() < 0.3
    policy = Policy(counts)
    given: Any = policy
    if multi:
        options |= {"num_collectors": draw.randint(1, n), "context": "auto" if draw.random() < 0.05 else "fork"}
        make: Any = muster.MultiCollector
    else:
        options |= {
            "overlap": n > 1 and not agents and draw.random() < 0.3,
            "make_vec_options": draw_backend(draw, backends, n),
        }
        make = muster.Collector
        if not agents and not isinstance(plans[0].observation_space, spaces.Dict) and draw.random() < 0.5:
            given = TensorDictModule(policy, ["observation"], ["action"])
    loop, kept = _by_hand(plans, policy, options), []
    with make([plan.env for plan in plans], given, **options) as collector:
        for _ in range(draw.choice([2, 4])):
            if draw.random() < 0.5:
                policy.shift.data += 1
                if multi:
                    collector.update_policy_weights_()
            batch, expected = collector.rollout(), next(loop)
            _require_same(batch, expected)
            kept.append((batch, batch.clone()))
            tally.rows += batch.numel()
    for batch, copied in kept:
        _require_same(batch, copied)
    tally.programs += 1


def _by_hand(plans: Any, policy: Policy, options: dict[str, Any]) -> Iterator[TensorDict]:
    """The batches, ``[N, T]``, of envs that are stepped one by one."""
    n, limit = len(plans), options["max_frames_per_traj"]
    model = Model(plans, "disabled")
    fresh = dict.fromkeys(range(n))
    model.reset(fresh, None)
    frames, batches = [0] * n, 0
    while True:
        rows = []
        if options.get("reset_at_each_iter") and batches:
            model.reset(fresh, None)
            frames = [0] * n
        for _ in range(options["frames_per_batch"] // n):
            before = [model.last[i] for i in range(n)]
            obs = _tensors(model.side.batch(before)[0])
            with torch.no_grad():
                actions = policy(obs)
            after = [model.step({i: _one(actions, i)})[i] for i in range(n)]
            rows.append(_frame(model, obs, model.side.batch(before)[4], actions, model.side.batch(after)))
            for i in range(n):
                frames[i] += 1
                if limit == frames[i] and not model.over[i]:
                    _cut_off(rows[-1], i)
                if limit == frames[i] or model.over[i]:
                    model.reset({i: None}, None)
                    frames[i] = 0
        batches += 1
        yield torch.stack(rows, 1)


def _tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tensors(one) for key, one in value.items()}
    return torch.from_numpy(np.array(value))


def _one(actions: Any, i: int) -> Any:
    if isinstance(actions, dict):
        return {group: list(part[i].numpy()) for group, part in actions.items()}
    return actions[i].numpy()[()]


def _frame(model: Model, obs: Any, infos: Any, actions: Any, result: Any) -> TensorDict:
    """One step of all envs, ``[N]``."""
    after, rewards, terminated, truncated, about = result
    n = model.num_envs
    ends = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
    frame: dict[str, Any] = {"next": {key: torch.from_numpy(one)[:, None] for key, one in ends.items()}}
    if isinstance(actions, Tensor):
        frame |= {"observation": obs, "action": actions}
        frame["next"] |= {"observation": _tensors(after), "reward": torch.from_numpy(np.float32(rewards))[:, None]}
        if isinstance(obs, dict):
            frame |= frame.pop("observation")
            frame["next"] |= frame["next"].pop("observation")
        return TensorDict(frame, [n])
    for group in obs:
        flags = {key: torch.from_numpy(infos[key][group]) for key in ("alive", "acting")}
        frame[group] = {"observation": obs[group], "action": actions[group], **flags}
        ended = {key: torch.from_numpy(about[f"agent_{key}"][group])[..., None] for key in ("terminated", "truncated")}
        frame["next"][group] = {
            "there": torch.from_numpy(about["alive"][group]),  # for `_cut_off`
            "observation": _tensors(after[group]),
            "reward": torch.from_numpy(rewards[group])[..., None],
            **ended,
            "done": ended["terminated"] | ended["truncated"],
        }
    return TensorDict(frame, [n])


def _cut_off(frame: TensorDict, i: int) -> None:
    """Truncates the trajectory of env i, and those of its agents that were there and have not ended."""
    after = frame["next"]
    after["truncated"][i] = after["done"][i] = True
    for group in (key for key, part in after.items() if isinstance(part, TensorDictBase) and "done" in part):
        there = frame[group, "alive"][i] & after[group, "there"][i]
        left = there.unsqueeze(-1) & ~after[group, "done"][i]
        after[group, "truncated"][i] |= left
        after[group, "done"][i] |= left


def _require_same(batch: TensorDict, expected: TensorDict) -> None:
    for key in expected.keys(True, True):
        if key[-1] == "there":
            continue
        ours, theirs = batch[key], expected[key]
        if ours.dtype != theirs.dtype or not ours.equal(theirs):
            raise Difference(f"{key}: {ours!r:.400}, expected {theirs!r:.400}")
    if not batch["collector", "mask"].all():
        raise Difference("frames are masked")
    ids = batch["collector", "traj_ids"]
    if not (ids[:, 1:] != ids[:, :-1]).equal(batch["next", "done"][:, :-1, 0]):
        raise Difference(f"traj_ids: {ids}")
