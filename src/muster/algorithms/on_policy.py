"""The loop of `PPO` and `MAPPO`: iterations that are whole or undone, the state between them, envs and the device."""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Self, TypeVar

import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv
from torch import Tensor, nn

from muster.algorithms.actor_critic import as_allowed, torch_threads
from muster.algorithms.encoder import MEASURED, as_observation, kind_of, leaves_of
from muster.algorithms.ppo_config import (
    EpisodeWindow,
    MAPPOConfig,
    MAPPOMetrics,
    PPOConfig,
    PPOMetrics,
    Rates,
    Schedule,
)  # fmt: skip
from muster.errors import ClosedError, ConfigError, MusterError, TrainingDiverged, UsageError
from muster.rollout.batch_source import packed_envs
from muster.rollout.collector import Collector
from muster.rollout.multi_collector import MultiCollector, env_options
from muster.rollout.weights import place, to_device
from muster.vector.make import make_vec
from muster.vector.multi_agent import MultiAgentVectorEnv

OF_LEARNING = ("optimizer", "minibatch_rng")  # in a state
MOMENTS = {"mean", "var", "count"}  # of `RunningMoments.to_dict`, which fit together or not at all
M = TypeVar("M", PPOMetrics, MAPPOMetrics)
LARGE = 1_000_000  # weights; with fewer, and without a CNN, the GPU's calls take longer than the CPU's work
# What PPO leaves to the user of `MultiCollector`'s options; the first ones are those of `make_vec` for workers, too.
_OF_WORKERS = ("context", "start_timeout", "close_timeout")
OPTIONS = (
    *("num_collectors", "cluster", "make_vec_options", "on_failure", "max_restarts", *_OF_WORKERS),
    *("collect_timeout", "threads_per_collector", "preemptive_threshold"),
)


