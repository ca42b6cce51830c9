"""Envs that wait: coroutine envs, and envs that are bound to the thread that has built them."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
import time
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

import muster

STEP, RAISE, HANG, SWALLOW, BLOCK, DELAY, EXIT, CANCEL, EXIT_IN_TASK, STOP_LOOP, LONG_DELAY, CANCEL_ALL = range(12)
Row = tuple[Any, float, bool, bool, dict[str, Any]]


class Base:
    """Observes ``[episode, step, a random number]`` in a buffer that it reuses; `length` steps an episode."""

    metadata: ClassVar[dict[str, Any]] = {}
    render_mode = None
    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = spaces.Discrete(12)

    def __init__(self, wait_s: float = 0.0, length: int = 1000) -> None:
        self.wait_s, self.length, self.episode, self.t = wait_s, length, 0, 0
        self.buffer, self.generator = np.zeros(3), np.random.default_rng(0)

    def _reset(self, seed: int | None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.generator = np.random.default_rng(seed)
        self.episode, self.t = self.episode + 1, 0
        self.buffer[:] = self.episode, 0, self.generator.random()
        return self.buffer, {"env": here()}

    def _step(self) -> Row:
        self.t += 1
        self.buffer[:] = self.episode, self.t, self.generator.random()
        info = {"env": here(), "text": "x" * self.t, "same": self.buffer}
        return self.buffer, float(self.t), self.t >= self.length, False, info


def here() -> int:
    info = muster.get_worker_info()
    return -1 if info is None or info.env_index is None else info.env_index


class Coroutines(Base):
    """An env with coroutine functions. The action says what it does."""

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        await asyncio.sleep(self.wait_s)
        return self._reset(seed)

    async def step(self, action: int) -> Row:
        wait_s = self.wait_s
        match int(action):
            case 1:
                raise ValueError("refused")
            case 2:
                await asyncio.Event().wait()
            case 3:
                while True:
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.sleep(60)
            case 4:
                time.sleep(wait_s or 60)
            case 5:
                wait_s = 0.3
            case 6:
                raise SystemExit(3)
            case 7:
                raise asyncio.CancelledError("its own")
            case 8:
                await asyncio.gather(self.exits())
            case 9:
                asyncio.get_running_loop().stop()
            case 11:
                await self.cancel_all()
        # In a task of its own, as wait_for makes one.
        await asyncio.wait_for(asyncio.create_task(self.waits(wait_s)), 60)
        return self._step()

    async def waits(self, wait_s: float) -> int:
        await asyncio.sleep(wait_s)
        return here()

    async def exits(self) -> None:
        raise SystemExit(4)

    async def asked(self, value: int) -> tuple[int, int]:
        return value, await self.waits(0.01)

    async def cancel_all(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def close(self) -> None:
        await self.cancel_all()


class Bound(Base):
    """An env of ordinary methods that only its own thread may call."""

    def __init__(self, wait_s: float = 0.0, length: int = 1000, hangs_s: float = 60.0) -> None:
        super().__init__(wait_s, length)
        self.hangs_s = hangs_s
        self.thread, self.database = threading.get_ident(), sqlite3.connect(":memory:")
        self.database.execute("create table steps (t integer)")

    def require_thread(self) -> None:
        assert threading.get_ident() == self.thread

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.require_thread()
        return self._reset(seed)

    def step(self, action: int) -> Row:
        self.require_thread()
        self.database.execute("insert into steps values (?)", (self.t,))
        if int(action) == RAISE:
            raise ValueError("refused")
        time.sleep({HANG: self.hangs_s, DELAY: 0.3, LONG_DELAY: 1.5}.get(int(action), self.wait_s))
        return self._step()

    def asked(self, value: int) -> tuple[int, int]:
        self.require_thread()
        return value, here()

    def render(self) -> int:
        self.require_thread()
        return len(self.database.execute("select t from steps").fetchall())

    def close(self) -> None:
        self.require_thread()
        self.database.close()


class SlowToClose(Bound):
    """Its close hangs."""

    def close(self) -> None:
        time.sleep(60)
