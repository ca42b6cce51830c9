"""PPO (Schulman et al. 2017, arXiv:1707.06347) over a vector env or collectors, to be read from top to bottom.

    envs = muster.make_vec("CartPole-v1", num_envs=8, autoreset_mode="same_step")
    ppo = PPO(envs, PPOConfig(total_steps=100_000))
    for metrics in ppo.train():
        print(metrics.steps, metrics.episodes.mean_return)

One iteration collects ``num_steps`` steps of ``num_envs`` envs (`PPO.collect_rollout`), judges them by values and GAE
(`Learner.judge`), and learns from them in ``update_epochs`` passes over random minibatches (`Learner.update`,
`Learner.loss`). A truncated episode is bootstrapped from its final observation: a time limit is no termination.
Everything random comes from ``seed``, through generators of its own: the same seed leads to the same policy, torch's
global generator stays as it was, and runs with neighbouring seeds share nothing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from muster.algorithms.actor_critic import CHOSEN, MEMORY, Explorer, Network, Sequences, as_seen, followers, goes_on
from muster.algorithms.encoder import ObservationNormalizer, RewardNormalizer, observed
from muster.algorithms.on_policy import OnPolicy, facts_of, generator_of, placed, seed_of
from muster.algorithms.own_network import policy_of
from muster.algorithms.ppo_config import EpisodeWindow, Losses, PPOConfig, PPOMetrics, Rates
from muster.errors import TrainingDiverged
from muster.spaces.masks import MASK

KL_MARGIN = 1.5  # a minibatch may exceed target_kl so many times, as in Stable-Baselines3
Observation = Any
"""A tensor, or a TensorDict of several."""


class PPO(OnPolicy[PPOMetrics]):
    """Trains a policy on ``envs``, single-agent ones with Box, Discrete, MultiDiscrete or MultiBinary spaces.

    envs: a vector env of ``config.num_envs``, with ``same_step`` or ``next_step`` autoreset. It stays the caller's: PPO
        steps it, but never closes it. With `collectors` what `muster.make_vec` takes as its first argument.
    config: the options, a `PPOConfig`.
    policy: a `PolicyNetwork`, such as an ActorCritic for these spaces. This object itself is trained, neither copied
        nor pickled except to collectors. Or a function that makes one of the observation and the action space. None
        draws a new one from the seed.
    device: where policy and statistics compute, acting and learning, and where rollouts are copied to: "cpu", "cuda",
        "cuda:1", "mps". "auto" is the GPU for images and for networks of over a million weights, else the CPU. A policy
        object is moved there.
    collectors: ``{"num_collectors": 8}``: so many processes share the envs, and act by copies that have the weights and
        statistics of the moment in each rollout. Further options are those of `muster.MultiCollector` for its processes
        and envs, such as ``cluster`` and ``make_vec_options``. One env is made first, to see its spaces. Same seed and
        number of collectors, same policy. `close` ends them, or the end of a ``with`` block.

    Raises UsageError for other envs, ConfigError for options that do not fit them and for devices that are not
    there, and what `MultiCollector` raises.

    >>> import muster
    >>> from muster.algorithms import PPO, PPOConfig
    >>> config = PPOConfig(total_steps=256, num_envs=4, num_steps=32)
    >>> with muster.make_vec("CartPole-v1", num_envs=4, autoreset_mode="same_step") as envs:
    ...     [metrics.steps for metrics in PPO(envs, config).train()]
    [128, 256]
    """

    def __init__(
        self, envs: Any, config: PPOConfig, policy: Any = None, *,
        device: str | torch.device = "cpu", collectors: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        facts = facts_of(envs, config, collectors)
        space = facts.observation_space
        collecting, weights, minibatches = np.random.SeedSequence(config.seed).spawn(3)
        self.policy = policy_of(config, space, facts.action_space, generator_of(weights), policy)
        self.observations = ObservationNormalizer(space) if config.normalize_observations else None
        at = placed(device, [self.policy], [self.observations], config)
        self.learner = Learner(self.policy, config, (config.num_envs,), at, seed_of(minibatches))
        explorer = Explorer(self.policy, self.observations, config.learning_rate)
        super().__init__(envs, facts, config, explorer, at, EpisodeWindow(), seed_of(collecting), collectors)

    def _learn(self, rates: Rates) -> PPOMetrics:
        rollout = self.collect_rollout()
        steps = self.collector.frames
        losses = self.learner.update(rollout, rates, steps)
        rest = rollout.explained_variance(), rates.learning_rate, self.episodes.figures()
        return PPOMetrics(steps, self.episodes.summary(), losses, *rest)

    @torch.no_grad()
    def collect_rollout(self) -> Rollout:
        """The next ``num_steps`` steps of every env, going on where the last rollout ended."""
        batch = self._collect()
        rewards, terminated, truncated = (
            batch["next", name].squeeze(-1) for name in ("reward", "terminated", "truncated")
        )
        rows, last, finals = observed(batch, self.facts.observation_space, ("observation",))
        collected = Experience(
            rows, last, finals, batch["collector", "final_at"], batch[CHOSEN], rewards, terminated, truncated,
            counts=batch["collector", "mask"],
            keeps=goes_on(batch),
            masks=batch.get(MASK, None),
            memory=batch.get(MEMORY, None),
        )  # fmt: skip
        # Before anything else: what is not finite enters neither statistics nor returns.
        self._require_finite(collected)
        self.episodes.add(self.collector.last_episodes)
        # By the statistics that the actor saw them by; the rollout's own rows count from the next one on.
        seen, last, finals = (as_seen(one, self.observations) for one in (rows, last, finals))
        if self.observations is not None:
            self.observations.update(rows[collected.counts])
        return self.learner.judge(replace(collected, observations=seen, last=last, finals=finals))

    @property
    def network(self) -> Network:
        return Network(self.policy, self.observations)

    def _learnt(self) -> dict[str, Any]:
        state = self.learner.state_dict()
        if self.observations is not None:
            state["normalizers"]["observations"] = self.observations.to_dict()
        return state

    def _carried(self) -> dict[str, Any]:
        return self.learner.carried()

    def _load_carried(self, state: Mapping[str, Any]) -> None:
        self.learner.load_carried(state)

    def _load_learnt(self, state: Mapping[str, Any]) -> None:
        self.learner.load_state_dict(state)
        if self.observations is not None:
            self.observations.load(state["normalizers"]["observations"])


@dataclass(frozen=True)
class Experience:
    """A collector's batch as a policy sees it: T steps of N envs, in which K episodes have ended.

    Agents that share a policy have [N, T, A] for [N, T], also below and in `Rollout`, which has [B, A] for [B].
    """

    observations: Observation  # [N, T, *obs_shape], what each action is for
    last: Observation  # [N, *obs_shape], what follows the last action
    finals: Observation  # [K, *obs_shape], what ended the episodes
    final_at: Tensor  # [K, 2] int64, env and step
    actions: Tensor  # [N, T, C]: C choices (int64) or C continuous numbers (float32)
    rewards: Tensor  # [N, T] float32
    terminated: Tensor  # [N, T] bool
    truncated: Tensor  # [N, T] bool
    counts: Tensor  # [N, T] bool, the rows that are learnt from
    keeps: Tensor  # [N, T] bool, whether a step has the memory of the one before; else zeros
    masks: Tensor | None = None  # [N, T, n] bool, the choices that were allowed; None: all
    memory: Tensor | None = None  # [N, T, H] float32, before each step; None without


class Rollout(NamedTuple):
    """The B rows of a rollout, by env, then time, with what the policy that collected them computed of each.

    B = N * T for T steps of N envs, less the rows that are left out.
    """

    observations: Observation  # [B, *obs_shape], the space's dtype; normalised ones float32
    actions: Tensor  # [B, C]: C choices (int64) or C continuous numbers (float32)
    log_probs: Tensor  # [B] float32
    values: Tensor  # [B] float32
    advantages: Tensor  # [B] float32
    targets: Tensor  # [B] float32, for the values
    masks: Tensor | None = None  # [B, n] bool, allowed choices
    counts: Tensor | None = None  # [B] bool, what the value is learnt from; None: all
    acts: Tensor | None = None  # [B] bool, what the policy is learnt from; None: all
    memory: Sequences | None = None  # of the rows, which are S sequences of L = B / S, one behind the other

    def at(self, chosen: Tensor) -> Rollout:
        """Some of its rows, or with memory of its sequences. chosen: indices [M]."""
        rows, memory = chosen, None
        if self.memory is not None:
            length = self.memory.keeps.shape[1]
            rows = (chosen.unsqueeze(1) * length + torch.arange(length, device=chosen.device)).flatten()
            memory = Sequences(self.memory.start[chosen], self.memory.keeps[chosen])
        parts: Any = (None if part is None else part[rows] for part in self[:-1])
        return Rollout(*parts)._replace(memory=memory)

    def in_sequences(self, memory: Tensor, keeps: Tensor, most: int) -> Rollout:
        """All T rows of N envs as S equal sequences of L steps, ``most`` at the most, which begin with their memory.

        An env's last row is repeated, where T is no multiple of L; these rows do not count.
        memory: [N, T, H], before each row.  keeps: [N, T].
        """
        N, T = keeps.shape[:2]
        count = math.ceil(T / most)
        times = torch.arange(count * math.ceil(T / count), device=keeps.device).view(count, -1)
        firsts = T * torch.arange(N, device=keeps.device).view(N, 1, 1)
        at = (firsts + times.clamp(max=T - 1)).flatten(0, 1)
        start, kept = memory.flatten(0, 1)[at[:, 0]], keeps.flatten(0, 1)[at]
        kept[:, 0] = True  # the memory before the first row is as it was
        rows, repeats = self.at(at.flatten()), (times >= T).expand(N, *times.shape).flatten()
        for kind in (rows.counts, rows.acts):
            assert kind is not None
            kind[repeats] = False
        return rows._replace(memory=Sequences(start, kept))

    def explained_variance(self) -> float:
        """The share of the targets' variance that the values explain: 1 all, 0 no more than their mean does."""
        targets, values = _where(self.counts, self.targets), _where(self.counts, self.values)
        if not len(targets):
            return math.nan
        left = (targets - values).var(correction=0)
        return 1 - (left / (targets.var(correction=0) + 1e-8)).item()


