"""What one policy learns from a rollout: values, advantages, and PPO's loss over random minibatches.

`PPO` has one learner, `MAPPO` one for each team of agents that share a network.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from muster.algorithms.actor_critic import Sequences
from muster.algorithms.encoder import RewardNormalizer
from muster.algorithms.ppo_config import Losses, PPOConfig, Rates
from muster.errors import TrainingDiverged
from muster.rollout.returns import gae

KL_MARGIN = 1.5  # by which a minibatch may exceed target_kl, as in Stable-Baselines3
Observation = Any
"""A tensor, or a TensorDict of several."""


class Experience(NamedTuple):
    """A collector's batch as one policy sees it: T steps of N envs, [N, T]; of A agents in each env, [N, T, A].

    K episodes have ended in it.
    """

    observations: Observation  # [N, T, (A,) *obs_shape], what each action is for
    last: Observation  # [N, (A,) *obs_shape], what follows the last action
    finals: Observation  # [K, (A,) *obs_shape], what ended the episodes
    final_at: Tensor  # [K, 2] int64, env and step
    actions: Tensor  # [N, T, (A,) C]: C choices (int64) or C continuous numbers (float32)
    rewards: Tensor  # [N, T, (A)] float32
    terminated: Tensor  # [N, T, (A)] bool
    truncated: Tensor  # [N, T, (A)] bool
    counts: Tensor  # [N, T, (A)] bool, the rows that are learnt from
    acts: Tensor | None = None  # [N, T, A] bool, of these the rows in which the action counted; None: all
    masks: Tensor | None = None  # [N, T, (A,) n] bool, the choices that were allowed; None: all
    follows: Tensor | None = None  # [N, T, A] bool, whether the agent is there after the step; None: always
    ends: Tensor | None = None  # [N, T, 1] bool, whether the step ended the env's episode; with `follows`
    memory: Tensor | None = None  # [N, T, (A,) H] float32, before each step; None without
    keeps: Tensor | None = None  # [N, T, (A)] bool, whether a step has the memory of the one before; else zeros


class Rollout(NamedTuple):
    """The B rows of a rollout, by env, then time, with what the policy that collected them computed of each.

    B = N * T for T steps of N envs, less the rows that are left out. For A agents all shapes have [B, A] for [B].
    """

    observations: Observation  # [B, *obs_shape], the space's dtype; normalised ones float32
    actions: Tensor  # [B, C]: C choices (int64) or C continuous numbers (float32)
    log_probs: Tensor  # [B] float32
    values: Tensor  # [B] float32
    advantages: Tensor  # [B] float32
    targets: Tensor  # [B] float32, for the values
    masks: Tensor | None = None  # [B, n] bool, allowed choices
    counts: Tensor | None = None  # [B, A] bool, the agents that the value is learnt from; None: all
    acts: Tensor | None = None  # [B, A] bool, the agents that the policy is learnt from; None: all
    memory: Sequences | None = None  # of the rows, which are S sequences of L = B / S, one behind the other

    @property
    def num_parts(self) -> int:
        """How many there are to draw from: B rows, or with memory S sequences."""
        return len(self.targets) if self.memory is None else len(self.memory.start)

    def at(self, chosen: Tensor) -> Rollout:
        """Some of its parts. chosen: indices [M]."""
        rows, memory = chosen, None
        if self.memory is not None:
            length = self.memory.keeps.shape[1]
            rows = (chosen.unsqueeze(1) * length + torch.arange(length, device=chosen.device)).flatten()
            memory = Sequences(self.memory.start[chosen], self.memory.keeps[chosen])
        parts: Any = (None if part is None else part[rows] for part in self[:-1])
        return Rollout(*parts)._replace(memory=memory)

    def explained_variance(self) -> float:
        """The share of the targets' variance that the values explain: 1 all, 0 no more than their mean does."""
        targets, values = (x if self.counts is None else x[self.counts] for x in (self.targets, self.values))
        if not len(targets):
            return math.nan
        left = (targets - values).var(correction=0)
        return 1 - (left / (targets.var(correction=0) + 1e-8)).item()


