"""The loop of `PPO` and `MAPPO`: iterations that are whole or undone, and the state between them."""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch

from muster.algorithms.actor_critic import Network, as_allowed, torch_threads
from muster.algorithms.encoder import as_observation
from muster.algorithms.ppo_config import PPOConfig
from muster.algorithms.ppo_envs import TrainingSpaces, collector_over
from muster.algorithms.ppo_parts import EpisodeWindow, MAPPOMetrics, PPOMetrics, Rates, Schedule
from muster.algorithms.teams import Networks
from muster.errors import ClosedError, UsageError

OF_LEARNING = ("optimizer", "minibatch_rng")  # in a state
MOMENTS = {"mean", "var", "count"}  # of `RunningMoments.to_dict`, which fit together or not at all
M = TypeVar("M", PPOMetrics, MAPPOMetrics)


class OnPolicy(ABC, Generic[M]):
    """Collects a rollout, learns from it, and begins again, until ``config.total_steps``.

    facts: of one env.  envs, collectors: as for `PPO`.  explorer: what acts, on the device.  device: that of rollouts,
    too.  episodes: counts those that end.  seed: of the collector.
    """

    def __init__(
        self,
        envs: Any,
        facts: TrainingSpaces,
        config: PPOConfig,
        explorer: Any,
        device: torch.device,
        episodes: EpisodeWindow,
        seed: int,
        collectors: Mapping[str, Any] | None,
    ) -> None:
        self.envs, self.facts, self.config, self.episodes = envs, facts, config, episodes
        self.device = device
        self.steps = 0  # env steps of the complete iterations
        self._explorer = explorer
        self.schedule = Schedule(config)
        self.collector = collector_over(envs, explorer, config, device, seed, collectors)
        self._under_way = False  # an iteration has begun, and has not ended
        self._complete: tuple[dict[str, Any], M | None] = self._state(), None

    @property
    @abstractmethod
    def network(self) -> Network | Networks:
        """What acts as the policy is now."""

    def act(self, obs: Any, state: Any = None, *, masks: Any = None, alive: Any = None, sample: bool = False) -> Any:
        """Actions for observations, as the envs want them: the likeliest ones, or drawn if ``sample``.

        obs: a tensor [B, *obs_shape]; of agents by group, [B, A, *obs_shape].
        state: the memory before the step, which this returned besides the actions; None where episodes begin.
        masks: bool [B, n], the choices that are allowed; of agents by group.  alive: bool [B, A] by group.

        Statistics of observations stay as they are. Numbers that are not finite count as 0.
        """
        threads = self.config.torch_threads
        if not self.facts.groups:
            masks = as_allowed(masks, self.facts.action_space, len(as_observation(obs)))
        actions, after = self.network.act(obs, state, masks=masks, alive=alive, sample=sample, threads=threads)
        return actions if after is None else (actions, after)

    @abstractmethod
    def _learn(self, rates: Rates) -> M:
        """Collects one rollout and learns from it."""

    @abstractmethod
    def _learnt(self) -> dict[str, Any]:
        """The state of what learns: not a copy."""

    @abstractmethod
    def _load_learnt(self, state: Mapping[str, Any]) -> None:
        """Goes on from `_learnt`."""

    @property
    def metrics(self) -> M | None:
        """The metrics of the last complete iteration, whose state is ``state_dict``; None before the first one."""
        return self._complete[1]

    def train(self) -> Iterator[M]:
        """Trains until ``total_steps``; yields the metrics of each iteration."""
        while self.steps < self.config.total_steps:
            yield self.iterate()

    def iterate(self) -> M:
        """Collects one rollout and learns from it.

        After an error or Ctrl-C all is as it was after the last complete iteration, in new episodes.
        """
        if self._under_way:
            self._go_back()
        self._under_way = True
        try:
            with torch_threads(self.config.torch_threads):
                metrics = self._learn(self.schedule.at(self.steps))
            self.steps = self.collector.frames
            self._complete = self._state(), metrics  # one statement: whenever it is read, it is of one moment
            self._under_way = False
            return metrics
        except BaseException:
            self._go_back()
            raise

    def _collect(self) -> Any:
        """The next ``num_steps`` steps of every env, going on where the last rollout ended: a ``compact`` batch."""
        self._explorer.steps = self.steps
        self.collector.update_policy_weights_()
        batch = self.collector.rollout()
        while not batch["collector", "mask"].any():  # every collector was replaced in it
            batch = self.collector.rollout()
        return batch

    @property
    def _steps_before(self) -> int:
        """The steps that each env had made before the batch that was collected last."""
        return (self.collector.batches - 1) * self.config.num_steps

    def state_dict(self) -> dict[str, Any]:
        """The state after the last complete iteration, whole, also while another one is under way or was cut short.

        Without the envs: plain tensors, numbers and lists, so that weights_only=True loads them.
        """
        return copy.deepcopy(self._complete[0])

    def _state(self) -> dict[str, Any]:
        """A copy of the state as it is now."""
        state = {
            **self._learnt(),
            "steps": self.steps,
            "schedule": self.schedule.state_dict(),
            "collector": {name: one for name, one in self.collector.state_dict().items() if name != "policy"},
            "episodes": self.episodes.state_dict(),
        }
        return copy.deepcopy(state)

    def load_state_dict(self, state: Mapping[str, Any], *, learning_rate: float | None = None) -> None:
        """Goes on from `state` of `state_dict`, in new episodes. The config has the same network and normalisation.

        With another ``total_steps`` an annealed learning rate falls from what was reached to 0 at the new end; a run
        that had finished starts at the config's again.  learning_rate: what to start from instead.
        """
        self._load(state)
        self.schedule.load_state_dict(state["schedule"], self.steps, learning_rate)
        self._complete = self._state(), None
        self._under_way = False

    def adopt(self, state: Mapping[str, Any]) -> list[str]:
        """Takes weights and statistics from another run's `state`, where names and shapes are equal.

        Optimizer, counters and generators stay new. Returns the names of the tensors that begin anew. Raises UsageError
        where all do.
        """
        anew, taken = list[str](), list[str]()
        self._load_learnt(_adopted(self._learnt(), state, (), anew, taken))
        if not taken:
            raise UsageError("none of its tensors has the name and the shape of one here")
        self._complete = self._state(), None
        return anew

    def _go_back(self) -> None:
        """Goes back to the state after the last complete iteration."""
        with contextlib.suppress(ClosedError):  # what has closed the collectors is told, and not that it did
            self._load(self._complete[0])
        self._under_way = False

    def _load(self, state: Mapping[str, Any]) -> None:
        self._load_learnt(state)
        self.steps = int(state["steps"])
        self.episodes.load_state_dict(state["episodes"])
        self.collector.load_state_dict(state["collector"])

    def close(self) -> None:
        """Ends the collectors. A vector env stays open: it is the caller's."""
        self.collector.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _adopted(own: Any, other: Any, name: tuple[str, ...], anew: list[str], taken: list[str]) -> Any:
    """The state ``own`` with what ``other`` has by the same names; tensors are listed by whether it has them."""
    if isinstance(own, list):
        return [*_adopted(dict(enumerate(own)), dict(enumerate(other or ())), name, anew, taken).values()]
    if isinstance(own, Mapping) and own.keys() != MOMENTS:
        others = other if isinstance(other, Mapping) else {}
        return {
            key: one if key in OF_LEARNING else _adopted(one, others.get(key), (*name, str(key)), anew, taken)
            for key, one in own.items()
        }
    mean, others = (one["mean"] if isinstance(one, Mapping) else one for one in (own, other))
    fits = isinstance(others, torch.Tensor) and mean.shape == others.shape
    (taken if fits else anew).append(".".join(name))
    return other if fits else own


def generator_of(sequence: np.random.SeedSequence) -> torch.Generator:
    """A generator of torch's that is seeded by the sequence."""
    return torch.Generator().manual_seed(seed_of(sequence))


def seed_of(sequence: np.random.SeedSequence) -> int:
    return int(sequence.generate_state(1, np.uint64)[0])
