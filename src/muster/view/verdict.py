"""The cause of a run's speed, by two looks at it: one sentence with its numbers, and the line to write."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from muster._core import Doing
from muster.pool.watch import seconds
from muster.view.looks import IN_ENV, Look, Process, short, stepped_s

_MOST = 0.85  # of the clock: the whole of it, as far as anybody would say
_WAIT = 0.8  # of the envs of a worker that steps them at the same time
_READY = 0.25  # of the clock: a few workers more than cores on a machine of their own stay below
_HANGS, _HANGS_S, _SLOW_S = 100, 1.0, 30.0  # times its mean, but at least so long; a reset, and a first step
_SENTENCES = {
    "idle": "idle: no env was stepped for {dt} s; the caller, or its policy, has the time",
    "unseen": "its workers use {cpu:.2f} of a core each; steps of TorchRL's own collectors are not counted",
    "starting": "starting: its envs are being built",
    "stopped": "{who} (pid {pid}) is stopped by a signal; kill -CONT {pid} lets it go on",
    "hang": "env {env} hangs: {words}{times}. Its stack: py-spy dump --pid {pid}; step_timeout= ends such waits",
    "machine": "the machine: workers are ready and have no core for {ready:.2f} of the time; {runnable:.1f} or more "
    "runnable processes a core, of which {others:.1f} are not this run's. End what else runs, or num_workers={fewer}",
    "resets": "resets: {resetting:.2f} of the workers' time{each}. send and recv(min_envs=k) go on without the envs "
    "that reset; longer episodes reset less",
    "copying": "observations: copying takes {copying:.2f} of the workers' time, {copy_ms} of {step_ms} ms a step. "
    "copy=False, or smaller dtypes and images",
    "straggler": "worker {number} ({envs}) is {times:.3g} times as slow as the others, which wait for it: {env_ms} ms "
    "a step of an env. {waits_not}, or give it fewer envs",
    "envs": "the envs: workers step {stepping:.2f} of the time, {step_ms} ms a step; {steps_per_s} env steps a second "
    "are what {place}",
    "waits": "the envs wait: of {count} envs of a worker {in_step} are in a step at a time, {step_ms} ms each, and the "
    "worker uses {cpu:.2f} of a core. More of them in it: a larger num_envs",
    "blocked": "worker {number} ({envs}): code of one env keeps the loop of all for {blocked:.2f} of the time; "
    "py-spy dump --pid {pid} shows where. Await it, or call it by asyncio.to_thread",
    "long": "the envs: workers step {stepping:.2f} of the time, and no step has ended within {dt} s",
    "caller": "the caller: {wait_ms} of {step_ms} ms a step lie between step and step. overlap=True, num_collectors=, "
    "or a GPU for the policy",
    "uneven": "uneven steps: workers step {stepping:.2f} of the time and wait {waiting:.2f} of it, most for each "
    "other. send and recv(min_envs=k) do not wait, and more envs for each worker even it out",
    "waiting": "workers wait {waiting:.2f} of the time, {wait_ms} of {step_ms} ms a step: for the caller between step "
    "and step, or for each other (muster top says which). overlap=True, or send and recv(min_envs=k)",
    "outside": "the policy: collectors step envs for {stepping:.2f} of the time and compute in most of the rest "
    "({cpu:.2f} of a core each). More envs for each, a smaller network, or a GPU",
    "learner": "the caller: collectors step envs for {stepping:.2f} of the time and wait for the learner in most of "
    "the rest ({cpu:.2f} of a core each). sync=False collects meanwhile",
    "between": "between the envs and the caller: workers step {stepping:.2f} of the time and wait {waiting:.2f}, "
    "{step_ms} ms a step. overlap=True does both at once",
}
_KINDS = {"stopped": "hang", "learner": "caller", "unseen": "idle", "blocked": "straggler"}
_KINDS |= {"waits": "envs", "long": "envs"}


class Cause(NamedTuple):
    """kind: idle, starting, hang, machine, resets, copying, straggler, envs, caller, outside, or what lies between
    these: uneven, waiting, between."""

    kind: str
    sentence: str


class Shares(NamedTuple):
    """The shares of the clock that a worker has spent between two looks, and its env steps and resets.

    waiting: for its caller; None in collectors, which act by themselves.  ready: without a core.
    """

    steps: int
    resets: int
    stepping: float
    waiting: float | None
    copying: float
    cpu: float
    ready: float


def shares_of(before: Look, after: Look) -> list[Shares]:
    """For each host."""
    dt, found = after.at - before.at, []
    for i, (old, new) in enumerate(zip(before.hosts, after.hosts, strict=False)):
        counts = max(0, new.env_steps - old.env_steps), max(0, new.resets - old.resets)
        spent_s = stepped_s(old, new), max(0.0, seconds(new.copying - old.copying))
        stepping, copying = (min(1.0, one / dt) for one in spent_s)
        # The record counts a wait as it ends, which may be long after this look.
        waiting = max(0.0, 1.0 - stepping - copying) if after.is_stepped else None
        cpu = of_clock(dt, before.processes[i], after.processes[i])
        found.append(Shares(*counts, stepping, waiting, copying, *cpu))
    return found


def of_clock(dt: float, before: Process, after: Process) -> tuple[float, float]:
    """The shares of the clock on a core, and ready without one; 0 where another process has taken its place."""
    if before.pid != after.pid:
        return 0.0, 0.0
    return (after.cpu_s - before.cpu_s) / dt, min(1.0, (after.ready_s - before.ready_s) / dt)


def verdict(before: Look, after: Look) -> Cause:
    """The cause of a run's speed between two looks."""
    shares, dt, cores = shares_of(before, after), after.at - before.at, after.cores
    if (stuck := _stuck(after)) is not None:
        return stuck
    if not shares or all(host.doing == Doing.BUILDING for host in after.hosts):
        return _cause("starting")
    steps, resets = sum(one.steps for one in shares), sum(one.resets for one in shares)
    stepping, copying, cpu = (
        statistics.fmean(getattr(one, name) for one in shares) for name in ("stepping", "copying", "cpu")
    )
    # A worker that waits awake gives its core away again and again, and is ready meanwhile.
    ready = statistics.fmean(min(one.ready, 1.0 - (one.waiting or 0.0)) for one in shares)
    if not steps + resets and stepping < 0.01:
        return _cause("unseen" if cpu > 0.05 and not after.is_stepped else "idle", dt=short(dt), cpu=cpu)
    waiting, step_ms = 1.0 - stepping - copying, 1e3 * dt * sum(len(host.envs) for host in after.hosts) / max(1, steps)
    figures = {"stepping": stepping, "waiting": waiting, "cpu": cpu, "copying": copying, "dt": short(dt)}
    figures |= {f"{name}_ms": of * step_ms for name, of in (("step", 1.0), ("wait", waiting), ("copy", copying))}
    resetting = statistics.fmean(after.resetting or (0.0,))
    slowest = max(range(len(shares)), key=lambda i: shares[i].stepping)
    rest = statistics.median([one.stepping for i, one in enumerate(shares) if i != slowest] or [1.0])
    if ready >= _READY:
        return _machine(before, after, ready)
    blocked = [seconds(new.blocked - old.blocked) / dt for old, new in zip(before.hosts, after.hosts, strict=False)]
    if max(blocked) > 1 / 3:
        host, share = after.hosts[blocked.index(max(blocked))], min(1.0, max(blocked))
        pid = after.processes[host.number].pid
        return _cause("blocked", number=host.number, envs=named(host.envs), pid=pid, blocked=share)
    count = statistics.fmean(len(host.envs) for host in after.hosts)
    if count > 1 and after.hosts[0].of_envs and stepping >= _WAIT and cpu < _MOST and steps:
        return _cause("waits", count=short(count), in_step=short(stepping * count), **figures)
    if resetting > 1 / 3:
        each = f", {short(1e3 * resetting * dt * len(shares) / resets)} ms each" if resets >= len(shares) else ""
        return _cause("resets", resetting=resetting, each=each)
    if copying > 1 / 3:
        return _cause("copying", **figures)
    if shares[slowest].stepping >= 0.6 and rest <= 0.6 * shares[slowest].stepping:
        return _straggler(after, shares, slowest, dt)
    if stepping >= _MOST:
        place = f"this machine can give ({cores} core{'s' * (cores > 1)}). More cores, or fewer wrappers"
        if len(shares) < cores:
            place = f"{len(shares)} of {cores} cores can give. More workers, by num_workers=, or fewer wrappers"
        return _cause("envs" if steps else "long", place=place, steps_per_s=short(steps / dt), **figures)
    if not after.is_stepped:
        return _cause("outside" if cpu - stepping >= 0.5 * (1 - stepping) else "learner", **figures)
    if after.asked is None:
        return _cause("waiting" if waiting >= _MOST else "between", **figures)
    if waiting > 0.2 and 1 - after.asked < 0.5 * waiting:
        return _cause("uneven", **figures)
    return _cause("caller" if waiting >= _MOST else "between", **figures)


