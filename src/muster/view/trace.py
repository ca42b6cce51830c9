"""A timeline of one run in Chrome's trace format, made by looking at it up to 1,000 times a second."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from muster._core import Doing, ticks
from muster.errors import ConfigError
from muster.pool.watch import seconds
from muster.view.looks import IN_ENV, HostState, Look, Watched, runs, shorter
from muster.view.verdict import named, shares_of

_EVERY_S, _SELDOM_S = 1e-3, 4e-3  # the second for steps that are far shorter, of which it sees some in any case
_COUNTERS_S = 0.1


def write_trace(only: int | None, path: Path, for_s: float) -> str:
    """Looks at the runs of the one process that has any, or of process `only`, for so long, and writes the file.

    Returns a sentence about it. Raises ConfigError where several processes have runs, or none, and as `runs` does.
    """
    found = [run for run in runs(only) if not run.problem]
    owners = {run.pid: run.program for run in found}
    if len(owners) != 1:
        listed = "".join(f"\n  {pid}  {program}" for pid, program in owners.items())
        raise ConfigError(
            f"--trace needs a PID, as several programs run:{listed}" if owners else "--trace: nothing runs"
        )
    try:
        open(path, "a").close()  # before the looks: it may be refused
    except OSError as error:
        raise ConfigError(f"--trace cannot write {path}: {error.strerror}") from None
    [(pid, program)], seen, made = owners.items(), 0, 0
    traces, until = [Trace(run, number) for number, run in enumerate(found)], time.monotonic() + for_s
    try:
        while (now := time.monotonic()) < until and sum(trace.follow(now) for trace in traces):
            seen, made = (sum(getattr(trace, name) for trace in traces) for name in ("seen", "made"))
            time.sleep(max(0.0, (_EVERY_S if made < 4 * seen + 100 else _SELDOM_S) - (time.monotonic() - now)))
    finally:  # also after a Ctrl-C
        said = f"{seen:,} of {made:,} steps and resets of envs seen"
        head = json.dumps({"steps": said, "program": program, "pid": pid})
        events = sorted((event for trace in traces for event in trace.events()), key=lambda event: event.get("ts", 0.0))
        lines = ",\n".join(map(json.dumps, events))
        path.write_text(f'{{"otherData": {head}, "displayTimeUnit": "ms",\n"traceEvents": [\n{lines}\n]}}\n')
    return f"{path}: {said}"


class Trace:
    """The events of a run while somebody follows it. Times are of the core's clock, in microseconds.

    number: of the run in its process.  seen, made: steps and resets of envs.
    """

    def __init__(self, run: Watched, number: int) -> None:
        self._run, self._tick_us = run, seconds(1e6)
        self._events: list[dict[str, Any]] = []
        self._first = number * 10_000  # of its threads' numbers: the caller has that, and hosts the next ones
        self._caller_thread = run.pid, self._first
        self._threads: dict[int, tuple[int, int]] = {}  # by host: the process in its place, and the number
        self._open: dict[tuple[int, int], tuple[str, float]] = {}  # by thread: spans that have not ended yet
        self._names = {self._caller_thread: f"caller: {run.program}"}
        self._looked_us, self._before, self._counted = self._now(), run.hosts(), run.look()
        self.seen = self.made = 0

    def follow(self, now: float) -> bool:
        """Looks once; False where the run has ended. now: time.monotonic()."""
        self._looked_us = self._now()  # before the look: what a host is not in then may begin right after it
        run, hosts = self._run, self._run.hosts()
        for old, new in zip(self._before, hosts, strict=False):
            self._host(old, new)
        self._before = hosts or self._before
        if hosts and (not self._first or run.training is None):
            self._caller(hosts, run.phase())
        if self._counted is not None and now - self._counted.at >= _COUNTERS_S and (look := run.look()) is not None:
            self._counters(self._counted, look)
            self._counted = look
            if any(process.pid is None for process in look.processes):  # others take the places of those
                self._run = next((one for one in runs() if one.key == run.key), run)
        return bool(hosts)

    def events(self) -> list[dict[str, Any]]:
        """All events; what has not ended, ends here, a step that hangs, too."""
        for host in self._before:
            if host.doing in IN_ENV:
                self._open[self._thread(host)] = shorter(host.activity), host.since * self._tick_us
        for thread in [*self._open]:
            self._end(thread, self._now())
        return self._events + [
            {"ph": "M", "pid": pid, "tid": thread, "name": kind, "args": {"name": name}}
            for (pid, thread), name in self._names.items()
            for kind in ("process_name", "thread_name")
            if kind == "thread_name" or pid != self._run.pid or thread == 0
        ]

    def _host(self, old: HostState, new: HostState) -> None:
        before, thread = self._threads.get(new.number), self._thread(new)
        made, spent_us = (
            new.env_steps + new.resets - old.env_steps - old.resets,
            self._tick_us * (new.in_env - old.in_env),
        )
        self.made += max(0, made)
        if new.restarts is not None and new.restarts > (old.restarts or 0):
            self._add(thread, "restart", "i", self._now(), s="t")
        changed = new.since * self._tick_us if new.since > old.since else self._looked_us
        if before is not None and before != thread:
            self._end(before, changed)
        if new.doing in IN_ENV or new.doing == Doing.NOTHING:
            self._end(thread, changed)
            self._steps(thread, old, new, made, spent_us)
        elif (old.doing, old.since) != (new.doing, new.since) or thread not in self._open:
            self._end(thread, changed)
            self._open[thread] = shorter(new.activity), new.since * self._tick_us

    def _steps(self, thread: tuple[int, int], old: HostState, new: HostState, made: int, spent_us: float) -> None:
        """Adds the steps that have ended and began at a known time: that of the last look, and the last one of all."""
        ended = [old] if old.doing in IN_ENV and made > 0 else []
        if new.since != old.since and new.doing == Doing.NOTHING and made > 0:
            ended.append(new)
        each_us = spent_us / max(1, made)
        for host in ended:
            begun = host.since * self._tick_us
            latest = new.since * self._tick_us if host is old and new.since != old.since else self._looked_us
            name = "reset" if host.doing == Doing.RESETTING or new.env_steps == old.env_steps else "step"
            self._span(thread, f"{name} env {host.env}", begun, min(begun + each_us, latest), env=host.env)
            self.seen += 1

    def _caller(self, hosts: Sequence[HostState], phase: tuple[str, int] | None) -> None:
        """The caller's own row: where it works, since no env is asked, and where it waits, nothing; or its phases."""
        thread = self._caller_thread
        name = phase[0] if phase else "" if any(host.pending for host in hosts) else "at work"
        if name != self._open.get(thread, ("", 0.0))[0]:
            since = self._looked_us if phase is None else self._tick_us * phase[1]
            self._end(thread, since)
            if name:
                self._open[thread] = name, since

    def _counters(self, before: Look, now: Look) -> None:
        shares = shares_of(before, now)
        for name, figures in {
            "env steps/s": {"steps/s": (now.env_steps - before.env_steps) / (now.at - before.at)},
            "ready without a core": {f"worker {i}": one.ready for i, one in enumerate(shares)},
        }.items():
            self._add(self._caller_thread, name, "C", self._now(), args=figures)

    def _thread(self, host: HostState) -> tuple[int, int]:
        """The process and the number of a host's row; of one that is being replaced, those before."""
        names, number = self._run.about["names"], self._first + 1 + host.number
        pid = self._run.pids.get(names[host.number]) if host.number < len(names) else self._run.pid
        thread = self._threads.get(host.number, (0, number)) if pid is None else (pid, number)
        if thread not in self._names:
            self._names[thread] = f"worker {host.number} ({named(host.envs)})"
        self._threads[host.number] = thread
        return thread

    def _now(self) -> float:
        return ticks() * self._tick_us

    def _end(self, thread: tuple[int, int], at: float) -> None:
        if thread in self._open:
            self._span(thread, *self._open.pop(thread), at)

    def _span(self, thread: tuple[int, int], name: str, since: float, until: float, **about: Any) -> None:
        self._add(thread, name, "X", since, dur=max(0.0, until - since), **({"args": about} if about else {}))

    def _add(self, thread: tuple[int, int], name: str, kind: str, at: float, **rest: Any) -> None:
        self._events.append({"name": name, "ph": kind, "ts": at, "pid": thread[0], "tid": thread[1], **rest})
