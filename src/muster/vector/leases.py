"""Envs of a vector env that are lent to tasks of asyncio, one at a time, each until the task gives it back."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import iterate

from muster._core import verb
from muster.errors import ClosedError, MusterError, PendingError, UsageError, WaitTimeout
from muster.hosts.failures import to_exception
from muster.pool.thread_pool import Outcome
from muster.spaces.tree import Array
from muster.transport.infos import InfoReader, Infos
from muster.vector.checks import timeout_of

_WATCH_S = 0.05
_RESTARTS = 4  # at a time: the loop goes on between two
_ROWS = "rows"


def lease(envs: Any) -> Lease:
    """As `VectorEnv.lease`."""
    envs.require_open()
    if envs.metadata["autoreset_mode"] is not AutoresetMode.DISABLED:
        raise UsageError('lease() needs autoreset_mode="disabled": each task resets its env itself')
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise UsageError("lease() is for tasks of asyncio; call it in a coroutine, as in asyncio.run(main())") from None
    before: Leases | None = envs._leases
    if before is None or (before.loop is not loop and not before.is_used):
        envs._leases = Leases(envs, loop, () if before is None else before.answers)
    elif before.loop is not loop:
        raise UsageError("lease() in two event loops: the envs of a vector env are lent in one at a time")
    return Lease(envs, envs._leases)


class Lease:
    """One env, lent to the task that enters the ``async with`` block of `VectorEnv.lease`. Its infos are its own dict.

    env_index: of the env; None outside of the block.
    """

    def __init__(self, envs: Any, leases: Leases) -> None:
        self._envs, self._leases, self._is_entered = envs, leases, False
        self.env_index: int | None = None

    async def __aenter__(self) -> Self:
        if self._is_entered:
            raise UsageError("this lease is in use; call lease() for another one")
        self._is_entered = True
        try:
            self.env_index = await self._leases.take()
        finally:
            self._is_entered = self.env_index is not None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        env, self.env_index, self._is_entered = self.env_index, None, False
        if env is not None:
            self._leases.give_back(env)

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None, timeout: float | None = None
    ) -> tuple[Any, Infos]:
        """The first observation of an episode, and its info. Drops the result of a step that was too late.

        Raises EnvError, ClosedError; WaitTimeout as `step` does.
        """
        seeds = None if seed is None else [seed]
        obs, *_, info = await self._answer("reset", lambda env: self._envs.send_reset([env], seeds, options), timeout)
        return obs, info

    async def step(self, action: Any, timeout: float | None = None) -> tuple[Any, float, bool, bool, Infos]:
        """The env's step: obs, reward, terminated, truncated, info.

        Raises WaitTimeout after `timeout` seconds: the step stays pending, and the next `step` waits for its result and
        sends nothing. A call that is cancelled drops its result; the next one waits for that first.
        """
        actions = _batched(self._envs.single_action_space, action)
        row: tuple[Any, float, bool, bool, Infos]
        row = await self._answer("step", lambda env: self._envs.send(actions, [env]), timeout)
        return row

    async def _answer(self, kind: str, send: Callable[[int], None], timeout: float | None) -> Any:
        """The row with which the env answers. Sends first, unless it owes the answer to such a call that was late."""
        ends = math.inf if timeout is None else time.monotonic() + (timeout_of(timeout) or 0.0)
        while True:
            if (env := self.env_index) is None:
                raise UsageError("this env was given back at the end of its `async with` block; lease() another one")
            if (answer := self._leases.answers.get(env)) is None:
                answer = self._leases.ask(env, kind, send)
            elif answer.is_awaited:
                raise PendingError(f"env {env}: another task waits for this env; a lease is for one task")
            elif not answer.is_dropped and answer.kind == "reset" != kind:
                raise PendingError(
                    f"env {env}: its reset was late and is pending; call reset() again, which waits for it"
                )
            answer.is_dropped |= answer.kind != kind
            is_own = not answer.is_dropped
            row, error = await answer.wait(env, ends, is_own=is_own)
            if is_own and error is not None:
                raise error
            if is_own:
                return row


class _Answer:
    """The answer that an env owes to a call. kind: "reset" or "step".

    is_awaited: whether the call waits for it.  is_dropped: whether nobody will; else the call was too late.
    """

    def __init__(self, kind: str, loop: asyncio.AbstractEventLoop) -> None:
        self.kind, self.outcome = kind, loop.create_future()
        self.is_awaited = self.is_dropped = False

    async def wait(self, env: int, ends: float, *, is_own: bool) -> Outcome:
        """The outcome, until `ends`. is_own: whether the caller wants it; else it waits for the env to be free."""
        self.is_awaited = is_own
        try:  # not `wait_for`, which may lose the result, or the cancellation
            await asyncio.wait((self.outcome,), timeout=None if ends == math.inf else max(0.0, ends - time.monotonic()))
        except asyncio.CancelledError:
            self.is_dropped |= is_own
            raise
        finally:
            self.is_awaited &= not is_own
        if not self.outcome.done():
            raise WaitTimeout(
                f"env {env} has not answered in time; its answer stays pending, and the same call waits for it"
            )
        outcome: Outcome = self.outcome.result()
        return outcome


class Leases:
    """The envs of one vector env that are lent, in one loop. owing: those that owe an answer which nobody wants."""

    def __init__(self, envs: Any, loop: asyncio.AbstractEventLoop, owing: Iterable[int]) -> None:
        self.loop, self._envs = loop, weakref.ref(envs)  # the leases keep it
        self._notify_fd, self._notify = envs._backend.notify_fd, envs._caller.notify
        hosts = len(envs._backend.first_envs) - 1
        self._steps_here = hosts > envs._backend.num_workers  # somebody has to step those, too
        self.answers = {env: _Answer("", loop) for env in owing}
        self._returned = set(self.answers)  # given back while they owed an answer
        self._free = deque(env for env in range(envs.num_envs) if env not in self._returned)
        self._takers: deque[asyncio.Future[int]] = deque()
        self._reader, self._lent, self._fd = _OwnInfos(envs.info_reader.columns), 0, -1
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_used(self) -> bool:
        """True while envs are lent, or waited for, in a loop that runs."""
        return bool(self._lent) and not self.loop.is_closed()

    # ---- lending

    async def take(self) -> int:
        """A free env, once there is one."""
        envs: Any = self._envs()
        envs.require_open()
        if not self._lent and envs.num_pending > len(self.answers):
            raise PendingError("lease: envs owe answers to an earlier call; take these with recv() first")
        self._lent += 1
        self._watches()
        if self._free:
            return self._free.popleft()
        taker: asyncio.Future[int] = self.loop.create_future()
        self._takers.append(taker)
        try:
            return await taker
        except BaseException:
            self._lent -= 1
            if taker.done() and not taker.cancelled() and taker.exception() is None:
                self._lend(taker.result())
            raise

    def give_back(self, env: int) -> None:
        """Takes an env back; it is lent again once it owes nothing."""
        self._lent -= 1
        if (answer := self.answers.get(env)) is not None:
            answer.is_dropped = True
            self._returned.add(env)
        else:
            self._lend(env)
        if not self._lent:
            self._stop()  # answers that nobody wants are taken by the next lease

    def _lend(self, env: int) -> None:
        while self._takers:
            taker = self._takers.popleft()
            if not taker.done():
                return taker.set_result(env)
        return self._free.append(env)

    # ---- answers

    def ask(self, env: int, kind: str, send: Callable[[int], None]) -> _Answer:
        """Sends an env something; returns the answer that it owes then."""
        self._notify(True)
        send(env)
        answer = self.answers[env] = _Answer(kind, self.loop)
        if self._steps_here:
            self._take()  # one env at a time: the loop goes on between two
        return answer

    def _take(self) -> None:
        """Hands the rows that are there to those that wait for them."""
        envs = self._envs()
        if not self.answers or envs is None:
            return
        self._notify(True)
        try:
            if (batch := _recv_now(envs, self._reader)) is None:
                self.loop.call_soon(self._take)
            self._hand_over(envs, batch)
        except WaitTimeout:
            pass
        except MusterError as error:
            if envs.closed:
                self._end(error)
            for failure in error.failures:
                self._answered(failure.env_index, (None, to_exception(failure)))
            self._hand_over(envs, error.batch)
            # Without failures it is a call's that was wrong: another thread is in one, or has taken the answers.
        for env in [env for env in self.answers if not envs._caller.is_pending(env)]:
            taken = UsageError(f"env {env} is lent, and another call has taken its answer: recv() is not for lent envs")
            self._answered(env, (None, taken))

    def _hand_over(self, envs: Any, batch: Any) -> None:
        if batch is None:
            return
        infos = batch.infos.get(_ROWS) or [{} for _ in batch.env_ids]
        obs = iterate(envs.observation_space, batch.obs)
        scalars = batch.rewards.tolist(), batch.terminated.tolist(), batch.truncated.tolist()
        for env, *row in zip(batch.env_ids.tolist(), obs, *scalars, infos, strict=True):
            self._answered(env, (tuple(row), None))

    def _answered(self, env: int, outcome: Outcome) -> None:
        answer = self.answers.pop(env, None)
        if answer is not None and not answer.outcome.done():
            answer.outcome.set_result(outcome)
        if env in self._returned:
            self._returned.discard(env)
            self._lend(env)

    # ---- the watch

    def _watches(self) -> None:
        if self._timer is None:
            if self._notify_fd >= 0:
                self._fd = os.dup(self._notify_fd)  # closed in this loop alone, which knows it
                self.loop.add_reader(self._fd, self._is_notified)
            self._look()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._fd >= 0:
            self._notify(False)
            self.loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _is_notified(self) -> None:
        os.eventfd_read(self._fd)
        self._take()

    def _look(self) -> None:
        """Looks for workers that are dead or late, which notify nobody."""
        self._timer = self.loop.call_later(_WATCH_S, self._look)
        self._take()

    def end(self) -> None:
        """Wakes all that wait: the vector env is closed. From any thread."""
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            if self.loop.is_running() and here is not self.loop:
                self.loop.call_soon_threadsafe(self._end)
            elif not self.loop.is_closed():
                self._end()

    def _end(self, error: BaseException | None = None) -> None:
        self._stop()
        error = error or ClosedError("this vector env was closed while a task waited for one of its envs")
        for env in [*self.answers]:
            self._answered(env, (None, copy.copy(error)))
        while self._takers:
            taker = self._takers.popleft()
            if not taker.done():
                taker.set_exception(copy.copy(error))


@verb
def _recv_now(envs: Any, reader: InfoReader) -> Any:
    """As `recv`, of the envs that are ready; None where it has restarted some instead. Raises WaitTimeout."""
    if envs._recovery is not None and envs._recovery.retry_failed(_RESTARTS):
        return None
    envs._wait(1, 0.0, "recv")
    return envs._batch._make(envs._read(True, reader)[:6])


class _OwnInfos(InfoReader):
    """Reads infos as one dict for each env, as the env has given it."""

    in_core = False

    def read(self, ids: Array, objects: Sequence[Iterator[Any]]) -> Infos:
        return {_ROWS: [self.last(env, rest) for env, rest in zip(ids.tolist(), objects, strict=True)]}

    def read_plain(self, ids: Array) -> Infos | None:
        return None

    def add(self, infos: Infos, info: Infos, row: int, count: int) -> None:
        infos.setdefault(_ROWS, [{} for _ in range(count)])[row] |= info


def _batched(space: Any, action: Any) -> Any:
    """The batch of one action."""
    if isinstance(space, spaces.Dict) and isinstance(action, dict):
        return {key: _batched(space.spaces.get(key), one) for key, one in action.items()}
    if isinstance(space, spaces.Tuple) and isinstance(action, tuple):
        return tuple(_batched(part, one) for part, one in zip(space.spaces, action, strict=False))
    return [action]
