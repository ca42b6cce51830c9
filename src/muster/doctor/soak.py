"""The long run of one env in a guarded process, and what grows in it."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from muster.doctor.diagnosis import Finding, Soak, SoakedQuantity, Trend, amount, seconds
from muster.doctor.findings import about_early_end
from muster.envs.player import RandomPlayer
from muster.hosts.trial import Reporter, TrialOutcome, Trials
from muster.pool.resources import descendants, memory_left, private_bytes, read_text
from muster.pool.worker import freeze_heap
from muster.recipes.recipe import Recipe
from muster.vector.side_by_side import built

_MOST_SAMPLES = 200
# Taking samples may take a tenth of the time.
_SAMPLE_COSTS_AT_MOST = 1 / 10
# An episode that takes longer than this part of the time is cut short, so that there are enough samples.
_LONGEST_EPISODE = 1 / 30
# A soak ends early at so much growth since its start: of memory a part of what is free, this much at most.
_PART_OF_MEMORY, _MOST_BYTES = 0.25, 4 << 30
_MOST_HANDLES = 0.9  # of what the process may open
_MOST_CHILDREN = 200

# The first third of a soak is for caches and lazy imports; only what grows after it can be a leak.
_WARM_UP = 1 / 3
_FEWEST_LATER_SAMPLES = 12
# A leak goes on: from one quarter of the later samples to the next it adds this part of its mean, at least. And it
# stands out from what comes and goes within a quarter.
_GOES_ON, _STANDS_OUT = 0.5, 2.0
_MILLION = 1e6
# A leak of memory that takes no more than this in a million steps deserves no care.
_SLIGHT_BYTES = 10e6


class Sample(NamedTuple):
    """The process of a soaked env right after a reset, without garbage.

    at_s: seconds since the start.  memory_bytes: resident, and what its children share with nobody.
    handles: of its own process alone.
    """

    at_s: float
    steps: int
    episodes: int
    memory_bytes: int
    handles: int
    children: int


# By field of `Sample`: name, unit, and the growth after the first third that is none: an amount, or a part of what
# there was. Memory comes last: whatever else leaks takes some of it, too.
_QUANTITIES = {
    "handles": ("file handles", "", (2.5, 0.0)),
    "children": ("child processes", "", (2.5, 0.0)),
    "memory_bytes": ("memory", "bytes", (256_000, 0.005)),
}


def soaking(recipe: Recipe, reporter: Reporter, seconds: float, most_bytes: int) -> None:
    """The trial that steps and resets one env for so many seconds, and reports samples of what its process holds.

    most_bytes: growth of memory that ends the soak early. The quantity that has done so is reported as ``stopped_by``.
    """
    reporter.stage("building it")
    with built(recipe) as env:
        freeze_heap(collects=True)  # as in a worker
        most_handles = _MOST_HANDLES * resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        limits = {"memory_bytes": most_bytes, "handles": most_handles, "children": _MOST_CHILDREN}
        reporter.stage("soaking it")
        first, names = None, _names()
        for sample in _samples(env, seconds, reporter.alive):
            reporter.append("samples", sample)
            first = first or sample
            over = [one for one, most in limits.items() if getattr(sample, one) - getattr(first, one) > most]
            if over:
                reporter.result("stopped_by", over[0])
                break
        for field, more in _names().items():
            if added := (more - names[field]).most_common(1):
                reporter.result(f"new {field}", added[0][0])
        reporter.stage("closing it")


def _samples(env: Any, seconds: float, alive: Callable[[], None]) -> Iterator[Sample]:
    """Plays an env by random actions for so many seconds. alive: called after each step."""
    player = RandomPlayer(env)
    player.seed(0)
    steps = episodes = 0
    start, next_at_s, seed = time.perf_counter(), 0.0, {"seed": 0}
    while True:
        player.begin_episode(**seed)
        began_at_s = at_s = time.perf_counter() - start
        episodes, seed = episodes + 1, {}
        if at_s >= next_at_s or at_s > seconds:
            cpu_s = time.thread_time()
            yield Sample(at_s, steps, episodes, *_held())
            # Not by the wall's clock: while other processes have the core, the env does not step either.
            next_at_s = at_s + max(seconds / _MOST_SAMPLES, (time.thread_time() - cpu_s) / _SAMPLE_COSTS_AT_MOST)
            if at_s > seconds:
                return
        while not player.over and at_s <= min(seconds, began_at_s + seconds * _LONGEST_EPISODE):
            player.take_step(player.act())
            at_s = time.perf_counter() - start
            steps += 1
            alive()


def _held() -> tuple[int, int, int]:
    gc.collect()  # what waits for its collection is no leak
    children = descendants(os.getpid()) or ()
    # In a fork its own private memory would grow with each page of the caller's that it writes to.
    resident_bytes = int(read_text(Path("/proc/self/statm")).split()[1]) * os.sysconf("SC_PAGE_SIZE")
    held_bytes = resident_bytes + sum(private_bytes(child) or 0 for child in children)
    return held_bytes, len(os.listdir("/proc/self/fd")), len(children)


def _names() -> dict[str, Counter[str]]:
    handles = Counter[str]()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            handles[re.sub(r":\[\d+\]$", "", os.readlink(f"/proc/self/fd/{fd}"))] += 1  # pipe:[4711], socket:[4711]
    children = descendants(os.getpid()) or ()
    return {"handles": handles, "children": Counter(read_text(Path(f"/proc/{one}/comm")).strip() for one in children)}


# ---- the verdicts


def run_soak(env: Trials, soak_s: float) -> tuple[Soak | None, list[Finding]]:
    """Steps and resets an env for `soak_s` seconds in one trial; returns what grew, and the verdicts."""
    most_bytes = min(_MOST_BYTES, int(_PART_OF_MEMORY * memory_left()[0]))
    return judge_soak(env.run(soaking, seconds=soak_s, most_bytes=most_bytes), soak_s)


def judge_soak(outcome: TrialOutcome, soak_s: float) -> tuple[Soak | None, list[Finding]]:
    """The soak that the trial `soaking` has reported, and the findings that follow. soak_s: what was asked for."""
    findings = about_early_end(outcome, "warns")
    samples = [Sample(*row) for row in outcome.results.get("samples", ())]
    if not samples:
        return None, findings
    stopped_by, last = outcome.results.get("stopped_by"), samples[-1]
    grown = {field: _growth(field, samples, field == stopped_by) for field in _QUANTITIES}
    quantities = tuple(growth for growth in grown.values() if growth is not None)
    soak = Soak(last.at_s, soak_s, last.steps, last.episodes, quantities)
    played = f"{seconds(soak.seconds)}, {soak.episodes:,} episodes and {soak.steps:,} steps"
    for field, growth in grown.items():
        if growth is not None and growth.trend == "grows":
            text = _about_leak(growth, soak, outcome.results.get(f"new {field}"))
            if field == stopped_by:
                text += f". The soak was ended there, after {soak.seconds:.3g} of {soak_s:g} s, to spare the machine"
            slight = growth.unit == "bytes" and growth.a_step * _MILLION < _SLIGHT_BYTES
            findings.append(Finding("note" if slight else "warns", "soak", text))
    if not findings and quantities:
        names = ", ".join(one.name for one in quantities)
        findings.append(Finding("good", "soak", f"no leak in {played}: {names} stay as they are"))
    elif not findings:
        text = f"{played} are too few to show that anything grows: soak it for longer"
        findings.append(Finding("note", "soak", text))
    return soak, findings


def _growth(field: str, samples: Sequence[Sample], stopped: bool) -> SoakedQuantity | None:
    """The course of one quantity; None where the samples are too few. stopped: whether it ended the soak."""
    name, unit, tolerance = _QUANTITIES[field]
    columns = ("at_s", "steps", "episodes", field)
    at_s, *counts, values = (np.array([getattr(one, column) for one in samples], np.float64) for column in columns)
    later = np.flatnonzero(at_s >= at_s[-1] * _WARM_UP)
    if len(later) < _FEWEST_LATER_SAMPLES and not stopped:
        return None
    quarters = np.array_split(later, 4)
    grows = stopped or _goes_on_growing([values[part] for part in quarters], tolerance)
    first, last = ([0], [-1]) if stopped else (quarters[0], quarters[-1])
    added = np.median(values[last]) - np.median(values[first])
    a_step, an_episode = (float(added / max(1.0, np.median(one[last]) - np.median(one[first]))) for one in counts)
    trend: Trend = "grows" if grows else "steady"
    thirds = np.searchsorted(at_s, at_s[-1] * np.arange(4) / 3).clip(max=len(at_s) - 1)
    marks = tuple(map(float, values[thirds]))
    return SoakedQuantity(name, unit, trend, marks, a_step * grows, an_episode * grows)


def _goes_on_growing(quarters: Sequence[npt.NDArray[np.float64]], tolerance: tuple[float, float]) -> bool:
    typical = np.array([np.median(values) for values in quarters])  # which bears what comes and goes
    added = np.diff(typical)
    grown = added.sum() * 4 / 3  # from the first sample to the last, not from middle to middle
    spread = np.median([np.median(np.abs(values - middle)) for values, middle in zip(quarters, typical, strict=True)])
    allowed = max(tolerance[0], tolerance[1] * typical[0], _STANDS_OUT * spread)
    return bool(grown > allowed and added.min() > _GOES_ON * added.mean())


def _about_leak(growth: SoakedQuantity, soak: Soak, example: str | None) -> str:
    many = f"after {soak.episodes:,} episodes and {soak.steps:,} steps"
    start, after = (amount(growth.marks[i], growth.unit) for i in (0, 3))
    rates = f"{amount(growth.a_step, growth.unit)} a step, {amount(growth.an_episode, growth.unit)} an episode"
    text = f"leaks {growth.name}, {rates}: from {start} to {after} {many}"
    if growth.unit == "bytes":
        text += f". A million steps would take {amount(growth.a_step * _MILLION, growth.unit)}"
    return text if example is None else f"{text}, such as {example}"
