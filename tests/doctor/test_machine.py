"""`muster doctor` without a target: the machine, the installation, and what they mean."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import muster
import programs
from command import muster as run_muster
from muster.doctor import machine
from muster.doctor.diagnosis import Finding
from muster.doctor.egl import EglDevice, egl_devices
from muster.doctor.machine import Fact, examine
from muster.pool import resources
from test_layers import OPTIONAL

REPOSITORY = Path(__file__).parents[2]
RUN_MUSTER = "from muster.cli import main; main()"
ALL_START = {"forkserver": None, "spawn": None, "fork": None}

Only = Callable[[str], Fact]


def run(code: str, *arguments: str, cwd: Path, columns: int = 80) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": str(columns), "NO_COLOR": "1"}
    done: subprocess.CompletedProcess[str] = programs.run("-c", code, *arguments, cwd=cwd, env=environment)
    return done


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Only:
    """Examines the machine without starting workers, and returns the only fact about a topic."""
    monkeypatch.setattr(machine, "try_contexts", lambda *args, **options: ALL_START)

    def examined(topic: str) -> Fact:
        [fact] = [fact for fact in examine().facts if fact.topic == topic]
        return fact

    return examined


@contextmanager
def limited(limit: int, soft: int) -> Iterator[None]:
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(limit, before)


def test_a_machine_in_order_is_told_on_one_screen(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise AssertionError('the doctor imports torch')")
    done = run(RUN_MUSTER, "doctor", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"Muster {muster.__version__}"
    assert lines[-1] == "Workers run here. To try an env out: muster doctor ENV; what runs: muster top"
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 50
    for topic in (
        "Python",
        "system",
        "cores",
        "memory",
        "shared memory",
        "GPU",
        "EGL",
        "limits",
        "start methods",
        "required",
    ):
        assert re.search(rf"^[x!+-]  {topic} ", done.stdout, re.MULTILINE), topic
    assert "forkserver, spawn, fork tried, and work" in done.stdout


ON_ONE_CORE = """
import json, os, sys
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
try:
    from muster.cli import main
    main()
finally:
    print(json.dumps([*sys.modules]), file=sys.stderr)
