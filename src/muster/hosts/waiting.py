"""The ways in which a host calls its envs: in turn; or all at the same time, for envs that wait.

At the same time, a loop in the host's thread awaits coroutine envs, and each other env has a thread of its own, for all
of its code. Rows are written in the loop's thread alone, by the core's halves of a step.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import inspect
import logging
import random
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable
from contextvars import Context, copy_context
from functools import partial
from types import FrameType, coroutine
from typing import Any, TypeVar

from muster._core import Doing, ticks
from muster.errors import StepTimeout, UsageError
from muster.hosts.env_facts import is_awaited, is_awaited_class
from muster.hosts.questions import CalledHost, Deed, EnvQuestion, InTurn
from muster.pool.thread_pool import CallingThread, Outcome, awaited, outcome_of
from muster.pool.watch import WORDS, About, Watch, env_lines, lines_of, seconds
from muster.worker_info import WorkerInfo, context_of

T = TypeVar("T")
_log = logging.getLogger("muster")

_BEAT_S = 0.1
_CANCEL_S = 1.0  # for a coroutine that is cancelled, until it is left behind
_SAID_AFTER_S = (1.0, 10.0, 60.0)  # of a loop that does not answer
_KEPT_S = 0.01  # a beat that comes later than this finds a loop that an env keeps
_END_S = 1.0


class _LoopTasks:
    """Makes the tasks of a loop. One that an env's code begins is that env's, see `envs`.

    `asyncio.all_tasks` shows code of envs no others: it may cancel all that it finds.
    """

    def __init__(self) -> None:
        self.envs: weakref.WeakKeyDictionary[asyncio.Task[Any], int] = weakref.WeakKeyDictionary()

    def __call__(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **more: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **more)
        running = asyncio.current_task(loop) if loop.is_running() else None
        if running is not None and (env := self.envs.get(running)) is not None:
            self.envs[task] = env
        else:
            asyncio._unregister_task(task)
        return task


class InLoop(InTurn):
    """One coroutine env after the other, in a loop with a thread of its own: the thread that asks may have one."""

    def __init__(self) -> None:
        self._loop, self._tasks, self._ends = asyncio.new_event_loop(), _LoopTasks(), False
        self._loop.set_task_factory(self._tasks)
        self._thread = threading.Thread(target=self._run, name="muster-loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ends:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # which tasks of an env raise; it may stop it, too
                self._loop.run_forever()
        close_loop(self._loop, self._tasks)

    def within(self, host: CalledHost, i: int, doing: int, function: Callable[..., Any], *args: Any) -> Any:
        if i >= len(host.envs) or not is_awaited(host.envs[i]):
            return (yield from super().within(host, i, doing, function, *args))
        with host.activity.of(doing, host.first_env + i):
            return outcome_of(self.called, host.info_of(i), function, *args)

    def called(self, info: WorkerInfo, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of an env's code, which runs in the loop. info: the env's."""
        context = context_of(info)

        async def call() -> Outcome:
            task = self._loop.create_task(awaited(function, *args, **kwargs), context=context)
            self._tasks.envs[task] = info.worker_index
            return await task

        future = asyncio.run_coroutine_threadsafe(call(), self._loop)
        try:
            value, error = future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise
        if error is not None:
            raise error
        return value

    def to_step(self, host: CalledHost, i: int) -> Any:
        env = host.envs[i]
        return Awaited(env, partial(self.called, host.info_of(i))) if is_awaited(env) else env

    def end(self) -> None:
        self._ends = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_S)


class Awaited:
    """A coroutine env with ordinary methods. called: carries out the env's own."""

    api_name = "coroutines"

    def __init__(self, env: Any, called: Callable[..., Any]) -> None:
        self._env, self._called = env, called

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._env, name)
        return partial(self._called, value) if callable(value) else value


