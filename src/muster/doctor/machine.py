"""The doctor's examination of the machine and the installation. Imports none of the packages that it lists."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from muster.doctor.diagnosing import Subject, try_contexts
from muster.doctor.diagnosis import Finding, Severity, size
from muster.doctor.egl import EglDevice, egl_devices
from muster.doctor.findings import about_start_methods
from muster.extras import installed_version, is_older
from muster.hosts.trial import TrialOutcome
from muster.pool.resources import cpu_quota, memory_left, usable_cores
from muster.recipes.recipe import make_recipes

DEV = Path("/dev")

# Open files of the caller: for each worker; and for slab, mail, log records, notices, the launcher, and a start.
FDS_PER_WORKER = 6
OTHER_FDS = 8
_LITTLE_MEMORY = 500_000_000
_LITTLE_SHM = 64 << 20  # docker's default
_TRIAL_S = 30.0
_OLDEST_LINUX = "5.3"


@dataclass(frozen=True)
class Fact(Finding):
    """A finding about the machine. meaning: what follows from it for Muster; "" where that needs no words."""

    meaning: str = ""


@dataclass(frozen=True)
class MachineReport:
    """The result of `examine`. packages: one finding for each group of packages, under the name of its extra."""

    version: str
    facts: tuple[Fact, ...]
    packages: tuple[Finding, ...]

    @property
    def blocks(self) -> bool:
        """True where a fact keeps worker processes from running here."""
        return any(fact.severity == "blocks" for fact in self.facts)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        return {**dataclasses.asdict(self), "blocks": self.blocks}


def examine() -> MachineReport:
    """The facts about this machine, and the packages that are installed. Starts a worker by each start method."""
    facts = [_about_python(), _about_system(), _about_cores(), _about_memory(), _about_shm()]
    facts += [_about_gpu(), about_egl(egl_devices()), _about_limits(), *_about_starts()]
    return MachineReport(installed_version("muster-rl") or "of unknown version", tuple(facts), tuple(_about_packages()))


def _about_python() -> Fact:
    text = f"{platform.python_version()}, {sys.executable}"
    return Fact("good", "Python", text, meaning="workers run the same Python, with the packages below")


def _about_system() -> Fact:
    text = " ".join(filter(None, [platform.system(), platform.release(), platform.machine(), *platform.libc_ver()]))
    meaning = f"workers need Linux {_OLDEST_LINUX} or newer: pidfd_open, memfd_create"
    return Fact("warns" if is_older(platform.release(), _OLDEST_LINUX) else "good", "system", text, meaning=meaning)


def _about_cores() -> Fact:
    import psutil  # which only this report needs, and no other part of the doctor

    count, allowed, quota, cores = os.cpu_count() or 1, len(os.sched_getaffinity(0)), cpu_quota(), usable_cores()
    physical = psutil.cpu_count(logical=False)
    text = f"{count} logical CPU{'s' * (count > 1)}"
    if physical and physical < count:
        text += f" on {physical} cores" if physical > 1 else " on 1 core"
    if allowed < count:
        text += f", {allowed} of them by this process's affinity"
    if quota is not None:
        text += f"; the cgroup allows the time of {quota:.3g}"
    if cores == 1:
        return Fact("note", "cores", text, meaning='make_vec starts 1 worker; backend="serial" does without it')
    return Fact("good", "cores", text, meaning=f"make_vec starts {cores} workers, fewer for fewer envs")


def _about_memory() -> Fact:
    left, limit = memory_left()
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    severity: Severity = "warns" if left < _LITTLE_MEMORY else "good"
    meaning = "make_vec refuses envs that will not fit (memory_check)"
    return Fact(severity, "memory", f"{size(left)} {limit}; {size(installed)} installed", meaning=meaning)


def _about_shm() -> Fact:
    """Muster's own memory lies in memfds, which the size of /dev/shm does not limit."""
    needs = "Muster's memory (memfd) is not in it; what torch shares is"
    remedy = "docker run --shm-size=2g ..."
    try:
        found = os.statvfs(DEV / "shm")
    except OSError:
        return Fact("warns", "shared memory", "there is no /dev/shm", meaning=needs)
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    text = f"{size(free)} free of {size(total)} in /dev/shm"
    if free > _LITTLE_SHM:
        return Fact("good", "shared memory", text, meaning=needs)
    return Fact("warns", "shared memory", text, remedy if total <= _LITTLE_SHM else None, needs)


def _about_gpu() -> Fact:
    # NVIDIA's, AMD's, and in WSL 2 all of them behind one device.
    count = len([*DEV.glob("nvidia[0-9]*"), *DEV.glob("kfd"), *DEV.glob("dxg")])
    torch = installed_version("torch") or ""
    if not count:
        return Fact("note", "GPU", "none found", meaning="policies compute on the CPU")
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return Fact("note", "GPU", "hidden by CUDA_VISIBLE_DEVICES", meaning="policies compute on the CPU")
    if torch.endswith("+cpu"):
        return Fact("warns", "GPU", str(count), meaning=f"the installed torch ({torch}) cannot use it")
    return Fact("good", "GPU", str(count), meaning='policies can use it: policy_device="cuda"')


