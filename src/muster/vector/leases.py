"""Envs of a vector env that are lent to tasks of asyncio, one at a time, each until the task gives it back."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import iterate

from muster.errors import ClosedError, MusterError, PendingError, UsageError, WaitTimeout
from muster.hosts.failures import Failure, to_exception
from muster.pool.thread_pool import Outcome
from muster.spaces.tree import Array
from muster.transport.infos import InfoReader, Infos

_WATCH_S = 0.05
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
    if envs._leases is None or envs._leases.loop.is_closed():
        envs._leases = Leases(envs, loop)
    if envs._leases.loop is not loop:
        raise UsageError("lease() in two event loops: the envs of a vector env are lent in one, the first")
    return Lease(envs._leases)


class Lease:
    """One env, lent to the task that enters the ``async with`` block of `VectorEnv.lease`. Its infos are its own dict.

    env_index: of the env; None outside of the block.
    """

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self.env_index: int | None = None

    async def __aenter__(self) -> Self:
        if self.env_index is not None:
            raise UsageError("this lease is in use; call lease() for another one")
        self.env_index = await self._leases.take()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        env, self.env_index = self.env_index, None
        if env is not None:
            self._leases.give_back(env)

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None, timeout: float | None = None
    ) -> tuple[Any, Infos]:
        """The first observation of an episode, and its info. Raises EnvError, ClosedError, WaitTimeout as `step`."""
        seeds = None if seed is None else [seed]
        obs, *_, info = await self._ask(lambda env: self._leases.envs.send_reset([env], seeds, options), timeout)
        return obs, info

    async def step(self, action: Any, timeout: float | None = None) -> tuple[Any, float, bool, bool, Infos]:
        """The env's step: obs, reward, terminated, truncated, info.

        Raises WaitTimeout after `timeout` seconds: the step stays pending, and the next call waits for its result and
        sends nothing. A call that is cancelled drops its result; the next one waits for that first.
        """
        actions = _batched(self._leases.envs.single_action_space, action)
        row: tuple[Any, float, bool, bool, Infos]
        row = await self._ask(lambda env: self._leases.envs.send(actions, [env]), timeout)
        return row

    async def _ask(self, send: Callable[[int], None], timeout: float | None) -> Any:
        if self.env_index is None:
            raise UsageError("this env was given back at the end of its `async with` block; lease() another one")
        return await self._leases.answer(self.env_index, partial(send, self.env_index), timeout)


class _Answer:
    """The answer that an env owes. is_dropped: whether the call that had asked for it was cancelled."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.outcome: asyncio.Future[Outcome] = loop.create_future()
        self.is_awaited, self.is_dropped = True, False