class _Code:
    """Code of an env that runs. done: takes its outcome, once; None when nobody waits for that any more.

    stack: where it was when its time had passed.  cancelled_at: when that was, for a coroutine.
    kept_s, longest_s: the time for which others have kept it from going on, in all and at most; that does not count.
    """

    def __init__(self, i: int, doing: int, done: Callable[[Outcome], None]) -> None:
        self.i, self.doing, self.is_left, self.kept_s, self.longest_s = i, doing, False, 0.0, 0.0
        self.done: Callable[[Outcome], None] | None = done
        self.begun_at, self.since, self.cancelled_at = time.monotonic(), ticks(), 0.0
        self.task: asyncio.Task[None] | None = None
        self.stack: list[str] | None = None


class Waiting(InTurn):
    """All envs at the same time: coroutine envs in a loop of this thread, each other env in a thread of its own.

    has_threads: False where the loop calls those others itself, so that they wait for each other.
    step_timeout: seconds for one call of an env, None without a limit.  start_timeout: for building one again.
    """

    def __init__(self, step_timeout: float | None, start_timeout: float, *, has_threads: bool) -> None:
        self._has_threads, self._step_timeout, self._start_timeout = has_threads, step_timeout, start_timeout
        self._loop, self._tasks, self._base = asyncio.new_event_loop(), _LoopTasks(), copy_context()
        self._loop.set_task_factory(self._tasks)
        self._threads: dict[int, CallingThread] = {}
        self._in_loop: set[int] = set()  # envs that need no thread
        self._contexts: dict[int, Context] = {}
        self._codes: dict[int, _Code] = {}  # by env, in the order in which they began
        self._left: dict[int, UsageError] = {}  # by env, until that is built again
        self._still_run = 0  # of those that were left behind
        # By env, what it is asked again where nobody else remembers that.
        self._again: dict[int, dict[Any, EnvQuestion]] = collections.defaultdict(dict)
        self._deeds: set[asyncio.Task[None]] = set()
        self._settled: dict[int, asyncio.Future[Outcome]] = {}
        self._rung, self._crash = asyncio.Event(), list[BaseException]()
        self._bell: threading.Thread | None = None
        self._watch, self._ends, self._loop_thread = Watch(), False, threading.get_ident()
        self._asked_at, self._beat_at, self._silent_until = 0, ticks(), 0.0

    # ---- what a host does

    def run(self, deed: Any) -> Any:
        task = self._loop.create_task(_task(deed))
        while True:
            try:
                return self._loop.run_until_complete(task)
            except (RuntimeError, SystemExit, KeyboardInterrupt):  # an env has stopped it, or a task of one raised that
                if task.done() or self._loop.is_closed():
                    raise

    def begun(self, deeds: Iterable[Deed[T]]) -> Iterable[Any]:
        return [self._loop.create_task(_task(deed)) for deed in deeds]

    async def within(self, host: CalledHost, i: int, doing: int, function: Callable[..., Any], *args: Any) -> Outcome:
        answered: asyncio.Future[Outcome] = self._loop.create_future()
        self._call(host, i, doing, answered.set_result, partial(function, *args))
        outcome = await answered
        if doing == Doing.BUILDING and outcome[1] is None:
            self._left.pop(i, None)
            if i in self._threads and is_awaited(outcome[0].env):
                self._in_loop.add(i)
                self._threads.pop(i).ends()
        return outcome

    def notes(self, i: int, question: EnvQuestion) -> None:
        if question.key is not None:
            self._again[i][type(question), question.key] = question

    def reset_env(
        self, host: CalledHost, i: int, seed: Any, options: Any, passes_options: bool
    ) -> BaseException | None:
        arguments = {"seed": seed, "options": options} if passes_options else {"seed": seed}
        if i in self._left:
            self.restart(self._reset_anew(host, i, arguments))
        else:
            self._reset(host, i, None, arguments)
        return None

    @coroutine
    def _reset_anew(self, host: CalledHost, i: int, arguments: dict[str, Any]) -> Deed[None]:
        if (error := (yield from host.rebuilt(i, [*self._again[i].values()]))) is not None:
            return host.stepper.refuse(i, error)
        return self._reset(host, i, None, arguments)

    def restart(self, deed: Deed[None]) -> None:
        task = self._loop.create_task(_task(deed))
        self._deeds.add(task)
        task.add_done_callback(self._is_done)

    def _is_done(self, deed: asyncio.Task[None]) -> None:
        self._deeds.discard(deed)
        if not deed.cancelled() and (error := deed.exception()) is not None:
            self._fails(error)

    # ---- steps

    def until_message(self, host: CalledHost) -> None:
        if self._bell is None:
            host.activity.put(Doing.NOTHING)
            self._bell = threading.Thread(target=self._listen, args=(host,), name="muster-bell", daemon=True)
            self._bell.start()
        self.run(self._until_message(host))

    async def _until_message(self, host: CalledHost) -> None:
        while True:
            self._rung.clear()
            has_message = host.stepper.takes_message()
            for i in host.stepper.take_requested():  # after that look: steps begin before a message that came later
                self._step(host, i)
            await asyncio.sleep(0)
            if has_message:
                return
            await self._rung.wait()
            if self._crash:
                raise self._crash[0]

    def _step(self, host: CalledHost, i: int) -> None:
        try:
            arguments = host.stepper.begin_step(i)
        except BaseException as error:
            return host.stepper.refuse(i, error)
        if arguments is None:
            return self._reset(host, i, None, {})
        env = host.envs[i]
        return self._call(host, i, Doing.STEPPING, partial(self._stepped, host, i), lambda: env.step(*arguments))

    def _stepped(self, host: CalledHost, i: int, outcome: Outcome) -> None:
        result, error = outcome
        if error is not None:
            return host.stepper.refuse(i, error)
        final_objects = host.stepper.finish_step(i, result)
        return None if final_objects is None else self._reset(host, i, final_objects, {})

    def _reset(self, host: CalledHost, i: int, final_objects: list[Any] | None, arguments: dict[str, Any]) -> None:
        next_seed, env = host.stepper.take_seed(i), host.envs[i]
        if next_seed is not None and arguments.get("seed") is None:
            arguments = {"options": None, **arguments, "seed": next_seed}

        def finish(outcome: Outcome) -> None:
            result, error = outcome
            if error is not None:
                return host.stepper.refuse(i, error)
            return host.stepper.finish_reset(i, result, final_objects)

        self._call(host, i, Doing.RESETTING, finish, lambda: env.reset(**arguments))

    # ---- the code of envs

    def _call(
        self, host: CalledHost, i: int, doing: int, done: Callable[[Outcome], None], function: Callable[[], Any]
    ) -> None:
        """Begins a call of env i's code; `done` takes the outcome, or that it was left behind."""
        if i in self._left and doing != Doing.BUILDING:
            return done((None, self._left[i] if doing != Doing.NOTHING else None))
        code = self._codes[i] = _Code(i, doing, done)
        self._show(host)
        if doing == Doing.BUILDING and is_awaited_class(host.recipes[i].factory):
            self._in_loop.add(i)
        if not self._has_threads or i in self._in_loop:
            return self._begin_task(host, code, function)
        if i not in self._threads:
            self._threads[i] = CallingThread(f"muster-env-{host.numbers[i]}", host.info_of(i), self._loop)
        return self._threads[i].call(partial(self._returned, host, code), function)

    def _returned(self, host: CalledHost, code: _Code, outcome: Outcome) -> None:
        """Takes what an env's thread has returned."""
        if code.done is not None and outcome[1] is None and inspect.isawaitable(outcome[0]):
            self._begin_task(host, code, lambda: outcome[0])
        else:
            if inspect.iscoroutine(outcome[0]):
                outcome[0].close()  # nobody waits for it any more
            self._end(host, code, outcome)

    def _begin_task(self, host: CalledHost, code: _Code, function: Callable[[], Any]) -> None:
        if code.i not in self._contexts:
            self._contexts[code.i] = self._base.run(context_of, host.info_of(code.i))
        code.task = self._loop.create_task(self._run(host, code, function), context=self._contexts[code.i])
        self._tasks.envs[code.task] = code.i

    async def _run(self, host: CalledHost, code: _Code, function: Callable[[], Any]) -> None:
        code.begun_at = time.monotonic()
        self._end(host, code, await awaited(function))

    def _end(self, host: CalledHost, code: _Code, outcome: Outcome) -> None:
        done, code.done = code.done, None
        if done is None:
            self._still_run -= code.is_left
            return
        self._forget(host, code)
        if code.stack is not None:
            outcome = None, self._too_late(code)
        try:
            done(outcome)
        except BaseException as error:
            self._fails(error)

    def _forget(self, host: CalledHost, code: _Code) -> None:
        del self._codes[code.i]
        self._show(host)

    def _show(self, host: CalledHost) -> None:
        """Says in what the host is: in the code that began first."""
        code = next(iter(self._codes.values()), None)
        doing, i, since = (Doing.NOTHING, 0, 0) if code is None else (code.doing, code.i, code.since)
        if self._bell is not None:
            host.stepper.overlaps(len(self._codes), doing, i, since)
        elif code is None:
            host.activity.put(Doing.BUILDING)
        else:
            host.activity.put(doing, host.first_env + i)

    def _fails(self, error: BaseException) -> None:
        """Ends the worker, by what is no env's fault."""
        self._crash.append(error)
        self._rung.set()

    # ---- the watch

    def _listen(self, host: CalledHost) -> None:
        """Wakes the loop where the caller rings, and now and then, in a thread of its own."""
        seen, due, said, beats = 0, 0.0, 0, random.Random(0)  # at odd times: steps may come as regularly as these
        while not self._ends:
            wait_s = _BEAT_S if self._asked_at else min(_BEAT_S, max(0.0, due - time.monotonic()))
            rung = host.stepper.await_ring(seen, int(1e9 * wait_s))
            if (asked_at := self._asked_at) and self._loop.is_running():
                said = self._say_kept(host, seconds(ticks() - asked_at), said)
            try:
                if rung != seen:
                    self._loop.call_soon_threadsafe(self._rung.set)
                if not asked_at and (now := time.monotonic()) >= due:
                    due, said, self._asked_at = now + beats.uniform(0.5, 1.5) * _BEAT_S, 0, ticks()
                    self._loop.call_soon_threadsafe(self._beat, host)
            except RuntimeError:  # the loop has ended
                return
            seen = rung

    def _say_kept(self, host: CalledHost, for_s: float, said: int) -> int:
        """Says for how long the loop has not answered, if it is time. said: how often that was done."""
        if said == len(_SAID_AFTER_S) or for_s < _SAID_AFTER_S[said]:
            return said
        task = asyncio.current_task(self._loop)
        i = None if task is None else self._tasks.envs.get(task)
        if i is not None and (code := self._codes.get(i)) is not None:
            host.stepper.shows(code.doing, i, code.since)
        if not said and time.monotonic() < self._silent_until:  # it comes again and again
            return 1
        self._silent_until = time.monotonic() + _SAID_AFTER_S[1]
        name = "Code of an env" if i is None else f"env {host.numbers[i]}"
        frame = sys._current_frames().get(self._loop_thread)
        where = "\n".join(env_lines(lines_of(traceback.walk_stack(frame)))) if frame is not None else ""
        others = len(host.envs) - 1
        _log.warning(
            "%s blocks %d other envs of %s %d: their loop has not answered for %.1f s. It computes, or waits without "
            "`await`: call that by asyncio.to_thread; concurrent=True gives an env of ordinary methods a thread.\n"
            "It is here, most recent call first:\n%s",
            *(name, others, host.worker_noun, host.info.worker_index, for_s, where),
        )
        return said + 1

    def _beat(self, host: CalledHost) -> None:
        at = ticks()
        (asked_at, before), self._asked_at, self._beat_at = (self._asked_at, self._beat_at), 0, at
        kept_s = seconds(at - asked_at)
        host.stepper.beat(at - before if kept_s > _KEPT_S else 0, self._still_run)
        now = time.monotonic()
        for code in [*self._codes.values()]:
            if code.task is not None and kept_s > _KEPT_S:
                code.longest_s = max(code.longest_s, own := min(kept_s, now - code.begun_at))
                code.kept_s += own
            self._end_late(host, code, now)
        codes = [code for code in self._codes.values() if code.doing != Doing.NOTHING]
        states = [(code.i, (code.doing, host.numbers[code.i], code.since)) for code in codes]
        self._watch.look(lambda: states, partial(self._about, host))

    def _about(self, host: CalledHost, i: int, env: int) -> About:
        return f"env {env} ({host.worker_noun} {host.info.worker_index})", "", self._stack(self._codes[i])

    def _end_late(self, host: CalledHost, code: _Code, now: float) -> None:
        limit_s = self._limit_s(code.doing)
        if code.stack is None:
            if limit_s is None or now - code.begun_at - min(code.kept_s, max(limit_s, code.longest_s)) < limit_s:
                return
            code.stack, code.cancelled_at = self._stack(code), now
            if code.task is not None:
                code.task.cancel()
                return
        elif now - code.cancelled_at < _CANCEL_S:
            return
        # It cannot be ended: nobody waits for it any more.
        code.is_left = True
        error = self._too_late(code)
        said = f"{error.doing} it was left behind ({error.limit}): reset it, and it is built again"
        self._left[code.i] = UsageError(said)
        self._still_run += 1
        host.stepper.beat(0, self._still_run)
        self._contexts.pop(code.i, None)
        if code.i in self._threads:
            self._threads.pop(code.i).ends()
        self._end(host, code, (None, error))

    def _limit_s(self, doing: int) -> float | None:
        if doing == Doing.NOTHING:  # its close, which has limits of its own
            return None
        return self._start_timeout if doing == Doing.BUILDING else self._step_timeout

    def _too_late(self, code: _Code) -> StepTimeout:
        stack = "\n".join(env_lines(code.stack or []))
        limit = "start_timeout" if code.doing == Doing.BUILDING else "step_timeout"
        return StepTimeout(WORDS[code.doing], f"{limit}={self._limit_s(code.doing)}", stack, code.is_left)

    def _stack(self, code: _Code) -> list[str]:
        """The stack of an env's code, as faulthandler prints it."""
        if code.task is None:
            thread = self._threads.get(code.i)
            frame = sys._current_frames().get(thread.thread.ident or 0) if thread is not None else None
            return lines_of(traceback.walk_stack(frame)) if frame is not None else []
        frames = list[tuple[FrameType, int]]()
        inner: Any = code.task.get_coro()
        while inner is not None:
            frame = getattr(inner, "cr_frame", None) or getattr(inner, "gi_frame", None)
            if frame is not None:
                frames.append((frame, frame.f_lineno))
            inner = getattr(inner, "cr_await", None) or getattr(inner, "gi_yieldfrom", None)
        return lines_of(reversed(frames))

    # ---- the end

    async def stop(self, host: CalledHost) -> None:
        tasks = [*self._deeds]
        for code in [*self._codes.values()]:
            if code.task is None:
                settled = self._settled[code.i] = self._loop.create_future()
                code.done = settled.set_result
            else:
                code.done = None
                self._forget(host, code)
                tasks.append(code.task)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_S)

    async def settle(self, envs: Iterable[int]) -> None:
        for i in envs:
            if i in self._settled:
                await self._settled[i]

    def end(self) -> None:
        self._ends = True
        for thread in self._threads.values():
            thread.ends()
        ends_at = time.monotonic() + _END_S
        for one in [*(one.thread for one in self._threads.values()), *([self._bell] if self._bell else [])]:
            one.join(max(0.0, ends_at - time.monotonic()))
        close_loop(self._loop, self._tasks)


def close_loop(loop: asyncio.AbstractEventLoop, of_loop: _LoopTasks) -> None:
    """Cancels what code of envs still runs in a loop, and closes it."""
    if tasks := [task for task in [*of_loop.envs] if not task.done()]:
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks, timeout=_CANCEL_S))
        for task in [task for task in tasks if not task.done()]:
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # it would not be cancelled
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


async def _task(deed: Any) -> Any:
    return await deed
