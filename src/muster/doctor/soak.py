"""The verdicts of a soak: what an env leaks, how fast, and where that ends."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from muster.doctor.diagnosis import Finding, Soak, SoakedQuantity, seconds, size
from muster.doctor.findings import about_early_end
from muster.doctor.growth import Growth, Tolerance, judge, overall, samples_needed
from muster.doctor.soaking import Sample, soaking
from muster.recipes.recipe import Recipe
from muster.workers.guarded import PackedRecipes, TrialOutcome, run_guarded
from muster.workers.resources import memory_left

# Growth that ends a soak early: a part of the free memory, this much at most.
_PART_OF_MEMORY, _MOST_BYTES = 0.25, 4 << 30
_NUMBERS = ("no", "one", "two", "three", "four", "five")
# A rate this close to a whole number is called that number.
_NEARLY = 0.03
_MILLION = 1e6
# A soak that is too short is to be longer by a half than what its samples ask for, and by this where it has none.
_MARGIN, _FAR_LONGER = 1.5, 10
# A leak of memory that takes no more than this in a million steps deserves no care.
_SLIGHT_BYTES = 10e6


@dataclass(frozen=True)
class _Quantity:
    """A quantity of `Sample`. name: in the plural for what is counted.  one: the singular."""

    field: str
    name: str
    unit: str
    tolerance: Tolerance
    one: str = ""


_FEW = Tolerance(2.5)
_COMMON = "common_files"
_QUANTITIES = (
    _Quantity("memory_bytes", "memory", "bytes", Tolerance(256_000, 0.005)),
    _Quantity("handles", "file handles", "", _FEW, "file handle"),
    _Quantity("threads", "threads", "", _FEW, "thread"),
    _Quantity("children", "child processes", "", _FEW, "child process"),
    _Quantity("files", "temporary files", "", _FEW, "temporary file"),
    _Quantity(_COMMON, "files in /tmp and /dev/shm", "", _FEW, "file in /tmp or /dev/shm"),
    _Quantity("step_s", "time of a step", "seconds", Tolerance(5e-6, 0.5, has_floor=False), "step"),
    _Quantity("reset_s", "time of a reset", "seconds", Tolerance(100e-6, 0.5, has_floor=False), "reset"),
)


def run_soak(
    recipe: PackedRecipes | Sequence[Recipe], soak_s: float, timeout_s: float
) -> tuple[Soak | None, list[Finding]]:
    """Steps and resets an env for `soak_s` seconds in a guarded process; returns what grew, and the verdicts.

    recipe: as for `run_guarded`.  timeout_s: limit for each step and reset.
    """
    with tempfile.TemporaryDirectory(prefix="muster-soak-", ignore_cleanup_errors=True) as folder:
        most_bytes = min(_MOST_BYTES, int(_PART_OF_MEMORY * memory_left()[0]))
        options = {"seconds": soak_s, "folder": folder, "most_bytes": most_bytes}
        outcome = run_guarded(soaking, recipe, stage_timeout_s=timeout_s, options=options)
    return judge_soak(outcome, soak_s)


def judge_soak(outcome: TrialOutcome, soak_s: float) -> tuple[Soak | None, list[Finding]]:
    """The soak that the trial `soak` has reported, and the findings that follow. soak_s: what was asked for."""
    findings = about_early_end(outcome, "warns")
    samples = [Sample(*row) for row in outcome.results.get("samples", ())]
    if not samples:
        return None, findings
    stopped_by, last = outcome.results.get("stopped_by"), samples[-1]
    grown = {one: growth for one in _QUANTITIES if (growth := _growth_of(one, samples, stopped_by)) is not None}
    quantities = tuple(
        SoakedQuantity(one.name, one.unit, growth.trend, growth.marks, growth.a_step, growth.an_episode)
        for one, growth in grown.items()
        if one.field != _COMMON or growth.trend != "steady"
    )
    soak = Soak(last.at_s, soak_s, last.steps, last.episodes, quantities)
    # Memory comes last: whatever else leaks takes some of it, too.
    in_order = sorted(grown, key=lambda one: one.unit == "bytes")
    verdicts = [_verdict(one, grown[one], soak, outcome.results) for one in in_order]
    findings += [verdict for verdict in verdicts if verdict is not None]
    if all(finding.severity == "good" for finding in findings):
        findings.append(_when_nothing_grows(soak, samples))
    unjudged = [one for one in _QUANTITIES if one.unit == "seconds" and one not in grown]
    if unjudged and quantities and stopped_by is None:
        findings.append(_about_unjudged(unjudged, samples, soak, outcome.results.get("cut_short", 0)))
    return soak, findings


def _growth_of(quantity: _Quantity, samples: Sequence[Sample], stopped_by: str | None) -> Growth | None:
    known = [one for one in samples if getattr(one, quantity.field) is not None]
    if quantity.unit == "bytes" and not any(one.memory_bytes for one in known):  # the kernel does not tell
        return None
    at_s, steps, episodes, values = (
        np.array([getattr(one, name) for one in known], np.float64)
        for name in ("at_s", "steps", "episodes", quantity.field)
    )
    growth = judge(at_s, steps, episodes, values, quantity.tolerance)
    if quantity.field == stopped_by and not quantity.unit and (growth is None or growth.trend != "grows"):
        return overall(steps, episodes, values)  # no warm-up takes so many
    return growth


def _verdict(one: _Quantity, growth: Growth, soak: Soak, results: Mapping[str, Any]) -> Finding | None:
    """The finding about one quantity; None where there is nothing to say."""
    stopped = results.get("stopped_by") == one.field
    if growth.trend == "grows":
        text = _about_leak(one, growth, soak)
        if one.field in results.get("new_names", {}):
            text += f", such as {results['new_names'][one.field]}"
        text += _where_it_ends(one, growth, soak, results.get("most_handles")) + _cut_short(soak) * stopped
        return Finding("note" if _is_slight(one, growth) else "warns", "soak", text)
    if stopped:
        text = f"{one.name}: {_amount(growth.added, one)} more after {seconds(soak.seconds)}: a leak, or a big cache"
        return Finding("warns", "soak", text + _cut_short(soak))
    if growth.trend == "grows unevenly":
        marks = ", ".join(
            f"{_amount(mark, one)} after {seconds(soak.seconds * third / 3)}"
            for third, mark in enumerate(growth.marks[1:], 1)
        )
        text = f"{one.name}: {marks}; whether that is a leak or a long warm-up, a longer soak tells"
        return Finding("note", "soak", text, f"--soak {3 * soak.asked_s:g}")
    if growth.trend == "grew at first":
        before, after = (_amount(mark, one) for mark in growth.marks[:2])
        text = f"{one.name}: from {before} to {after} in the first {seconds(soak.seconds / 3)}, not more since"
        return Finding("good", "soak", f"{text}: a warm-up, no leak")
    return None


def _is_slight(one: _Quantity, growth: Growth) -> bool:
    return one.unit == "bytes" and growth.a_step * _MILLION < _SLIGHT_BYTES


def _about_leak(one: _Quantity, growth: Growth, soak: Soak) -> str:
    many = f"after {soak.episodes:,} episodes and {soak.steps:,} steps"
    if one.unit == "seconds":
        before, after = (seconds(mark) for mark in (growth.marks[1], growth.marks[3]))
        return f"a {one.one} takes longer and longer: {before} after {seconds(soak.seconds / 3)}, {after} {many}"
    if one.unit == "bytes":
        rates = f"{_amount(growth.a_step, one)} a step, {_amount(growth.an_episode, one)} an episode"
        return f"leaks memory, {rates}: {_amount(growth.added, one)} {many}"
    return f"leaks {_rate(one, growth)}: {_amount(growth.added, one)} {many}"


def _rate(one: _Quantity, growth: Growth) -> str:
    """The rate of a count, as ``one file handle an episode``."""
    for rate, of in ((growth.a_step, "a step"), (growth.an_episode, "an episode")):
        if round(rate) >= 1 and abs(rate - round(rate)) < _NEARLY * rate:
            return f"{_counted(round(rate), one)} {of}"
    if growth.an_episode > 1:
        return f"about {growth.an_episode:.2g} {one.name} an episode"
    return f"one {one.one} every {1 / growth.an_episode:,.0f} episodes" if growth.an_episode else one.name


def _where_it_ends(one: _Quantity, growth: Growth, soak: Soak, most_handles: int | None) -> str:
    """The consequence of a leak, for people who wonder whether it matters."""
    if one.field == "handles" and growth.an_episode > 0 and most_handles is not None:
        left = max(0, most_handles - growth.marks[3]) / growth.an_episode + soak.episodes
        return f". A process may open {most_handles:,}: enough for about {float(f'{left:.2g}'):,.0f} episodes"
    if one.unit == "bytes":
        return f". A million steps would take {_amount(growth.a_step * _MILLION, one)}"
    return ""


def _cut_short(soak: Soak) -> str:
    return f". The soak was ended there, after {seconds(soak.seconds)} of {soak.asked_s:g} s, to spare the machine"


def _when_nothing_grows(soak: Soak, samples: Sequence[Sample]) -> Finding:
    played = f"{seconds(soak.seconds)}, {soak.episodes:,} episodes and {soak.steps:,} steps"
    if not soak.quantities:
        text = f"{played} are too few to tell whether anything grows"
        return Finding("note", "soak", text, _longer(_QUANTITIES[:1], samples, soak))
    names = ", ".join(one.name for one in soak.quantities)
    return Finding("good", "soak", f"no leak in {played}: {names} stay as they are")


def _about_unjudged(unjudged: Sequence[_Quantity], samples: Sequence[Sample], soak: Soak, cut_short: int) -> Finding:
    """The finding about durations of which there were too few."""
    what = " and ".join(f"{one.one}s" for one in unjudged)
    text = f"whether {what} take longer and longer was not judged: {seconds(soak.seconds)}"
    if cut_short >= soak.episodes - 1 > 0 and [one.field for one in unjudged] == ["reset_s"]:
        return Finding("note", "soak", f"{text} had no episode that came to its end")
    return Finding("note", "soak", f"{text} gave too few samples of them", _longer(unjudged, samples, soak))


def _longer(wanted: Sequence[_Quantity], samples: Sequence[Sample], soak: Soak) -> str:
    """The option for a soak that is long enough to judge all that is wanted."""
    needed_s = [_FAR_LONGER * soak.asked_s]
    for one in wanted:
        at_s = [sample.at_s for sample in samples if getattr(sample, one.field) is not None]
        if len(at_s) > 1:
            between_s = (at_s[-1] - at_s[0]) / (len(at_s) - 1)
            needed_s.append(_MARGIN * between_s * samples_needed(one.tolerance))
    return f"--soak {math.ceil(max(_MARGIN * soak.asked_s, *(needed_s[1:] or needed_s)))}"


def _amount(value: float, one: _Quantity) -> str:
    if one.unit == "seconds":
        return seconds(value)
    return size(round(value)) if one.unit == "bytes" else f"{value:,.0f}"


def _counted(number: int, one: _Quantity) -> str:
    count = _NUMBERS[number] if number < len(_NUMBERS) else f"{number:,}"
    return f"{count} {one.one if number == 1 else one.name}"
