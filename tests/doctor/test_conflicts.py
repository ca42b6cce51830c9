"""What two envs fight over, and the lines that give each its own."""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import socket
import tempfile
import threading
import warnings
from dataclasses import replace
from typing import Any

import gymnasium as gym
import pytest
from patients import Patient
from rivals import (
    Bound,
    Daemon,
    Driving,
    Logging,
    PortOfItsOwn,
    Recording,
    Served,
    Sharing,
    make_by_index,
    make_by_variable,
    make_hard_coded,
    make_single,
)

import muster
from muster.doctor import trials
from muster.doctor.advice import Verdict, candidates
from muster.doctor.conflicts import Conflicts, find_conflicts, leftovers, watched
from muster.doctor.diagnosis import Measurements
from muster.doctor.fixes import Fix, arguments_of, fixes_for
from muster.doctor.held import Held
from muster.envs import resolve_foreign_id
from muster.errors import NotEnoughMemory
from muster.hosts.trial import Trials, pack_for_trials
from muster.recipes.recipe import make_recipes
from slow import slow

SLOW = pytest.mark.slow
pytestmark = pytest.mark.usefixtures("kept_launchers")


@pytest.fixture
def port() -> int:
    """A port with others that are free behind it, which the kernel gives to nobody else meanwhile."""
    for first in range(21_000 + os.getpid() % 500 * 16, 32_000, 16):
        try:
            for one in range(first, first + 8):
                for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                    with socket.socket(type=kind) as tried:
                        tried.bind(("127.0.0.1", one))
        except OSError:
            continue
        return first
    raise AssertionError("no ports are free")


def conflicts_of(env: Any, limit_s: float = 60.0, **kwargs: Any) -> Conflicts:
    recipe = make_recipes(env, 1, kwargs, resolve_foreign_id=resolve_foreign_id)[0]
    env_trials = Trials(pack_for_trials([recipe], "spawn"), limit_s)
    alone = watched(env_trials, trials.behaviour)
    assert alone.stage is None, alone
    again = watched(env_trials, trials.replay, rows=alone.results["rows"])
    env_trials = replace(env_trials, leftovers=leftovers((alone, again)))
    return find_conflicts(env_trials, (alone, again), lambda stage: None, arguments_alone=False)


INDEX = "muster.get_worker_info().unique_index"


@pytest.mark.parametrize(
    ("wanted", "arguments", "codes"),
    [
        ([("TCP port", "5550")], {"at": "localhost:5550"}, [f'f"localhost:{{5550 + {INDEX}}}"']),
        ([("TCP port", "5550"), ("TCP port", "5551")], {"port": 5550}, [f"5550 + 2 * {INDEX}"]),
        ([("device", "/dev/robot0")], {"robot": "/dev/robot0"}, [f'f"/dev/robot{{{INDEX}}}"']),
        ([("device", "/dev/robot3")], {"robot": "/dev/robot3"}, [f'f"/dev/robot{{3 + {INDEX}}}"']),
        ([("file", "/tmp/run.db-journal")], {"file": "/tmp/run.db"}, [f'f"/tmp/run-{{{INDEX}}}.db"']),
        ([("TCP port", "5550")], {"name": "arm", "level": 3}, []),
    ],
)
def test_an_argument_that_names_a_thing_becomes_another_for_each_env(wanted, arguments, codes):
    fixes = [fix for fix, _ in fixes_for([Held(*one) for one in wanted], arguments, arguments_alone=True)]
    expected = [dict.fromkeys(arguments, f"muster.lazy(lambda: {code})") for code in codes]
    assert [fix.arguments for fix in fixes] == expected


def test_arguments_are_those_of_the_class_of_an_id_and_of_its_spec():
    gym.register("MusterTestServed-v0", "rivals:Served", kwargs={"port": 5550})
    try:
        recipe = make_recipes("MusterTestServed-v0", 1, {"kind": "udp", "lock": muster.lazy(threading.Lock)})[0]
    finally:
        del gym.registry["MusterTestServed-v0"]
    assert arguments_of(recipe) == {"port": 5550, "kind": "udp", "server_bytes": 0}


def run_four(env: Any, fix: Fix, **kwargs: Any) -> None:
    code = str(fix).replace("...", "env, num_envs=4").replace("env_kwargs={", "env_kwargs={**kwargs, ")
    with eval(code, {"muster": muster, "tempfile": tempfile, "env": env, "kwargs": kwargs}) as envs:
        envs.reset(seed=0)
        for _ in range(3):
            envs.step(envs.sample_actions())


@pytest.mark.parametrize(
    ("env", "kwargs", "kind", "fails"),
    [
        (Served, {"port": "PORT"}, "TCP port", True),
        pytest.param(Served, {"port": "PORT", "kind": "udp"}, "UDP port", False, marks=SLOW),
        pytest.param(Bound, {"address": "simulator.sock"}, "Unix socket", True, marks=SLOW),
        (Daemon, {"folder": "FOLDER"}, "file", True),
        pytest.param(Recording, {"database": "levels.db"}, "file", True, marks=SLOW),
        (Logging, {"log": "run.log"}, "file", False),
        pytest.param(Logging, {"log": "run.log", "how": "reopened"}, "file", False, marks=SLOW),
        pytest.param(Sharing, {"memory": "SHARED"}, "shared memory", True, marks=SLOW),
        pytest.param(Driving, {"device": "robot0"}, "device", True, marks=SLOW),
    ],
)
def test_what_both_want_is_named_and_fixed_for_four(env, kwargs, kind, fails, port, tmp_path):
    for number in range(4):
        os.mkfifo(tmp_path / f"robot{number}")
    named = {"PORT": port, "FOLDER": str(tmp_path), "SHARED": f"muster-test-{os.getpid()}"}
    kwargs = {
        name: named.get(value, str(tmp_path / value) if "." in value or "robot" in value else value)
        for name, value in kwargs.items()
    }
    found = conflicts_of(env, **kwargs)
    assert found.fails is fails
    name = str(next(iter(kwargs.values())))
    assert [one for one in found.wanted if one.kind == kind and name in one.name], found
    assert found.fix is not None, found
    assert found.findings()[0].remedy == str(found.fix)
    assert not list(tmp_path.glob("*.pid"))
    run_four(env, found.fix, **kwargs)


