"""The base of all collectors: an iterator that counts, and makes batches of full storages."""

from __future__ import annotations

import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict  # type: ignore[import-untyped]  # ships no types

from muster.arguments import whole
from muster.backends.recycling import RECYCLED
from muster.errors import ClosedError, ConfigError, ReplayDiffers, UsageError
from muster.introspection import caller_stacklevel
from muster.rollout.episodes import EpisodeCounter, Episodes, TrajectoryCounter
from muster.rollout.fields import floating_dtype
from muster.rollout.returns import split_trajectories
from muster.rollout.storage import Loss, Storage
from muster.rollout.weights import Device, to_device


def packed_envs(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a collector with the `EnvState` of each env as a byte tensor."""
    envs = [{**one, "state": _tensor(one["state"].to_bytes())} for one in state.get("envs", ())]
    return {**state, "envs": envs} if envs else {**state}


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class BatchSource(ABC):
    """An iterator of batches until `total_frames`. The arguments are those of `Collector`. Raises ConfigError.

    frames, batches: the numbers collected so far.  last_episodes: the episodes that ended in the last batch.
    last_losses: the envs that failed in the last batch, and were replaced.
    """

    _trajectories: TrajectoryCounter  # of all envs, once their number is known
    _episodes: EpisodeCounter

    def __init__(
        self,
        *,
        frames_per_batch: int,
        total_frames: int,
        init_random_frames: int,
        max_frames_per_traj: int | None,
        seed: int | None,
        storing_device: Device,
        split_trajs: bool,
        compact: bool,
        replay_buffer: Any,
        observation_dtype: torch.dtype | None,
        episode_info: Sequence[str] | None,
    ) -> None:
        frames_per_batch = whole("frames_per_batch", frames_per_batch, 1)
        total_frames = whole("total_frames", total_frames, -1)
        init_random_frames = whole("init_random_frames", init_random_frames, 0)
        if max_frames_per_traj is not None:
            max_frames_per_traj = whole("max_frames_per_traj", max_frames_per_traj, 1)
        if seed is not None:
            seed = whole("seed", seed, 0)
        if split_trajs and compact:
            raise ConfigError("split_trajs needs every row's next observation: not with compact=True")
        if replay_buffer is not None and compact:
            raise ConfigError("replay_buffer needs every row's next observation: not with compact=True")
        self._dtype = None if observation_dtype is None else floating_dtype("observation_dtype", observation_dtype)
        names = () if episode_info is None else episode_info
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise ConfigError("episode_info", 'a list of names, such as ["is_success"], or None', episode_info)
        self._names = tuple(dict.fromkeys(names))
        self._limits = {
            "frames_per_batch": frames_per_batch,
            "init_random_frames": init_random_frames,
            "max_frames_per_traj": max_frames_per_traj,
            "compact": compact,
            "observation_dtype": observation_dtype,
            "episode_info": self._names,
        }
        self.total_frames, self._init_random_frames = total_frames, init_random_frames
        self.frames = 0
        self.batches = 0
        self.last_episodes = Episodes(np.empty(0), np.empty(0, np.int64), np.empty(0, np.int64))
        self.last_losses: list[Loss] = []
        self._seed = seed
        self._compact = compact
        self._split_trajs = split_trajs
        self._replay_buffer = replay_buffer
        self._storing_device = None if storing_device is None else to_device(storing_device)
        self._closed = False
        self._collecting: int | None = None  # the thread that does
        self._cut_short = False  # an error or Ctrl-C ended the last call before it could return its batch

    def __iter__(self) -> Iterator[TensorDict | None]:
        """Yields batches until `total_frames`; another ``iter`` goes on where the last one stopped."""
        while self.total_frames < 0 or self.frames < self.total_frames:
            batch = self.rollout()
            if (buffer := self._replay_buffer) is None:
                yield batch
            else:
                takes_whole = getattr(getattr(buffer, "storage", None), "ndim", 1) > 1
                buffer.extend(batch if takes_whole else batch[batch["collector", "mask"]])
                yield None

    def rollout(self) -> TensorDict:
        """The next batch. After an error or Ctrl-C the following one starts new episodes in all envs."""
        with self._afresh():
            batch = self._collect()
            if self._split_trajs:
                batch = split_trajectories(batch)
            return batch if self._storing_device is None else batch.to(self._storing_device)

    @contextmanager
    def _afresh(self) -> Iterator[None]:
        """Runs its body between batches; where that does not end well, the next batch starts new episodes."""
        with self._between_batches():
            self._cut_short = True
            yield
            self._cut_short = False

    @contextmanager
    def _between_batches(self) -> Iterator[None]:
        """Keeps other threads from collecting; drops what an error has left under way."""
        if self._closed:
            raise ClosedError("this collector was shut down; make another one")
        here = threading.get_ident()
        if self._collecting not in (None, here):  # a Ctrl-C may have left this thread's own behind
            raise UsageError("another thread is collecting; use one at a time, or a lock")
        self._collecting, has_gradients = here, torch.is_grad_enabled()
        try:
            if self._cut_short:
                self._give_up()
                self._cut_short = False
            yield
        finally:
            self._collecting = None
            torch.set_grad_enabled(has_gradients)  # an interrupt at the edge of `torch.no_grad` leaves them off

    @abstractmethod
    def _give_up(self) -> None:
        """Drops what is under way: the next batch starts new episodes in all envs."""

    @abstractmethod
    def _collect(self) -> TensorDict:
        """The next batch ``[N, T]``; adds its frames to the counts."""

    def _count_envs(self, num_envs: int) -> None:
        self._num_envs = num_envs
        self._trajectories, self._episodes = TrajectoryCounter(num_envs), EpisodeCounter(num_envs, self._names)

    def _batch_over(self, storage: Storage, first_env: int = 0) -> TensorDict:
        """The batch of a full storage, with trajectories numbered and episodes added up; warns of envs that failed."""
        self.last_episodes = self._episodes.count(storage, first_env)
        for note in self._episodes.notes:
            warnings.warn(f"episode_info: {note}", UserWarning, stacklevel=caller_stacklevel())
        self.last_losses = [loss._replace(env=first_env + loss.env) for loss in storage.losses]
        failed = [loss for loss in self.last_losses if not loss.reason.startswith(RECYCLED)]
        for loss in failed:  # Python's default filter shows each env's failures once for each reason.
            warnings.warn(
                f"env {loss.env} failed and was replaced; its episode ends truncated with a masked row. "
                f"The reason: {loss.reason}",
                RuntimeWarning,
                stacklevel=caller_stacklevel(),
            )
        return storage.to_batch(self._trajectories.count(storage.begins, first_env))

    def _counters(self) -> dict[str, Any]:
        return {"frames": self.frames, "batches": self.batches, "next_traj_id": self._trajectories.next_id}

    def _load_counters(self, state: Mapping[str, Any]) -> None:
        self.frames, self.batches = int(state["frames"]), int(state["batches"])
        self._trajectories.next_id = int(state["next_traj_id"])

    @abstractmethod
    def env_states(self) -> list[dict[str, Any]] | None:
        """For each env its own part of a state; None where the next batch starts new episodes anyway."""

    def going_on(self) -> dict[str, Any]:
        """The part of a state that is of the envs, see `packed_envs`; empty where new episodes are started."""
        envs = self.env_states()
        return {} if envs is None else {"envs": envs, **self._trajectories.state(), **self._episodes.state()}

    def _load_envs(self, state: Mapping[str, Any], load: Callable[[Any], Sequence[ReplayDiffers]]) -> None:
        """Has envs go on from a state that has theirs. load: sets them, and returns the errors of those that differ."""
        if "envs" not in state:
            return
        differing = load(state["envs"])
        self._trajectories.load(state)
        self._episodes.load(state)
        for error in differing:
            said = f"{error.summary}. Envs {', '.join(map(str, error.was_reset))} begin new episodes"
            warnings.warn(said, RuntimeWarning, stacklevel=caller_stacklevel())

    @abstractmethod
    def shutdown(self) -> None:
        """Closes envs and ends processes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
