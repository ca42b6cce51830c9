"""`muster top`: all runs of this user, again and again, as a screen, as a table or as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import select
import statistics
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from muster.pool.resources import anonymous_bytes
from muster.view.looks import IN_ENV, Look, Process, Watched, runs, shorter
from muster.view.verdict import named, of_clock, shares_of, verdict

_SAMPLES = 10  # of what workers are in, a look
_ROWS = 10
_SHARES = ("stepping", "waiting", "copying", "cpu", "ready")
_HEAD = "    pid envs      steps/s step wait copy  cpu ready    MB lost in"


class Top:
    """The runs as they were at the last two looks. only: see `runs`."""

    def __init__(self, only: int | None = None) -> None:
        self._only = only
        self._runs: list[Watched] = []
        self._looks: dict[tuple[int, int], Look] = {}

    def look(self) -> list[dict[str, Any]]:
        """For JSON, a dict for each run: its figures since the last look. None of one that is seen first."""
        samples, before, said = {run.key: run.samples for run in self._runs}, self._looks, list[dict[str, Any]]()
        self._runs, self._looks = runs(self._only), {}
        for run in self._runs:
            if run.problem:
                said.append({"pid": run.pid, "program": run.program, "problem": run.problem})
                continue
            run.samples = samples.get(run.key, [])
            if (now := run.look()) is not None:
                self._looks[run.key] = now
                if run.key in before:
                    said.append(_said(run, before[run.key], now))
        return said

    def wait(self, for_s: float, waits: Callable[[float], bool]) -> bool:
        """Counts meanwhile what workers are in; True as soon as `waits` says so."""
        until = time.monotonic() + for_s
        while (left_s := until - time.monotonic()) > 0:
            if waits(min(left_s, max(0.02, for_s / _SAMPLES))):
                return True
            for run in self._runs:
                if not run.problem:
                    run.sample()
        return False


def watch(console: Console, only: int | None, every_s: float, *, once: bool, as_json: bool) -> None:
    """Shows all runs each `every_s` seconds, until ``q`` or Ctrl-C; with `once` a single time, after as long."""
    top, shows = Top(only), console.is_terminal and not (once or as_json or console.is_dumb_terminal)
    top.look()
    with contextlib.ExitStack() as stack:
        waits = stack.enter_context(_keys()) if shows else _sleep
        live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False)) if shows else None
        if live is not None:
            live.update(Text(f"looking for runs, for {every_s:g} s; q ends"), refresh=True)
        while not top.wait(every_s, waits):
            said = top.look()
            if live is not None:
                live.update(Group(*drawn(said, console.height)), refresh=True)
            elif as_json:
                console.out(json.dumps({"at": time.time(), "runs": said}))
            else:
                console.out("\n".join(part.plain for part in drawn(said)), highlight=False)
            if once:
                return


def _sleep(for_s: float) -> bool:
    time.sleep(for_s)
    return False


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Reads keys one by one. Yields what waits, and says whether ``q`` was pressed."""
    if sys.stdin is None or not sys.stdin.isatty():
        yield _sleep
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield lambda for_s: bool(select.select([fd], [], [], for_s)[0]) and os.read(fd, 1) in (b"q", b"Q", b"")
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _said(run: Watched, before: Look, now: Look) -> dict[str, Any]:
    dt, cause, phase = now.at - before.at, verdict(before, now), run.phase()
    workers = []
    for host, process, shares in zip(now.hosts, now.processes, shares_of(before, now), strict=False):
        figures = {"env_steps_per_s": shares.steps / dt, **{key: getattr(shares, key) for key in _SHARES}}
        own = {"index": host.number, "envs": [*host.envs], "restarts": host.restarts, "in": host.words}
        workers.append(own | figures | _held(process) | {"for_s": host.for_s if host.doing in IN_ENV else 0.0})
    pending = sum(host.pending or 0 for host in now.hosts)
    caller = _held(now.caller) | dict(zip(("cpu", "ready"), of_clock(dt, before.caller, now.caller), strict=True))
    caller |= {"pending": pending, "in": f"in {phase[0]}" if phase else "waiting" if pending else "at work"}
    return {
        **{key: run.about[key] for key in ("kind", "env", "since")},
        **({} if run.training is None else {"kind": "muster train", "run_dir": run.training[2]["run"]}),
        "pid": run.pid,
        "program": run.program,
        "num_envs": run.num_envs,
        "seconds": dt,
        "env_steps": now.env_steps,
        "env_steps_per_s": (now.env_steps - before.env_steps) / dt,
        "verdict": cause._asdict(),
        "workers": workers,
        "caller": caller,
    }