def about_egl(devices: Sequence[EglDevice] | str) -> Fact:
    """The fact about the devices that EGL has, with the option that spreads workers over its GPUs."""
    if not devices or isinstance(devices, str):
        meaning = 'envs render without a screen by "MUJOCO_GL": "osmesa"'
        return Fact("note", "EGL", str(devices or "it has no device"), meaning=meaning)
    text = "; ".join(map(str, devices))
    gpus = sorted((one.cuda, one.index) for one in devices if one.cuda is not None)
    if not gpus:
        chosen = f'worker_env={{"MUJOCO_GL": "egl", "MUJOCO_EGL_DEVICE_ID": {devices[0].index}}}'
        return Fact("note", "EGL", text, chosen, "envs render without a screen, on no GPU of CUDA")
    count, (of_cuda, of_egl) = len(gpus), ([pair[k] for pair in gpus] for k in (0, 1))
    variables = {"CUDA_VISIBLE_DEVICES": f"{of_cuda}[i % {count}]", "MUJOCO_EGL_DEVICE_ID": f"{of_egl}[i % {count}]"}
    code = ", ".join(f'"{name}": {value}' for name, value in variables.items())
    chosen = f'worker_env=lambda i: {{"MUJOCO_GL": "egl", {code}}}'
    return Fact("good", "EGL", text, chosen, "envs render on a GPU; its index is not always CUDA's")


def _about_limits() -> Fact:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return Fact("good", "limits", "none on open files")
    room = max(0, (files - len(os.listdir("/proc/self/fd")) - OTHER_FDS) // FDS_PER_WORKER)
    meaning = f"enough for about {room:,} workers; others are in `ulimit -a` and the cgroup's pids.max"
    severity: Severity = "warns" if room < usable_cores() else "good"
    return Fact(severity, "limits", f"{files:,} open files (ulimit -n)", meaning=meaning)


def _about_starts() -> list[Fact]:
    """The start methods, each tried with a CartPole."""
    tried = try_contexts(Subject.of(make_recipes("CartPole-v1", 1)[0], _TRIAL_S, []), TrialOutcome())
    works = [name for name, problem in tried.items() if problem is None]
    first, *others = (Fact(**dataclasses.asdict(one)) for one in about_start_methods(tried, known=False))
    meaning = 'make_vec works with backend="thread" and backend="serial" alone'
    if "forkserver" in works:
        meaning = 'context="auto" is forkserver, which never forks the caller'
    elif works:
        meaning = 'context="auto" is forkserver, which fails here'
        remedy = f'muster.make_vec(..., context="{works[0]}")'
        first = dataclasses.replace(first, severity="warns", remedy=remedy)
    return [dataclasses.replace(first, meaning=meaning), *others]


_OPENCV = "opencv-python-headless|opencv-python|opencv-contrib-python|opencv-contrib-python-headless"

# The topic, which is the extra's name where there is one; what the packages are for; their names, those in place of
# each other with | between them; what installs them.
_GROUPS = (
    ("required", "vector envs", "numpy gymnasium cloudpickle", "pip install muster-rl"),
    ("torch", "collectors, networks", "torch tensordict", "pip install 'muster-rl[torch]'"),
    ("train", "muster train", f"tensorboard matplotlib av {_OPENCV}", "pip install 'muster-rl[train]'"),
    ("torchrl", "as_torchrl", "torchrl", "pip install 'muster-rl[torchrl]'"),
    ("sb3", "drop-ins for SB3", "stable-baselines3", "pip install 'muster-rl[sb3]'"),
    ("marl", "PettingZoo's envs", "pettingzoo mpe2", "pip install 'muster-rl[marl]'"),
    ("meltingpot", "what Melting Pot needs", "dmlab2d dm-env", "pip install 'muster-rl[meltingpot]'"),
    ("meltingpot", "Melting Pot itself", "dm-meltingpot", "python -m muster.envs.install_meltingpot"),
    ("gymnasium", "Atari, MuJoCo", "ale-py mujoco", "pip install 'gymnasium[atari,mujoco]'"),
)


def _about_packages() -> Iterator[Finding]:
    oldest = _oldest_versions()
    for topic, purpose, names, command in _GROUPS:
        versions = dict(_installed_of(alternatives.split("|")) for alternatives in names.split())
        old = [name for name, found in versions.items() if found and is_older(found, oldest.get(name, ""))]
        texts = [f"{name} {found}" if found else f"no {name}" for name, found in versions.items()]
        texts += [f"{name} must be {oldest[name]} or newer" for name in old]
        severity: Severity = "warns" if old else "good" if all(versions.values()) else "note"
        yield Finding(severity, topic, f"{purpose}: {', '.join(texts)}", None if severity == "good" else command)


def _installed_of(alternatives: list[str]) -> tuple[str, str | None]:
    versions = {name: installed_version(name) for name in alternatives}
    return next((one for one in versions.items() if one[1]), (alternatives[0], None))


def _oldest_versions() -> dict[str, str]:
    try:
        needed = metadata.requires("muster-rl") or []
    except metadata.PackageNotFoundError:
        return {}
    return dict(re.findall(r"^([\w.-]+) *>= *([\d.]+)", "\n".join(needed), re.MULTILINE))
