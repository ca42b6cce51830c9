"""PPO (Schulman et al. 2017, arXiv:1707.06347) over a vector env or collectors, to be read from top to bottom.

    envs = muster.make_vec("CartPole-v1", num_envs=8, autoreset_mode="same_step")
    ppo = PPO(envs, PPOConfig(total_steps=100_000))
    for metrics in ppo.train():
        print(metrics.steps, metrics.episodes.mean_return)

One iteration collects ``num_steps`` steps of ``num_envs`` envs, then learns from them for ``update_epochs`` passes:
values, advantages and the loss are in `Learner`. A truncated episode is bootstrapped from its final observation: a
time limit is no termination. Everything random comes from ``seed``, through generators of its own: the same seed leads
to the same policy, torch's global generator stays as it was, and runs with neighbouring seeds share nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from muster.algorithms.actor_critic import CHOSEN, MEMORY, Explorer, Network, as_seen
from muster.algorithms.encoder import ObservationNormalizer, observed
from muster.algorithms.learner import Experience, Learner, Rollout, goes_on
from muster.algorithms.on_policy import OnPolicy, facts_of, generator_of, placed, require_finite_rows, seed_of
from muster.algorithms.own_network import policy_of
from muster.algorithms.ppo_config import EpisodeWindow, PPOConfig, PPOMetrics, Rates
from muster.spaces.masks import MASK


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
        self,
        envs: Any,
        config: PPOConfig,
        policy: Any = None,
        *,
        device: str | torch.device = "cpu",
        collectors: Mapping[str, Any] | None = None,
    ) -> None:
        facts = facts_of(envs, config, collectors)
        space = facts.observation_space
        collecting, weights, minibatches = np.random.SeedSequence(config.seed).spawn(3)
        policy = policy_of(config, space, facts.action_space, generator_of(weights), policy)
        self.observations = ObservationNormalizer(space) if config.normalize_observations else None
        at = placed(device, [policy], [self.observations], config)
        self.policy = policy
        self.learner = Learner(policy, config, (config.num_envs,), at, seed_of(minibatches))
        explorer = Explorer(policy, self.observations, config.learning_rate)
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
        places = ((), 2), (("collector", "last"), 1), (("collector", "final"), 1)
        observations, last, finals = (
            observed(batch, self.facts.observation_space, at, ("observation",), dims) for at, dims in places
        )
        rewards, terminated, truncated = (
            batch["next", name].squeeze(-1) for name in ("reward", "terminated", "truncated")
        )
        collected = Experience(
            observations, last, finals, batch["collector", "final_at"], batch[CHOSEN],
            rewards, terminated, truncated, batch["collector", "mask"],
            masks=batch.get(MASK, None),
            memory=batch.get(MEMORY, None),
            keeps=goes_on(batch),
        )  # fmt: skip
        # Before anything else: what is not finite enters neither statistics nor returns.
        require_finite_rows(collected, self._steps_before, self.steps)
        self.episodes.add(self.collector.last_episodes)
        # By the statistics that the actor saw them by; the rollout's own rows count from the next one on.
        observations, last, finals = (as_seen(one, self.observations) for one in collected[:3])
        if self.observations is not None:
            self.observations.update(collected.observations[collected.counts])
        return self.learner.judge(collected._replace(observations=observations, last=last, finals=finals))

    @property
    def network(self) -> Network:
        return Network(self.policy, self.observations)

    def _learnt(self) -> dict[str, Any]:
        state = self.learner.state_dict()
        if self.observations is not None:
            state["normalizers"]["observations"] = self.observations.to_dict()
        return state

    def _load_learnt(self, state: Mapping[str, Any]) -> None:
        self.learner.load_state_dict(state)
        if self.observations is not None:
            self.observations.load(state["normalizers"]["observations"])
