"""Looks at runs of this user: their pools, found by links in /proc, and what their workers say in shared memory.

A run does nothing for it, and no file of its own stays open here between two looks: memory that it drops is free.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from muster._core import HOST_BYTES, HOST_DOING_AT, HOST_OF_ENVS_AT, RECORD_BYTES, Doing
from muster.errors import ConfigError
from muster.extras import VERSION
from muster.pool.resources import read_text, stat_of
from muster.pool.watch import NO_ENV, WORDS, State, seconds, seconds_since
from muster.transport.slab import HOSTS_AT, LAYOUT, RECORD

IN_ENV = Doing.STEPPING, Doing.RESETTING
PHASES_AT, PHASES = 4096, struct.Struct("<QQ")  # in a training's about file: an index of its phases, and since when
_HOST = struct.Struct("<II5Q")  # HostRecord in _core/records.hpp, from `doing` on
_AT_ONCE = struct.Struct("<QQ")  # of it, from `ticks_of_envs` on
_MEMFD = "/memfd:muster-"
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_MOST_ENVS, _MOST_ABOUT = 1 << 20, 1 << 24


class Process(NamedTuple):
    """A process as one look sees it; pid None where it has ended. Seconds are so far.

    state: as in /proc/PID/stat, such as "T" for stopped.  ready_s: its main thread was ready to run and had no core.
    """

    pid: int | None = None
    state: str = ""
    cpu_s: float = 0.0
    ready_s: float = 0.0


class HostState(NamedTuple):
    """The record of a worker, or of a caller that steps envs, as one look sees it.

    doing, env, since: see `State`.  for_s: seconds for which it is in that.  in_env, copying: ticks so far, without
    the step or reset under way.  restarts: of its envs.  pending: envs that it has been asked to step or reset, and has
    not; both None in collectors, which act by themselves.
    of_envs, blocked: ticks so far, of a worker that steps all its envs at the same time: the sum over its envs of their
    time in their own code, and the time for which one has kept the others; 0 in other workers.
    """

    number: int
    envs: range
    doing: int
    env: int
    since: int
    for_s: float
    env_steps: int
    resets: int
    in_env: int
    copying: int
    of_envs: int = 0
    blocked: int = 0
    restarts: int | None = None
    pending: int | None = None

    @property
    def activity(self) -> str:
        """Such as ``in step of env 5``."""
        if self.doing == Doing.NOTHING:
            return "acting" if self.pending is None else "about to step" if self.pending else "waiting"
        return WORDS[self.doing] + ("" if self.env == NO_ENV else f" of env {self.env}")

    @property
    def words(self) -> str:
        """Such as ``in step of env 5 for 3.2 s``."""
        return self.activity + ("" if self.doing == Doing.NOTHING else f" for {short(self.for_s)} s")


class Look(NamedTuple):
    """One moment of a run.

    at: time.monotonic().  processes: of the hosts, in their order.  machine_s: CPU time of all processes so far.
    is_stepped: by a caller, so that workers wait for that; collectors act by themselves.
    resetting, asked: shares of the samples since the last look: of each worker those in a reset, and of all those in
    which the caller waited for an env. None without samples.
    """

    at: float
    hosts: Sequence[HostState]
    processes: Sequence[Process]
    caller: Process
    machine_s: float
    cores: int
    is_stepped: bool = True
    resetting: Sequence[float] | None = None
    asked: float | None = None

    @property
    def env_steps(self) -> int:
        return sum(host.env_steps for host in self.hosts)


@dataclass(eq=False)
class Watched:
    """A pool of a process, as its about file has it.

    pid: of the owner.  files: paths and inodes, by name.  pids: of workers, by process name.
    problem: a sentence, where it cannot be looked at.  samples: those since the last look.
    training: path, inode and content of its training's about file.
    """

    pid: int
    about: dict[str, Any]
    files: dict[str, tuple[str, int]] = field(default_factory=dict)
    pids: Mapping[str, int] = field(default_factory=dict)
    problem: str = ""
    samples: list[list[bool]] = field(default_factory=list)
    training: tuple[str, int, dict[str, Any]] | None = None

    @property
    def key(self) -> tuple[int, int]:
        """Who it is, in all looks."""
        return self.pid, self.files.get("activity", ("", 0))[1]

    @property
    def num_envs(self) -> int:
        return int(self.about["first_envs"][-1])

    @property
    def program(self) -> str:
        """The owner's command line."""
        first, *rest = read_text(Path(f"/proc/{self.pid}/cmdline")).rstrip("\0").split("\0")
        return " ".join(" ".join([os.path.basename(first), *rest]).split())[:200]

    def hosts(self) -> list[HostState]:
        """The records of its hosts now; none where the run has ended."""
        firsts, names = self.about["first_envs"], self.about["names"]
        count, told = len(firsts) - 1, len(names) * HOST_BYTES
        activity, size = _bytes_of(*self.files["activity"], told), count * HOST_BYTES + self.num_envs * RECORD_BYTES
        slab = _bytes_of(*self.files["slab"], size, HOSTS_AT) if "slab" in self.files else b""
        if len(activity) < told or 0 < len(slab) < size:
            return []
        of_envs: Sequence[tuple[int | None, int | None]] = [(None, None)] * count
        if slab:  # it is empty until the envs are built
            records = np.frombuffer(slab, RECORD, offset=count * HOST_BYTES)
            counts = records["restarts"], records["requested"] != records["finished"]
            of_envs = np.add.reduceat(counts, firsts[:-1], axis=1).T.tolist()
        found = []
        for i in range(count if slab else len(names)):
            said = _HOST.unpack_from(activity, i * HOST_BYTES + HOST_DOING_AT) if i < len(names) else (0,) * 7
            own = _HOST.unpack_from(slab, i * HOST_BYTES + HOST_DOING_AT) if slab else said
            doing, env, since = (said if said[0] != Doing.NOTHING else own)[:3]
            if env != NO_ENV and self.about["own_indices"]:
                env += firsts[i]
            at_once = _AT_ONCE.unpack_from(slab, i * HOST_BYTES + HOST_OF_ENVS_AT) if slab else (0, 0)
            found.append(_host(i, range(*firsts[i : i + 2]), (doing, env, since), (*own[3:7], *at_once), *of_envs[i]))
        return found

    def sample(self) -> None:
        """Notes what its workers are in, for the next look."""
        if hosts := self.hosts():
            resetting = [host.doing == Doing.RESETTING for host in hosts]
            self.samples.append([*resetting, any(host.pending for host in hosts)])

    def look(self) -> Look | None:
        """A look; None where the run has ended."""
        hosts, names, caller = self.hosts(), self.about["names"], process_of(self.pid)
        if not hosts or caller.pid is None:
            return None
        pids = [self.pids.get(names[i]) if i < len(names) else self.pid for i in range(len(hosts))]
        whole = [one for one in self.samples if len(one) == len(hosts) + 1]
        self.samples, sampled = [], np.mean(whole, axis=0).tolist() if whole else None
        resetting, asked = (None, None) if sampled is None else (sampled[:-1], sampled[-1])
        at, processes, is_stepped = time.monotonic(), [*map(process_of, pids)], "slab" in self.files
        return Look(at, hosts, processes, caller, _machine_s(), _cores(self.pid), is_stepped, resetting, asked)

    def phase(self) -> tuple[str, int] | None:
        """The phase of its training, and since when by the core's clock."""
        if self.training is None:
            return None
        path, inode, content = self.training
        said = _bytes_of(path, inode, PHASES.size, PHASES_AT)
        index, since = PHASES.unpack(said) if len(said) == PHASES.size else (len(content["phases"]), 0)
        return (content["phases"][index], since) if index < len(content["phases"]) else None