class Learner:
    """A policy, its weights, and all else that training changes.

    policy: as for `PPO`, where it computes.  shape: of one step's rewards, (N,).  device: of rollouts.  seed: of the
    minibatches.
    """

    def __init__(self, policy: Any, config: PPOConfig, shape: tuple[int, ...], device: torch.device, seed: int) -> None:
        self.policy, self.config = policy, config
        fused = device.type == "cpu" or None  # elsewhere torch takes what is fastest there
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=config.learning_rate, eps=1e-5, fused=fused)
        self.rewards = RewardNormalizer(shape, config.gamma, device) if config.normalize_rewards else None
        self._rng = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def judge(self, collected: Any) -> Rollout:
        """The rollout: what was collected, with the policy's log-probabilities and values, and advantages by GAE."""
        config, counts, ended = self.config, collected.counts, collected.terminated | collected.truncated
        rewards = collected.rewards.masked_fill(~counts, 0.0)
        if config.clip_rewards is not None:
            rewards = rewards.clamp(-config.clip_rewards, config.clip_rewards)
        if self.rewards is not None:
            rewards = self.rewards.update(*(x.transpose(0, 1) for x in (rewards, ended, counts))).transpose(0, 1)

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
        following = self._following(collected, values, last, finals)

        # GAE (Schulman et al. 2015, arXiv:1506.02438). Rows that do not count pass on what comes after them.
        deltas = rewards + config.gamma * following.masked_fill(collected.terminated, 0.0) - values
        deltas = deltas.masked_fill(~counts, 0.0).transpose(0, 1)
        decays = torch.full_like(values, config.gamma * config.gae_lambda).masked_fill(~counts, 1.0)
        decays = decays.masked_fill(ended, 0.0).transpose(0, 1)
        sums = deltas.new_zeros(len(deltas) + 1, *deltas.shape[1:])
        for t in reversed(range(len(deltas))):
            torch.addcmul(deltas[t], decays[t], sums[t + 1], out=sums[t])
        advantages = sums[:-1].transpose(0, 1)
        targets = (advantages + values).masked_fill(~counts, 0.0)
        rest = log_probs, flat_values, advantages.flatten(0, 1), targets.flatten(0, 1), masks
        return self._learnt_from(collected, Rollout(observations, actions, *rest))

    def _evaluate(self, obs: Observation, masks: Tensor | None = None, memory: Tensor | None = None) -> list[Tensor]:
        """The policy's outputs for observations [B, ...], a minibatch at a time, as images take much memory."""
        size = self.config.batch_size // self.config.num_minibatches
        parts = [[None] * len(obs) if x is None else torch.split(x, size) for x in (obs, masks, memory)]
        outputs = [self.policy(*_provided(*part)) for part in zip(*parts, strict=False)]
        return [torch.cat(one) for one in zip(*outputs, strict=True)]

    def _following(self, collected: Any, values: Tensor, last: Tensor, finals: Tensor) -> Tensor:
        """The value of what follows each row."""
        return followers(values, last, finals, collected.final_at)

    def _learnt_from(self, collected: Any, rows: Rollout) -> Rollout:
        """The rows that count."""
        counts = collected.counts.flatten()
        if collected.memory is not None:
            rows = rows._replace(counts=counts, acts=counts)
            return rows.in_sequences(collected.memory, collected.keeps, self.config.sequence_length)
        return rows if counts.all() else rows.at(torch.nonzero(counts).squeeze(1))

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
        for rows in self._minibatches(rollout):
            loss, figures = self.loss(rows, rates.clip_coef)
            history.append(figures)
            if config.target_kl is not None and figures[3] > KL_MARGIN * config.target_kl:
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
        """Random minibatches of the rollout's rows, or with memory of its sequences, pass after pass."""
        size = len(rollout.targets if rollout.memory is None else rollout.memory.start)
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
        """Goes on from ``state_dict``."""
        self.policy.load_state_dict(state["policy"])
        # A copy, as the optimizer takes its tensors as they are, and writes into them.
        self.optimizer.load_state_dict(_adams(copy.deepcopy(state["optimizer"]), self.optimizer))
        self._rng.set_state(state["minibatch_rng"])
        if self.rewards is not None:
            self.rewards.load_state_dict(state["normalizers"]["rewards"])

    def carried(self) -> dict[str, Any]:
        """The returns of episodes so far: not a copy."""
        return {} if self.rewards is None else {"returns": self.rewards.returns}

    def load_carried(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`, which `carried` returned."""
        if self.rewards is not None:
            self.rewards.returns.copy_(state["returns"])


def _provided(obs: Observation, masks: Tensor | None, memory: Any) -> tuple[Any, ...]:
    """The arguments of a policy: without masks and memory it need not know of them."""
    if memory is not None:
        return obs, masks, memory
    return (obs,) if masks is None else (obs, masks)


def _where(kept: Tensor | None, x: Tensor) -> Tensor:
    return x if kept is None else x[kept]


def _mean(x: Tensor) -> Tensor:
    """The mean; 0 of no rows, such as those of agents none of whom acts in a minibatch."""
    return x.mean() if x.numel() else x.sum()


def _adams(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of the optimizer, with moments laid out as the weights are: the fused Adam takes them to be so."""
    for group in state["param_groups"]:  # Adam checks the numbers
        torch.optim.Adam([torch.empty(0)], **{name: group[name] for name in ("lr", "betas", "eps", "weight_decay")})
    weights = [one.detach() for group in optimizer.param_groups for one in group["params"]]
    held = {}
    for number, one in state["state"].items():
        like = {"step": torch.empty(()), "exp_avg": weights[number], "exp_avg_sq": weights[number]}
        held[number] = {name: torch.empty_like(tensor).copy_(one[name]) for name, tensor in like.items()}
    return {**state, "state": held}
