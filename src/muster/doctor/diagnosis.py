"""The doctor's results: findings, measurements, a recommendation."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["blocks", "warns", "good", "note"]
# The worst severity comes first: the report lists findings in this order.
MARKS: dict[Severity, str] = {"blocks": "x", "warns": "!", "good": "+", "note": "-"}


@dataclass(frozen=True)
class Finding:
    """One finding of the doctor.

    severity: ``"blocks"`` keeps the env from running in parallel, ``"warns"`` deserves care, ``"good"`` is as it should
    be, ``"note"`` is a mere fact.  topic: the subject of the trial.  text: the finding.  remedy: code to write instead,
    or None.
    """

    severity: Severity
    topic: str
    text: str
    remedy: str | None = None


@dataclass(frozen=True)
class Measurements:
    """Figures of one env in a process of its own, in seconds and bytes; None where nothing could be measured.

    step_p99_s, reset_p99_s: the 99th percentiles.  step_longest_s, reset_longest_s: the longest one.
    episode_rows: mean steps of an episode of the first line that was run, None if none ended.
    waiting: the share of the time of steps and resets in which neither it nor what it has started computes.
    """

    build_s: float | None = None
    step_median_s: float | None = None
    step_mean_s: float | None = None
    step_p99_s: float | None = None
    step_longest_s: float | None = None
    reset_median_s: float | None = None
    reset_mean_s: float | None = None
    reset_p99_s: float | None = None
    reset_longest_s: float | None = None
    episode_rows: float | None = None
    obs_bytes: int | None = None
    env_bytes: int | None = None
    worker_bytes: int | None = None
    threads_started: int | None = None
    waiting: float | None = None

    def rows(self) -> list[tuple[str, str]]:
        """The figures in words, as (name, value); those that are None are left out."""
        rows = [
            ("build", seconds(self.build_s)),
            ("step", _spread(self.step_median_s, self.step_mean_s, self.step_p99_s, self.step_longest_s)),
            ("reset", _spread(self.reset_median_s, self.reset_mean_s, self.reset_p99_s, self.reset_longest_s)),
            ("it waits", "" if self.waiting is None or self.waiting < 0.1 else f"{self.waiting:.0%} of that time"),
            ("episode", "" if self.episode_rows is None else f"{self.episode_rows:,.0f} steps by random actions"),
            ("observation", size(self.obs_bytes)),
            ("memory of an env", size(self.env_bytes)),
            ("memory of a worker", size(self.worker_bytes)),
            ("threads it starts", "" if self.threads_started is None else str(self.threads_started)),
        ]
        return [(name, value) for name, value in rows if value]


@dataclass(frozen=True)
class Recommendation:
    """The way to run many of the env. line: ready to use.  factory: code to write before it, or None.

    steps_per_s: env steps a second that the line made, without a policy; None where it was not run, or failed.
    memory_bytes: memory of all envs and workers, predicted from one of each; None where nothing was measured.
    """

    line: str
    factory: str | None
    backend: str
    context: str | None
    num_envs: int
    num_workers: int
    steps_per_s: float | None = None
    memory_bytes: int | None = None
    caller_steps: bool = False

    @property
    def code(self) -> str:
        """The code to write, imports included."""
        code = f"{self.factory}\n{self.line}" if self.factory else self.line
        imported = "import muster\n" in code or code.startswith("from muster.")
        modules = "import tempfile\n" * ("tempfile." in self.line) + "import muster\n\n" * (not imported)
        return modules + code

    @property
    def title(self) -> str:
        """The heading of the line: nothing is recommended that was not seen to work."""
        return "To begin with; it was not seen to work" if self.steps_per_s is None else "Recommended"

    def rows(self) -> list[tuple[str, str]]:
        """The way in words, as (name, value)."""
        each = self.num_envs / max(1, self.num_workers + self.caller_steps)
        workers = f"{self.num_workers} worker{'s' * (self.num_workers > 1)}{' and the caller' * self.caller_steps}"
        envs = f"{self.num_envs}, in the caller"
        if self.num_workers:
            envs = f"{self.num_envs} on {workers}, {each:.3g} each"
        rows = [
            ("backend", self.backend if self.context is None else f"{self.backend}, started by {self.context}"),
            ("envs", envs),
            ("speed", "" if self.steps_per_s is None else f"{self.steps_per_s:,.0f} env steps/s"),
            ("predicted memory", size(self.memory_bytes)),
        ]
        return [(name, value) for name, value in rows if value]


@dataclass(frozen=True)
class TriedLine:
    """A line that could be recommended. steps_per_s: env steps a second that it made, None where there is a problem."""

    line: str
    steps_per_s: float | None = None
    problem: str | None = None


@dataclass(frozen=True)
class PolicyVerdict:
    """The decision if a policy can be copied to collector processes.

    weight_bytes: size of its parameters and buffers.  path, type, reason: these describe the object in the way, ""
    where there is none.  ways_out: what can be done about it.
    """

    copyable: bool
    weight_bytes: int
    path: str = ""
    type: str = ""
    reason: str = ""
    ways_out: tuple[str, ...] = ()


# The course of a quantity in a soak after its first third: what grows is a leak.
Trend = Literal["steady", "grows"]


@dataclass(frozen=True)
class SoakedQuantity:
    """One quantity of a soak. unit: "bytes", or "" for a count.

    marks: its value at the start, after a third of the time, after two thirds and at the end.
    a_step, an_episode: growth after the first third; 0 where `trend` says that it does not grow.
    """

    name: str
    unit: str
    trend: Trend
    marks: tuple[float, ...]
    a_step: float
    an_episode: float


@dataclass(frozen=True)
class Soak:
    """The long run of one env. seconds: how long it was.  asked_s: how long it should have been."""

    seconds: float
    asked_s: float
    steps: int
    episodes: int
    quantities: tuple[SoakedQuantity, ...]

    @property
    def title(self) -> str:
        """The heading of the table."""
        return f"Soaked for {self.seconds:.3g} s, {self.steps:,} steps and {self.episodes:,} episodes of random actions"

    def rows(self) -> list[tuple[str, ...]]:
        """Its table: a row of headings, then for each quantity its name, four values, growth and trend."""
        times = [f"{self.seconds * third / 3:.3g} s" for third in (1, 2, 3)]
        rows = [("", "start", *times, "an episode", "")]
        for one in self.quantities:
            marks = [amount(value, one.unit) for value in one.marks]
            grows = f"+{amount(one.an_episode, one.unit)}" if one.an_episode else ""
            rows.append((one.name, *marks, grows, one.trend))
        return rows


@dataclass(frozen=True)
class Diagnosis:
    """The result of `muster.diagnose`. Printing it shows everything.

    tried: the lines that could be recommended, and how fast each was.  policy: None where none was passed.
    soak: None where none was asked for, or none was possible.
    """

    target: str
    findings: tuple[Finding, ...]
    measured: Measurements
    recommendation: Recommendation | None
    policy: PolicyVerdict | None = None
    tried: tuple[TriedLine, ...] = ()
    soak: Soak | None = None

    @property
    def blocks(self) -> bool:
        """True where a finding keeps the env from running in parallel in the form in which it was passed."""
        return any(finding.severity == "blocks" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as plain values, for JSON."""
        return {**dataclasses.asdict(self), "blocks": self.blocks}

    def __str__(self) -> str:
        lines = [self.target]
        for finding in self.findings:
            lines.append(f"  {MARKS[finding.severity]} {finding.topic}: {finding.text}")
            if finding.remedy:
                lines.append(textwrap.indent(finding.remedy, " " * 8))
        lines += [f"  {name}: {value}" for name, value in self.measured.rows()]
        if self.soak is not None:
            lines.append(f"  {self.soak.title}:")
            lines += ["  " + "  ".join(f"{cell:>16}" for cell in row) for row in self.soak.rows()]
        if self.tried:
            lines.append("  tried, in env steps/s:")
        lines += [f"  {speed:>12}  {text}" for speed, text in tried_rows(self.tried)]
        if self.recommendation is not None:
            lines += ["", f"  {self.recommendation.title}:"]
            lines += [f"  {name}: {value}" for name, value in self.recommendation.rows()]
            lines.append(textwrap.indent(self.recommendation.code, "    "))
        return "\n".join(lines)


