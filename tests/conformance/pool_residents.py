"""Residents for the contract of pools, which know no env, and functions that tell them what to do."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hanging import go_on, hang
from muster.pool.limits import CloseLimits
from muster.pool.messages import Build, Failed
from muster.pool.place import Plan
from muster.pool.pool import Pool
from muster.pool.set_up import Processes
from muster.pool.verbs import Successor
from muster.pool.worker import Here, Resident
from muster.worker_info import WorkerInfo

NUM_PARTS = 2


@dataclass
class Doing:
    """A plan. build, close: called with the resident when it is built, and when each of its parts is closed."""

    build: Callable[[Echo], object] | None = None
    close: Callable[[Echo], object] | None = None


class Echo(Resident):
    """Its facts are its plan, its answers the questions, and what it says at its end is what was posted to it.

    A question or a post that can be called is called with the resident instead.
    """

    def __init__(self, plan: Any, here: Here) -> None:
        self.plan, self.here = plan, here
        self.posts: list[Any] = []
        if isinstance(plan, Doing) and plan.build is not None:
            plan.build(self)

    def facts(self) -> Any:
        return self.plan

    def answer(self, question: Any) -> Any:
        return question(self) if callable(question) else question

    def take(self, message: Any) -> None:
        if callable(message):
            message(self)
        else:
            self.posts.append(message)

    def close(self, closes: Callable[[int], None]) -> Any:
        for self.part in range(NUM_PARTS):
            closes(self.part)
            if isinstance(self.plan, Doing) and self.plan.close is not None:
                self.plan.close(self)
        return self.posts


class DiesInSetUp(Echo):
    """Dies before anything of its plan is there."""

    @classmethod
    def prepare(cls) -> None:
        die()


class DiesInUnpacking:
    """A plan whose rebuilding kills."""

    def __reduce__(self) -> tuple[Any, ...]:
        return die, ()


class HangsInUnpacking:
    """A plan whose rebuilding does not end."""

    def __reduce__(self) -> tuple[Any, ...]:
        return hang, ()


class ArrivesBroken:
    """Can be pickled, but not rebuilt."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


class StaysAtHome(Exception):
    """Cannot be pickled, and says so."""

    def __reduce__(self) -> NoReturn:
        raise TypeError("stays at home")


class Outer(Echo):
    """Holds a pool of its own, and passes questions on to it. plan: the start method of that."""

    def __init__(self, plan: str, here: Here) -> None:
        super().__init__(plan, here)
        self.inner = Pool(name_of(Echo), [plan_for(0)], Processes(plan), Hooks())
        self.inner.start()

    def answer(self, question: Any) -> Any:
        asked = self.inner.round()
        asked.ask({0: question}, "at work")
        return [asked.answers[place].content for place in asked.wait()]

    def close(self, closes: Callable[[int], None]) -> Any:
        return self.inner.close(CloseLimits())


class Reported(Exception):
    """What `Hooks.raised` makes of a report. Its cause is the original exception."""

    def __init__(self, place: int, failed: Failed) -> None:
        super().__init__(f"place {place}: {failed.type_name}: {failed.message}")
        self.place, self.failed = place, failed
        self.__cause__ = failed.original()


class Hooks:
    """An owner. successors: of lost workers, one after the other; then a loss is an error.

    lost, rung: the calls of `on_lost` and `ring`.  at: called with the name of each hook that is called.
    """

    def __init__(self, *successors: Successor, at: Callable[[str], object] = lambda _: None, pending: int = 0) -> None:
        self.successors, self.at, self._pending = list(successors), at, pending
        self.lost: list[tuple[int, str]] = []
        self.rung: list[int] = []

    def on_lost(self, place: int, reason: str) -> Successor | None:
        self.at("on_lost")
        self.lost.append((place, reason))
        return self.successors.pop(0) if self.successors else None

    def raised(self, place: int, failed: Failed) -> BaseException:
        self.at("raised")
        return Reported(place, failed)

    def doing(self, place: int) -> str:
        self.at("doing")
        return f"at work in place {place}"

    def state(self, place: int) -> None:
        self.at("state")

    def pending(self, place: int) -> int:
        self.at("pending")
        return self._pending

    def ring(self, place: int) -> None:
        self.at("ring")
        self.rung.append(place)


