"""The interface of every backend, and what all backends share: the slab, the mail, the caller's end of the core."""

from __future__ import annotations

import _thread
import contextlib
import dataclasses
import functools
import itertools
import math
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from muster._core import Caller, Status
from muster.errors import StepTimeout, UsageError
from muster.hosts.env_facts import EnvFacts
from muster.hosts.env_host import EnvHost
from muster.hosts.failures import Failure
from muster.hosts.questions import EnvQuestion, InTurn, Pack, shared
from muster.hosts.requests import HostOptions, Restart, WaitBudget
from muster.introspection import caller_stacklevel
from muster.pickling import MAKE_VEC, UserCall
from muster.pool.closing import CloseNotice, CloseProgress, name_envs, warn_of_cuts
from muster.pool.deaths import NOUNS, Nouns
from muster.pool.limits import AT_ONCE, FOR_EVER, CloseLimits
from muster.pool.resources import Usage, naming_limits
from muster.pool.verbs import Whole
from muster.recipes.recipe import Recipe
from muster.spaces.tree import Array
from muster.transport.mail import Mail
from muster.transport.slab import Slab, SlabPlan

# By the numbers of envs, what they are asked again.
Questions = Mapping[int, Sequence[EnvQuestion]]
# Called with a lost worker, its envs and the reason; returns what the new envs are asked first.
WorkerLost = Callable[[int, range, str], Questions]


@dataclass(frozen=True)
class CallerOptions:
    """How the caller sends and waits.

    must_reset: the user has to reset envs after the end of an episode.
    steps_unreset: envs may be stepped before their first reset.
    writes_actions: the core writes those batches of actions that fit the action space exactly.
    """

    must_reset: bool
    steps_unreset: bool
    writes_actions: bool
    wait_budget: WaitBudget


