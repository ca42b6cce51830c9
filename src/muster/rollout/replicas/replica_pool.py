"""The replicas of a `MultiCollector`, here and on nodes: started, asked, ordered to collect, replaced and closed."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any

import numpy as np
from torch import Tensor

from muster.backends.recycling import held_at_start, worn_out
from muster.errors import SpecMismatch, UnknownMessage
from muster.hosts.failures import Failure
from muster.hosts.questions import Again, EnvQuestion, Kept
from muster.pool.closing import close_abandoned
from muster.pool.launcher_client import standard_fds
from muster.pool.limits import CloseLimits
from muster.pool.logs import hand_over
from muster.pool.pool import Pool
from muster.pool.resources import naming_limits
from muster.pool.verbs import Answered, BasePool, Lost, Round
from muster.rollout.replicas.batch_memory import BatchMemory
from muster.rollout.replicas.carriers import Blocks, Carrier
from muster.rollout.replicas.hooks import PlaceHooks, ReplicaHooks
from muster.rollout.replicas.plans import Filled, PoolPlan, ReplicaFields
from muster.rollout.replicas.replica import AskFields, AskShapes, AskWeights, Raised
from muster.rollout.replicas.shared_weights import SharedWeights, WeightShapes
from muster.transport.channel import watched_s

_SLICE_S = 0.5  # after which places that are back get orders, too


class ReplicaPool:
    """Replicas of a policy with shares of envs, in the places of a pool: each place has one collector, or several.

    With `max_restarts` an env that raises is replaced in its replica. A place that is lost is replaced with all its
    envs: its part of the current batch is masked, and the batch's notes say why.

    With `plan.sync` a batch is of all envs; once `plan.threshold` (a number) of the collectors are done, the others
    stop. Otherwise a batch is of one collector's envs, and each place begins its next batch before its last one is
    returned.
    """

    def __init__(self, plan: PoolPlan, pool: BasePool[Any], carrier: Carrier, hooks: PlaceHooks) -> None:
        self._plan, self._pool, self._carrier, self._hooks = plan, pool, carrier, hooks
        self._places, self._most = range(len(hooks.collectors)), max(map(len, hooks.collectors))
        self._ready: deque[Filled] = deque()
        self._afresh: set[int] = set()  # places that begin new episodes with their next batch
        self._questions, self._batches = pool.round(), pool.round()
        weakref.finalize(self, close_abandoned, pool.close)

    def launch(self, seeds: Sequence[int | None]) -> None:
        """Starts all places. seeds: one for each collector. `reset` and `lay_out` come next."""
        self._pool.start(self._hooks.launches(seeds))
        for plan in self._plan.plans:
            plan.big.clear()  # the pool has stored them
        if not self._hooks.restarts:
            self._pool.never_replaces()

    def again(self, questions: Mapping[int, Sequence[EnvQuestion]]) -> None:
        """Has new envs answer what those before them were asked. questions: by env."""
        self._hooks.kept.keep(questions)
        for k in self._places:
            self._pool.post(k, self._pool.sealed(Again({env: questions[env] for env in self._envs(k)})))

    def lay_out(self) -> ReplicaFields:
        """Learns the fields of batches, once episodes have begun. Raises SpecMismatch."""
        first: ReplicaFields
        first, *others = self._ask_all(AskFields())
        for k, fields in enumerate(others, 1):
            if fields != first:
                noun = self._hooks.nouns.worker
                raise SpecMismatch(f"{noun} {k} has {fields}, but {noun} 0 {first}; all must be alike")
        self._carrier.lay_out(first)
        self._hooks.started(first)
        return first

    # ---- questions between batches

    def weights(self) -> dict[str, Tensor]:
        """The weights with which the first replica was built, by name."""
        built: dict[str, Tensor] = self._ask_all(AskWeights())[0]
        return built

    def shapes(self) -> list[WeightShapes]:
        """The shapes and dtypes of the weights that each replica takes."""
        return [shapes for of_place in self._ask_all(AskShapes()) for shapes in of_place]

    def reset(self, seeds: Sequence[int | None], frames: int = 0) -> None:
        """Begins new episodes, and drops what is under way. seeds: one for each collector.

        frames: number that all collectors together have collected before.
        """
        self.give_up()
        self._afresh.clear()
        self._hooks.begins(seeds, frames)
        begin = {k: self._hooks.begin(k) for k in self._places}
        for k, answer in self._ask(begin, "in reset", is_for_all=True).items():
            if isinstance(answer, Raised):
                self._replace_or_raise(k, answer)
        self._forget_reasons()

    def ask(self, question: EnvQuestion) -> list[Any]:
        """The answers of all envs, as they left their processes; of a place that was lost meanwhile None or an error.

        None where the envs of its successor are asked again.
        """

        def act() -> list[Any]:
            if question.needs_all:
                self._require(self._places)
            parts = {k: question.to(self._envs(k)) for k in self._places}
            answers = self._ask(parts, question.words, is_for_all=question.key is not None)
            lost = [k for k in self._places if k not in answers or isinstance(answers[k], Lost)]
            must_answer = question.needs_all or len(lost) == len(self._places)
            if must_answer:
                self._require(lost)
            for k in lost:
                if must_answer and question.key is None and k in answers:
                    raise answers[k].error
                answers[k] = [None] * len(self._envs(k))
            for k, answer in answers.items():
                if isinstance(answer, Raised):
                    raised.append(self._error(k, answer))
                    answers[k] = [Failure.of(raised[-1], env, k, None, None) for env in self._envs(k)]
                elif not isinstance(answer, list) or len(answer) != len(self._envs(k)):
                    raise self._no_answer(k, answer)
            return [one for k in self._places for one in answers[k]]

        raised: list[Exception] = []
        answers = self._hooks.kept.while_asking(question, act)
        if raised:
            raise raised[0]
        return answers

    def stats(self) -> dict[str, Any]:
        """Counts and shares of time, see `MultiCollector.stats`. For any thread."""
        return self._hooks.stats(self._pool)

    def nodes(self) -> list[dict[str, Any]]:
        """See `MultiCollector.nodes`."""
        return self._hooks.nodes(self._pool)

    @property
    def closed(self) -> bool:
        """True once it is closed, by `close` or by an error."""
        return self._pool.closed

    def follow(self, weights: SharedWeights) -> None:
        """Has replicas act by `weights`, of the file that they have, from their next batches on."""
        self._carrier.follow(weights)

    def close(self, limits: CloseLimits | None = None) -> None:
        """Closes envs, and ends the processes. limits: None for those of the plan."""
        self.stop()
        self._pool.close(self._plan.close_limits if limits is None else limits)

    def _envs(self, place: int) -> range:
        return self._hooks.plans[place].envs

    def _part(self, place: int) -> slice:
        """The envs of a place in a batch of all."""
        envs, first = self._envs(place), self._envs(0).start
        return slice(envs.start - first, envs.stop - first)

    def _require(self, places: Sequence[int]) -> None:
        """Raises for the first of these places that is out of reach."""
        there = self._pool.reachable
        for k in places:
            if k not in there and (error := self._hooks.lost(k)) is not None:
                raise error

    def _ask_all(self, question: object, words: str = "answering a call") -> list[Any]:
        """The answers of all places. Raises the first failure."""
        self._require(self._places)
        answers = self._ask(dict.fromkeys(self._places, question), words)
        for k, answer in answers.items():
            if isinstance(answer, Raised):
                raise self._error(k, answer)
            if isinstance(answer, Lost):
                raise answer.error
        return list(answers.values())

    def _ask(self, questions: Mapping[int, object], words: str, *, is_for_all: bool = False) -> dict[int, Any]:
        """Asks places between batches; returns the answers by place, among them what is `Raised` or `Lost`.

        is_for_all: who is out of reach gets it as well, once it is there, and does not answer.
        """
        if self._batches.owing:  # those that are under way, and what they have failed with, come first
            self._batches.wait()
        try:
            self._replace_raised(self._batches)
        except Exception:
            self.give_up()
            raise
        self._questions.drop()
        there = self._pool.reachable
        for k in questions.keys() - there if is_for_all else ():
            self._pool.post(k, self._pool.sealed(questions[k]))
        asked = {k: question for k, question in questions.items() if k in there}
        self._questions.ask(asked, words, self._plan.limit, "about to answer a call")
        self._questions.wait()
        answers = sorted(self._questions.answers.items())
        self._questions.drop()
        return {k: one.content if isinstance(one, Answered) else one for k, one in answers}

    # ---- collecting

    def collect(self) -> Filled:
        """The next batch."""
        if self._questions.owing:  # what a Ctrl-C has left
            self._questions.wait()
        return self._collect_all() if self._plan.sync else self._collect_first()

    def give_up(self) -> None:
        """Stops all places. Their envs have gone on meanwhile, so that their next batches begin new episodes."""
        self._ready.clear()
        if self._pool.closed:
            return
        self.stop()
        self._end(self._batches)
        self._end(self._questions)
        if self._carrier.gives_up is not None:
            self._questions.ask(dict.fromkeys(self._pool.reachable, self._carrier.gives_up), "giving up", None)
            self._questions.wait()
            for k, one in self._questions.answers.items():
                if isinstance(one, Answered) and isinstance(one.content, Raised):
                    raise self._error(k, one.content)
            self._questions.drop()
        self._forget_reasons()
        self._carrier.finish(self._places)
        self._afresh.update(self._places)

    def stop(self) -> None:
        """Ends the batches that are under way early. For any thread."""
        self._carrier.stop(self._batches.owing)

    def _end(self, of: Round) -> None:
        of.wait()
        if self._hooks.restarts:
            self._replace_raised(of)
        of.drop()

    def _collect_all(self) -> Filled:
        self._order(self._pool.reachable)
        made = self._carrier.storage(0, None)
        assert made is not None
        storage, first_env = made
        versions, missing, done, is_stopped = np.zeros(storage.N, np.int64), {*self._places}, 0, False
        while self._batches.owing or self._batches.answers:
            for k, answer in self._receive(max(1, ceil((self._plan.threshold - done) / self._most))):
                part = self._part(k)
                versions[part] = self._carrier.fill(k, answer, storage, part)
                missing.discard(k)
                done += len(self._hooks.collectors[k])
            if done >= self._plan.threshold and not is_stopped:
                self.stop()
                is_stopped = True
        for k in missing:
            storage.blank(self._part(k))
            self._hooks.note_loss(k)
        if not self._pool.reachable:
            self._require(self._places)
        storage.finals.sort(key=lambda one: (one.time, one.env))
        storage.losses.sort(key=lambda one: (one.time, one.env))
        self._carrier.finish(self._places)
        return Filled(storage, first_env, versions, self._notes())

    def _collect_first(self) -> Filled:
        if self._batches.answers:  # that came before a question: their places are idle
            self._take_ready(0)
        while not self._ready:
            self._order_idle()
            self._take_ready(0 if self._hooks.reasons else 1)
            if not self._pool.reachable:
                self._require(self._places)
        # Each place goes on at once, while the caller learns; at most one of its batches waits.
        self._order_idle()
        return self._ready.popleft()

    def _take_ready(self, at_least: int) -> None:
        came = self._receive(at_least)
        idle = [k for k in self._hooks.reasons if k not in self._batches.owing and k not in self._batches.answers]
        for k, answer in [*came, *((k, None) for k in idle)]:
            if answer is None:
                self._hooks.note_loss(k)
            if (made := self._carrier.storage(k, answer)) is None:
                continue
            storage, first_env = made
            versions = np.zeros(storage.N, np.int64)
            if answer is None:
                storage.blank(slice(0, storage.N))
            else:
                versions[:] = self._carrier.fill(k, answer, storage, slice(0, storage.N))
            self._carrier.finish([k])
            self._ready.append(Filled(storage, first_env, versions, self._notes()))

    def _order_idle(self) -> None:
        busy = {*self._batches.owing, *self._batches.answers}
        if idle := [k for k in self._pool.reachable if k not in busy]:
            self._order(idle)

    def _order(self, places: Sequence[int]) -> None:
        """Has idle places collect. One that was lost while it was idle begins with the next batch."""
        after = self._plan.limits.recycle_after
        if after is not None and isinstance(self._pool, Pool):  # nodes recycle in pools of their own
            self._recycle(self._pool, places, after)
        orders = self._carrier.orders(places, self._afresh)
        asked = {k: order for k, order in orders.items() if k not in self._hooks.reasons}
        self._batches.ask(asked, "collecting", self._plan.limit, "about to collect")
        self._carrier.sent(asked)
        self._afresh.difference_update(places)

    def _recycle(self, pool: Pool, places: Sequence[int], after: Mapping[str, float]) -> None:
        """Replaces idle replicas that were due, and finds out which are: these end their batch with an episode."""
        hooks = self._hooks
        assert isinstance(hooks, ReplicaHooks)
        for k in [k for k in places if k in hooks.ended]:
            pool.replace(k, hooks.due[k], hooks.recycle(k), self._plan.close_limits)
        ready = [(at, k) for k in places if k not in hooks.due and (at := pool.ready_at(k)) is not None]
        starting, processes = sum(pool.ready_at(k) is None for k in self._places), pool.processes()
        for at, k in sorted(ready):  # the oldest first: none is passed over
            if len(hooks.due) + starting >= (self._plan.limits.max_concurrent_starts or 1):
                return
            steps, resets, _ = hooks.counts[k].tolist()
            pid, at_start = processes[k]
            if reason := worn_out(after, resets, steps, watched_s() - at, pid):
                hooks.due[k] = reason
                if said := held_at_start(after, at_start):
                    with pool.whole():
                        hooks.spend(k, said)

    def _receive(self, at_least: int) -> list[tuple[int, Any]]:
        """Waits for batches; returns the places that are done, with their answers, without those that were lost."""
        done = []
        for k in self._batches.wait(at_least, _SLICE_S):
            one = self._batches.answers.pop(k)
            if isinstance(one, Lost):
                continue
            if isinstance(one.content, Raised):
                self._replace_or_raise(k, one.content)
            elif isinstance(one.content, self._carrier.kind):
                done.append((k, one.content))
            else:
                raise self._no_answer(k, one.content)
        return done

    def _forget_reasons(self) -> None:
        """Batches that were dropped say nothing of replicas that were replaced; of nodes the rows are still masked."""
        if self._hooks.restarts:
            self._hooks.reasons.clear()

    def _notes(self) -> list[str]:
        notes, self._hooks.notes[:] = [*self._hooks.notes], []
        return notes

    # ---- what replicas have raised

    def _replace_raised(self, of: Round) -> None:
        """Has others take the places of replicas that have raised; their answers are Lost from then on."""
        for k, one in [*of.answers.items()]:
            if isinstance(one, Answered) and isinstance(one.content, Raised):
                self._replace_or_raise(k, one.content)
                of.answers[k] = Lost(k, self._error(k, one.content))

    def _replace_or_raise(self, place: int, raised: Raised) -> None:
        """Has another process take the place of a replica that has raised, where that may help."""
        if raised.is_final or not self._hooks.restarts:
            raise self._error(place, raised)
        reason = f"{raised.failed.type_name}: {raised.failed.message}"
        assert isinstance(self._pool, Pool)
        with self._pool.whole():
            successor = self._hooks.on_lost(place, reason)
        assert successor is not None
        self._pool.replace(place, reason, successor, self._plan.close_limits)

    def _no_answer(self, place: int, said: object) -> Exception:
        return UnknownMessage(f"{self._hooks.nouns.name(place)} has sent what is no answer: {said!r:.200}")

    def _error(self, place: int, raised: Raised) -> Exception:
        """The error for what a replica has raised. Closes the pool where restarting its envs did not help."""
        if raised.is_final:
            self.close()
        return self._hooks.raised(place, raised.failed, raised.is_final)


def in_processes(
    plan: PoolPlan, weights_fd: int, kept: Kept, take_logs: Callable[[bytes, int], None] = hand_over
) -> ReplicaPool:
    """Replicas in processes of this machine.

    weights_fd: the file of the weights that they follow; stays the owner's.  kept: see `PlaceHooks`.
    take_logs: see `LogInbox`.
    """
    hooks = ReplicaHooks(plan.plans, plan.nouns, plan.limits.restarts, kept)
    with naming_limits("the collectors could not start"), standard_fds():
        memory = BatchMemory()
    pool = Pool(
        *("muster.rollout.replicas.replica:Replica", plan.plans, plan.processes, hooks, plan.limits),
        files={"batches": memory.fd, "weights": weights_fd},
        nouns=plan.nouns,
        take_logs=take_logs,
        about=plan.about,
    )
    return ReplicaPool(plan, pool, Blocks(plan, memory, hooks), hooks)