@pytest.mark.slow
def test_an_env_that_refuses_to_start_beside_another_one_starts_after_the_doctor(tmp_path):
    """Its pid file has no argument, so that no fix is known, and trials of all kinds fail."""

    pid_file = tmp_path / "sim.pid"

    class Single(Patient):
        def __init__(self):
            super().__init__()
            pid_file.open("x").close()

        def close(self):
            pid_file.unlink()

    diagnosis = muster.diagnose(Single, num_envs=2, seconds=0.1)
    assert "sim.pid" in str(diagnosis)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("waits", [False, *slow(True)])
def test_what_a_server_has_printed_stands_in_the_report(waits, port):
    (finding,) = conflicts_of(Served, 20.0 if waits else 60.0, port=port, waits=waits).findings()
    assert finding.severity == "blocks"
    assert f"the same TCP port {port}" in finding.text
    assert f"simulator on port {port}" in finding.text
    assert "Address already in use" in finding.text
    assert f"env_kwargs={{'port': muster.lazy(lambda: {port} + {INDEX})}}" in finding.remedy


@pytest.mark.slow
def test_what_a_variable_says_is_another_for_each_worker(port, monkeypatch):
    monkeypatch.setenv("MUSTER_TEST_PORT", str(port))
    found = conflicts_of(make_by_variable)
    assert found.fix.variables == {"MUSTER_TEST_PORT": f'f"{{{port} + i}}"'}
    run_four(make_by_variable, found.fix)


def test_files_in_the_folder_for_temporary_ones_get_a_folder_per_worker(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    found = conflicts_of(make_single)
    assert found.fix.options() == ['worker_env=lambda i: {"TMPDIR": tempfile.mkdtemp()}']
    run_four(make_single, found.fix)


@pytest.mark.slow
def test_a_port_that_no_argument_says_is_named_and_no_line_is_claimed(port):
    diagnosis = muster.diagnose(make_hard_coded(port), num_envs=4, seconds=0.1, timeout=20.0)
    (finding,) = [one for one in diagnosis.findings if one.topic == "at once"]
    assert f"the same TCP port {port}" in finding.text
    assert diagnosis.recommendation is None


@pytest.mark.parametrize("env", [Patient, *slow(PortOfItsOwn, make_by_index)])
def test_envs_that_want_nothing_of_each_other_are_told_of_nothing(env, port):
    found = conflicts_of(env, **({} if env is Patient else {"port": port}))
    assert (found.wanted, found.fix, found.findings()) == ((), None, []), found


@pytest.mark.slow
@pytest.mark.parametrize("package", ["gymnasium", "minigrid", "pettingzoo"])
@pytest.mark.filterwarnings("ignore:.*out of date:DeprecationWarning")
def test_installed_envs_are_told_of_nothing(package):
    told = {name: found for name in installed(package) if (found := conflicts_of(name)).findings()}
    assert not told


def installed(package: str) -> list[str]:
    """Ids of envs that can be reset here, one of each class."""
    pytest.importorskip(package)
    if package == "pettingzoo":
        families = {"mpe2": "mpe2", **{f"pettingzoo.{name}": name for name in ("sisl", "butterfly", "classic")}}
        names = [
            f"pettingzoo/{family}/{one.name}"
            for module, family in families.items()
            for one in pkgutil.iter_modules(importlib.import_module(module).__path__)
        ]
        return [name for name in names if name.rpartition("_v")[2].isdigit()]
    newest = {}
    for spec in gym.registry.values():
        if str(spec.entry_point).startswith(f"{package}.") and "MuJoCo" not in str(spec.entry_point):
            newest[spec.entry_point] = spec.id
    return [name for name in newest.values() if builds(name)]


def builds(name: str) -> bool:
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Box2D dies of one that is an error
        env = gym.make(name)
        env.reset()  # MiniGrid's wheel lacks the patterns of some
        env.close()
        return True
    return False


def test_the_memory_of_an_envs_server_is_the_envs(port, monkeypatch):
    kwargs = {"port": port, "server_bytes": 200_000_000}
    recipe = make_recipes(Served, 1, kwargs)[0]
    alone = Trials(pack_for_trials([recipe], "spawn"), 60.0).run(trials.behaviour)
    assert alone.results["env_bytes"] == pytest.approx(200e6, rel=0.1)
    measured = Measurements(env_bytes=alone.results["env_bytes"], worker_bytes=alone.results["worker_bytes"])
    (line, *_) = candidates(Verdict("make_env", {}, 4, travels=True, tried={"forkserver": None}), measured)
    assert line.advice.memory_bytes == pytest.approx(4 * (200e6 + measured.worker_bytes), rel=0.1)
    with muster.make_vec(Served, 1, env_kwargs=kwargs) as envs:
        (worker,) = envs.stats()["workers"]
    assert worker["memory_bytes"] == pytest.approx(200e6 + alone.results["worker_bytes"], rel=0.1)
    monkeypatch.setattr("muster.pool.resources.memory_left", lambda: (500_000_000, "left in this test"))
    with pytest.raises(NotEnoughMemory, match="2[01][0-9] MB for an env"):
        muster.make_vec(make_by_index, 4, env_kwargs=kwargs)