class Leases:
    """The envs of one vector env that are lent, in one loop."""

    def __init__(self, envs: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.envs, self.loop = envs, loop
        self._fd, self._notify = envs._backend.notify_fd, envs._caller.notify
        hosts = len(envs._backend.first_envs) - 1
        self._steps_here = hosts > envs._backend.num_workers  # somebody has to step those, too
        self._free = deque(range(envs.num_envs))
        self._takers: deque[asyncio.Future[int]] = deque()
        self._answers: dict[int, _Answer] = {}
        self._returned: set[int] = set()  # given back while they owed an answer
        self._reader, self._lent = _OwnInfos(envs.info_reader.columns), 0
        self._timer: asyncio.TimerHandle | None = None

    # ---- lending

    async def take(self) -> int:
        """A free env, once there is one."""
        self.envs.require_open()
        if not self._lent and self.envs.num_pending:
            raise PendingError("lease: envs owe answers to an earlier call; take these with recv() first")
        self._lent += 1
        self._watches(True)
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
        if env in self._answers:
            self._returned.add(env)
        else:
            self._lend(env)
        self._watches(bool(self._lent or self._answers))

    def _lend(self, env: int) -> None:
        while self._takers:
            taker = self._takers.popleft()
            if not taker.done():
                return taker.set_result(env)
        return self._free.append(env)

    # ---- answers

    async def answer(self, env: int, send: Callable[[], None], timeout: float | None) -> Any:
        """The row with which an env answers; sends first, unless it owes the answer to a call that was too late."""
        answer = self._answers.get(env)
        if answer is not None and answer.is_awaited:
            raise PendingError(f"env {env}: another task waits for this env; a lease is for one task")
        while answer is not None and answer.is_dropped:
            await asyncio.wait([answer.outcome])
            answer = self._answers.get(env)
        if answer is None:
            self._notify(True)
            send()
            answer = self._answers[env] = _Answer(self.loop)
            if self._steps_here:
                self.loop.call_soon(self._take)
        answer.is_awaited = True
        try:
            row, error = await asyncio.wait_for(asyncio.shield(answer.outcome), timeout)
        except asyncio.CancelledError:
            answer.is_dropped = True
            raise
        except TimeoutError:
            raise WaitTimeout(
                f"env {env} has not answered within timeout={timeout}; its answer stays pending, and the next call "
                "waits for that"
            ) from None
        finally:
            answer.is_awaited = False
        if error is not None:
            raise error
        return row

    def _take(self) -> None:
        """Hands the rows that are there to those that wait for them."""
        if not self._answers:
            return None
        self._notify(True)
        try:
            batch = self.envs.recv(1, 0.0, _copies=True, _reader=self._reader)
            self._hand_over(batch)
        except WaitTimeout:
            return None
        except MusterError as error:
            failures: Sequence[Failure] = getattr(error, "failures", ())
            if self.envs.closed or not failures:
                return self.end(error)
            for failure in failures:
                self._answered(failure.env_index, (None, to_exception(failure)))
            self._hand_over(getattr(error, "batch", None))

    def _hand_over(self, batch: Any) -> None:
        if batch is None:
            return
        infos = batch.infos.get(_ROWS) or [{} for _ in batch.env_ids]
        rows = zip(
            iterate(self.envs.observation_space, batch.obs),
            batch.rewards.tolist(),
            batch.terminated.tolist(),
            batch.truncated.tolist(),
            infos,
            strict=True,
        )
        for env, row in zip(batch.env_ids.tolist(), rows, strict=True):
            self._answered(env, (row, None))

    def _answered(self, env: int, outcome: Outcome) -> None:
        answer = self._answers.pop(env, None)
        if answer is not None and not answer.outcome.done():
            answer.outcome.set_result(outcome)
        if env in self._returned:
            self._returned.discard(env)
            self._lend(env)

    # ---- the watch

    def _watches(self, watches: bool) -> None:
        if not watches or self.envs.closed:
            self._stop()
        elif self._timer is None:
            if self._fd >= 0:
                self.loop.add_reader(self._fd, self._is_notified)
            self._look()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            if self._fd >= 0:
                self.loop.remove_reader(self._fd)
                self._notify(False)

    def _is_notified(self) -> None:
        os.eventfd_read(self._fd)
        self._take()

    def _look(self) -> None:
        """Looks for workers that are dead or late, which notify nobody."""
        self._timer = self.loop.call_later(_WATCH_S, self._look)
        self._take()
        if not self._lent and not self._answers:
            self._stop()

    def end(self, error: BaseException | None = None) -> None:
        """Wakes all that wait: the vector env is closed. From any thread."""
        if self.loop.is_running() and asyncio._get_running_loop() is not self.loop:
            self.loop.call_soon_threadsafe(self._end, error)
        elif not self.loop.is_closed():
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self._stop()
        error = error or ClosedError("this vector env was closed while a task waited for one of its envs")
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.outcome.done():
                answer.outcome.set_result((None, error))
        while self._takers:
            taker = self._takers.popleft()
            if not taker.done():
                taker.set_exception(error)


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