class OnPolicy(ABC, Generic[M]):
    """Collects a rollout, learns from it, and begins again, until ``config.total_steps``.

    facts: of one env.  envs, collectors: as for `PPO`.  explorer: what acts, on the device.  device: that of rollouts,
    too.  episodes: counts those that end.  seed: of the collector.
    """

    def __init__(
        self, envs: Any, facts: TrainingSpaces, config: PPOConfig, explorer: Any, device: torch.device,
        episodes: EpisodeWindow, seed: int, collectors: Mapping[str, Any] | None,
    ) -> None:  # fmt: skip
        self.envs, self.facts, self.config, self.episodes = envs, facts, config, episodes
        self.device = device
        self.steps = 0  # env steps of the complete iterations
        self._explorer = explorer
        self.schedule = Schedule(config)
        shared: Any = {"frames_per_batch": config.batch_size, "seed": seed, "compact": True}
        shared |= {"episode_info": config.episode_info} | ({} if device.type == "cpu" else {"device": device})
        self.collector: Collector | MultiCollector
        if collectors is None:
            self.collector = Collector(envs, explorer, **shared)
        else:
            self.collector = MultiCollector(envs, explorer, num_envs=config.num_envs, **shared, **collectors)
        options = (collectors or {}).get("make_vec_options") or {"replayable": getattr(envs, "replayable", False)}
        self._replays = bool(options.get("replayable"))
        self._under_way = False  # an iteration has begun, and has not ended
        self._entered: Callable[[str], object] = str
        self._complete: tuple[dict[str, Any], M | None] = self._state(), None

    @property
    @abstractmethod
    def network(self) -> Any:
        """The policy as it acts now: a `Network`, or `Networks` of agents."""

    def act(self, obs: Any, state: Any = None, *, masks: Any = None, alive: Any = None, sample: bool = False) -> Any:
        """Actions for observations, as the envs want them: the likeliest ones, or drawn if ``sample``.

        obs: a tensor [B, *obs_shape]; of agents by group, [B, A, *obs_shape].
        state: the memory before the step, which this returned with the actions; None where episodes begin.
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
        """The metrics of the last complete iteration, that of ``state_dict``; None before the first one."""
        return self._complete[1]

    def train(self) -> Iterator[M]:
        """Trains until ``total_steps``; yields the metrics of each iteration."""
        while self.steps < self.config.total_steps:
            yield self.iterate()

    def tell_phases(self, entered: Callable[[str], object]) -> None:
        """Has `entered` called with "rollout" and with "update" as these begin."""
        self._entered = entered

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
        self._entered("rollout")
        self._explorer.steps = self.steps
        self.collector.update_policy_weights_()
        batch = self.collector.rollout()
        while not batch["collector", "mask"].any():  # every collector was replaced in it
            batch = self.collector.rollout()
        self._entered("update")
        return batch

    def _require_finite(self, collected: Any, agents: Sequence[object] = (), what: str = "an observation") -> None:
        """Raises TrainingDiverged for the first observation or reward to be learnt from that is not finite in float32.

        collected: an `Experience`, the observations as the envs returned them.  agents: their names, where there are
        several.  what: it is called.

        The final observation of a terminated episode is never learnt from, and may be anything; so may masked rows.
        """
        rewards, mask, ended = collected.rewards, collected.counts, collected.terminated
        bootstraps = mask & collected.truncated & ~ended
        used = mask.clone()
        used[:, 1:] |= bootstraps[
            :, :-1
        ]  # where an env is reset in a row of its own, that row has the final observation
        env_ids, times = (index.tolist() for index in collected.final_at.unbind(-1))
        T = mask.shape[1]
        # By the number of steps that the env had made when it returned it, a final observation before the reset's.
        found = [(t + 1, 0, env, *agent, "a reward of", rewards[env, t]) for env, t, *agent in _bad(rewards, mask)]
        seen, final = f"{what} that holds", "a final observation that holds"
        leaves = zip(*(map(_leaves, (collected.observations, collected.last, collected.finals))), strict=True)
        for rows, last, finals in leaves:
            at_end, after = _bad(finals, bootstraps[env_ids, times]), _bad(last, ~(mask[:, -1] & ended[:, -1]))
            found += [(t, 1, env, *agent, seen, rows[env, t]) for env, t, *agent in _bad(rows, used)]
            found += [(times[k] + 1, 0, env_ids[k], *agent, final, finals[k]) for k, *agent in at_end]
            found += [(T, 1, env, *agent, seen, last[env]) for env, *agent in after]
        if not found:
            return
        step, _, env, *agent, returned, row = min(found, key=lambda one: one[:-2])
        row = row[agent[0]] if agent else row
        number = row[~_finite(row)][0].item()
        of = f"for {agents[agent[0]]!r} " if agent else ""
        step += (self.collector.batches - 1) * self.config.num_steps  # those before this batch
        when = f"in its step {step}" if step else "at its first reset"
        raise TrainingDiverged(
            f"Env {env} returned {returned} {number} {of}{when}; PPO learns from finite numbers of float32 alone. "
            f"Nothing of this rollout was learnt: the state is that after step {self.steps:,}. Mend the env, or "
            "replace such numbers in a wrapper; make_vec(check_finite=True) raises in the env's own step."
        )

    def state_dict(self) -> dict[str, Any]:
        """The state after the last complete iteration, whole, also while another one is under way or was cut short.

        With those of envs that are ``replayable=True``. Plain tensors, numbers and lists, so that weights_only=True
        loads them.
        """
        state = copy.deepcopy(self._complete[0])
        return {**state, "collector": packed_envs(state["collector"])}

    def _carried(self) -> dict[str, Any]:
        """The numbers that are carried from rollout to rollout within episodes: not a copy."""
        return {}

    def _load_carried(self, state: Mapping[str, Any]) -> None:
        """Goes on from `_carried`."""

    def _state(self) -> dict[str, Any]:
        """A copy of the state as it is now."""
        state = {
            **self._learnt(),
            "steps": self.steps,
            "schedule": self.schedule.state_dict(),
            "collector": {name: one for name, one in self._of_collector().items() if name != "policy"},
            "episodes": self.episodes.state_dict(),
        }
        return copy.deepcopy(state)

    def _of_collector(self) -> dict[str, Any]:
        state = self.collector.state_dict()
        if self._replays:
            with contextlib.suppress(MusterError):  # of a collector that was lost: its envs begin new episodes
                state |= self.collector.going_on()
        return state if "envs" not in state else {**state, "carried": self._carried()}

    def load_state_dict(self, state: Mapping[str, Any], *, learning_rate: float | None = None) -> None:
        """Goes on from `state` of `state_dict`: where it has them, in the states of its envs, else in new episodes.

        The config has the same network and normalisation.
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
        state, _ = self._complete
        begins = {**state, "collector": {name: one for name, one in state["collector"].items() if name != "envs"}}
        with contextlib.suppress(ClosedError):  # the reason is raised, not that the collectors are closed
            self._load(begins)
        self._under_way = False

    def _load(self, state: Mapping[str, Any]) -> None:
        self._load_learnt(state)
        self.steps = int(state["steps"])
        self.episodes.load_state_dict(state["episodes"])
        self.collector.load_state_dict(state["collector"])
        if self._replays and "envs" in state["collector"]:
            self._load_carried(state["collector"]["carried"])

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


def _leaves(obs: Any) -> list[Tensor]:
    """The tensors of an observation: itself, or those in a TensorDict."""
    return [obs] if isinstance(obs, Tensor) else list(obs.values(include_nested=True, leaves_only=True))


def _bad(rows: Tensor, used: Tensor) -> list[list[int]]:
    """The places of ``used`` (bool, of the first dims of ``rows``) where a row is not finite."""
    if not rows.is_floating_point():
        return []
    finite = _finite(rows)
    while finite.ndim > used.ndim:
        finite = finite.all(-1)
    places: list[list[int]] = torch.nonzero(used & ~finite).tolist()
    return places


def _finite(rows: Tensor) -> Tensor:
    """Says of each number if it is finite in float32, the policy's dtype."""
    return rows.float().isfinite()


