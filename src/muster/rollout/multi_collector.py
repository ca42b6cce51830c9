"""`MultiCollector`: several collector processes, each with its share of the envs and a replica of the policy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict  # type: ignore[import-untyped]  # ships no types
from tensordict.nn import InteractionType  # type: ignore[import-untyped]  # ships no types
from torch import Tensor, nn

from muster.envs import resolve_foreign_id
from muster.envs.inbound import Inbound
from muster.errors import ClosedError, ConfigError, UsageError
from muster.introspection import caller_stacklevel
from muster.recipe import Recipe, make_recipes
from muster.rollout.collector import Collector, check_numbers
from muster.rollout.crew import Crew, CrewOptions
from muster.rollout.devices import Device, to_device
from muster.rollout.episodes import EpisodeCounter, Episodes, TrajectoryCounter
from muster.rollout.returns import split_trajectories
from muster.rollout.travel import Obstacle, obstacle_to
from muster.rollout.weights import load_weights, named_weights

_ENV_OPTIONS = ("env_kwargs", "wrappers", "groups")


class MultiCollector:
    """Iterates batches that several processes collect: TensorDicts ``[T, N]``, neither copied nor pickled on their way.

    envs: what `muster.make_vec` takes as its first argument, with `num_envs` (None: one for each collector, or the
        list's length) and of its other options ``env_kwargs``, ``wrappers`` and ``groups`` in `make_vec_options`. The
        envs are split evenly.
    policy: as for `Collector`, and copied to each collector; with `policy_factory` it is built there, and `policy`
        only says where weights come from. A policy that cannot be copied stays here, with a warning, and acts for all.
    sync: True gives batches of `frames_per_batch` frames of all envs; False those of one collector's envs, first come.
        Each collector then begins its next batch while its last one is learnt from.
    preemptive_threshold: with `sync`: once this share of the collectors is done, the others stop; the rows that are
        missing are False in ``("collector", "mask")``.
    context, start_timeout, on_failure, max_restarts, threads_per_collector: as `make_vec` has them for workers.
    collect_timeout: seconds that a collector may take for a batch before it is killed.

    Other options are `Collector`'s. ``("collector", "policy_version")``, int64 ``[T, N]``, says which weights acted.
    Raises ConfigError, CannotTravel, what `make_vec` raises, and while collecting EnvError, CollectorError, WorkerDied,
    WorkerTimeout.
    """

    def __init__(
        self,
        envs: Any,
        policy: Callable[..., Any] | None = None,
        *,
        num_collectors: int,
        frames_per_batch: int,
        total_frames: int = -1,
        num_envs: int | None = None,
        make_vec_options: Mapping[str, Any] | None = None,
        policy_factory: Callable[[], Callable[..., Any]] | None = None,
        sync: bool = True,
        preemptive_threshold: float | None = None,
        device: Device = None,
        policy_device: Device = None,
        storing_device: Device = None,
        seed: int | None = None,
        init_random_frames: int = 0,
        max_frames_per_traj: int | None = None,
        reset_at_each_iter: bool = False,
        split_trajs: bool = False,
        compact: bool = False,
        replay_buffer: Any = None,
        initial_state: Mapping[Any, Tensor] | None = None,
        exploration: InteractionType = InteractionType.RANDOM,
        context: str = "auto",
        start_timeout: float = 300.0,
        collect_timeout: float | None = None,
        on_failure: str = "raise",
        max_restarts: int = 10,
        threads_per_collector: int = 1,
    ) -> None:
        check_numbers(
            num_collectors=(num_collectors, 1),
            frames_per_batch=(frames_per_batch, 1),
            total_frames=(total_frames, -1),
            init_random_frames=(init_random_frames, 0),
            max_frames_per_traj=(max_frames_per_traj, 1),
            seed=(seed, 0),
        )
        _check(sync, preemptive_threshold, split_trajs, compact)
        self.policy = policy
        self.total_frames = total_frames
        self.frames = 0
        self.batches = 0
        self.last_episodes = Episodes(np.empty(0), np.empty(0, np.int64), np.empty(0, np.int64))
        self._replay_buffer = replay_buffer
        self._split_trajs = split_trajs
        storing = device if storing_device is None else storing_device
        self._storing_device = None if storing is None else to_device(storing)
        self._closed = False
        recipes = _understood(envs, num_envs, num_collectors, make_vec_options)
        shared = {
            "policy_device": device if policy_device is None else policy_device,
            "max_frames_per_traj": max_frames_per_traj,
            "reset_at_each_iter": reset_at_each_iter,
            "compact": compact,
            "initial_state": dict(initial_state or {}),
            "exploration": exploration,
        }
        self._staying: Collector | None = None
        self._crew: Crew | None = None
        if policy is not None and policy_factory is None and (obstacle := obstacle_to(policy)) is not None:
            warnings.warn(_explained(obstacle), UserWarning, stacklevel=caller_stacklevel())
            self._staying = Collector(
                envs,
                policy,
                num_envs=len(recipes),
                make_vec_options={
                    **(make_vec_options or {}),
                    "num_workers": num_collectors,
                    "context": context,
                    "start_timeout": start_timeout,
                    "step_timeout": collect_timeout,
                    "on_failure": on_failure,
                    "max_restarts": max_restarts,
                    "threads_per_worker": threads_per_collector,
                },
                frames_per_batch=frames_per_batch,
                seed=seed,
                init_random_frames=init_random_frames,
                overlap=not sync and len(recipes) > 1,
                **shared,
            )
        else:
            self._crew = Crew(
                recipes,
                policy,
                policy_factory,
                num_collectors=num_collectors,
                frames_per_batch=frames_per_batch,
                sync=sync,
                seed=seed,
                collector_options={**shared, "init_random_frames": -(-init_random_frames // num_collectors)},
                options=CrewOptions(
                    context,
                    start_timeout,
                    collect_timeout,
                    on_failure,
                    max_restarts,
                    threads_per_collector,
                    1.0 if preemptive_threshold is None else preemptive_threshold,
                ),
            )
        self._trajectories: dict[int, TrajectoryCounter] = {}  # by the first env of a batch
        self._episodes: dict[int, EpisodeCounter] = {}
        self._next_traj_id = 0

    def __iter__(self) -> Iterator[TensorDict | None]:
        """Batches until `total_frames`; another ``iter`` goes on where the last one stopped."""
        while self.total_frames < 0 or self.frames < self.total_frames:
            batch = self.rollout()
            if self._replay_buffer is None:
                yield batch
            else:
                self._replay_buffer.extend(batch[batch["collector", "mask"]])
                yield None

    def rollout(self) -> TensorDict:
        """The next batch. After an error the following one starts new episodes in all envs."""
        if self._closed:
            raise ClosedError("this collector was shut down; make another one")
        batch = self._from_crew(self._crew) if self._crew is not None else self._from_staying()
        self.batches += 1
        if self._split_trajs:
            batch = split_trajectories(batch)
        return batch if self._storing_device is None else batch.to(self._storing_device)

    def update_policy_weights_(self, weights: Any = None) -> None:
        """From the next batch that each collector begins, it acts with these weights, whole.

        weights: None for the current ones of `policy`, else a module, a state dict or a TensorDict of parameters, which
        `policy`, if there is one, takes, too. Raises SpecMismatch, UsageError.
        """
        if weights is not None and self.policy is not None:
            load_weights(self.policy, weights)
        if self._crew is None:
            return
        own = named_weights(self.policy)
        if self.policy is None and weights is not None:
            own = named_weights(weights) if isinstance(weights, nn.Module) else dict(weights)
        if not own:
            raise UsageError("there are no weights to send: give `weights`, or a policy that has some")
        self._crew.publish(own)

    @property
    def policy_version(self) -> int:
        """Of the weights that collectors take for their next batch; 1 for those they started with."""
        return self._crew.version if self._crew is not None else 1

    def reset(self) -> None:
        """Starts new episodes in all envs with the next batch."""
        if self._staying is not None:
            self._staying.reset()
        elif self._crew is not None:
            self._crew.reset(self.batches + 1, self.frames)

    def stats(self) -> dict[str, Any]:
        """Counts of frames and batches; ``collectors``: how their processes' time went."""
        inner = self._crew.stats() if self._crew is not None else self._staying.stats()["envs"]  # type: ignore[union-attr]  # one of both
        return {"frames": self.frames, "batches": self.batches, "collectors": inner}

    def state_dict(self) -> dict[str, Any]:
        """Counters and the policy's weights. Envs have no state to save: they will start new episodes."""
        state: dict[str, Any] = {"frames": self.frames, "batches": self.batches, "next_traj_id": self._next_traj_id}
        if self._staying is not None:
            state["staying"] = self._staying.state_dict()
        elif isinstance(self.policy, nn.Module):
            state["policy"] = self.policy.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state_dict`, in new episodes with seeds of their own."""
        self.frames, self.batches = int(state["frames"]), int(state["batches"])
        self._next_traj_id = int(state["next_traj_id"])
        if self._staying is not None:
            self._staying.load_state_dict(state["staying"])
            return
        if isinstance(self.policy, nn.Module) and "policy" in state:
            self.policy.load_state_dict(state["policy"])
            self.update_policy_weights_()
        self.reset()

    def shutdown(self) -> None:
        """Ends the processes."""
        self._closed = True
        if self._staying is not None:
            self._staying.shutdown()
        elif self._crew is not None:
            self._crew.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def _from_crew(self, crew: Crew) -> TensorDict:
        storage, first_env, versions = crew.collect()
        counter = self._trajectories.setdefault(first_env, TrajectoryCounter(storage.N))
        counter.next_id = self._next_traj_id
        traj_ids = counter.count(storage.begins)
        self._next_traj_id = counter.next_id
        episodes = self._episodes.setdefault(first_env, EpisodeCounter(storage.N)).count(
            storage.rewards(), storage.begins, storage.terminated | storage.truncated, storage.mask
        )
        self.last_episodes = episodes._replace(env_ids=episodes.env_ids + first_env)
        self.frames += int(storage.mask.sum())
        batch = storage.to_batch(traj_ids)
        batch["collector", "policy_version"] = torch.from_numpy(versions).expand(storage.T, -1)
        return batch

    def _from_staying(self) -> TensorDict:
        assert self._staying is not None
        batch = self._staying.rollout()
        self.frames, self.last_episodes = self._staying.frames, self._staying.last_episodes
        batch["collector", "policy_version"] = torch.ones(batch.batch_size, dtype=torch.int64)
        return batch


def _understood(
    envs: Any, num_envs: int | None, num_collectors: int, make_vec_options: Mapping[str, Any] | None
) -> list[Recipe]:
    options = dict(make_vec_options or {})
    if unknown := sorted(options.keys() - set(_ENV_OPTIONS)):
        raise ConfigError(
            f"make_vec_options: collectors step their envs themselves, so of make_vec's options only "
            f"{', '.join(_ENV_OPTIONS)} are theirs, got {', '.join(unknown)}"
        )
    if num_envs is None and not isinstance(envs, (list, tuple)):
        num_envs = num_collectors
    wrappers = [*(options.get("wrappers") or ()), Inbound(options.get("groups"))]
    recipes = make_recipes(envs, num_envs, options.get("env_kwargs"), wrappers, resolve_foreign_id=resolve_foreign_id)
    if len(recipes) < num_collectors:
        raise ConfigError(f"num_collectors={num_collectors}, but there are only {len(recipes)} envs; each needs one")
    return recipes


def _check(sync: bool, threshold: float | None, split_trajs: bool, compact: bool) -> None:
    if split_trajs and compact:
        raise ConfigError("split_trajs needs every row's next observation: not with compact=True")
    if threshold is not None and not (sync and 0 < threshold <= 1):
        raise ConfigError(f"preemptive_threshold must lie in (0, 1], with sync=True, got {threshold!r}")


def _explained(obstacle: Obstacle) -> str:
    return (
        f"the policy cannot be copied to collector processes, because of {obstacle}. It stays in this process and acts "
        "for all envs, which are stepped in workers. To have replicas nonetheless, either\n"
        "  pass policy_factory=, which builds the policy in each collector; or\n"
        f"  call muster.rebuild_with({obstacle.type_name.rsplit('.', 1)[-1]}, a_factory), which rebuilds it there; or\n"
        "  mark the policy with muster.nn.uncopyable, or use muster.Collector, if staying is what you want."
    )