def _held(process: Process) -> dict[str, Any]:
    memory = None if process.pid is None else anonymous_bytes(process.pid)
    return {"pid": process.pid, "memory_bytes": memory, "stopped": process.state in ("T", "t")}


def drawn(said: Sequence[dict[str, Any]], height: int = 1000) -> list[Text]:
    """The runs as tables of text, with as many workers as the height has room for."""
    rows = min(_ROWS, max(1, height // max(1, len(said)) - 9))
    parts = [part for run in said for part in _parts(run, rows)]
    return parts or [Text("nothing with envs in worker processes runs")]


def _parts(run: dict[str, Any], rows: int) -> list[Text]:
    head = Text(f"{run['pid']}: {run['program']}", "bold", no_wrap=True, overflow="ellipsis")
    if "problem" in run:
        return [head, Text(f"{run['problem']}\n")]
    since, workers = time.strftime("%H:%M:%S", time.localtime(run["since"])), run["workers"]
    count, folder = len(workers), f", in {run['run_dir']}" if "run_dir" in run else ""
    about = f"{run['kind']} of {run['env']}, envs: {run['num_envs']}, processes: {count}, since {since}{folder}"
    first = sorted(sorted(workers, key=_matters)[-rows:], key=lambda one: int(one["index"]))
    lines = [_line(one, named(range(one["envs"][0], one["envs"][-1] + 1)).partition(" ")[2]) for one in first]
    if count > rows:
        lines.append(_line(_sum([one for one in workers if one not in first]), f"{count - rows} more"))
    if count > 1:
        lines.append(_line(_sum(workers), "all"))
    table = "\n".join([about, _HEAD, *lines, _line(run["caller"], "caller")])
    return [head, Text(table, no_wrap=True, overflow="ellipsis"), Text(f"→ {run['verdict']['sentence']}\n")]


def _matters(worker: dict[str, Any]) -> tuple[bool, float, float]:
    """Those come last that are stopped, are longest in one step, or step most."""
    return worker["stopped"], worker["for_s"] * (worker["for_s"] > 1), worker["stepping"]


def _sum(workers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Workers as one row: the sums of steps, memory and restarts, and the means of shares."""

    def of(key: str, joined: Callable[[Sequence[Any]], float]) -> float | None:
        known = [one[key] for one in workers if one[key] is not None]
        return joined(known) if known else None

    sums = {key: of(key, sum) for key in ("env_steps_per_s", "memory_bytes", "restarts")}
    return {"pid": "", "in": "", **sums, **{key: of(key, statistics.fmean) for key in _SHARES}}


def _line(one: dict[str, Any], envs: str) -> str:
    steps, memory, lost = (one.get(key) for key in ("env_steps_per_s", "memory_bytes", "restarts"))
    shares = ["-" if one.get(key) is None else f"{one[key]:.2f}" for key in _SHARES]
    parts = [
        f"{'ended' if one['pid'] is None else one['pid']:>7} {envs:<8.8} {'' if steps is None else f'{steps:,.0f}':>8}"
    ]
    parts += [f"{share:>{4 + (i == 4)}}" for i, share in enumerate(shares)]
    parts += [f"{'-' if memory is None else f'{memory / 1e6:,.0f}':>5} {'-' if lost is None else lost:>4}"]
    return " ".join([*parts, "stopped by a signal" if one.get("stopped") else shorter(one["in"])])
