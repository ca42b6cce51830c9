"""What the doctor says: findings, measurements, a recommendation."""

from __future__ import annotations

import dataclasses
import textwrap
from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["blocks", "warns", "good", "note"]
MARKS: dict[Severity, str] = {"blocks": "x", "warns": "!", "good": "+", "note": "-"}


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    severity: it ``"blocks"`` parallel use, deserves care (``"warns"``), is as it should be, or is a mere fact.
    topic: what was looked at.  text: what was found.  remedy: code to write instead, or None.
    """

    severity: Severity
    topic: str
    text: str
    remedy: str | None = None


@dataclass(frozen=True)
class Measurements:
    """What one env did in a process of its own. Seconds and bytes; None where it could not be measured.

    Times are taken on all cores at once, one env on each, since that is how many envs will run.

    row_s: for each row of a vector env, that is a step or the reset after an episode's end, mean; with all that a
    worker does for it, without what the caller does.  episode_rows: mean rows of an episode, None if none ended.
    gil_free: share of a step's time for which it leaves the GIL to other threads.
    """

    build_s: float | None = None
    step_median_s: float | None = None
    step_p99_s: float | None = None
    reset_median_s: float | None = None
    reset_p99_s: float | None = None
    row_s: float | None = None
    episode_rows: float | None = None
    obs_bytes: int | None = None
    env_bytes: int | None = None
    worker_bytes: int | None = None
    gil_free: float | None = None
    threads_started: int | None = None


@dataclass(frozen=True)
class Recommendation:
    """How to run many of the env. line: ready to use.  factory: code to write first, or None.

    steps_per_s, memory_bytes: predicted for the whole vector env, policy not counted; None where nothing was measured.
    """

    line: str
    factory: str | None
    backend: str
    context: str | None
    num_envs: int
    num_workers: int
    steps_per_s: float | None
    memory_bytes: int | None


@dataclass(frozen=True)
class PolicyVerdict:
    """Whether a policy can be copied to collector processes.

    weight_bytes: of its parameters and buffers.  path, type, reason: of what is in the way, "" where nothing is.
    ways_out: what can be done about it.
    """

    copyable: bool
    weight_bytes: int
    path: str = ""
    type: str = ""
    reason: str = ""
    ways_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Diagnosis:
    """What `muster.diagnose` returns. Printing it shows it all. policy: None where none was given."""

    target: str
    findings: tuple[Finding, ...]
    measured: Measurements
    recommendation: Recommendation | None
    policy: PolicyVerdict | None = None

    @property
    def blocks(self) -> bool:
        """Whether something keeps the env from running in parallel as it was handed over."""
        return any(finding.severity == "blocks" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**dataclasses.asdict(self), "blocks": self.blocks}

    def __str__(self) -> str:
        lines = [self.target]
        for finding in self.findings:
            lines.append(f"  {MARKS[finding.severity]} {finding.topic}: {finding.text}")
            if finding.remedy:
                lines.append(textwrap.indent(finding.remedy, " " * 8))
        lines += [f"  {name}: {value}" for name, value in measured_rows(self.measured)]
        if self.recommendation is not None:
            lines += ["", *(f"  {name}: {value}" for name, value in recommended_rows(self.recommendation))]
            lines.append(textwrap.indent(code_of(self.recommendation), "    "))
        return "\n".join(lines)


def code_of(advice: Recommendation) -> str:
    """The code to write, from its imports on."""
    code = f"{advice.factory}\n{advice.line}" if advice.factory else advice.line
    return code if "import muster\n" in code else f"import muster\n\n{code}"


def measured_rows(measured: Measurements) -> list[tuple[str, str]]:
    """The measurements in words, those there are."""
    rows = [
        ("build", seconds(measured.build_s)),
        ("step", _median_and_p99(measured.step_median_s, measured.step_p99_s)),
        ("reset", _median_and_p99(measured.reset_median_s, measured.reset_p99_s)),
        ("episode", "" if measured.episode_rows is None else f"{measured.episode_rows:,.0f} rows by random actions"),
        ("observation", size(measured.obs_bytes)),
        ("memory of an env", size(measured.env_bytes)),
        ("memory of a worker", size(measured.worker_bytes)),
        ("step without the GIL", "" if measured.gil_free is None else f"{measured.gil_free:.0%} of its time"),
        ("threads it starts", "" if measured.threads_started is None else str(measured.threads_started)),
    ]
    return [(name, value) for name, value in rows if value]


def recommended_rows(advice: Recommendation) -> list[tuple[str, str]]:
    """The recommendation in words."""
    each = advice.num_envs / max(1, advice.num_workers)
    workers = f"{advice.num_workers} worker{'s' * (advice.num_workers > 1)}, {each:.3g} each"
    rows = [
        ("backend", advice.backend if advice.context is None else f"{advice.backend}, started by {advice.context}"),
        ("envs", f"{advice.num_envs} on {workers}" if advice.num_workers else f"{advice.num_envs}, in the caller"),
        ("predicted speed", "" if advice.steps_per_s is None else f"{advice.steps_per_s:,.0f} env steps/s"),
        ("predicted memory", size(advice.memory_bytes)),
    ]
    return [(name, value) for name, value in rows if value]


def seconds(value: float | None) -> str:
    """``41 us``, ``1.2 ms``, ``3.4 s``; nothing for None."""
    if value is None:
        return ""
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if value * factor < 1000:
            return f"{value * factor:.3g} {unit}"
    return f"{value:.3g} s"


def size(value: int | None) -> str:
    """``512 bytes``, ``38 MB``; nothing for None."""
    if value is None:
        return ""
    for unit, factor in (("bytes", 1.0), ("KB", 1e3), ("MB", 1e6)):
        if value / factor < 1000:
            return f"{value / factor:.3g} {unit}"
    return f"{value / 1e9:.3g} GB"


def _median_and_p99(median_s: float | None, p99_s: float | None) -> str:
    return "" if median_s is None else f"{seconds(median_s)}, p99 {seconds(p99_s)}"