class Backend(ABC):
    """Builds envs, in this process or in others, and steps them.

    The order of calls: `start` builds the envs and returns their facts, `attach` provides the slab that they are
    stepped into. From then on `caller` sends and waits, and the methods below do everything that is not a step.
    `first_envs`: see `SlabPlan`.
    """

    holds_signals = False
    """Whether `whole` does, so that no env's own code may run in it."""
    num_workers: int
    """Workers that step envs, the caller not counted."""
    first_envs: tuple[int, ...]
    recipes: Sequence[Recipe]
    """Those of its envs."""
    numbers: Sequence[int]
    """The numbers of all envs that users know, and that questions have."""
    nouns: Nouns = NOUNS
    user_call: UserCall = MAKE_VEC
    slab: Slab
    caller: Caller
    recycled = 0
    """How many workers were replaced by ``recycle_after``."""
    notify_fd = -1
    """An eventfd that workers write to where the caller asks for that by `Caller.notify`; -1: there are none."""
    close_limits: CloseLimits = CloseLimits()
    """How long the user's own ``close()`` waits, and the replacement of an env for the close of the old one."""
    log_flag: memoryview = memoryview(bytes(1))
    """``log_flag[0]`` is not 0 while there are log records to deliver. Workers in other processes set it."""
    pack: Pack = staticmethod(shared)
    """Turns a user's value into one that can be sent to envs, and again as it was."""

    @abstractmethod
    def start(self) -> list[EnvFacts]:
        """Builds all envs and returns their facts in order. An error leaves nothing behind."""

    @abstractmethod
    def attach(self, plan: SlabPlan, options: HostOptions, caller: CallerOptions) -> None:
        """Creates the slab and makes every host ready to step into it."""

    def deliver_logs(self) -> None:
        """Hands log records of other processes to the caller's loggers."""

    def recycle(self, host: int, reason: str, questions: Questions) -> None:
        """Replaces a worker that is well, and owes nothing. questions: to the new envs."""
        raise NotImplementedError

    def ready_at(self, host: int) -> float | None:
        """The moment since which a worker is ready, by `watched_s`; None while it starts."""
        raise NotImplementedError

    def replaces_lost(self, worker_lost: WorkerLost | None) -> None:
        """Has workers that are lost replaced. worker_lost: called with each; None where its loss is an error."""

    @abstractmethod
    def mail_of(self, host: int) -> Mail:
        """The mail to and from the envs of `host`."""

    @abstractmethod
    def ask(self, question: EnvQuestion) -> None:
        """Asks envs. Those of a question by row are pending from then on; else `answers` takes what they say.

        Raises CannotTravel before anything is sent.
        """

    @abstractmethod
    def answers(self, timeout_s: float | None) -> list[Any]:
        """The answer of each env, a Failure where it raised. Raises WaitTimeout.

        None for the envs of a worker that was lost, if the new ones are asked again. The same until they are dropped.
        """

    @abstractmethod
    def drop_answers(self) -> None:
        """Drops the answers that have come or will come."""

    @abstractmethod
    def restart(self, restart: Restart) -> bool:
        """Makes a failed env answer again; True if the env's worker has been replaced for that."""

    def has_own_worker(self, env: int) -> bool:
        """True if a worker has this env alone, and can be replaced for it."""
        return False

    def steps_at_once(self, env: int) -> bool:
        """True if the worker of an env steps all its envs at the same time, and ends late ones itself."""
        return False

    @abstractmethod
    def watch(self, waited_s: float) -> None:
        """Checks the workers during a wait. Raises WorkerDied or WorkerTimeout where waiting longer is useless."""

    @abstractmethod
    def processes(self) -> list[tuple[int | None, Usage]]:
        """The process that runs each host: its id, None where it has ended, and what it held once it was ready to step.

        All of that is None while it is being replaced.
        """

    @abstractmethod
    def close(self, limits: CloseLimits) -> list[Failure]:
        """Closes envs and workers within `limits`; returns what ``env.close()`` raised.

        Gives a RuntimeWarning about workers that were cut off, except with `AT_ONCE`. Only the first call does
        anything, and none does in a forked child.
        """

    def answers_to(self, question: EnvQuestion) -> list[Any]:
        """Asks envs, and returns what each has answered."""
        try:
            self.ask(question)
            return self.answers(None)
        finally:
            self.drop_answers()

    def ids_of(self, question: EnvQuestion) -> Array:
        """The indices of the envs that a question asks."""
        return np.array([env for env, number in enumerate(self.numbers) if question.asks(number)], np.int64)

    def whole(self) -> Whole:
        """Closes the vector env where the body ends halfway: its envs would be out of step."""
        return Whole(self._ends_halfway, holds=self.holds_signals)

    def _ends_halfway(self, error: BaseException) -> None:
        if not isinstance(error, UsageError):  # raised before anything was done
            self.caller.closed = True
            self.close(AT_ONCE)

    @contextlib.contextmanager
    def _answering_here(self, host: EnvHost | None, env_ids: Array) -> Iterator[None]:
        """Resets envs, among them some that this thread steps, by `host`: answers for those that Ctrl-C leaves out."""
        try:
            yield
        except BaseException:
            if host is not None and not self.caller.closed:
                mine = range(host.first_env, host.first_env + len(host.envs))
                pending = [env for env in env_ids.tolist() if env in mine and self.caller.is_pending(env)]
                unanswered = [env for env in pending if not self.caller.finished(env)]
                host.refuse(unanswered, UsageError("this reset was interrupted; reset the vector env again"))
            raise

    @functools.cached_property
    def last_objects(self) -> dict[int, Sequence[Any]]:
        """The mailed objects of each env's last step, by env; kept where observations have parts that are mailed."""
        return {}

    def objects_again(self, env: int) -> Iterator[Any]:
        """Copies of the objects of the last step of `env`; without end None for one that has not been reset yet."""
        last = self.last_objects.get(env)
        return itertools.repeat(None) if last is None else iter(self.mail_of(self.caller.host_of(env)).own([*last]))

    def obs_again(self, ids: Array, *, copies: bool) -> Any:
        """The last observations of the envs `ids`, which owe no answer: copies, or views where `ids` adjoin."""
        self.caller.bring_home()
        return self.slab.obs_batch(ids, [self.objects_again(env) for env in ids.tolist()], copies)

    def settled(self) -> Array:
        """The envs that owe no answer, int64 ``[n]``. Raises ClosedError."""
        self.caller.require_open()
        pending, envs = self.caller.num_pending, range(self.slab.plan.num_envs)
        return np.array([env for env in envs if not (pending and self.caller.is_pending(env))], np.int64)

    def take_mail(self, ids: Array) -> list[tuple[Iterator[Any], Iterator[Any]]]:
        """The objects that envs `ids` have mailed with their last step: of the step itself, and of the final step.

        A restarted env may answer without an observation of its own. The objects of its last one are then repeated.
        """
        lengths, keeps = self.slab.records["mail_bytes"][ids], self.slab.plan.obs.has_objects
        if not keeps and not lengths.any():
            return [(iter(()), iter(()))] * len(ids)
        both: list[tuple[Iterator[Any], Iterator[Any]]] = []
        for env, length in zip(ids.tolist(), lengths.tolist(), strict=True):
            step, final = self.mail_of(self.caller.host_of(env)).get(env, length) or ((), ())
            if keeps:
                last = self.last_objects.get(env, ())
                step, final = step or last, final or last
                self.last_objects[env] = step
            both.append((iter(step), iter(final)))
        return both

    def failures(self, ids: Array) -> list[Failure]:
        """The failures among the last steps of envs `ids`."""
        raised = ids[self.slab.records["status"][ids] == Status.RAISED]
        lengths = self.slab.records["mail_bytes"][raised]
        failures: list[Failure] = [
            self.mail_of(self.caller.host_of(env)).get(env, length)
            for env, length in zip(raised.tolist(), lengths.tolist(), strict=True)
        ]
        for env, failure in zip(raised.tolist(), failures, strict=True):
            error = failure.original() if self.steps_at_once(env) else None
            if isinstance(error, StepTimeout) and error.is_left:
                warnings.warn(f"env {failure.env_index}: {error}", RuntimeWarning, stacklevel=caller_stacklevel())
        return failures

    def put_actions(self, ids: Array, objects: Sequence[list[Any]], *, as_provided: bool = False) -> None:
        """Mails those parts of the actions that have no place in the slab. as_provided: envs may get the very objects.

        Else each env gets objects of its own, which the caller may go on changing.
        """
        for env, action in zip(ids.tolist(), objects, strict=True):
            box, mail = self.slab.plan.num_envs + env, self.mail_of(self.caller.host_of(env))
            own = action if as_provided or not mail.lends_objects else mail.own(action)
            with naming_limits(f"the action of env {env} could not be sent"):
                self.slab.action_mail_bytes[env] = mail.put(box, own)

    def fetch_schemas(self, host: int, at: int) -> tuple[list[Any], int]:
        """The info layouts that the worker of `host` has mailed behind `at`, and where they end.

        Each is a tuple of new layouts, see `InfoTable` in _core/infos.hpp.
        """
        box, end = 2 * self.slab.plan.num_envs + host, self.slab.layout.layouts_end(host)
        return self.mail_of(host).appended(box, at, end), end