def short(number: float) -> str:
    """Three digits that count, and never an exponent."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}" if number >= 1e-3 else "0"


def shorter(words: str) -> str:
    """For rows that are narrow: ``step env 5 3.2 s``."""
    return words.removeprefix("in ").removeprefix("a ").replace(" of env", " env").replace(" for ", " ")


def _host(number: int, envs: range, state: State, counts: Sequence[int], *of_envs: int | None) -> HostState:
    fields: Any = (*state, max(0.0, seconds_since(state[2])), *counts, *of_envs)
    return HostState(number, envs, *fields)


def stepped_s(old: HostState, new: HostState) -> float:
    """Seconds in envs between two looks at a host; the mean of its envs where it steps them at the same time."""
    if new.of_envs:
        return max(0.0, seconds(new.of_envs - old.of_envs)) / max(1, len(new.envs))
    under_way = (host.for_s if host.doing in IN_ENV else 0.0 for host in (new, old))
    return max(0.0, seconds(new.in_env - old.in_env) + next(under_way) - next(under_way))


def look_before(num_hosts: int) -> Look:
    """The look before anything was done, of processes that are not known yet."""
    hosts = [_host(number, range(0), (Doing.NOTHING, NO_ENV, 0), (0,) * 6) for number in range(num_hosts)]
    return Look(time.monotonic(), hosts, [Process()] * num_hosts, Process(), 0.0, 1)


def look_inside(hosts: Iterable[tuple[range, dict[str, int], int | None]]) -> Look:
    """A look of the process that has the vector env. hosts: for each its envs, `Slab.host`, and the process's id."""
    found, processes = [], []
    for number, (envs, state, pid) in enumerate(hosts):
        counted = "env_steps", "resets", "ticks_in_env", "ticks_copying", "ticks_of_envs", "ticks_blocked"
        counts = [state[key] for key in counted]
        found.append(_host(number, envs, (state["doing"], state["env_index"], state["since"]), counts))
        processes.append(process_of(pid))
    return Look(time.monotonic(), found, processes, process_of(os.getpid()), _machine_s(), _cores(0))