def tried_rows(tried: Sequence[TriedLine]) -> list[tuple[str, str]]:
    """The tried lines, as (env steps a second, call); with a problem as ("-", call) and ("", problem)."""
    rows = []
    for one in tried:
        call = one.line.removeprefix("envs = ")
        rows.append(("-" if one.steps_per_s is None else f"{one.steps_per_s:,.0f}", call))
        if one.problem is not None:
            rows.append(("", one.problem))
    return rows


def amount(value: float, unit: str) -> str:
    """A value of a `SoakedQuantity`, as ``38 MB`` or ``17``."""
    return size(round(value)) if unit == "bytes" else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def seconds(value: float | None) -> str:
    """A duration as ``41 us``, ``1.2 ms``, ``3.4 s``; "" for None."""
    return _in_units(value, {"us": 1e-6, "ms": 1e-3, "s": 1.0})


def _spread(median: float | None, mean: float | None, p99: float | None, longest: float | None) -> str:
    named = {"mean": mean, "p99": p99, "longest": longest}
    return ", ".join([seconds(median), *(f"{name} {seconds(value)}" for name, value in named.items() if value)])


def size(value: int | None) -> str:
    """A size as ``512 bytes``, ``38 MB``; "" for None."""
    return _in_units(value, {"bytes": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9})


def _in_units(value: float | None, units: Mapping[str, float]) -> str:
    if value is None:
        return ""
    unit = next((unit for unit, one in units.items() if value / one < 1000), list(units)[-1])
    return f"{value / units[unit]:.3g} {unit}"