def _cause(name: str, **figures: object) -> Cause:
    said = {key: short(one) if key.endswith("_ms") and isinstance(one, float) else one for key, one in figures.items()}
    return Cause(_KINDS.get(name, name), _SENTENCES[name].format(**said))


def _stuck(look: Look) -> Cause | None:
    for number, process in enumerate((*look.processes, look.caller)):
        if process.state in ("T", "t"):
            who = f"worker {number}" if number < len(look.hosts) else "the caller"
            return _cause("stopped", who=who, pid=process.pid)
    inside = [host for host in look.hosts if host.doing in IN_ENV]
    if not inside:
        return None
    longest = max(inside, key=lambda host: host.for_s)
    done = longest.env_steps + longest.resets
    mean_s = seconds(longest.of_envs or longest.in_env) / max(1, done)
    least_s = _HANGS_S if done and longest.doing == Doing.STEPPING else _SLOW_S
    if longest.for_s < max(least_s, _HANGS * mean_s):
        return None
    times = f", {longest.for_s / mean_s:,.0f} times its mean" if mean_s > 0 else ""
    words, pid = longest.words.replace(f" of env {longest.env}", ""), look.processes[longest.number].pid
    return _cause("hang", env=longest.env, words=words, times=times, pid=pid)


def _machine(before: Look, after: Look, ready: float) -> Cause:
    dt, old = after.at - before.at, {one.pid: one for one in (*before.processes, before.caller)}
    both = {one.pid: one for one in (*after.processes, after.caller)}  # several hosts may be in one process
    own = [of_clock(dt, old.get(pid, Process()), one) for pid, one in both.items()]
    cpu = sum(one for one, _ in own)
    others = max(0.0, (after.machine_s - before.machine_s) / dt - cpu)
    runnable = (cpu + sum(waits for _, waits in own) + others) / after.cores
    fewer = max(1, min(len(after.hosts), after.cores) - 1)
    return _cause("machine", ready=ready, runnable=runnable, others=others / after.cores, fewer=fewer)


def _straggler(after: Look, shares: Sequence[Shares], slowest: int, dt: float) -> Cause:
    each_s = [one.stepping * dt / max(1, one.steps + one.resets) for one in shares]
    others_s = statistics.median(one for i, one in enumerate(each_s) if i != slowest)
    host, times = after.hosts[slowest], each_s[slowest] / max(others_s, 1e-9)
    waits_not = "send and recv(min_envs=k) do not wait" if after.is_stepped else "sync=False does not wait"
    figures = {"number": host.number, "envs": named(host.envs), "times": times, "env_ms": 1e3 * each_s[slowest]}
    return _cause("straggler", waits_not=waits_not, **figures)


def named(envs: range) -> str:
    """The words ``env 5``, ``envs 6, 7`` or ``envs 0 to 15``."""
    if len(envs) == 1:
        return f"env {envs[0]}"
    return f"envs {', '.join(map(str, envs)) if len(envs) < 4 else f'{envs[0]} to {envs[-1]}'}"