def name_of(resident: type[Resident] | str) -> str:
    return resident if isinstance(resident, str) else f"{resident.__module__}:{resident.__name__}"


def plan_for(index: int, content: Any = None, num_places: int = 1) -> Plan:
    return Plan(content, WorkerInfo(None, index, num_places, num_places, seed=None), parts=NUM_PARTS)


# ---- what residents do; each can be called with the resident


def die(*_: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL kills")


def hang_in_the_first_part(resident: Echo) -> None:
    if resident.part == 0:
        hang()


def stop(*_: object) -> None:
    """Stops this process, as Ctrl-Z does."""
    os.kill(os.getpid(), signal.SIGSTOP)


def fail(resident: Echo) -> NoReturn:
    raise ValueError(f"no, says place {resident.here.info.worker_index}")


def fail_at_home(_: Echo) -> NoReturn:
    raise StaysAtHome("hello")


def lock(_: Echo) -> Any:
    """What cannot be pickled."""
    return threading.Lock()


def broken(_: Echo) -> ArrivesBroken:
    return ArrivesBroken()


def post_broken(resident: Echo) -> None:
    resident.posts.append(ArrivesBroken())


def posts(resident: Echo) -> list[Any]:
    return resident.posts


def place(resident: Echo) -> int:
    return resident.here.info.worker_index


def open_fds(_: Echo) -> int:
    return len(os.listdir("/proc/self/fd"))


def plan(resident: Echo) -> Any:
    return resident.plan


def log(resident: Echo) -> None:
    logging.getLogger("resident").warning("logged in place %d", place(resident))


def hang_shortly(_: Echo) -> None:
    time.sleep(0.3)


def speak_unknown(resident: Echo) -> None:
    """Sends the owner what only an owner sends."""
    resident.here.send(Build())


@dataclass
class Waits:
    """Waits until there is a file, then answers with its own name."""

    gate: Path

    def __call__(self, _: Echo) -> str:
        while not (self.gate.exists() or go_on.is_set()):
            time.sleep(0.005)
        return self.gate.name


@dataclass
class Notes:
    """Appends a line to a file, with the place of the resident; then does something else."""

    path: Path
    line: str
    then: Callable[[Echo], object] | None = None

    def __call__(self, resident: Echo) -> object:
        with self.path.open("a") as file:
            file.write(f"{self.line} {resident.here.info.worker_index}\n")
        return None if self.then is None else self.then(resident)


@dataclass
class Reports:
    """Reports its progress some times, after a pause before each."""

    times: int
    pause_s: float = 0.0

    def __call__(self, resident: Echo) -> str:
        for i in range(self.times):
            time.sleep(self.pause_s)
            resident.here.report(i)
        return "reported"


def pause(seconds: float, _: Echo) -> None:
    time.sleep(seconds)


def pid(_: Echo) -> int:
    return os.getpid()


def report_halves(resident: Echo) -> str:
    """Reports two parts before it answers."""
    for part in ("first", "second"):
        resident.here.report(part)
    return "both"


def hash_of_a_word(_: Echo) -> int:
    return hash("word")


def be_noisy(_: Echo) -> None:
    os.write(1, b"printed")
    os.write(2, b"natively")
    logging.getLogger("resident").error("logged")


def start_nameless(_: Echo) -> int:
    """Starts a process with a group of its own and an empty environment; returns its pid."""
    return subprocess.Popen(["/bin/sleep", "1000"], env={}, process_group=0).pid


def arguments(_: Echo) -> list[str]:
    return sys.argv


def parent_pid(_: Echo) -> int:
    return os.getppid()