class TrainingSpaces(NamedTuple):
    """Facts of one of the envs, for PPO and MAPPO. Spaces are one agent's, of MAPPO's envs by group."""

    observation_space: Any
    action_space: Any
    spec: EnvSpec | None
    groups: Mapping[str, Sequence[Hashable]] = {}  # the agents of each
    state_space: gym.Space[Any] | None = None


def facts_of(envs: Any, config: PPOConfig, collectors: Mapping[str, Any] | None) -> TrainingSpaces:
    """The facts of envs; with `collectors` those of one that is made in a process of its own, and closed again.

    Raises UsageError for envs that PPO cannot train on, ConfigError for options that do not fit them, or are not PPO's.
    """
    if collectors is None:
        return _facts(envs, config, config.num_envs)
    if not isinstance(collectors, Mapping) or "num_collectors" not in collectors:
        raise ConfigError('collectors: say how many there are to be, as in collectors={"num_collectors": 4}')
    for name in collectors:
        if name not in OPTIONS:
            raise ConfigError(
                f"collectors: PPO's collectors have no option {name!r}. They have {', '.join(OPTIONS)}; options of the "
                "envs go into make_vec_options, those of rollouts into PPOConfig"
            )
    options = env_options(collectors.get("make_vec_options"))
    if isinstance(changes := options.get("worker_env"), (list, tuple)):
        options["worker_env"] = changes[:1]
    options |= {name: collectors[name] for name in _OF_WORKERS if name in collectors}
    first = envs[:1] if isinstance(envs, (list, tuple)) else envs
    with contextlib.closing(make_vec(first, 1, **{"state": True, **options})) as one:
        return _facts(one, config, 1)


def _facts(envs: Any, config: PPOConfig, num_envs: int) -> TrainingSpaces:
    several, got, count = isinstance(envs, MultiAgentVectorEnv), type(envs).__name__, getattr(envs, "num_envs", None)
    if isinstance(config, MAPPOConfig) and not several:
        raise UsageError(
            f"MAPPO trains several agents per env and needs a muster.MultiAgentVectorEnv, got {got}. For one agent per "
            "env there is PPO."
        )
    if not isinstance(config, MAPPOConfig) and not isinstance(envs, VectorEnv):
        instead = " For several agents there is MAPPO." if several else ""
        raise UsageError(f"PPO trains one agent per env and needs a gymnasium VectorEnv, got {got}.{instead}")
    if count != num_envs:
        name = type(config).__name__
        raise UsageError(f"envs has num_envs={count}, the config num_envs={num_envs}; pass {name}(num_envs={count}).")
    seen, acts, spec = envs.single_observation_space, envs.single_action_space, getattr(envs, "spec", None)
    if not isinstance(config, MAPPOConfig):
        _require_fitting(config, seen)
        return TrainingSpaces(seen, acts, spec)
    groups, shared = envs.groups, config.share_params
    if unknown := [] if isinstance(shared, bool) else [name for name in shared if name not in groups]:
        raise ConfigError(f"share_params names {unknown}, and the envs have the groups {list(groups)}")
    _require_fitting(config, *(seen[group] for group in groups))
    return TrainingSpaces({g: seen[g] for g in groups}, {g: acts[g] for g in groups}, spec, groups, envs.state_space)


def _require_fitting(config: PPOConfig, *spaces: gym.Space[Any]) -> None:
    """Raises ConfigError where observations of codes or pixels are to be normalised, and for sprites without images."""
    leaves = [leaf for one in spaces for leaf in (leaves_of(one).values() if kind_of(one) == "mixed" else [one])]
    if config.sprite is not None and "images" not in map(kind_of, leaves):
        raise ConfigError("sprite", "left out where no observation is an image", config.sprite)
    for space in spaces if config.normalize_observations else ():
        if (kind := kind_of(space)) not in MEASURED:
            raise ConfigError(
                "normalize_observations is for measurements, such as positions and speeds: Boxes of floats, of large "
                f"whole numbers, and rows of bytes. This env observes {space}, which the policy reads as {kind}, in "
                "numbers of about 1 already. Leave it off."
            )


def placed(
    wish: str | torch.device, policies: Iterable[Any], statistics: Iterable[Any], config: PPOConfig
) -> torch.device:
    """The device, with the policies and statistics there.

    wish: as for `PPO`. Raises ConfigError where there is no such device, or it cannot compute what is asked for.
    """
    policies = list(policies)
    if wish == "auto":  # the GPU, if there is one, for images and for large networks; else the CPU
        images = any(isinstance(layer, nn.Conv2d) for policy in policies for layer in policy.modules())
        weights = sum(one.numel() for policy in policies for one in policy.parameters())
        wish = "cuda" if (images or weights > LARGE) and torch.cuda.is_available() else "cpu"
    device = to_device(wish)
    if device.type == "mps" and (config.normalize_observations or config.normalize_rewards):
        raise ConfigError(
            "device", "one with float64, for normalize_observations and normalize_rewards: cpu or cuda", str(device)
        )
    for one in (*policies, *statistics):
        place(one, device, "device")
    return device
