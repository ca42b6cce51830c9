"""Shared parts of the benchmarks: a description of the machine, plain tables, and `benchmarks/RESULTS.md`."""

from __future__ import annotations

import datetime
import os
import platform
import re
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

RESULTS_PATH = Path(__file__).parent / "RESULTS.md"
_PACKAGES = ("muster-rl", "gymnasium", "numpy", "stable-baselines3", "envpool", "mujoco", "ale-py", "torch")
_TITLE = (
    "# Results of the benchmarks\n\nWritten by the scripts in this folder with `--write`; each says what it measures.\n"
)


def machine() -> str:
    """Cores, processor, memory and kernel, in one line."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model = re.search(r"^model name\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    processor = model.group(1) if model else platform.machine()
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of {processor}, {memory_gb:.0f} GB, {platform.system()} {platform.release()}"


def versions() -> str:
    """Python and the packages that take part, in one line."""
    found = [f"Python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"{package} not installed")
    return ", ".join(found)


def busy_share(seconds: float) -> float:
    """The share of all CPU time of the machine that was not idle, over ``seconds`` in which this process sleeps."""

    def ticks() -> tuple[int, int]:
        fields = [int(field) for field in Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]]
        return sum(fields), fields[3] + fields[4]  # all; idle and waiting for a disk

    total, idle = ticks()
    time.sleep(seconds)
    total_then, idle_then = ticks()
    return 1.0 - (idle_then - idle) / max(1, total_then - total)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that reads well as plain text too: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * width if column == 0 else "-" * (width - 1) + ":" for column, width in enumerate(widths)]
    return "\n".join(line(cells) for cells in (header, rule, *rows))


def heading(question: str) -> str:
    """The heading of a section: the question, the date, the command, the machine and the versions."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    return f"## {question}\n\n{today}, `{command}`\n\n- {machine()}\n- {versions()}\n"


def write_section(name: str, text: str) -> None:
    """Puts ``text`` between the markers of section ``name`` of RESULTS.md, which is made where it is missing."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    section = f"{begin}\n{text.rstrip()}\n{end}"
    old = RESULTS_PATH.read_text(encoding="utf-8") if RESULTS_PATH.exists() else _TITLE
    before, found, rest = old.partition(begin)
    after = rest.partition(end)[2] if found else ""
    parts = [part.strip("\n") for part in (before, section, after)]
    RESULTS_PATH.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