class Learner:
    """A policy, and all that training changes besides its weights.

    policy: as for `PPO`, where it computes.  shape: of one step's rewards, (N,), or (N, A) for A agents.  device: of
    rollouts.  seed: of the minibatches.
    """

    def __init__(self, policy: Any, config: PPOConfig, shape: tuple[int, ...], device: torch.device, seed: int) -> None:
        self.policy, self.config = policy, config
        fused = device.type == "cpu" or None  # elsewhere torch takes what is fastest there
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=config.learning_rate, eps=1e-5, fused=fused)
        self.rewards = RewardNormalizer(shape, config.gamma, device) if config.normalize_rewards else None
        self._rng = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def judge(self, collected: Experience) -> Rollout:
        """The rollout: what was collected, with the policy's log-probabilities and values, and advantages by GAE."""
        config, counts = self.config, collected.counts
        terminated, truncated, rewards = collected.terminated, collected.truncated, collected.rewards
        rewards = rewards.masked_fill(~counts, 0.0)
        if config.clip_rewards is not None:
            rewards = rewards.clamp(-config.clip_rewards, config.clip_rewards)
        # Time first, from here on where time counts.
        rewards, ended, kept = (x.transpose(0, 1) for x in (rewards, terminated | truncated, counts))
        if self.rewards is not None:
            rewards = self.rewards.update(rewards, ended, kept)

        # While collecting only the actor ran: values and log-probabilities come from one pass over all rows.
        masks, memory = (None if x is None else x.flatten(0, 1) for x in (collected.masks, collected.memory))
        observations, actions = (x.flatten(0, 1) for x in (collected.observations, collected.actions))
        params, flat_values, *after = self._evaluate(observations, masks, memory)
        log_probs, _ = self.policy.head.log_prob_and_entropy(params, actions)
        values = flat_values.view(counts.shape)
        # What follows a row that does not count, such as one of an absence, begins with zeros.
        memories = [x.view(*counts.shape, -1).masked_fill(~counts.unsqueeze(-1), 0.0) for x in after]
        last = self._evaluate(collected.last, None, *(x[:, -1] for x in memories))[1]
        finals = values[:0, 0]
        if len(collected.finals):
            at = collected.final_at.unbind(-1)
            finals = self._evaluate(collected.finals, None, *(x[at] for x in memories))[1]
        following = followers(values, last, finals, collected.final_at)
        if collected.follows is not None and collected.ends is not None:
            following = _across_absences(following, values, collected.follows, collected.ends)
        time_first = (x.transpose(0, 1) for x in (values, following, terminated, truncated))
        returns = gae(rewards, *time_first, gamma=config.gamma, gae_lambda=config.gae_lambda, mask=kept)
        advantages, targets = (x.transpose(0, 1).flatten(0, 1) for x in returns)
        rows = Rollout(observations, actions, log_probs, flat_values, advantages, targets, masks)
        counted = counts.flatten(0, 1)
        acts = counted if collected.acts is None else (collected.acts & counts).flatten(0, 1)
        if collected.memory is not None and collected.keeps is not None:
            rows = rows._replace(counts=counted, acts=acts)
            return in_sequences(rows, collected.memory, collected.keeps, self.config.sequence_length)
        if collected.acts is not None:
            rows = rows._replace(counts=counted, acts=acts)
            counted = counted.any(-1)
        return rows if counted.all() else rows.at(torch.nonzero(counted).squeeze(1))

    def _evaluate(self, obs: Observation, masks: Tensor | None = None, memory: Tensor | None = None) -> list[Tensor]:
        """The policy's outputs for observations [B, ...], a minibatch at a time, as images take much memory."""
        size = self.config.batch_size // self.config.num_minibatches
        parts = [[None] * len(obs) if x is None else torch.split(x, size) for x in (obs, masks, memory)]
        outputs = [self.policy(*_provided(*part)) for part in zip(*parts, strict=False)]
        return [torch.cat(one) for one in zip(*outputs, strict=True)]

    @torch.enable_grad()
    def update(self, rollout: Rollout, rates: Rates, steps: int) -> Losses:
        """Learns from the rollout, which ended at step ``steps``, in several passes, over random minibatches.

        Raises TrainingDiverged for gradients and weights that are not finite.
        """
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = rates.learning_rate
        if not rollout.targets.isfinite().all():
            raise TrainingDiverged(
                f"The rollout that ended at step {steps} gives value targets that are not finite, from rows that are. "
                "Look for huge rewards and observations, or use normalize_rewards=True."
            )

        def diverged(what: str) -> TrainingDiverged:
            return TrainingDiverged(
                f"PPO diverged after step {steps}: {what}. Lower learning_rate, which is {rates.learning_rate:g}, or "
                "look for huge observations and rewards."
            )

        history: list[Tensor] = []
        if not (len(rollout.targets) if rollout.counts is None else rollout.counts.any()):  # nobody was there
            return Losses(*[math.nan] * 5)
        for rows in self._minibatches(rollout):
            loss, parts = self.loss(rows, rates.clip_coef)
            history.append(parts)
            if config.target_kl is not None and parts[3] > KL_MARGIN * config.target_kl:
                break
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves backward untyped
            norm = nn.utils.clip_grad_norm_(self.policy.parameters(), config.max_grad_norm)
            if not norm.isfinite():
                raise diverged(f"loss {loss.item()}, gradient norm {norm.item()}")
            self.optimizer.step()
        if not all(weights.isfinite().all() for weights in self.policy.parameters()):
            raise diverged("the last step led to weights that are not finite")
        return Losses(*torch.stack(history).mean(0).tolist())

    def _minibatches(self, rollout: Rollout) -> Iterator[Rollout]:
        """Random minibatches of the rollout, pass after pass."""
        size = rollout.num_parts
        # Fewer where rows were left out: a minibatch has 2 rows at least, as a single one has no deviation.
        count = min(self.config.num_minibatches, max(size // 2, 1))
        for _ in range(self.config.update_epochs):
            for chosen in torch.randperm(size, generator=self._rng).tensor_split(count):
                yield rollout.at(chosen.to(rollout.targets.device))

    def loss(self, batch: Rollout, clip_coef: float) -> tuple[Tensor, Tensor]:
        """The loss of a minibatch, and its five figures for ``Losses`` [5]."""
        config = self.config
        params, values, *_ = self.policy(*_provided(batch.observations, batch.masks, batch.memory))
        log_probs, entropy = self.policy.head.log_prob_and_entropy(params, batch.actions)
        log_ratio, entropy, advantages = (
            _where(batch.acts, x) for x in (log_probs - batch.log_probs, entropy, batch.advantages)
        )
        ratio = log_ratio.exp()

        if config.norm_adv and len(advantages) > 1:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
        policy_loss = -_mean(torch.minimum(advantages * ratio, advantages * clipped_ratio))

        errors = (values - batch.targets).square()
        if config.clip_vloss:
            clipped = batch.values + (values - batch.values).clamp(-clip_coef, clip_coef)
            errors = torch.maximum(errors, (clipped - batch.targets).square())
        value_loss = 0.5 * _mean(_where(batch.counts, errors))

        entropy = _mean(entropy)
        loss = policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy
        # Never negative and of low variance: http://joschu.net/blog/kl-approx.html, estimator k3.
        approx_kl = _mean(ratio - 1 - log_ratio)
        clip_fraction = _mean(((ratio - 1).abs() > clip_coef).float())
        return loss, torch.stack([policy_loss, value_loss, entropy, approx_kl, clip_fraction]).detach()

    def state_dict(self) -> dict[str, Any]:
        """Weights, moments of the optimizer, statistics and generator: not copies of them."""
        return {
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "minibatch_rng": self._rng.get_state(),
            "normalizers": {} if self.rewards is None else {"rewards": self.rewards.moments.to_dict()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from ``state_dict``, in new episodes."""
        self.policy.load_state_dict(state["policy"])
        # A copy, as the optimizer takes its tensors as they are, and writes into them.
        self.optimizer.load_state_dict(_adams(copy.deepcopy(state["optimizer"]), self.optimizer))
        self._rng.set_state(state["minibatch_rng"])
        if self.rewards is not None:
            self.rewards.load_state_dict(state["normalizers"]["rewards"])


def _provided(obs: Observation, masks: Tensor | None, memory: Any) -> tuple[Any, ...]:
    """What a policy is called with: without masks and memory it need not know of them."""
    if memory is not None:
        return obs, masks, memory
    return (obs,) if masks is None else (obs, masks)


def goes_on(batch: Any, trajectories: Tensor | None = None) -> Tensor:
    """Whether each row of a batch, [N, T], is of the same trajectory as the one before.

    trajectories: [N], those of the rows before the first; None: these go on.
    """
    ids = batch["collector", "traj_ids"]
    before = ids[:, 0] if trajectories is None else trajectories
    same: Tensor = ids == torch.cat([before.unsqueeze(1), ids[:, :-1]], 1)
    return same


def in_sequences(rows: Rollout, memory: Tensor, keeps: Tensor, most: int) -> Rollout:
    """The rows of N envs, T of each, as equal sequences of at most ``most`` steps.

    memory: [N, T, (A,) H], before each row: sequences begin with theirs.  keeps: [N, T, (A)]. Where T is no multiple of
    their length, the last one of each env ends with copies of its last row that do not count.
    """
    N, T = keeps.shape[:2]
    count = math.ceil(T / most)
    times = torch.arange(count * math.ceil(T / count), device=keeps.device).view(count, -1)
    firsts = T * torch.arange(N, device=keeps.device).view(N, 1, 1)
    at = (firsts + times.clamp(max=T - 1)).flatten(0, 1)  # [S, L], indices of rows
    start, kept = memory.flatten(0, 1)[at[:, 0]], keeps.flatten(0, 1)[at]
    kept[:, 0] = True  # the memory before the first row is as it was
    rows = rows.at(at.flatten())
    is_copy = (times >= T).expand(N, *times.shape).flatten()
    for kind in (rows.counts, rows.acts):
        assert kind is not None
        kind[is_copy] = False
    return rows._replace(memory=Sequences(start, kept))


def followers(rows: Tensor, last: Tensor, finals: Tensor, final_at: Tensor) -> Tensor:
    """What follows each of ``rows`` [N, T, ...]: the next row, ``last`` [N, ...] after the last one, and ``finals``
    [K, ...] after those that ended an episode."""
    following = torch.cat([rows[:, 1:], last.unsqueeze(1)], 1)
    if len(finals):
        following[final_at.unbind(-1)] = finals
    return following


def _across_absences(following: Tensor, values: Tensor, follows: Tensor, ends: Tensor) -> Tensor:
    """The value of what an agent observes next, be it after several steps in which it is not there.

    Of an agent that is not there again in its episode, or in the rollout, it is the value of its last observation.
    """
    following = following.clone()
    nothing = torch.full_like(values[:, 0], torch.nan)
    later = nothing
    for t in reversed(range(values.shape[1])):
        later = torch.where(follows[:, t], following[:, t], torch.where(ends[:, t], nothing, later))
        following[:, t] = later
    return torch.where(following.isnan(), values, following)


def _where(kept: Tensor | None, x: Tensor) -> Tensor:
    return x if kept is None else x[kept]


def _mean(x: Tensor) -> Tensor:
    """The mean; 0 of no rows, such as those of agents none of whom acts in a minibatch."""
    return x.mean() if x.numel() else x.sum()


def _adams(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of the optimizer, with moments laid out as the weights are: the fused Adam takes them to be so."""
    for group in state["param_groups"]:  # whose numbers Adam checks
        torch.optim.Adam([torch.empty(0)], **{name: group[name] for name in ("lr", "betas", "eps", "weight_decay")})
    weights = [one.detach() for group in optimizer.param_groups for one in group["params"]]
    held = {}
    for number, one in state["state"].items():
        like = {"step": torch.empty(()), "exp_avg": weights[number], "exp_avg_sq": weights[number]}
        held[number] = {name: torch.empty_like(tensor).copy_(one[name]) for name, tensor in like.items()}
    return {**state, "state": held}
