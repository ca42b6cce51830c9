"""What two envs fight over, and the lines that give each its own."""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
import tempfile
import threading
from dataclasses import replace
from multiprocessing import shared_memory
from typing import Any

import gymnasium as gym
import pytest
from patients import Patient
from rivals import (
    Daemon,
    Exclusive,
    Logging,
    Served,
    make_by_index,
    make_single,
)

import muster
from muster.doctor import trials
from muster.doctor.advice import Verdict, candidates
from muster.doctor.conflicts import Conflicts, find_conflicts, leftovers, watched
from muster.doctor.diagnosis import Measurements
from muster.doctor.fixes import Fix, arguments_of, fixes_for
from muster.doctor.held import Held, held
from muster.envs import resolve_foreign_id
from muster.errors import NotEnoughMemory
from muster.hosts.trial import Trials, pack_for_trials
from muster.recipes.recipe import make_recipes
from slow import slow

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
        pytest.param(Served, {"port": "PORT", "kind": "udp"}, "UDP port", False, marks=pytest.mark.slow),
        (Daemon, {"folder": "FOLDER"}, "file", True),
        (Logging, {"log": "FOLDER/run.log"}, "file", False),
    ],
)
def test_what_both_want_is_named_and_fixed_for_four(env, kwargs, kind, fails, port, tmp_path):
    kwargs = {name: value.replace("FOLDER", str(tmp_path)) for name, value in kwargs.items()}
    kwargs |= {"port": port} if "port" in kwargs else {}
    found = conflicts_of(env, **kwargs)
    assert found.fails is fails
    name = str(next(iter(kwargs.values())))
    assert [one for one in found.wanted if one.kind == kind and name in one.name], found
    assert found.fix is not None, found
    assert found.findings()[0].remedy == str(found.fix)
    assert not list(tmp_path.glob("*.pid"))
    run_four(env, found.fix, **kwargs)


def test_envs_that_cannot_be_built_at_once_take_turns(tmp_path):
    lock = str(tmp_path / "lock")
    found = conflicts_of(Exclusive, lock=lock)
    assert found.fails
    assert str(found.fix) == "muster.make_vec(..., max_concurrent_starts=1)"


def test_what_a_process_holds_is_listened_on_written_locked_or_shared(tmp_path, port):
    memory = shared_memory.SharedMemory(create=True, size=8)
    memory.buf[:1] = b"x"
    os.mkfifo(tmp_path / "robot")
    device = os.open(tmp_path / "robot", os.O_RDWR)
    with (
        socket.socket(socket.AF_UNIX) as unix,
        socket.create_server(("127.0.0.1", port)),
        contextlib.closing(sqlite3.connect(tmp_path / "levels.db")) as database,
        (tmp_path / "read").open("w"),
        (tmp_path / "read").open(),
    ):
        unix.bind(str(tmp_path / "unix"))
        unix.listen()
        database.execute("create table steps (number)")
        found = {(one.kind, one.name) for one in held(os.getpid())}
    os.close(device)
    assert found >= {
        *(("TCP port", str(port)), ("shared memory", f"/dev/shm/{memory.name}")),
        *(("Unix socket", str(tmp_path / "unix")), ("file", str(tmp_path / "levels.db"))),
        *(("file", str(tmp_path / "read")), ("device", str(tmp_path / "robot"))),
    }
    memory.close()
    memory.unlink()


@pytest.mark.parametrize("waits", [False, *slow(True)])
def test_what_a_server_has_printed_stands_in_the_report(waits, port):
    (finding,) = conflicts_of(Served, 20.0 if waits else 60.0, port=port, waits=waits).findings()
    assert finding.severity == "blocks"
    assert f"the same TCP port {port}" in finding.text
    assert f"simulator on port {port}" in finding.text
    assert "Address already in use" in finding.text
    assert f"env_kwargs={{'port': muster.lazy(lambda: {port} + {INDEX})}}" in finding.remedy


def test_files_in_the_folder_for_temporary_ones_get_a_folder_per_worker(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    found = conflicts_of(make_single)
    assert found.fix.options() == ['worker_env=lambda i: {"TMPDIR": tempfile.mkdtemp()}']
    run_four(make_single, found.fix)


@pytest.mark.parametrize("env", [Patient, *slow(make_by_index)])
def test_envs_that_want_nothing_of_each_other_are_told_of_nothing(env, port):
    found = conflicts_of(env, **({} if env is Patient else {"port": port}))
    assert (found.wanted, found.fix, found.findings()) == ((), None, []), found


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
