"""The processes of a `MultiCollector`: started, ordered to collect, waited for, replaced and closed."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from muster.errors import SpecMismatch
from muster.hosts.failures import Failure
from muster.hosts.questions import Again, EnvQuestion, Kept
from muster.pool.closing import close_abandoned
from muster.pool.launcher_client import standard_fds
from muster.pool.limits import CloseLimits
from muster.pool.logs import hand_over
from muster.pool.pool import Pool
from muster.pool.resources import MemoryPlan, figures, naming_limits, usable_cores
from muster.pool.verbs import Answered, Lost, Round
from muster.rollout.replicas.batch_memory import BatchMemory, Block, own, stop_flag
from muster.rollout.replicas.hooks import ReplicaFailed, ReplicaHooks
from muster.rollout.replicas.plans import Filled, PoolPlan, ReplicaFields
from muster.rollout.replicas.replica import COUNTS, AskFields, AskShapes, AskWeights, Begin, Collect, Collected, Raised
from muster.rollout.replicas.shared_weights import SharedWeights, WeightShapes
from muster.rollout.storage import Storage


class ReplicaPool:
    """Replicas of a policy with shares of envs, in processes of their own.

    With `max_restarts` an env that raises is replaced in its replica. A replica that dies, or whose policy raises, is
    replaced with all its envs: its part of the current batch is lost, and the batch's notes say why.

    sync: a batch is of all envs; once `threshold` (a number) of the collectors are done, the others stop. Otherwise a
    batch is of one collector's envs, and each collector begins its next batch before its last one is returned.
    weights_fd: the file of the weights that replicas follow; stays the owner's.  kept: see `ReplicaHooks`.
    take_logs: see `LogInbox`.
    """

    def __init__(
        self,
        plan: PoolPlan,
        weights_fd: int,
        kept: Kept,
        take_logs: Callable[[bytes, int], None] = hand_over,
    ) -> None:
        self._plans, self._nouns, self._limit = plan.plans, plan.nouns, plan.limit
        self._sync, self._threshold, self._close_limits = plan.sync, plan.threshold, plan.close_limits
        self._collectors = range(len(plan.plans))
        self._filling: dict[int, Block] = {}  # by collector, the block that it is filling
        # Frames returned so far, by collector. They are counted here, so that they outlive a process that dies.
        self._frames = [0] * len(plan.plans)
        self._waiting = [1.0] * len(plan.plans)  # shares of their time
        self._ready: deque[Filled] = deque()
        self._afresh: set[int] = set()  # collectors whose next batch begins new episodes
        self._hooks = ReplicaHooks(plan.plans, plan.nouns, plan.limits.restarts, kept)
        with naming_limits("the collectors could not start"), standard_fds():
            self._batch_memory = BatchMemory()
        self._pool = Pool(
            *("muster.rollout.replicas.replica:Replica", plan.plans, plan.processes, self._hooks, plan.limits),
            files={"batches": self._batch_memory.fd, "weights": weights_fd},
            nouns=plan.nouns,
            take_logs=take_logs,
        )
        self._questions, self._batches = self._pool.round(), self._pool.round()
        weakref.finalize(self, close_abandoned, self._pool.close)

    def start(self, seeds: Sequence[int | None], frames: int = 0) -> None:
        """Starts all, and begins their first episodes. The arguments: as of `reset`. Raises SpecMismatch."""
        count = len(self._collectors)
        for plan, seed in zip(self._plans, seeds, strict=True):
            plan.seed(seed)
        self._pool.start(MemoryPlan(count, count, "error", min(usable_cores(), count)) if count > 1 else None)
        for plan in self._plans:
            plan.big.clear()  # the pool has stored them
        if not self._hooks.restarts:
            self._pool.never_replaces()
        for k, plan in enumerate(self._plans):
            if any((questions := self._hooks.kept.of(plan.envs)).values()):
                self._pool.post(k, self._pool.sealed(Again(questions)))
        self.reset(seeds, frames)
        first, *others = self._ask_all(AskFields())
        for k, fields in enumerate(others, 1):
            if fields != first:
                raise SpecMismatch(f"collector {k} has {fields}, but collector 0 {first}; all must be alike")
        self.fields: ReplicaFields = first
        self._layouts = [plan.content.layout(first) for plan in self._plans]

    # ---- questions between batches

    def weights(self) -> dict[str, Tensor]:
        """The weights with which the first replica was built, by name."""
        built: dict[str, Tensor] = self._ask_all(AskWeights())[0]
        return built

    def shapes(self) -> list[WeightShapes]:
        """The shapes and dtypes of the weights that each replica takes."""
        return self._ask_all(AskShapes())

    def reset(self, seeds: Sequence[int | None], frames: int = 0) -> None:
        """Begins new episodes, and drops what is under way. seeds: one for each collector.

        frames: number that all collectors together have collected before.
        """
        self.give_up()
        self._afresh.clear()
        self._frames = [frames // len(self._collectors)] * len(self._collectors)
        self._hooks.seeds = [*seeds]
        for k, answer in self._ask({k: Begin(seed) for k, seed in enumerate(seeds)}, "in reset").items():
            if isinstance(answer, Raised):
                self._replace_or_raise(k, answer)
        self._hooks.reasons.clear()

    def ask(self, question: EnvQuestion) -> list[Any]:
        """The answers of all envs, as they left their processes; of a replica that was lost meanwhile None or an error.

        None where the envs of its successor are asked again.
        """

        def act() -> list[Any]:
            parts = {k: question.to(plan.envs) for k, plan in enumerate(self._plans)}
            answers = self._ask(parts, question.words)
            for k, answer in answers.items():
                if isinstance(answer, Raised):
                    raised.append(self._error(k, answer))
                    answers[k] = [Failure.of(raised[-1], env, k, None, None) for env in self._plans[k].envs]
                if isinstance(answer, Lost) and question.key is None:
                    raise answer.error
                if isinstance(answer, Lost):
                    answers[k] = [None] * len(self._plans[k].envs)
            return [one for answer in answers.values() for one in answer]

        raised: list[ReplicaFailed] = []
        answers = self._hooks.kept.while_asking(question, act)
        if raised:
            raise raised[0]
        return answers

    def stats(self) -> dict[str, Any]:
        counts = self._hooks.counts_so_far()
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

    @property
    def closed(self) -> bool:
        """Whether it is closed, by `close` or by an error."""
        return self._pool.closed

    def follow(self, weights: SharedWeights) -> None:
        """Says that `weights`, of the file that replicas have, are new. They look there themselves."""

    def close(self, limits: CloseLimits | None = None) -> None:
        """Closes envs, and ends the processes. limits: None for those of the plan."""
        self.stop()
        self._pool.close(self._close_limits if limits is None else limits)

    def _ask_all(self, question: object, words: str = "answering a call") -> list[Any]:
        """The answers of all collectors. Raises the first failure."""
        answers = self._ask(dict.fromkeys(self._collectors, question), words)
        for k, answer in answers.items():
            if isinstance(answer, Raised):
                raise self._error(k, answer)
            if isinstance(answer, Lost):
                raise answer.error
        return list(answers.values())

    def _ask(self, questions: Mapping[int, object], words: str) -> dict[int, Any]:
        """Asks collectors between batches; returns the answers by collector, among them what is `Raised` or `Lost`."""
        if self._batches.owing:  # those that are under way, and what they have failed with, come first
            self._batches.wait()
        try:
            self._replace_raised(self._batches)
        except ReplicaFailed:
            self.give_up()
            raise
        self._questions.drop()
        self._questions.ask(questions, words, self._limit, "about to answer a call")
        self._questions.wait()
        answers = sorted(self._questions.answers.items())
        self._questions.drop()
        return {k: one.content if isinstance(one, Answered) else one for k, one in answers}

    # ---- collecting

    def collect(self) -> Filled:
        if self._questions.owing:  # what a Ctrl-C has left
            self._questions.wait()
        return self._collect_all() if self._sync else self._collect_first()

    def give_up(self) -> None:
        """Stops all collectors. Their envs have gone on meanwhile, so that their next batches begin new episodes."""
        self._ready.clear()
        self.stop()
        for of in (self._batches, self._questions):
            of.wait()
            if self._hooks.restarts:
                self._replace_raised(of)
            of.drop()
        self._hooks.reasons.clear()
        self._filling.clear()
        self._afresh.update(self._collectors)

    def stop(self) -> None:
        """Ends the batches that are under way early. For any thread."""
        for block in [*self._filling.values()]:  # a copy: another thread may close
            stop_flag(block)[0] = 1

    def _collect_all(self) -> Filled:
        count = len(self._collectors)
        offset, block = self._batch_memory.take_block(self._layouts[0].block_bytes)
        storage = self._layouts[0].storage(block)
        versions, notes = np.zeros(storage.N, np.int64), list[str]()
        self._order(dict.fromkeys(self._collectors, (offset, block)))
        while self._filling:
            enough = max(1, min(len(self._filling), int(np.ceil(self._threshold)) - (count - len(self._filling))))
            for k, _, collected in self._receive(enough):
                part = slice(*self._plans[k].content.part)
                versions[part] = self._finish(k, storage, part, collected, notes)
            if count - len(self._filling) >= self._threshold:
                stop_flag(block)[0] = 1
        storage.finals.sort(key=lambda one: (one.time, one.env))
        own(block)
        return Filled(storage, 0, versions, notes)

    def _collect_first(self) -> Filled:
        if self._batches.answers:  # that came before a question: their collectors are idle
            self._take_ready(0)
        while not self._ready:
            self._order_idle()
            self._take_ready(1)
        # Each collector goes on at once, while the caller learns; at most one of its batches waits.
        self._order_idle()
        return self._ready.popleft()

    def _take_ready(self, min_collectors: int) -> None:
        for k, block, collected in self._receive(min_collectors):
            storage, notes = self._layouts[k].storage(block), list[str]()
            version = self._finish(k, storage, slice(0, storage.N), collected, notes)
            own(block)
            self._ready.append(Filled(storage, self._plans[k].envs.start, np.full(storage.N, version), notes))

    def _order_idle(self) -> None:
        if idle := [k for k in self._collectors if k not in self._filling]:
            self._order({k: self._batch_memory.take_block(self._layouts[k].block_bytes) for k in idle})

    def _order(self, blocks: Mapping[int, tuple[int, Block]]) -> None:
        """Has collectors fill blocks of batch memory. blocks: by collector the offset, and the memory there."""
        for _, block in blocks.values():
            stop_flag(block)[0] = 0
        orders = {k: Collect(offset, self._frames[k], k in self._afresh) for k, (offset, _) in blocks.items()}
        asked = {k: order for k, order in orders.items() if k not in self._hooks.reasons}
        self._filling |= {k: block for k, (_, block) in blocks.items()}  # first: what has begun can be stopped
        self._batches.ask(asked, "collecting", self._limit, "about to collect")
        self._afresh.difference_update(blocks)

    def _receive(self, min_collectors: int) -> list[tuple[int, Block, Collected | None]]:
        """Waits for collectors; returns those that are done: index, filled block, and what it says of that.

        None: it was lost, and another is in its place.
        """
        batches = self._batches
        # Those that were lost while they had nothing to do were not asked.
        lost = [k for k in self._filling if k not in batches.owing and k not in batches.answers]
        done: list[tuple[int, Block, Collected | None]] = [(k, self._filling.pop(k), None) for k in lost]
        for k in batches.wait(max(0, min_collectors - len(done))):
            one, block = batches.answers.pop(k), self._filling.pop(k)
            content = one.content if isinstance(one, Answered) else None
            if isinstance(content, Raised):
                self._replace_or_raise(k, content)
                content = None
            elif content is not None:
                self._hooks.counts[k], self._waiting[k] = content.counts, content.waiting
            done.append((k, block, content))
        return done

    def _finish(
        self, collector: int, storage: Storage, part: slice, collected: Collected | None, notes: list[str]
    ) -> int:
        """Adds to the storage what the collector's process could not write into it; returns the weights' version.

        notes: receives what the user has to know of it.
        """
        name = self._nouns.name(collector)
        if collected is None:
            storage.blank(part)
            reason = self._hooks.reasons.pop(collector)
            notes.append(f"{name} was replaced, and its part of this batch is masked. What had happened: {reason}")
            return 0
        if collected.lost:
            notes.append(
                f"{name} was built again, and what set_attr had set is lost: {collected.lost}. "
                "It goes on with what its constructor gives it: call set_attr again, or give the factory the value"
            )
        self._frames[collector] += int(storage.mask[:, part].sum())
        storage.add_ends(collected.finals, collected.losses, collected.infos, part.start)
        return collected.version

    # ---- what replicas have raised

    def _replace_raised(self, of: Round) -> None:
        """Has others take the places of replicas that have raised; their answers are Lost from then on."""
        for k, one in [*of.answers.items()]:
            if isinstance(one, Answered) and isinstance(one.content, Raised):
                self._replace_or_raise(k, one.content)
                of.answers[k] = Lost(k, self._error(k, one.content))

    def _replace_or_raise(self, collector: int, raised: Raised) -> None:
        """Has another process take the place of a replica that has raised, where that may help."""
        if raised.is_final or not self._hooks.restarts:
            raise self._error(collector, raised)
        reason = f"{raised.failed.type_name}: {raised.failed.message}"
        with self._pool.whole():
            successor = self._hooks.successor(collector, reason)
        self._pool.replace(collector, reason, successor, self._close_limits)

    def _error(self, collector: int, raised: Raised) -> ReplicaFailed:
        """What a replica has raised. Closes the pool where restarting its envs did not help."""
        if raised.is_final:
            self.close()
        return self._hooks.raised(collector, raised.failed, raised.is_final)