def runs(only: int | None = None) -> list[Watched]:
    """The runs of this user's processes, oldest first. only: a process, the owner of a run or one of its workers.

    Raises ConfigError where `only` has none, or may not be looked at.
    """
    held = {pid: files for pid in _processes(only) if (files := _memfds(pid))}
    workers: dict[int, list[tuple[int, str, int]]] = {}  # by the inode of their activities: since when, name, pid
    for pid, files in held.items():
        for inode in [inode for kind, _, inode in files if kind == "activity"]:
            name, *fields = stat_of(pid) or ["", *["0"] * 20]
            workers.setdefault(inode, []).append((int(fields[19]), name, pid))
    # The oldest of a name: an env's own children may have it, too.
    pids = {inode: {name: pid for _, name, pid in sorted(known, reverse=True)} for inode, known in workers.items()}
    found = [run for pid, files in held.items() for run in _owned(pid, files, pids)]
    if only is not None:
        found = [run for run in found if only == run.pid or only in run.pids.values()]
        if not found:
            raise ConfigError(
                f"process {only} has no envs in worker processes yet, which is what can be looked at: threads, and "
                "envs in the calling process, share no memory with others"
            )
    return sorted(found, key=lambda run: run.about.get("since", 0.0))


def _owned(pid: int, held: list[tuple[str, str, int]], pids: Mapping[int, Mapping[str, int]]) -> list[Watched]:
    """The runs of one process. held: its files, see `_memfds`.  pids: of workers, by activity and name."""
    paths, found, training = {inode: path for _, path, inode in held}, list[Watched](), None
    for path, inode in [(path, inode) for name, path, inode in held if name == "about"]:
        about = _about(path, inode)
        if about is not None and about.get("pid") != _own_pid(pid):  # a fork of the owner has it, too
            continue
        if about is None:
            found.append(Watched(pid, {}, problem="its about file cannot be read"))
        elif about["version"] != VERSION or about.get("layout", LAYOUT) != LAYOUT:
            command = f"{about.get('python')} -m muster top {pid}"
            found.append(Watched(pid, {}, problem=f"it runs Muster {about['version']}; look at it by: {command}"))
        elif "phases" in about:
            training = path, inode, about
        else:
            files = {name: (paths[one], one) for name, one in about["files"].items() if one in paths}
            if "activity" in files:  # else it is about to end
                found.append(Watched(pid, about, files, pids.get(files["activity"][1], {})))
    for run in found:
        run.training = training
    return found


