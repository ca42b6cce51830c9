"""PPO (Schulman et al. 2017, arXiv:1707.06347) over a vector env or collectors, to be read from top to bottom.

    envs = muster.make_vec("CartPole-v1", num_envs=8, autoreset_mode="same_step")
    ppo = PPO(envs, PPOConfig(total_steps=100_000))
    for metrics in ppo.train():
        print(metrics.steps, metrics.episodes.mean_return)

One iteration collects ``num_steps`` steps of ``num_envs`` envs, then learns from them for ``update_epochs`` passes. A
truncated episode is bootstrapped from its final observation: a time limit is no termination. Everything random comes
from ``seed``, through generators of its own: the same seed leads to the same policy, torch's global generator stays
as it was, and runs with neighbouring seeds share nothing.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from muster.algorithms.actor_critic import ActorCritic, Explorer, act, as_seen, torch_threads
from muster.algorithms.normalization import ObservationNormalizer, RewardNormalizer
from muster.algorithms.ppo_config import PPOConfig
from muster.algorithms.ppo_envs import collector_over, facts_of
from muster.algorithms.ppo_parts import EpisodeWindow, Losses, PPOMetrics, Schedule, require_finite_rows
from muster.errors import ClosedError, TrainingDiverged
from muster.rollout.returns import gae

KL_MARGIN = 1.5  # by which a minibatch may exceed target_kl, as in Stable-Baselines3


class Rollout(NamedTuple):
    """The B rows of a rollout, by env, then time, with what the policy that collected them computed of each.

    B = N * T for T steps of N envs, less the rows that a collector leaves out.
    """

    observations: Tensor  # [B, *obs_shape], the space's dtype; normalised ones float32
    actions: Tensor  # [B, K]: K choices (int64) or K continuous numbers (float32)
    log_probs: Tensor  # [B] float32
    values: Tensor  # [B] float32
    advantages: Tensor  # [B] float32
    targets: Tensor  # [B] float32, for the values


class PPO:
    """Trains a policy on ``envs``, single-agent ones with Box, Discrete, MultiDiscrete or MultiBinary spaces.

    envs: a vector env of ``config.num_envs``, with ``same_step`` or ``next_step`` autoreset. It stays the caller's: PPO
        steps it, but never closes it. With `collectors` what `muster.make_vec` takes as its first argument.
    policy: an ActorCritic for these spaces, or a module with its attributes and methods. This object itself
        is trained, neither copied nor pickled except to collectors. None draws a new one from the seed.
    collectors: ``{"num_collectors": 8}``: so many processes share the envs, and act by copies that have the weights and
        statistics of the moment in each rollout. Further options are those of `muster.MultiCollector` for its processes
        and envs, such as ``cluster`` and ``make_vec_options``. One env is made first, to see its spaces. Same seed and
        number of collectors, same policy. `close` ends them, or the end of a ``with`` block.

    Raises UsageError for other envs, ConfigError for options that do not fit them, and what `MultiCollector` raises.
    """

    def __init__(
        self,
        envs: Any,
        config: PPOConfig,
        policy: ActorCritic | None = None,
        *,
        collectors: Mapping[str, Any] | None = None,
    ) -> None:
        self.observation_space, self.action_space, self.spec = facts_of(envs, config, collectors)
        self.envs = envs
        self.config = config
        self.steps = 0  # env steps of the complete iterations
        space = self.observation_space
        collecting, weights, minibatches = np.random.SeedSequence(config.seed).spawn(3)
        self._minibatch_rng = torch.Generator().manual_seed(_seed(minibatches))
        if policy is None:
            with torch_threads(config.torch_threads):  # orthogonal weights differ with the number of threads
                rng = torch.Generator().manual_seed(_seed(weights))
                policy = ActorCritic(space, self.action_space, rng, **config.network)
        self.policy = policy
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=config.learning_rate, eps=1e-5, fused=True)
        self.observations = ObservationNormalizer(space.shape or ()) if config.normalize_observations else None
        self.rewards = RewardNormalizer(config.num_envs, config.gamma) if config.normalize_rewards else None
        self.episodes = EpisodeWindow()
        self._explorer = Explorer(policy, self.observations, config.learning_rate)
        self.schedule = Schedule(config)
        self.collector = collector_over(envs, self._explorer, config, _seed(collecting), collectors)
        self._clip_coef = config.clip_coef
        self._under_way = False  # an iteration has begun, and has not ended
        self._complete: tuple[dict[str, Any], PPOMetrics | None] = self._state(), None

    @property
    def metrics(self) -> PPOMetrics | None:
        """The metrics of the last complete iteration, whose state is ``state_dict``; None before the first one."""
        return self._complete[1]

    def train(self) -> Iterator[PPOMetrics]:
        """Trains until ``total_steps``; yields the metrics of each iteration."""
        while self.steps < self.config.total_steps:
            yield self.iterate()

    def iterate(self) -> PPOMetrics:
        """Collects one rollout and learns from it.

        After an error or Ctrl-C all is as it was after the last complete iteration, in new episodes.
        """
        if self._under_way:
            self._go_back()
        self._under_way = True
        try:
            with torch_threads(self.config.torch_threads):
                learning_rate, clip_coef = self.schedule.at(self.steps)
                rollout = self.collect_rollout()
                losses = self.update(rollout, learning_rate, clip_coef)
                left = (rollout.targets - rollout.values).var(correction=0)
                explained = 1 - (left / (rollout.targets.var(correction=0) + 1e-8)).item()
            self.steps = self.collector.frames
            metrics = PPOMetrics(self.steps, self.episodes.summary(), losses, explained, learning_rate)
            self._complete = self._state(), metrics  # one statement: whenever it is read, it is of one moment
            self._under_way = False
            return metrics
        except BaseException:
            self._go_back()
            raise

    @torch.no_grad()
    def collect_rollout(self) -> Rollout:
        """The next ``num_steps`` steps of every env, going on where the last rollout ended."""
        self._explorer.steps = self.steps
        self.collector.update_policy_weights_()
        batch = self.collector.rollout()
        while not batch["collector", "mask"].any():  # every collector was replaced in it
            batch = self.collector.rollout()
        # Before anything else: what is not finite enters neither statistics nor returns.
        require_finite_rows(batch, (self.collector.batches - 1) * self.config.num_steps, self.steps)
        self.episodes.add(self.collector.last_episodes)
        seen = batch["observation"]
        last, finals = (
            as_seen(batch["collector", name, "observation"], self.observations) for name in ("last", "final")
        )
        terminated, truncated, rewards = (
            batch["next", name].squeeze(-1) for name in ("terminated", "truncated", "reward")
        )
        mask = batch["collector", "mask"]
        rewards = rewards.masked_fill(~mask, 0.0)
        if self.config.clip_rewards is not None:
            rewards = rewards.clamp(-self.config.clip_rewards, self.config.clip_rewards)
        if self.rewards is not None:
            rewards = self.rewards.update(rewards.T, (terminated | truncated).T, mask.T).T
        # By the statistics that the actor saw them by; the rollout's own rows count from the next one on.
        observations = as_seen(seen, self.observations)
        if self.observations is not None:
            self.observations.moments.update(seen[mask])

        # While collecting only the actor ran: values and log-probabilities come from one pass over all rows.
        params, values = self._evaluate(torch.cat([observations.flatten(0, 1), last]))
        values, last_values = values[: mask.numel()].view(mask.shape), values[mask.numel() :]
        next_values = torch.cat([values[:, 1:], last_values.unsqueeze(1)], 1)
        if len(finals):
            next_values[batch["collector", "final_at"].unbind(-1)] = self._evaluate(finals)[1]
        time_first = (x.T for x in (rewards, values, next_values, terminated, truncated))
        advantages, targets = gae(*time_first, gamma=self.config.gamma, gae_lambda=self.config.gae_lambda, mask=mask.T)
        observations, chosen, *rest = (
            x.flatten(0, 1) for x in (observations, batch["chosen"], values, advantages.T, targets.T)
        )
        log_probs, _ = self.policy.head.log_prob_and_entropy(params[: len(chosen)], chosen)
        rows = (observations, chosen, log_probs, *rest)
        return Rollout(*(rows if mask.all() else (row[mask.flatten()] for row in rows)))

    def act(self, obs: Tensor, *, sample: bool = False) -> Tensor:
        """Actions for observations [B, *obs_shape], as the env wants them: the likeliest ones, or drawn if ``sample``.

        Statistics of observations stay as they are. Numbers that are not finite count as 0.
        """
        return act(self.policy, self.observations, obs, sample=sample, threads=self.config.torch_threads)

    def _evaluate(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """The policy's output for observations [B, *obs_shape], a minibatch at a time, as images take much memory."""
        minibatches = torch.split(obs, self.config.batch_size // self.config.num_minibatches)
        params, values = zip(*map(self.policy, minibatches), strict=True)
        return torch.cat(params), torch.cat(values)

    @torch.enable_grad()
    def update(self, rollout: Rollout, learning_rate: float, clip_coef: float | None = None) -> Losses:
        """Learns from the rollout in several passes, over random minibatches. clip_coef: None for the config's.

        Raises TrainingDiverged for gradients and weights that are not finite.
        """
        config = self.config
        self._clip_coef = config.clip_coef if clip_coef is None else clip_coef
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        if not rollout.targets.isfinite().all():
            raise TrainingDiverged(
                f"The rollout that ended at step {self.collector.frames} gives value targets that are not finite, from "
                "rows that are. Look for huge rewards and observations, or use normalize_rewards=True."
            )
        history: list[Tensor] = []
        for rows in self._minibatches(rollout):
            loss, parts = self._loss(rows)
            history.append(parts)
            if config.target_kl is not None and parts[3] > KL_MARGIN * config.target_kl:
                break
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves backward untyped
            norm = nn.utils.clip_grad_norm_(self.policy.parameters(), config.max_grad_norm)
            if not norm.isfinite():
                raise self._diverged(f"loss {loss.item()}, gradient norm {norm.item()}", learning_rate)
            self.optimizer.step()
        if not all(weights.isfinite().all() for weights in self.policy.parameters()):
            raise self._diverged("the last step led to weights that are not finite", learning_rate)
        return Losses(*torch.stack(history).mean(0).tolist())

    def _minibatches(self, rollout: Rollout) -> Iterator[Rollout]:
        """Random minibatches of the rollout, pass after pass."""
        size = len(rollout.targets)
        # Fewer where rows were left out: a minibatch has 2 rows at least, as a single one has no deviation.
        count = min(self.config.num_minibatches, max(size // 2, 1))
        for _ in range(self.config.update_epochs):
            for chosen in torch.randperm(size, generator=self._minibatch_rng).tensor_split(count):
                yield Rollout(*(tensor[chosen] for tensor in rollout))

    def _diverged(self, what: str, learning_rate: float) -> TrainingDiverged:
        return TrainingDiverged(
            f"PPO diverged after step {self.collector.frames}: {what}. Lower learning_rate, which is "
            f"{learning_rate:g}, or look for huge observations and rewards."
        )

    def _loss(self, batch: Rollout) -> tuple[Tensor, Tensor]:
        """The loss of a minibatch, rows [M, ...], and its five figures for ``Losses`` [5]."""
        config, clip_coef = self.config, self._clip_coef
        params, values = self.policy(batch.observations)
        log_probs, entropy = self.policy.head.log_prob_and_entropy(params, batch.actions)
        log_ratio = log_probs - batch.log_probs
        ratio = log_ratio.exp()

        advantages = batch.advantages
        if config.norm_adv and len(advantages) > 1:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
        policy_loss = -torch.minimum(advantages * ratio, advantages * clipped_ratio).mean()

        errors = (values - batch.targets).square()
        if config.clip_vloss:
            clipped = batch.values + (values - batch.values).clamp(-clip_coef, clip_coef)
            errors = torch.maximum(errors, (clipped - batch.targets).square())
        value_loss = 0.5 * errors.mean()

        entropy = entropy.mean()
        loss = policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy
        # Never negative and of low variance: http://joschu.net/blog/kl-approx.html, estimator k3.
        approx_kl = (ratio - 1 - log_ratio).mean()
        clip_fraction = ((ratio - 1).abs() > clip_coef).float().mean()
        return loss, torch.stack([policy_loss, value_loss, entropy, approx_kl, clip_fraction]).detach()

    def state_dict(self) -> dict[str, Any]:
        """The state after the last complete iteration, whole, also while another one is under way or was cut short.

        Without the envs: plain tensors, numbers and lists, so that weights_only=True loads them.
        """
        return copy.deepcopy(self._complete[0])

    def _state(self) -> dict[str, Any]:
        """A copy of the state as it is now."""
        normalizers = {"observations": self.observations, "rewards": self.rewards}
        state = {
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
            "schedule": self.schedule.state_dict(),
            "collector": {name: one for name, one in self.collector.state_dict().items() if name != "policy"},
            "minibatch_rng": self._minibatch_rng.get_state(),
            "episodes": self.episodes.state_dict(),
            "normalizers": {name: one.moments.to_dict() for name, one in normalizers.items() if one is not None},
        }
        return copy.deepcopy(state)

    def load_state_dict(self, state: Mapping[str, Any], *, learning_rate: float | None = None) -> None:
        """Goes on from ``state_dict``, in new episodes. The config must be for the same network and normalisation.

        With another ``total_steps`` an annealed learning rate falls from what was reached to 0 at the new end; a run
        that had finished starts at the config's again.  learning_rate: what to start from instead.
        """
        self._load(state)
        self.schedule.load_state_dict(state["schedule"], self.steps, learning_rate)
        self._complete = self._state(), None
        self._under_way = False

    def _go_back(self) -> None:
        """Goes back to the state after the last complete iteration."""
        with contextlib.suppress(ClosedError):  # what has closed the collectors is told, and not that it did
            self._load(self._complete[0])
        self._under_way = False

    def _load(self, state: Mapping[str, Any]) -> None:
        state = copy.deepcopy(state)  # the optimizer takes its tensors as they are, and writes into them
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(_adams(state["optimizer"], self.optimizer))
        self.steps = int(state["steps"])
        self._minibatch_rng.set_state(state["minibatch_rng"])
        self.episodes.load_state_dict(state["episodes"])
        if self.observations is not None:
            self.observations.moments.load(state["normalizers"]["observations"])
        if self.rewards is not None:
            self.rewards.load_state_dict(state["normalizers"]["rewards"])
        self.collector.load_state_dict(state["collector"])

    def close(self) -> None:
        """Ends the collectors. A vector env stays open: it is the caller's."""
        self.collector.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


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


def _seed(sequence: np.random.SeedSequence) -> int:
    return int(sequence.generate_state(1, np.uint64)[0])