"""


def test_programs_read_the_report_as_json_and_no_optional_package_is_imported(tmp_path: Path) -> None:
    done = run(ON_ONE_CORE, "doctor", "--json", cwd=tmp_path)
    told = json.loads(done.stdout)
    assert told["blocks"] is False
    assert told["version"] == muster.__version__
    assert all(fact["text"] and fact["meaning"] for fact in told["facts"])
    [cores] = [fact for fact in told["facts"] if fact["topic"] == "cores"]
    count = os.cpu_count()
    assert cores["text"].startswith(f"{count} logical CPU")
    assert cores["text"].endswith("1 of them by this process's affinity" if count > 1 else "")
    assert cores["meaning"] == 'make_vec starts 1 worker; backend="serial" does without it'
    loaded = {name.partition(".")[0] for name in json.loads(done.stderr.splitlines()[-1])}
    assert loaded & OPTIONAL == {"psutil", "rich"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--num-envs", "3"], "--num-envs needs an ENV"),
        (["--policy", "my_game:make_policy", "--json"], "--policy needs an ENV"),
        (["--kwargs", '{"a": 1}', "--seconds", "2"], "--env-kwargs, --seconds need an ENV"),
    ],
)
def test_options_that_need_a_target_say_so(arguments: list[str], words: str) -> None:
    done = run_muster("doctor", *arguments)
    assert done.exit_code == 2
    assert words in " ".join(done.stderr.replace("│", " ").split())


def test_a_cgroup_limits_cores_and_memory(only: Only, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "cpu.max": "150000 100000",
        "memory.max": "400000000",
        "memory.current": "100000000",
        "memory.stat": "anon 5",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(resources, "CGROUP", tmp_path)
    monkeypatch.setattr(resources, "_own_cgroup", lambda: tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 32)
    cores, memory = only("cores"), only("memory")
    assert cores.text == "64 logical CPUs on 32 cores; the cgroup allows the time of 1.5"
    assert cores.meaning.startswith("make_vec starts 2 workers")
    assert memory.text.startswith("300 MB of the cgroup's memory.max=400000000; ")
    assert memory.severity == "warns"


def test_open_files_limit_the_workers(only: Only, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 8)
    soft = len(os.listdir("/proc/self/fd")) + 32
    with limited(resource.RLIMIT_NOFILE, soft):
        limits = only("limits")
    assert limits.severity == "warns"
    assert limits.text.startswith(f"{soft} open files (ulimit -n)")
    assert limits.meaning.startswith("enough for about 4 workers")


def test_a_worker_takes_what_the_limits_are_divided_by() -> None:
    held = {}
    for num_workers in (1, 3):
        with muster.make_vec("CartPole-v1", 3, num_workers=num_workers) as envs:
            envs.reset()
            held[num_workers] = len(os.listdir("/proc/self/fd"))
    assert held[3] - held[1] == 2 * machine.FDS_PER_WORKER
    others = 3  # that what else runs in this process may open meanwhile
    needed = len(os.listdir("/proc/self/fd")) + machine.OTHER_FDS + 3 * machine.FDS_PER_WORKER + others
    with limited(resource.RLIMIT_NOFILE, needed), muster.make_vec("CartPole-v1", 3, num_workers=3) as envs:
        envs.reset()


@pytest.mark.parametrize(
    ("free_mb", "total_mb", "severity", "remedy"),
    [(64, 64, "warns", "docker run --shm-size=2g ..."), (1, 4000, "warns", None), (4000, 4000, "good", None)],
)
def test_a_small_or_full_dev_shm_is_marked_though_muster_does_without(
    only: Only, monkeypatch: pytest.MonkeyPatch, free_mb: int, total_mb: int, severity: str, remedy: str | None
) -> None:
    found = SimpleNamespace(f_bavail=free_mb, f_blocks=total_mb, f_frsize=1 << 20)
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    fact = only("shared memory")
    assert (fact.severity, fact.remedy) == (severity, remedy)
    assert fact.meaning == "Muster's memory (memfd) is not in it; what torch shares is"


@pytest.fixture
def dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is examined in place of /dev."""
    monkeypatch.setattr(machine, "DEV", tmp_path)
    monkeypatch.setattr(machine, "installed_version", lambda package: "2.13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_a_machine_without_gpu_and_dev_shm(only: Only, dev: Path) -> None:
    assert only("GPU").text == "none found"
    assert (only("shared memory").severity, only("shared memory").text) == ("warns", "there is no /dev/shm")


def test_a_gpu_is_for_policies(only: Only, dev: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (dev / name).touch()
    gpu = only("GPU")
    assert (gpu.severity, gpu.text, gpu.meaning) == ("good", "2", 'policies can use it: policy_device="cuda"')
    monkeypatch.setattr(machine, "installed_version", lambda package: "2.13.0+cpu")
    assert (only("GPU").severity, only("GPU").meaning) == ("warns", "the installed torch (2.13.0+cpu) cannot use it")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert (only("GPU").severity, only("GPU").text) == ("note", "hidden by CUDA_VISIBLE_DEVICES")


def test_workers_are_spread_over_the_gpus_that_egl_has() -> None:
    fact = machine.about_egl([EglDevice(0, 2, False), EglDevice(1, None, True), EglDevice(2, 0, False)])
    assert fact.text == "device 0: GPU 2; device 1: in software; device 2: GPU 0"
    chosen = eval(f"dict({fact.remedy})")["worker_env"]
    names = "CUDA_VISIBLE_DEVICES", "MUJOCO_EGL_DEVICE_ID"
    assert [tuple(chosen(i)[name] for name in names) for i in range(3)] == [(0, 2), (2, 0), (0, 2)]
    assert "osmesa" in machine.about_egl("libEGL.so.1: cannot open shared object file").meaning


def test_egl_renders_on_the_device_that_is_listed() -> None:
    pytest.importorskip("mujoco")
    if isinstance(devices := egl_devices(), str):
        pytest.skip(devices)
    assert [device.index for device in devices] == list(range(len(devices)))
    [chosen] = eval(f"dict({machine.about_egl(devices).remedy})").values()
    kwargs = {"render_mode": "rgb_array"}
    with muster.make_vec("InvertedPendulum-v5", 4, num_workers=4, env_kwargs=kwargs, worker_env=chosen) as envs:
        envs.reset(seed=[7] * 4)
        first, *others = envs.call("render")
    assert first.std() > 1
    assert all((first == one).all() for one in others)


def test_a_kernel_that_refuses_what_workers_need_sets_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refused)
    done = run_muster("doctor")
    assert done.exit_code == 1
    first = done.stdout.split("\n\n")[1]
    assert first.startswith("x  start methods  forkserver, spawn, fork do not work: OSError: [Errno 38] Function not")
    assert done.stdout.rstrip().endswith("Worker processes cannot run here: see what is in the way, above.")


def test_a_default_start_method_that_fails_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = {"forkserver": "WorkerDied: it died", "spawn": None, "fork": None}
    monkeypatch.setattr(machine, "try_contexts", lambda *args, **options: tried)
    report = examine()
    works, fails = [fact for fact in report.facts if fact.topic == "start methods"]
    assert (works.severity, works.remedy) == ("warns", 'muster.make_vec(..., context="spawn")')
    assert fails.text == "forkserver does not work: WorkerDied: it died"
    assert not report.blocks


def packages(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> dict[str, Finding]:
    """The findings about packages by topic, where only `versions` are installed."""
    monkeypatch.setattr(machine, "try_contexts", lambda *args, **options: ALL_START)
    monkeypatch.setattr(machine, "installed_version", versions.get)
    return {finding.topic: finding for finding in examine().packages}


def test_what_is_missing_comes_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    found = packages(monkeypatch, {"numpy": "2.4.6", "gymnasium": "1.4.0", "cloudpickle": "3.1.2", "dmlab2d": "1.0"})
    assert found["required"].severity == "good"
    assert found["sb3"].text == "drop-ins for SB3: no stable-baselines3"
    assert found["sb3"].remedy == "pip install 'muster-rl[sb3]'"
    assert found["torch"].remedy == "pip install 'muster-rl[torch]'"
    assert found["meltingpot"].text == "Melting Pot itself: no dm-meltingpot"
    assert found["meltingpot"].remedy == "python -m muster.envs.install_meltingpot"


def test_a_version_that_is_too_old_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    found = packages(monkeypatch, {"stable-baselines3": "2.3.2", "torch": "2.13.0+cpu", "tensordict": "0.12"})
    assert found["sb3"].severity == "warns"
    assert found["sb3"].text == "drop-ins for SB3: stable-baselines3 2.3.2, stable-baselines3 must be 2.9 or newer"
    assert found["torch"].severity == "good"


def test_any_opencv_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    found = packages(monkeypatch, {"tensorboard": "2.20", "matplotlib": "3.10", "opencv-python": "4.12"})
    assert found["train"].text == "muster train: tensorboard 2.20, matplotlib 3.10, no av, opencv-python 4.12"
    assert packages(monkeypatch, {})["train"].text.endswith("no av, no opencv-python-headless")


def test_every_extra_brings_what_it_is_named_for() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    def brought(extra: str) -> set[str]:
        names = set()
        for line in extras[extra]:
            name, inner = re.match(r"([\w.-]+)(?:\[(.*?)\])?", line).groups()
            names |= {one for each in inner.split(",") for one in brought(each)} if name == "muster-rl" else {name}
        return names

    named = {}
    for _, _, packages, command in machine._GROUPS:
        if extra := re.fullmatch(r"pip install 'muster-rl\[(\w+)\]'", command):
            named[extra[1]] = {names.split("|")[0] for names in packages.split()}
    assert {"torch", "train", "sb3", "torchrl", "meltingpot"} <= named.keys()
    for extra in named.keys() & extras.keys():
        assert named[extra] <= brought(extra)