def make_caller(slab: Slab, options: CallerOptions) -> Caller:
    """The caller's end of the core."""
    plan = slab.plan
    return Caller(
        slab=slab.layout,
        memory=slab.memory,
        first_envs=plan.first_envs,
        obs=plan.obs.batch_node(slab.obs),
        action=plan.action.batch_node(slab.actions, checked=True) if options.writes_actions else None,
        lent=[rows for rows, lent in zip(slab.obs.arrays, slab.obs.lent, strict=True) if lent],
        must_reset=options.must_reset,
        steps_unreset=options.steps_unreset,
        wait_budget=options.wait_budget,
    )


def attach_local_host(backend: Backend, env_host: EnvHost, host: int, mail: Mail, options: HostOptions) -> None:
    """Lets the calling process step the envs of `env_host` itself."""
    env_host.attach(backend.slab, host, mail, options)
    backend.caller.set_local(env_host.stepper)


def in_loop() -> InTurn:
    """The way of a host of the caller's own for coroutine envs."""
    from muster.hosts.waiting import InLoop  # with asyncio, which takes a while to import

    return InLoop()


def close_here(env_host: EnvHost, limits: CloseLimits) -> list[Failure]:
    """Closes the envs of `env_host` in this thread, however long that takes; returns what they raised.

    A Ctrl-C ends the close of one env and leaves those after it unclosed; a RuntimeWarning names them.
    """
    envs, began = range(env_host.first_env, env_host.first_env + len(env_host.envs)), time.monotonic()
    progress = CloseProgress(NOUNS.name(env_host.info.worker_index, envs), envs, FOR_EVER, began, len(envs))
    notice = CloseNotice(dataclasses.replace(FOR_EVER, call_s=limits.call_s), began)
    # Not by `threading`, whose locks the code may hold that garbage collection stops.
    ended = _thread.allocate_lock()
    ended.acquire()

    def say_what_closes() -> None:
        if not ended.acquire(timeout=notice.after_s):
            notice.check([progress], lambda _: "about to close its envs")

    try:
        if notice.after_s < math.inf:
            with contextlib.suppress(RuntimeError):  # no thread is left, or the interpreter ends
                _thread.start_new_thread(say_what_closes, ())
    finally:  # also when a Ctrl-C comes now
        try:
            failures = env_host.close(progress.begins)
        finally:
            ended.release()
    if not limits.terminates and any(isinstance(one.exception, KeyboardInterrupt) for one in failures):
        interrupted, *unclosed = progress.left
        others = f"; {name_envs(unclosed)} had not begun" if unclosed else ""
        with contextlib.suppress(RuntimeWarning):  # made an error by a filter, it would hide the Ctrl-C
            warn_of_cuts(
                [f"Ctrl-C ended close() of {name_envs([interrupted])}{others}. Data that was not written is lost."]
            )
    return failures


def raise_local_interrupt(backend: Backend, host: int) -> None:
    """Raises the Ctrl-C that an env of `host`, the caller's own host, has ended with; the other envs may still be busy.

    That env then answers with an EnvError, so that only one KeyboardInterrupt is raised.
    """
    interrupt = None
    for env in range(backend.first_envs[host], backend.first_envs[host + 1]):
        if not (backend.caller.is_pending(env) and backend.caller.finished(env)):
            continue
        for failure in backend.failures(np.array([env])):
            if isinstance(failure.exception, KeyboardInterrupt):
                interrupt = failure.exception
                failure = dataclasses.replace(failure, exception=None)
            backend.mail_of(host).put(env, failure)  # put back: `failures` has taken it out
    if interrupt is not None:
        raise interrupt
