"""One collector of a `MultiCollector`, in its process: its share of the envs, a replica of the policy, shared memory.

To the engine it is an env whose step collects a batch. So whatever the engine does for envs holds for collectors, too:
start methods, first-ready waits, deaths that are noticed and explained, timeouts, restarts, no orphans.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from functools import cached_property
from io import FileIO
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from muster._core import map_fd
from muster.errors import EnvError, WorkerError
from muster.recipes.recipe import unpack
from muster.rollout.beside_weights import apply_changes
from muster.rollout.collector import Collector
from muster.rollout.collector_set import collector_nouns
from muster.rollout.fields import Array
from muster.rollout.processes.batch_memory import BatchLayout, stop_flag
from muster.rollout.processes.replica_plans import ReplicaFacts, ReplicaPlan
from muster.rollout.processes.shared_weights import SharedWeights, WeightShapes, shapes_of
from muster.rollout.storage import Storage
from muster.rollout.weights import named_weights
from muster.vector.assemble import serial_vec
from muster.worker_info import WorkerInfo, get_worker_info, worker_info_context

# The counts of a replica's envs, since the replica was built.
COUNTS = ("env_steps", "resets", "restarts")


class Replica(gymnasium.Env[Array, Array]):
    """A collector as an env: ``step([offset, frames, afresh])`` collects a batch into the block of memory at `offset`.

    The observation is [version of the weights, *COUNTS].
    frames: number that this collector has collected before, in this or earlier processes.  afresh: 1 to begin new
    episodes.
    An env that raises is replaced here, so that the others keep their episodes. Once `max_restarts` is used up, the
    step puts the error into ``infos["exhausted"]``; if it raised the error, only this replica would be replaced.
    """

    observation_space = spaces.Box(0, 2**62, (1 + len(COUNTS),), np.int64)
    action_space = spaces.Box(0, 2**62, (3,), np.int64)

    def __init__(self, plan: ReplicaPlan) -> None:
        # A forked process has none of the threads that torch's pool expects, and would wait for them forever. The
        # worker sets the number that the user asked for once everything is built.
        torch.set_num_threads(1)
        self._plan = plan
        recipes = unpack(plan.recipes, fds=plan.fds.fds) if isinstance(plan.recipes, bytes) else plan.recipes
        info = get_worker_info()
        seed = info.seed if info else None
        self._info = WorkerInfo(None, plan.index, plan.num_envs, plan.num_collectors, seed)
        envs = range(plan.first_env, plan.first_env + len(recipes))
        nouns = collector_nouns([envs], first_worker=plan.index)
        self._envs = serial_vec(recipes, self._info, max_restarts=plan.max_restarts, nouns=nouns)
        # Where a replica cannot replace its env, which must be alone in its process, the engine replaces both.
        self.metadata = {**self.metadata, "one_per_process": bool(self._envs.metadata.get("one_per_process"))}
        try:
            with worker_info_context(self._info):
                self.policy = _unpacked_policy(plan)
            self._batch_memory = _opened(plan.batch_memory_path)
            self._weights_file = _opened(plan.weights_path)
        except BaseException:
            self._envs.close()
            raise
        self._weights: SharedWeights | None = None
        self._version = 0
        self._collector: Collector | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Starts again with this seed: a new collector, and new episodes."""
        super().reset(seed=seed)
        self._collector = Collector(self._envs, self.policy, seed=seed, **self._plan.options)
        return self._report(), {}

    def facts(self) -> ReplicaFacts:
        """The fields of the replica's rollouts, known after the first reset."""
        collector = self._started()
        outputs = tuple(self._guarded(collector.output_fields))
        return ReplicaFacts(*collector.fields, outputs)

    def weights(self) -> dict[str, Tensor]:
        """The policy's weights by name."""
        return {name: tensor.detach().cpu() for name, tensor in named_weights(self.policy).items()}

    def weight_shapes(self) -> WeightShapes:
        """Shapes and dtypes of the weights that the policy takes, by name."""
        return shapes_of(named_weights(self.policy))

    def call_envs(self, name: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """`VectorEnv.call` on its envs; a function is called with their indices among all."""
        if callable(name):
            function = name
            name = lambda env, i, *args, **kwargs: function(env, self._plan.first_env + i, *args, **kwargs)  # noqa: E731
        return tuple(self._guarded(lambda: self._envs.call(name, *args, **kwargs)))

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """`VectorEnv.set_attr` on its envs. value: one for each of them."""
        self._guarded(lambda: self._envs.set_attr(name, value))
        return True

    def spaces(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        """One env's observation and action spaces."""
        return self._envs.single_observation_space, self._envs.single_action_space

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        offset, frames, afresh = map(int, action)
        collector = self._started()
        if afresh:
            collector.reset()
        collector.frames = frames
        infos: dict[str, Any] = {}
        try:
            storage = self._collect(collector, self._layout, offset)
            for name, entries in (("finals", storage.finals), ("losses", storage.losses)):
                if entries:
                    infos[name] = [tuple(one) for one in entries]
        except WorkerError as error:
            if not self._envs.closed:  # else restarting did not help
                raise
            infos["exhausted"] = error
        return self._report(), 0.0, False, False, infos

    def close(self) -> None:
        self._batch_memory.close()
        self._weights_file.close()
        self._envs.close()

    def _collect(self, collector: Collector, layout: BatchLayout, offset: int) -> Storage:
        """Fills the block at `offset`."""
        if self._weights is None:
            self._weights = SharedWeights(named_weights(self.policy), self._weights_file.fileno())
        self._version, beside = self._weights.read_into(named_weights(self.policy), self._version)
        if beside:
            apply_changes(self.policy, beside)
        block = map_fd(fd=self._batch_memory.fileno(), size=layout.block_bytes, offset=offset)
        storage = layout.storage(block, slice(*self._plan.part))
        storage.clear_flags()
        self._guarded(lambda: collector.fill(storage, stop_flag(block)))
        return storage

    def _report(self) -> Array:
        return np.array([self._version, *self._envs.counts()], np.int64)

    def _started(self) -> Collector:
        assert self._collector is not None
        return self._collector

    @cached_property
    def _layout(self) -> BatchLayout:
        return self._plan.layout(self.facts())

    def _guarded(self, work: Callable[[], Any]) -> Any:
        """Calls `work`, in which `get_worker_info` returns the info of this collector."""
        try:
            with worker_info_context(self._info):
                return work()
        except EnvError as error:
            error.batch = None  # the rows of the other envs are dropped, too
            raise


def _unpacked_policy(plan: ReplicaPlan) -> Any:
    if plan.policy is None:
        return None
    policy = pickle.loads(plan.policy)
    return policy() if plan.policy_is_factory else policy


def _opened(path: str) -> FileIO:
    return open(path, "r+b", buffering=0)
