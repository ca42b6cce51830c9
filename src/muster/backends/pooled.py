"""The base of the backends with envs in workers: processes or threads, in a pool with the same verbs."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from muster._core import Doing
from muster.backends.base import Backend, CallerOptions, WorkerLost, make_caller
from muster.errors import ClosedError, WaitTimeout
from muster.hosts.env_facts import EnvFacts, is_awaited_class
from muster.hosts.failures import Failure, HostFailed, to_exception
from muster.hosts.questions import EnvQuestion, opened
from muster.hosts.recipe_plans import Recipes
from muster.hosts.requests import Attach, EnvPlan, HostOptions, Restart
from muster.pickling.interrupts import Uninterrupted
from muster.pool.deaths import Nouns
from muster.pool.limits import AT_ONCE, Limit, Limits
from muster.pool.messages import Failed
from muster.pool.resources import Usage, naming_limits
from muster.pool.verbs import Answered, BasePool, Hooks, Round
from muster.pool.watch import WORDS, State, seconds_since
from muster.recipes.recipe import Recipe
from muster.transport.slab import Slab, SlabPlan, split_evenly

# The seconds more than ``step_timeout`` for which nothing may move in a worker that ends late envs itself.
STUCK_S = 5.0


class PooledBackend(Backend, Hooks):
    """Steps envs in the workers of a pool, and answers the hooks of that pool. Hosts 0 to W-1 are the workers."""

    holds_signals = True
    packs = False
    """Whether questions and answers are packed for their way."""
    pool: BasePool[Any]
    _round: Round
    """Of questions to the workers."""

    def __init__(
        self,
        recipes: Sequence[Recipe],
        num_workers: int,
        num_hosts: int,
        nouns: Nouns,
        limits: Limits,
        concurrent: bool,
    ) -> None:
        self.recipes = recipes
        self.nouns = nouns
        self.user_call = recipes[0].call
        self.num_workers = num_workers
        self.first_envs = split_evenly(len(recipes), num_hosts)
        self.numbers = [recipe.env_index for recipe in recipes]
        self._limits, self.close_limits, self._concurrent = limits, limits.close(), concurrent
        self._hosts = range(num_workers)
        self._at_once = {host for host in self._hosts if concurrent or self._has_awaited(host)}
        self._attached = self._has_caller = False
        self._is_asked_again = False  # whether new envs are asked the last question again
        self._worker_lost: WorkerLost | None = None

    def _content(self, recipes: Recipes, first_env: int, together: Sequence[Recipe] | None = None) -> EnvPlan:
        limits = self._limits.step_timeout, self._limits.start_timeout
        return EnvPlan(recipes, first_env, together, None, self._concurrent, *limits)

    def _has_awaited(self, host: int) -> bool:
        return any(is_awaited_class(self.recipes[env].factory) for env in self.envs_of(host))

    def _parts(self, host: int) -> int:
        """The number of closes that a worker reports: it closes envs that it steps at the same time together."""
        return 1 if host in self._at_once else len(self.envs_of(host))

    def envs_of(self, host: int) -> range:
        """The envs of a host."""
        return range(*self.first_envs[host : host + 2])

    def numbers_of(self, host: int) -> Sequence[int]:
        """The numbers of these envs."""
        return self.numbers[slice(*self.first_envs[host : host + 2])]

    # ---- starting

    def start(self) -> list[EnvFacts]:
        try:
            with naming_limits("the vector env could not start"):
                facts = self._start()
            self._at_once |= {host for host in self._hosts if any(facts[env].is_awaited for env in self.envs_of(host))}
            return facts
        except BaseException:
            self.close(AT_ONCE)
            raise

    @abstractmethod
    def _start(self) -> list[EnvFacts]:
        """Starts the pool; returns the facts of all envs."""

    def attach(self, plan: SlabPlan, options: HostOptions, caller: CallerOptions) -> None:
        with naming_limits("there is no memory for the rows of the envs"):
            self.slab = self._made_slab(plan)
        self.caller = make_caller(self.slab, caller)
        self._has_caller = True
        self._attach = self._attach_message(options)
        try:
            with self._fate():
                attaching = self.pool.round()
                words = "mapping the slab"
                limit_s = self._limits.start_timeout
                limit = Limit(limit_s, f"{self.nouns.start_limit(limit_s)}, {words}")
                attaching.ask(dict.fromkeys(self._hosts, self._attach), words, limit, words)
                attaching.wait()
        finally:  # those that wait in the core already are rung also where a Ctrl-C ends this
            self._attached = True

    @abstractmethod
    def _made_slab(self, plan: SlabPlan) -> Slab:
        """The slab, in memory that the workers can reach."""

    @abstractmethod
    def _attach_message(self, options: HostOptions) -> Attach:
        """The request to step into the slab."""

    def replaces_lost(self, worker_lost: WorkerLost | None) -> None:
        self._worker_lost = worker_lost
        if worker_lost is None:
            self.pool.never_replaces()

    def deliver_logs(self) -> None:
        self.pool.deliver_logs()

    # ---- commands

    @contextlib.contextmanager
    def _fate(self) -> Iterator[None]:
        """Closes the vector env where the body ends with the pool closed; a Ctrl-C alone ends neither."""
        try:
            yield
        except BaseException:
            if self.pool.closed:
                self._end_steps()
                self.close(AT_ONCE)
            raise

    def _end_steps(self) -> None:
        """Has every later call of the vector env refused."""
        if self._has_caller:
            self.caller.closed = True

    def restart(self, restart: Restart) -> bool:
        with self.whole():
            self._post(self.caller.host_of(restart.env), restart)
        return False

    def ask(self, question: EnvQuestion) -> None:
        packed = question.packed(self.pack) if self.packs else question
        numbers = {host: self.numbers_of(host) for host in self._hosts}
        parts = {host: packed.to(envs) for host, envs in numbers.items() if any(map(question.asks, envs))}
        if question.by_row:
            self._ask_by_row(question, parts)
        else:
            self._ask(question, parts)

    def _ask_by_row(self, question: EnvQuestion, parts: Mapping[int, EnvQuestion]) -> None:
        with self.whole():
            self.caller.request_resets(self.ids_of(question))
            for host, part in parts.items():
                self._post(host, part)

    def _ask(self, question: EnvQuestion, parts: Mapping[int, EnvQuestion]) -> None:
        self._is_asked_again = question.key is not None
        with self._fate(), Uninterrupted():
            self._round.drop()  # the answers to one that was interrupted
            limits = {host: limit for host in parts if (limit := self._limit(host)) is not None}
            self._round.ask(parts, question.words, limits)

    def answers(self, timeout_s: float | None) -> list[Any]:
        if self._round.owing:
            self._require_not_closed()
        with self._fate():
            self._round.wait(timeout_s=timeout_s)
        if owing := self._round.owing:
            raise WaitTimeout(f"call_wait(timeout={timeout_s}): {_named(owing)} not answered; the call stays pending")
        return [answer for host in self._hosts for answer in self._answers_of(host)]

    def drop_answers(self) -> None:
        self._round.drop()

    def _answers_of(self, host: int) -> list[Any]:
        one, envs = self._round.answers.get(host), self.numbers_of(host)
        if isinstance(one, Answered):
            return opened(one.content, envs, host) if self.packs else one.content
        if one is None or self._is_asked_again:
            return [None] * len(envs)
        about = type(one.error).__name__, str(one.error), "", one.error
        return [Failure(env, host, None, *about) for env in envs]

    def _post(self, host: int, request: object) -> None:
        self.pool.post(host, self.pool.sealed(request), self._limit(host))

    def _limit(self, host: int) -> Limit | None:
        """How long a worker may take for a message; it may have to reset each of its envs before it reads it."""
        limit_s = self._limits.step_timeout
        if limit_s is None:
            return None
        if host in self._at_once:  # the worker itself ends envs that are late
            return Limit(limit_s + STUCK_S, f"{self.nouns.step_timeout}={limit_s} and {STUCK_S:g} s more")
        return Limit(limit_s * len(self.envs_of(host)), f"{self.nouns.step_timeout}={limit_s} for each env")

    def steps_at_once(self, env: int) -> bool:
        return self.caller.host_of(env) in self._at_once

    # ---- watching

    def watch(self, waited_s: float) -> None:
        self._require_not_closed()
        with self._fate():
            self.pool.watch(waited_s)

    def _require_not_closed(self) -> None:
        if self.pool.closed:
            raise ClosedError("this vector env was closed by another thread while this one waited for it")

    def processes(self) -> list[tuple[int | None, Usage]]:
        return self.pool.processes()

    # ---- what the pool asks

    def raised(self, place: int, failed: Failed) -> BaseException:
        """The error for what a worker reports: of an env, or of its first env where that was not built yet."""
        original = failed.original()
        if isinstance(original, HostFailed):
            return to_exception(original.failure)
        fields = failed.type_name, failed.message, failed.traceback, failed.exception
        failure = Failure(
            self.first_envs[place], place, None, *fields, worker_noun=self.nouns.worker, hint=failed.about
        )
        return to_exception(failure)

    def doing(self, place: int) -> str:
        if not self._attached:
            return "mapping the slab"
        return doing_in(self.slab, place, self._busy(place))

    def state(self, place: int) -> State | None:
        """The env that a worker is in, or the first one that it owes; one that steps all at once says that itself."""
        if not self._attached or place in self._at_once:
            return None
        host, busy = self.slab.host(place), self._busy(place)
        if host["doing"] == Doing.NOTHING and not busy:
            return None
        env = busy[0] if host["doing"] == Doing.NOTHING else host["env_index"]
        return host["doing"], env, host["since"]

    def pending(self, place: int) -> int:
        """The number of envs that a worker has to step or reset first; one that steps all at once cancels these."""
        return len(self._busy(place)) if self._attached and place not in self._at_once else 0

    def ring(self, place: int) -> None:
        """Wakes a worker that may be asleep in the core."""
        if self._attached:
            self.caller.announce_message(place)

    def _busy(self, host: int) -> list[int]:
        return [env for env in self.envs_of(host) if self.caller.is_pending(env) and not self.caller.finished(env)]


def doing_in(slab: Slab, host: int, busy: Sequence[int]) -> str:
    """Words such as ``in step of env 5 for 3.2 s``. busy: the envs for which the worker owes an answer."""
    state = slab.host(host)
    if state["doing"] != Doing.NOTHING:
        return f"{WORDS[state['doing']]} of env {state['env_index']} for {seconds_since(state['since']):.3g} s"
    if busy:
        return f"about to step envs {', '.join(map(str, busy))}"
    return "waiting for the caller"


def _named(hosts: Sequence[int]) -> str:
    """The beginning of a sentence: ``worker 1 has`` or ``workers 0, 2 have``."""
    names = ", ".join(map(str, hosts))
    return f"worker {names} has" if len(hosts) == 1 else f"workers {names} have"
