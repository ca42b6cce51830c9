"""The long run of one env in a guarded process, and the samples of what the process holds meanwhile."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import re
import resource
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from muster.doctor.temporary_files import TemporaryFiles
from muster.envs.player import RandomPlayer
from muster.recipes.recipe import Recipe
from muster.vector.side_by_side import built
from muster.workers.env_host import freeze_heap
from muster.workers.resources import read_text
from muster.workers.trial_process import Reporter
from muster.workers.usage import anonymous_bytes, descendants

_MOST_SAMPLES_PER_S = 10.0
_FEWEST_SAMPLES = 200
# Taking a sample may take a thirtieth of the time.
_SAMPLE_COSTS_AT_MOST = 1 / 30
# Full garbage collections. Cycles of objects that wait for one are no leak, but Python may take minutes to get to it.
_COLLECTIONS = 24
# An episode that takes longer than this part of the time is cut short, so that there are enough resets.
_LONGEST_EPISODE = 1 / 20
_KEPT_STEPS = 4096
_SPARE_FDS = 8
_MOST_COUNTED_BYTES = 500_000_000
# A soak ends early before these would be used up, by growth since its start.
_MOST_CHILDREN, _MOST_THREADS, _MOST_FILES = 200, 1000, 20_000
_MOST_HANDLES = 0.9  # of what the process may open


class Sample(NamedTuple):
    """The process of a soaked env at one moment.

    at_s: seconds since the start.  memory_bytes: that belongs to no file, of all its processes.  handles, threads: of
    its own process alone.  files: in its folder for temporary files.  common_files: its own ones in the machine's
    folders for temporary files.  step_s, reset_s: medians since the sample before, None without any.
    """

    at_s: float
    steps: int
    episodes: int
    memory_bytes: int
    handles: int
    threads: int
    children: int
    files: int
    common_files: int
    step_s: float | None
    reset_s: float | None


def soaking(recipe: Recipe, reporter: Reporter, seconds: float, folder: str, most_bytes: int) -> None:
    """The trial that steps and resets one env for so many seconds, and reports samples of what its process holds.

    folder: the place for its temporary files.  most_bytes: growth of memory that ends the soak early.
    """
    files = TemporaryFiles(folder)
    reporter.stage("building it")
    with built(recipe) as env:
        freeze_heap(collects=True)  # as in a worker
        reporter.stage("soaking it")
        soak = Soaking(env, seconds, files, most_bytes, partial(reporter.append, "samples"))
        try:
            soak.run()
        finally:
            reporter.result("stopped_by", soak.stopped_by)
            reporter.result("cut_short", soak.cut_short)
            reporter.result("most_handles", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
            with contextlib.suppress(OSError):  # the env has used up all handles again
                reporter.result("new_names", soak.new_names())
        reporter.stage("closing it")


class Soaking:
    """One env that is stepped and reset by random actions until its time is over.

    most_bytes: growth of memory that ends the soak early.  on_sample: called with each sample.
    stopped_by: the field of `Sample` that has ended the soak early, else None.  cut_short: episodes that were.
    """

    def __init__(
        self,
        env: Any,
        seconds: float,
        files: TemporaryFiles,
        most_bytes: int,
        on_sample: Callable[[Sample], None],
    ) -> None:
        self._player = RandomPlayer(env)
        self._seconds = seconds
        self._on_sample = on_sample
        self._files = files
        self._spare_fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(_SPARE_FDS)]
        self._limits = {
            "memory_bytes": most_bytes,
            "children": _MOST_CHILDREN,
            "threads": _MOST_THREADS,
            "files": _MOST_FILES,
            "common_files": _MOST_FILES,
        }
        # Filled in place: what is kept for each sample would look like a leak of the env.
        self._durations_s = {"step": np.zeros(_KEPT_STEPS), "reset": np.zeros(_KEPT_STEPS)}
        self._counts = {"step": 0, "reset": 0}
        self._steps = self._episodes = 0
        self._sampled_at = self._collected_at = -math.inf
        self._cost_s = 0.0
        self._first: Sample | None = None
        self.stopped_by: str | None = None
        self.cut_short = 0

    def run(self) -> None:
        """Soaks the env. Its exceptions pass through, after a last sample."""
        self._player.seed(0)
        self._start = time.perf_counter()
        self._reset(seed=0)
        self._before = self._names()
        self._sample()
        try:
            while self.stopped_by is None and self._elapsed() < self._seconds:
                if self._player.over or self._elapsed() - self._began_at > self._seconds * _LONGEST_EPISODE:
                    self.cut_short += not self._player.over
                    self._reset()
                else:
                    self._step()
                if self._elapsed() > self._next_sample_at():
                    self._sample_if_possible()
        finally:
            while self._spare_fds:
                os.close(self._spare_fds.pop())
            self._sample_if_possible()

    def new_names(self) -> dict[str, str]:
        """By field of `Sample`: the name that most of what has been added since the start bears."""
        added = {field: (names - self._before[field]).most_common(1) for field, names in self._names().items()}
        return {field: most[0][0] for field, most in added.items() if most}

    # ---- stepping

    def _elapsed(self) -> float:
        return time.perf_counter() - self._start

    def _reset(self, **arguments: Any) -> None:
        started = self._elapsed()
        self._player.begin_episode(**arguments)
        self._began_at = self._elapsed()
        self._episodes += 1
        self._note("reset", self._began_at - started)

    def _step(self) -> None:
        action = self._player.act()
        started = self._elapsed()
        self._player.take_step(action)
        self._steps += 1
        self._note("step", self._elapsed() - started)

    def _note(self, kind: str, duration_s: float) -> None:
        self._durations_s[kind][self._counts[kind] % _KEPT_STEPS] = duration_s
        self._counts[kind] += 1

    def _take_median(self, kind: str) -> float | None:
        count, self._counts[kind] = min(self._counts[kind], _KEPT_STEPS), 0
        return float(np.median(self._durations_s[kind][:count])) if count else None

    # ---- sampling

    def _next_sample_at(self) -> float:
        between_s = min(1 / _MOST_SAMPLES_PER_S, self._seconds / _FEWEST_SAMPLES)
        return self._sampled_at + max(between_s, self._cost_s / _SAMPLE_COSTS_AT_MOST)

    def _sample_if_possible(self) -> None:
        try:
            self._sample()
        except OSError:  # this process may not open any more files
            self.stopped_by = "handles"

    def _sample(self) -> None:
        now = self._elapsed()
        if gc.isenabled() and now - self._collected_at >= self._seconds / _COLLECTIONS:
            self._collected_at = now
            gc.collect()
        sampled_at, started_at = self._elapsed(), time.thread_time()
        started = started_processes()
        handles = len(os.listdir("/proc/self/fd")) - len(self._spare_fds)
        sample = Sample(
            at_s=sampled_at,
            steps=self._steps,
            episodes=self._episodes,
            memory_bytes=own_memory() + sum(anonymous_bytes(pid, shared=True) or 0 for pid in started),
            handles=handles,
            threads=len(os.listdir("/proc/self/task")),
            children=len(started),
            files=len(self._files.own()),
            common_files=len(self._files.common(started)),
            step_s=self._take_median("step"),
            reset_s=self._take_median("reset"),
        )
        self._on_sample(sample)
        self._first = first = self._first or sample
        if handles > _MOST_HANDLES * resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
            self.stopped_by = "handles"
        for field, limit in self._limits.items():
            if getattr(sample, field) - getattr(first, field) > limit:
                self.stopped_by = field
        self._sampled_at = self._elapsed()
        # Not by the wall's clock: while other processes have the core, the env does not step either.
        self._cost_s = time.thread_time() - started_at

    def _names(self) -> dict[str, Counter[str]]:
        own = _name("self")  # that of threads which nobody has named
        return {
            "handles": Counter(map(_link, Path("/proc/self/fd").iterdir())),
            "threads": Counter(
                name for one in os.listdir("/proc/self/task") if (name := _name(f"self/task/{one}")) != own
            ),
            "children": Counter(map(_name, started_processes())),
            "files": Counter(self._files.own()),
            "common_files": Counter(self._files.common(started_processes())),
        }


def started_processes() -> set[int]:
    """The processes that this one has started, orphans in its session included. It must lead that session."""
    own = os.getpid()
    in_session = {int(name) for name in os.listdir("/proc") if name.isdigit() and _session(int(name)) == own}
    return (in_session | set(descendants(own) or ())) - {own}


def own_memory() -> int:
    """Bytes of memory of this process that belong to no file, shared memory included; 0 where the kernel does not tell.

    Counted to the page where that is quick: the other figure may be some pages off for each core. Pages that the
    process inherited from the one that forked it count from the start, so that writing to them is no growth.
    """
    quick = anonymous_bytes(os.getpid(), shared=True) or 0
    if quick > _MOST_COUNTED_BYTES:
        return quick
    lines = (line.split() for line in read_text(Path("/proc/self/smaps_rollup")).splitlines()[1:])
    names = ("Anonymous:", "Pss_Shmem:", "Swap:")
    return sum(int(words[1]) * 1024 for words in lines if words[0] in names) or quick


def _session(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return os.getsid(pid)
    return None


def _name(process: str | int) -> str:
    return read_text(Path(f"/proc/{process}/comm")).strip()


def _link(path: Path) -> str:
    with contextlib.suppress(OSError):
        return re.sub(r":\[\d+\]$", "", os.readlink(path))  # pipe:[4711] and socket:[4711]
    return ""
