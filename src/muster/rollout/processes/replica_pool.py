"""The processes of a `MultiCollector`: started, ordered to collect, waited for, replaced and closed."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium import Space
from torch import Tensor

from muster.backends.process import ENV_PRELOADS, with_hints
from muster.errors import ClosedError, SpecMismatch
from muster.hosts.recipe_plans import Recipes, plans_of
from muster.hosts.requests import Call, KeptAttributes, SetAttr, opened, packed
from muster.introspection import caller_stacklevel
from muster.pickling import named_arguments
from muster.pool.closing import close_abandoned
from muster.pool.launcher_client import standard_fds
from muster.pool.place import Limit, Plan
from muster.pool.pool import Pool
from muster.pool.resources import MemoryPlan, figures, naming_limits, usable_cores
from muster.pool.verbs import Answered, Lost
from muster.recipes.recipe import Recipe
from muster.rollout.beside_weights import BesideWeights
from muster.rollout.collector_set import CollectorOptions, Filled, collector_nouns
from muster.rollout.processes.batch_memory import BatchMemory, Block, own, stop_flag
from muster.rollout.processes.fates import Fates
from muster.rollout.processes.policy_travel import pack_factory, pack_policy
from muster.rollout.processes.replica import (
    COUNTS,
    AskFields,
    AskShapes,
    AskSpaces,
    AskWeights,
    Begin,
    Collect,
    Collected,
    Raised,
    ReplicaPlan,
)
from muster.rollout.processes.shared_weights import SharedWeights, WeightShapes, shapes_of
from muster.rollout.storage import Final, Loss, Storage
from muster.rollout.weights import Copies, module_of, named_weights, weights_to_send
from muster.transport.big_arrays import memfd
from muster.transport.slab import split_evenly

# The first word of the spawn keys for replicas' seeds; Collector uses smaller ones.
_REPLICAS = 3
_PRELOADS = (*ENV_PRELOADS, "muster.rollout.processes.replica")


class ReplicaPool:
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
        self._firsts = split_evenly(len(recipes), options.num_workers)
        self._collectors = range(options.num_workers)
        self._policy, self._call_words = policy, recipes[0].call
        self._sync, self._seed = sync, seed
        self._threshold = threshold * options.num_workers
        self._updating = threading.Lock()
        self._filling: dict[int, Block] = {}  # by collector, the block that it is filling
        # Frames returned so far, by collector. They are counted here, so that they outlive a process that dies.
        self._frames = [0] * options.num_workers
        self._waiting = [1.0] * options.num_workers  # shares of their time
        self._ready: deque[Filled] = deque()
        self._afresh: set[int] = set()  # collectors whose next batch begins new episodes
        self._is_cut_short = False  # whether an error or Ctrl-C in a question has left batches under way
        nouns = collector_nouns([range(*ends) for ends in itertools.pairwise(self._firsts)])
        self._nouns = with_hints(nouns, self._call_words, len(recipes), options.num_workers)
        self._processes, self._close_limits = options.processes(_PRELOADS), options.close_limits(nouns)
        self._plans = self._planned(recipes, policy_factory, collector_options, options)
        self._packed = pack = partial(packed, call=self._call_words, forked=self._processes.context == "fork")
        kept = KeptAttributes(len(recipes), lambda value, name: pack(value, {name: value}))
        self._fates = Fates(self._plans, self._nouns, options.restarts, kept)
        with naming_limits("the collectors could not start"), standard_fds():
            self._batch_memory = BatchMemory()
            self._weights_fd = memfd("weights")
        weakref.finalize(self, os.close, self._weights_fd)
        files = {"batches": self._batch_memory.fd, "weights": self._weights_fd}
        self._pool = Pool(
            *("muster.rollout.processes.replica:Replica", self._plans, self._processes, self._fates),
            files=files,
            nouns=self._nouns,
        )
        weakref.finalize(self, close_abandoned, self._pool.close)
        step_timeout = options.step_timeout
        self._limit = None if step_timeout is None else Limit(step_timeout, f"{nouns.step_timeout}={step_timeout}")
        try:
            with naming_limits("the collectors could not start"):
                self._begin()
        except BaseException:
            self.close()
            raise

    def _planned(
        self,
        recipes: Sequence[Recipe],
        policy_factory: Callable[[], Any] | None,
        collector_options: Mapping[str, Any],
        options: CollectorOptions,
    ) -> list[Plan]:
        """One plan for each collector. Raises CannotTravel, and what `check_forkable` raises."""
        if policy_factory is not None:
            policy: bytes | None = pack_factory(policy_factory, self._processes.context)
        else:
            policy = None if self._policy is None else pack_policy(self._policy)

        def content(own: Recipes, envs: range) -> ReplicaPlan:
            batch_envs = len(recipes) if self._sync else len(envs)
            T = -(-collector_options["frames_per_batch"] // batch_envs)
            return ReplicaPlan(
                own,
                envs.start,
                policy,
                policy_is_factory=policy_factory is not None,
                part=(envs.start, envs.stop) if self._sync else (0, len(envs)),
                batch_envs=batch_envs,
                max_restarts=options.restarts,
                options={
                    **collector_options,
                    "frames_per_batch": T * len(envs),
                    "init_random_frames": -(-collector_options["init_random_frames"] // len(self._collectors)),
                },
            )

        return plans_of(recipes, self._firsts, self._processes, content)

    # ---- starting

    def _begin(self) -> None:
        count = len(self._collectors)
        judge = MemoryPlan(count, count, "error", min(usable_cores(), count)).accepts
        with self._translating():
            self._pool.start(judge if count > 1 else None)
        if not self._fates.restarts:
            self._pool.never_replaces()
        self.reset(0)
        first, *others = self._ask_all(AskFields())
        for k, fields in enumerate(others, 1):
            if fields != first:
                raise SpecMismatch(f"collector {k} has {fields}, but collector 0 {first}; all must be alike")
        self._layouts = [plan.content.layout(first) for plan in self._plans]
        weights = named_weights(self._policy)
        if not weights:
            # Factories may draw different weights in each process; all collectors take those of the first.
            weights = self._ask_all(AskWeights())[0]
        expected = shapes_of(weights)
        for k, built in enumerate(self._ask_all(AskShapes())):
            _require_same(k, expected, built)
        self._weights = SharedWeights(weights, self._weights_fd)
        self._weights.write(weights)
        self._beside = BesideWeights(self._policy)

    # ---- weights

    @property
    def version(self) -> int:
        return self._weights.version

    def update_weights(self, weights: Any) -> None:
        with self._updating:
            self._publish(*weights_to_send(self._policy, weights))

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

    def _publish(self, weights: Mapping[str, Tensor], copies: Copies = ()) -> None:
        if missing := sorted(self._weights.names - weights.keys()):
            raise SpecMismatch(f"the weights are not the replicas': missing {missing[:5]}")
        self._weights.write(weights, self._beside.changes(), copies)

    # ---- questions between batches

    def reset(self, round_number: int, frames: int = 0) -> None:
        self.give_up()
        self._afresh.clear()
        count = len(self._collectors)
        seeds: list[int | None] = [None] * count
        if self._seed is not None:
            sequence = np.random.SeedSequence(self._seed, spawn_key=(_REPLICAS, round_number))
            seeds = [int(word) for word in sequence.generate_state(count)]
        self._frames = [frames // count] * count
        self._fates.seeds = seeds
        with self._translating():
            for k, answer in self._ask({k: Begin(seed) for k, seed in enumerate(seeds)}, "in reset").items():
                if isinstance(answer, Raised):
                    self._replace_or_raise(k, answer)
        self._fates.reasons.clear()

    def call(self, name: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        parts = {"the function": name} | named_arguments(args, kwargs)
        words = f"answering call({name!r})" if isinstance(name, str) else "answering call()"
        answers = self._ask_all(Call(self._packed((name, args, kwargs), parts)), words)
        return tuple(itertools.chain.from_iterable(map(opened, answers)))

    def set_attr(self, name: str, values: Mapping[int, Any]) -> None:
        requests = {}
        for k, plan in enumerate(self._plans):
            parts = {f"values[{env}]": values[env] for env in plan.envs}
            requests[k] = SetAttr(self._packed((name, {env: values[env] for env in plan.envs}), parts))

        def act() -> dict[int, Raised]:
            answers = self._ask(requests, f"answering set_attr({name!r})").items()
            raised = {k: answer for k, answer in answers if isinstance(answer, Raised)}
            return {env: one for k, one in raised.items() for env in one.refused or self._plans[k].envs}

        refused = self._fates.attributes.set(name, values, act)
        self._raise_first({bisect.bisect(self._firsts, env) - 1: one for env, one in refused.items()})

    def spaces(self) -> tuple[Space[Any], Space[Any]]:
        found: tuple[Space[Any], Space[Any]] = self._ask_all(AskSpaces())[0]
        return found

    def stats(self) -> dict[str, Any]:
        counts = self._fates.counts_so_far()
        env_steps, _, restarts = counts.sum(axis=0).tolist()
        processes = self._pool.processes()
        workers = [
            {
                "collecting": 1.0 - waiting,
                "waiting": waiting,
                **figures(pid, start),
                **dict(zip(COUNTS, of_envs, strict=True)),
            }
            for (pid, start), waiting, of_envs in zip(processes, self._waiting, counts.tolist(), strict=True)
        ]
        running = sum(pid is not None for pid, _ in processes)
        return {"env_steps": env_steps, "restarts": restarts, "processes": running, "workers": workers}

    def close(self) -> None:
        self._stop_filling()
        self._pool.close(self._close_limits)

    def _ask_all(self, question: object, words: str = "answering a call") -> list[Any]:
        """The answers of all collectors. Raises the first failure."""
        answers = self._ask(dict.fromkeys(self._collectors, question), words)
        self._raise_first(answers)
        return list(answers.values())

    def _raise_first(self, answers: Mapping[int, Any]) -> None:
        """Raises the first failure among answers, if any."""
        for k, answer in answers.items():
            if isinstance(answer, Raised):
                raise self._error(k, answer)
            if isinstance(answer, Lost):
                raise answer.error

    def _ask(self, questions: Mapping[int, object], words: str) -> dict[int, Any]:
        """Asks collectors between batches; returns the answers by collector, among them what is `Raised` or `Lost`."""
        if self._is_cut_short:
            self.give_up()
        if self._filling:
            self._is_cut_short = True
            self._take_ready(len(self._filling))
            self._is_cut_short = False
        answers: dict[int, Any] = {}
        with self._translating():
            self._forget_interrupted(self._collectors)
            self._send(questions, words)
            while self._fates.asked:
                answers |= {one.place: one.content if isinstance(one, Answered) else one for one in self._take(None)}
        return dict(sorted(answers.items()))

    # ---- collecting

    def collect(self) -> Filled:
        if self._is_cut_short:
            self.give_up()
        return self._collect_all() if self._sync else self._collect_first()

    def give_up(self) -> None:
        """Stops all collectors. Their envs have gone on meanwhile, so that their next batches begin new episodes."""
        self._ready.clear()
        self._stop_filling()
        with self._translating():
            while self._fates.asked:
                for one in self._take(None):
                    if isinstance(one, Answered) and isinstance(one.content, Raised) and self._fates.restarts:
                        self._replace_or_raise(one.place, one.content)
        self._fates.reasons.clear()
        self._filling.clear()
        self._afresh.update(self._collectors)
        self._is_cut_short = False

    def _stop_filling(self) -> None:
        for block in [*self._filling.values()]:  # a copy: another thread may close
            stop_flag(block)[0] = 1

    def _collect_all(self) -> Filled:
        count = len(self._collectors)
        offset, block = self._batch_memory.take_block(self._layouts[0].block_bytes)
        storage = self._layouts[0].storage(block)
        versions = np.zeros(storage.N, np.int64)
        self._order(dict.fromkeys(self._collectors, (offset, block)))
        while self._filling:
            enough = max(1, min(len(self._filling), int(np.ceil(self._threshold)) - (count - len(self._filling))))
            for k, _, collected in self._receive(enough):
                part = slice(*self._firsts[k : k + 2])
                versions[part] = self._finish(k, storage, part, collected)
            if count - len(self._filling) >= self._threshold:
                stop_flag(block)[0] = 1
        own(block)
        return Filled(storage, 0, versions)

    def _collect_first(self) -> Filled:
        while not self._ready:
            self._order_idle()
            self._take_ready(1)
        # Each collector goes on at once, while the caller learns; at most one of its batches waits.
        self._order_idle()
        return self._ready.popleft()

    def _take_ready(self, min_collectors: int) -> None:
        for k, block, collected in self._receive(min_collectors):
            storage = self._layouts[k].storage(block)
            version = self._finish(k, storage, slice(0, storage.N), collected)
            own(block)
            self._ready.append(Filled(storage, self._firsts[k], np.full(storage.N, version)))

    def _order_idle(self) -> None:
        if idle := [k for k in self._collectors if k not in self._filling]:
            self._order({k: self._batch_memory.take_block(self._layouts[k].block_bytes) for k in idle})

    def _order(self, blocks: Mapping[int, tuple[int, Block]]) -> None:
        """Has collectors fill blocks of batch memory. blocks: by collector the offset, and the memory there."""
        for _, block in blocks.values():
            stop_flag(block)[0] = 0
        with self._translating():
            orders = {k: Collect(offset, self._frames[k], k in self._afresh) for k, (offset, _) in blocks.items()}
            asked = {k: order for k, order in orders.items() if k not in self._fates.reasons}
            self._forget_interrupted(blocks)
            self._filling |= {k: block for k, (_, block) in blocks.items()}  # first: what has begun can be stopped
            self._send(asked, "collecting", "about to collect")
        self._afresh.difference_update(blocks)

    def _receive(self, min_collectors: int) -> list[tuple[int, Block, Collected | None]]:
        """Waits for collectors; returns those that are done: index, filled block, and what it says of that.

        None: it was lost, and another is in its place.
        """
        # Those that were lost while they had nothing to do were not asked.
        lost = [k for k in self._filling if k not in self._fates.asked]
        done: list[tuple[int, Block, Collected | None]] = [(k, self._filling.pop(k), None) for k in lost]
        with self._translating():
            for one in self._take(max(0, min_collectors - len(done))):
                block = self._filling.pop(one.place)
                content = one.content if isinstance(one, Answered) else None
                if isinstance(content, Raised):
                    self._replace_or_raise(one.place, content)
                    content = None
                elif content is not None:
                    self._fates.counts[one.place], self._waiting[one.place] = content.counts, content.waiting
                done.append((one.place, block, content))
        return done

    def _finish(self, collector: int, storage: Storage, part: slice, collected: Collected | None) -> int:
        """Adds to the storage what the collector's process could not write into it; returns the weights' version."""
        if collected is None:
            storage.blank(part)
            warnings.warn(
                f"{self._nouns.name(collector)} was replaced, and its part of this batch is masked. What had happened: "
                f"{self._fates.reasons.pop(collector)}",
                RuntimeWarning,
                stacklevel=caller_stacklevel(),
            )
            return 0
        if collected.lost:
            warnings.warn(
                f"{self._nouns.name(collector)} was built again, and what set_attr had set is lost: {collected.lost}. "
                "It goes on with what its constructor gives it: call set_attr again, or give the factory the value",
                RuntimeWarning,
                stacklevel=caller_stacklevel(),
            )
        self._frames[collector] += int(storage.mask[:, part].sum())
        storage.finals += [Final(one.time, part.start + one.env, one.leaves) for one in collected.finals]
        storage.losses += [Loss(one.time, part.start + one.env, one.reason) for one in collected.losses]
        return collected.version

    # ---- the pool

    def _send(self, questions: Mapping[int, object], words: str, at_first: str = "about to answer a call") -> None:
        """Asks replicas. words, at_first: what they do then, and what they do until they can have read it."""
        for k, sealed in self._pool.sealed_by_place(questions):
            self._fates.asked[k] = at_first, None
            self._pool.ask(k, sealed, self._limit)
            self._fates.asked[k] = words, time.monotonic()

    def _forget_interrupted(self, collectors: Collection[int]) -> None:
        """Drops what replicas that are idle still owe: answers to a question that was interrupted."""
        self._pool.forget(collectors)
        for k in collectors:
            self._fates.asked.pop(k, None)

    def _take(self, at_least: int | None) -> list[Answered | Lost]:
        arrived = self._pool.take(at_least=at_least)
        for one in arrived:
            self._fates.asked.pop(one.place, None)
        if at_least is None:  # nobody owes an answer, even where a Ctrl-C came just after one had arrived
            self._fates.asked.clear()
        self._pool.deliver_logs()
        return arrived

    def _replace_or_raise(self, collector: int, raised: Raised) -> None:
        """Has another process take the place of a replica that has raised, where that may help."""
        if raised.is_final or not self._fates.restarts:
            raise self._error(collector, raised)
        reason = f"{raised.failed.type_name}: {raised.failed.message}"
        with self._pool.whole():
            successor = self._fates.successor(collector, reason)
        self._pool.replace(collector, reason, successor, self._close_limits)

    def _error(self, collector: int, raised: Raised) -> BaseException:
        """The error that a replica has raised. Closes the pool where restarting its envs did not help."""
        if not raised.is_final:
            return self._fates.raised(collector, raised.failed)
        self.close()
        return raised.failed.original() or self._fates.raised(collector, raised.failed)

    @contextlib.contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except ClosedError:
            raise ClosedError("the collector processes have ended; make another MultiCollector") from None


def _require_same(collector: int, expected: WeightShapes, built: WeightShapes) -> None:
    if built == expected:
        return
    differing = sorted(name for name in expected.keys() | built.keys() if expected.get(name) != built.get(name))[:5]
    raise SpecMismatch(
        f"the policy of collector {collector} has other weights than those it is to follow: {differing} are "
        f"{[built.get(name) for name in differing]}, expected {[expected.get(name) for name in differing]}. "
        "policy_factory, and what rebuild_with was given, must build what they stand for"
    )