def _processes(only: int | None) -> Iterator[int]:
    if only is not None:
        try:
            os.listdir(f"/proc/{only}/fd")
        except FileNotFoundError:
            raise ConfigError(
                f"there is no process {only} here; in a container, call muster top where its processes are seen"
            ) from None
        except PermissionError:
            raise ConfigError(f"process {only} is another user's, who alone may look at it") from None
    with contextlib.suppress(OSError):
        user = os.geteuid() if only is None else os.stat(f"/proc/{only}").st_uid
        for entry in os.scandir("/proc"):
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and entry.stat().st_uid == user:
                    yield int(entry.name)


def _memfds(pid: int) -> list[tuple[str, str, int]]:
    """The files of Muster's that a process has open: names without "muster-", paths and inodes."""
    folder, found = f"/proc/{pid}/fd/", []
    with contextlib.suppress(OSError):
        for fd in os.listdir(folder):
            with contextlib.suppress(OSError):
                target = os.readlink(folder + fd)
                if target.startswith(_MEMFD):
                    name = target[len(_MEMFD) :].partition(" ")[0]
                    found.append((name, folder + fd, os.stat(folder + fd).st_ino))
    return found


def _about(path: str, inode: int) -> dict[str, Any] | None:
    """The content of an about file; None where it is cut off, or something else."""
    try:
        content: dict[str, Any] = json.loads(_bytes_of(path, inode, _MOST_ABOUT).partition(b"\0")[0])
        if content["version"] == VERSION:
            time.localtime(float(content["since"]))
            if "phases" in content:
                return content if all(isinstance(one, str) for one in (content["run"], *content["phases"])) else None
            firsts, names, files = content["first_envs"], content["names"], content["files"]
            is_whole = all(type(one) is int for one in (*firsts, *files.values())) and firsts == sorted({*firsts})
            is_whole &= all(type(one) is str for one in (*names, content["kind"], content["env"]))
            if not is_whole or not 0 <= firsts[0] <= firsts[-1] < _MOST_ENVS or len(firsts) <= len(names):
                return None
            content["own_indices"] = bool(content["own_indices"])
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, OSError, RecursionError):
        return None
    return content


def _bytes_of(path: str, inode: int, size: int, at: int = 0) -> bytes:
    """Bytes of another process's file; none where it has closed that, or has another one by that number."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.pread(fd, size, at) if os.fstat(fd).st_ino == inode else b""
    finally:
        os.close(fd)


def _own_pid(pid: int) -> int:
    """The number of a process in its own namespace of pids, which a container may have."""
    lines = read_text(Path(f"/proc/{pid}/status")).splitlines()
    return next((int(line.split()[-1]) for line in lines if line.startswith("NSpid:")), pid)


def process_of(pid: int | None) -> Process:
    """The process as it is now."""
    if pid is None or not (fields := stat_of(pid)):
        return Process()
    scheduled = read_text(Path(f"/proc/{pid}/schedstat")).split()
    ready_s = int(scheduled[1]) / 1e9 if len(scheduled) > 1 else 0.0
    return Process(pid, fields[1], (int(fields[12]) + int(fields[13])) * _TICK_S, ready_s)


def _cores(pid: int) -> int:
    """The cores that a process may use."""
    try:
        return len(os.sched_getaffinity(pid))
    except OSError:  # it has ended
        return os.cpu_count() or 1


def _machine_s() -> float:
    """CPU time of all processes of the machine so far, in seconds."""
    fields = [int(field) for field in read_text(Path("/proc/stat")).partition("\n")[0].split()[1:]]
    return (sum(fields[:8]) - fields[3] - fields[4]) * _TICK_S if len(fields) >= 8 else 0.0  # not idle, not iowait
