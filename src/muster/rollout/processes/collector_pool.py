"""The processes of a `MultiCollector`: started, ordered to collect, waited for, restarted and closed."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space
from torch import Tensor

from muster.errors import (
    ClosedError,
    CollectorError,
    EnvError,
    MusterError,
    NotPendingError,
    SpecMismatch,
)
from muster.introspection import caller_stacklevel
from muster.pickling import called_as
from muster.pool.launcher_client import standard_fds
from muster.recipes.recipe import Recipe, make_recipes
from muster.rollout.beside_weights import BesideWeights
from muster.rollout.collector_set import CollectorOptions, Filled, collector_nouns
from muster.rollout.processes.batch_memory import BatchMemory, Block, stop_flag
from muster.rollout.processes.replica import COUNTS, Replica
from muster.rollout.processes.replica_plans import ReplicaPlan, plans_for
from muster.rollout.processes.shared_weights import SharedWeights, WeightShapes, shapes_of
from muster.rollout.storage import Final, Loss, Storage
from muster.rollout.weights import module_of, named_weights, weights_to_send
from muster.transport.big_arrays import memfd
from muster.transport.slab import split_evenly
from muster.vector.assemble import process_vec
from muster.vector.results import PROCESS_KEYS, Batch

# The first word of the spawn keys for replicas' seeds; Collector uses smaller ones.
_REPLICAS = 3


class CollectorPool:
    """A `CollectorSet` of replicas of a policy with shares of envs, in processes of their own.

    With ``on_failure="restart"`` an env that raises is replaced in its replica. A replica that dies, or whose policy
    raises, is replaced with all its envs: its part of the current batch is lost, and a warning says why.

    sync: a batch is of all envs; once `threshold` (a share) of the collectors is done, the others stop. Otherwise a
    batch is of one collector's envs, and each collector begins its next batch before its last one is returned.
    """

    def __init__(
        self,
        recipes: Sequence[Recipe],
        policy: Any,
        policy_factory: Callable[[], Any] | None,
        *,
        sync: bool,
        threshold: float,
        seed: int | None,
        collector_options: Mapping[str, Any],
        options: CollectorOptions,
    ) -> None:
        num_collectors = options.num_workers
        self._firsts = split_evenly(len(recipes), num_collectors)
        self._policy = policy
        self._updating = threading.Lock()
        self._sync = sync
        self._seed = seed
        self._threshold = threshold * num_collectors
        with standard_fds():
            self._batch_memory = BatchMemory()
            self._weights_fd = memfd("weights")
        self._finalizer = weakref.finalize(self, os.close, self._weights_fd)
        self._filling: dict[int, Block] = {}  # by collector, the block that it is filling
        # Frames returned so far, by collector. They are counted here, so that they outlive a process that dies.
        self._frames = [0] * num_collectors
        # Counts of the collectors' envs, int64 [collectors, COUNTS]: of the current processes, and of earlier ones.
        self._counts, self._counts_before = np.zeros((2, num_collectors, len(COUNTS)), np.int64)
        self._ready: deque[Filled] = deque()
        self._afresh: set[int] = set()  # collectors whose next batch begins new episodes
        plans = plans_for(
            recipes,
            self._firsts,
            policy,
            policy_factory,
            sync=sync,
            batch_memory_fd=self._batch_memory.fd,
            weights_fd=self._weights_fd,
            collector_options=collector_options,
            options=options,
        )
        self._nouns = collector_nouns([range(*ends) for ends in itertools.pairwise(self._firsts)], is_env=True)
        with called_as(recipes[0].call):
            replicas = make_recipes(Replica, num_collectors, [{"plan": plan} for plan in plans])
        with self._translating():
            self._processes = process_vec(replicas, options.for_backend(self._nouns), options.restarts)
        try:
            self._begin(plans)
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        return self._weights.version

    def update_weights(self, weights: Any) -> None:
        with self._updating:
            self._publish(weights_to_send(self._policy, weights))

    def state_dict(self) -> dict[str, Any]:
        """State of the policy, under ``policy``: the module's, or copies of the weights published last, if any."""
        module = module_of(self._policy)
        weights = self._weights.read() if module is None else module.state_dict()
        return {} if module is None and not weights else {"policy": weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "policy" not in state:
            return
        weights = state["policy"]
        with self._updating:
            if (module := module_of(self._policy)) is not None:
                module.load_state_dict(weights)
                weights = named_weights(module)
            if weights:
                self._publish(weights)

    def _publish(self, weights: Mapping[str, Tensor]) -> None:
        if missing := sorted(self._weights.names - weights.keys()):
            raise SpecMismatch(f"the weights are not the replicas': missing {missing[:5]}")
        self._weights.write(weights, self._beside.changes())

    def reset(self, round_number: int, frames: int = 0) -> None:
        self.give_up()
        self._ready.clear()
        self._afresh.clear()
        seeds: list[int | None] = [None] * self._processes.num_envs
        if self._seed is not None:
            sequence = np.random.SeedSequence(self._seed, spawn_key=(_REPLICAS, round_number))
            seeds = [int(word) for word in sequence.generate_state(len(seeds))]
        self._frames = [frames // len(seeds)] * len(seeds)
        _, infos = self._processes.reset(seed=seeds)
        for k in np.flatnonzero(infos.get("_restarted", ())):
            self._count_loss(int(k))

    def collect(self) -> Filled:
        return self._collect_all() if self._sync else self._collect_first()

    def give_up(self) -> None:
        """Stops all collectors. Their envs have gone on meanwhile, so that their next batches begin new episodes."""
        for block in self._filling.values():
            stop_flag(block)[0] = 1
        with self._translating():
            while True:
                try:
                    self._take_in(self._processes.recv())
                except NotPendingError:
                    break
                except EnvError:
                    continue
        self._filling.clear()
        self._afresh.update(range(len(self._frames)))

    def call(self, name: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(itertools.chain.from_iterable(self._call("call_envs", name, args, dict(kwargs))))

    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        of_collectors = [list(values[first:last]) for first, last in itertools.pairwise(self._firsts)]
        self._end_batches()
        with self._translating():  # the replicas' own attribute, so that a replica in the place of another gets it, too
            self._processes.set_attr(name, of_collectors)

    def spaces(self) -> tuple[Space[Any], Space[Any]]:
        found: tuple[Space[Any], Space[Any]] = self._call("spaces")[0]
        return found

    def stats(self) -> dict[str, Any]:
        counts = self._counts_before + self._counts
        env_steps, _, restarts = counts.sum(axis=0).tolist()
        of_processes = self._processes.stats()
        workers = [
            {
                "collecting": 1.0 - process["waiting"],
                "waiting": process["waiting"],
                **{name: process[name] for name in PROCESS_KEYS},
                **dict(zip(COUNTS, of_envs, strict=True)),
            }
            for process, of_envs in zip(of_processes["workers"], counts.tolist(), strict=True)
        ]
        processes = of_processes["processes"]
        return {"env_steps": env_steps, "restarts": restarts, "processes": processes, "workers": workers}

    def close(self) -> None:
        for block in self._filling.values():
            stop_flag(block)[0] = 1
        self._processes.close()

    # ---- starting

    def _begin(self, plans: Sequence[ReplicaPlan]) -> None:
        self.reset(0)
        first, *others = self._call("facts")
        for k, facts in enumerate(others, 1):
            if facts != first:
                raise SpecMismatch(f"collector {k} has {facts}, but collector 0 {first}; all must be alike")
        self._layouts = [plan.layout(first) for plan in plans]
        weights = named_weights(self._policy)
        if not weights:
            # Factories may draw different weights in each process; all collectors take those of the first.
            weights = self._call("weights")[0]
        expected = shapes_of(weights)
        for k, built in enumerate(self._call("weight_shapes")):
            _require_same(k, expected, built)
        self._weights = SharedWeights(weights, self._weights_fd)
        self._weights.write(weights)
        self._beside = BesideWeights(self._policy)

    def _call(self, name: str, *args: Any) -> tuple[Any, ...]:
        """Calls a method of all replicas."""
        self._end_batches()
        with self._translating():
            return self._processes.call(name, *args)

    def _end_batches(self) -> None:
        if self._filling:
            self._take_ready(len(self._filling))

    # ---- collecting

    def _collect_all(self) -> Filled:
        count = len(self._frames)
        offset, block = self._batch_memory.take_block(self._layouts[0].block_bytes)
        storage = self._layouts[0].storage(block)
        versions = np.zeros(storage.N, np.int64)
        self._send(dict.fromkeys(range(count), (offset, block)))
        while self._filling:
            enough = max(1, min(len(self._filling), int(np.ceil(self._threshold)) - (count - len(self._filling))))
            for k, _, version, infos in self._receive(enough):
                part = slice(*self._firsts[k : k + 2])
                versions[part] = version
                self._finish(k, storage, part, infos)
            if count - len(self._filling) >= self._threshold:
                stop_flag(block)[0] = 1
        return Filled(storage, 0, versions)

    def _collect_first(self) -> Filled:
        while not self._ready:
            self._send_idle()
            self._take_ready(1)
        # Each collector goes on at once, while the caller learns; at most one of its batches waits.
        self._send_idle()
        return self._ready.popleft()

    def _take_ready(self, min_collectors: int) -> None:
        for k, block, version, infos in self._receive(min_collectors):
            storage = self._layouts[k].storage(block)
            self._finish(k, storage, slice(0, storage.N), infos)
            self._ready.append(Filled(storage, self._firsts[k], np.full(storage.N, version)))

    def _send_idle(self) -> None:
        if idle := [k for k in range(len(self._frames)) if k not in self._filling]:
            self._send({k: self._batch_memory.take_block(self._layouts[k].block_bytes) for k in idle})

    def _send(self, blocks: Mapping[int, tuple[int, Block]]) -> None:
        """Has collectors fill blocks of batch memory. blocks: by collector the offset, and the memory there."""
        for _, block in blocks.values():
            stop_flag(block)[0] = 0
        orders = [(offset, self._frames[k], k in self._afresh) for k, (offset, _) in blocks.items()]
        with self._translating():
            self._processes.send(np.array(orders, np.int64), list(blocks))
        self._afresh.difference_update(blocks)
        self._filling |= {k: block for k, (_, block) in blocks.items()}

    def _receive(self, min_collectors: int) -> list[tuple[int, Block, int, dict[str, Any]]]:
        """Waits for collectors; returns those that are done: index, filled block, version of the weights, infos."""
        with self._translating():
            batch = self._processes.recv(min_envs=min_collectors)
        self._take_in(batch)
        columns: dict[str, Any] = {
            name: batch.infos[name] for name in ("finals", "losses", "restarted") if name in batch.infos
        }
        done: list[tuple[int, Block, int, dict[str, Any]]] = []
        for row, k in enumerate(batch.env_ids.tolist()):
            infos = {name: column[row] for name, column in columns.items() if column[row] is not None}
            done.append((k, self._filling.pop(k), int(batch.obs[row, 0]), infos))
        return done

    def _take_in(self, batch: Batch) -> None:
        """Counts what the envs have done. Raises WorkerError where restarting them did not help."""
        for row, k in enumerate(batch.env_ids.tolist()):
            if "restarted" in batch.infos and batch.infos["_restarted"][row]:
                self._count_loss(k)
            self._counts[k] = batch.obs[row, 1:]
            if "exhausted" in batch.infos and batch.infos["_exhausted"][row]:
                self.close()
                raise batch.infos["exhausted"][row]

    def _count_loss(self, collector: int) -> None:
        """Counts a collector's process, or its replica there, as gone: the next counts start from zero."""
        self._counts_before[collector] += self._counts[collector]
        self._counts_before[collector, COUNTS.index("restarts")] += len(self._nouns.envs[collector])
        self._counts[collector] = 0

    def _finish(self, collector: int, storage: Storage, part: slice, infos: Mapping[str, Any]) -> None:
        """Adds to the storage what the collector's process could not write into it."""
        if "restarted" in infos:
            storage.blank(part)
            warnings.warn(
                f"{self._nouns.name(collector)} was replaced, and its part of this batch is masked. What had happened: "
                f"{infos['restarted']}",
                RuntimeWarning,
                stacklevel=caller_stacklevel(),
            )
            return
        self._frames[collector] += int(storage.mask[:, part].sum())
        for time, env, leaves in infos.get("finals", ()):
            storage.finals.append(Final(time, part.start + env, leaves))
        for time, env, reason in infos.get("losses", ()):
            storage.losses.append(Loss(time, part.start + env, reason))

    @contextlib.contextmanager
    def _translating(self) -> Iterator[None]:
        """Raises errors of the engine, to which a collector is an env, as errors of that collector."""
        try:
            yield
        except ClosedError:
            raise ClosedError("the collector processes have ended; make another MultiCollector") from None
        except EnvError as error:
            if error.env_index is None:
                raise
            failure = error.__cause__
            if not isinstance(failure, MusterError):
                failure = CollectorError(self._nouns.name(error.env_index), error.message)
            if error.worker_traceback:
                failure.add_note(f"In the collector's process:\n{error.worker_traceback.rstrip()}")
            raise failure from None


def _require_same(collector: int, expected: WeightShapes, built: WeightShapes) -> None:
    if built == expected:
        return
    differing = sorted(name for name in expected.keys() | built.keys() if expected.get(name) != built.get(name))[:5]
    raise SpecMismatch(
        f"the policy of collector {collector} has other weights than those it is to follow: {differing} are "
        f"{[built.get(name) for name in differing]}, expected {[expected.get(name) for name in differing]}. "
        "policy_factory, and what rebuild_with was given, must build what they stand for"
    )
