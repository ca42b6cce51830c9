"""Connecting to Ray on a real cluster of this machine: who may join, what is said where it fails, what is left."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_clusters import LOOPBACK, RunningCluster, needs_ray, run_cluster

import programs
from muster.errors import ConfigError
from muster.rollout.cluster.ray_connection import connect
from processes import is_alive

pytestmark = needs_ray

# Says what has come of its lines: each is run with `connect`, `seen` and `surroundings`.
PROGRAM = """
import json, os, signal, sys
from muster.rollout.cluster.ray_connection import connect

def surroundings():
    return [repr(sys.excepthook), repr(signal.getsignal(signal.SIGTERM)), dict(os.environ), sys.path[0]]

def stop(number, frame):
    pass

signal.signal(signal.SIGTERM, stop)
seen = {}
try:
    exec(sys.argv[1])
except Exception as error:
    seen["error"] = [type(error).__name__, str(error)]
print(json.dumps(seen))
"""


def seen_by(code: str, **environ: str | None) -> dict[str, Any]:
    """What `code` has put into `seen` in a program. environ: what differs from this process's; None: not set there."""
    changed = {name: value for name, value in {**os.environ, **environ}.items() if value is not None}
    done = programs.run("-c", PROGRAM, code, env=changed, imports=programs.TORCH, check=True, timeout=100)
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    yield from run_cluster()


# ---- what needs no Ray to answer


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The place where this machine's cluster would be named."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray" / "ray_current_cluster"


@pytest.mark.parametrize("address", ["k8s", "10.0.0.1", "10.0.0.1:ray", "10.0.0.1:0", "http://10.0.0.1:6379", ""])
def test_what_is_no_address_is_named(address: str):
    with pytest.raises(ConfigError, match="address must be 'auto', 'local' or the head's 'host:port'"):
        connect(address)


def test_the_client_of_ray_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://10.0.0.1:10001")
    for address in ("auto", "ray://10.0.0.1:10001"):
        with pytest.raises(
            ConfigError, match="sends a copy of each batch through a process in between. Run the script"
        ):
            connect(address)


def test_a_variable_that_is_no_address_is_named(monkeypatch: pytest.MonkeyPatch, no_cluster: Path):
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    with pytest.raises(ConfigError, match="the variable RAY_ADDRESS must be .*, got 'http"):
        connect()
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(ConfigError, match="no Ray cluster is known here"):
        connect()


def test_an_address_where_nothing_answers_is_said_to_be_out_of_reach():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port} cannot be reached: .*refused. Start its head with"):
            connect(f"127.0.0.1:{port}")


def test_a_machine_without_a_cluster_gets_the_ways_to_have_one(no_cluster: Path):
    with pytest.raises(ConfigError, match=r"no Ray cluster is known here: .* `ray start --head.*address='local'"):
        connect()


def test_another_users_cluster_is_joined_by_its_address_alone(no_cluster: Path, monkeypatch: pytest.MonkeyPatch):
    no_cluster.write_text("127.0.0.1:1")
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(ConfigError, match=r"is another user's: .* Set RAY_ADDRESS or give address='127.0.0.1:1'"):
        connect()
    with pytest.raises(ConfigError, match="cannot be reached"):
        connect("127.0.0.1:1")


# ---- on a real cluster


def test_a_process_joins_and_is_as_it_was_before(cluster: RunningCluster):
    code = """
before = surroundings()
one = connect()
seen["same"] = [a == b for a, b in zip(before, surroundings())]
import ray
two = connect(one.address)
one.close()
seen["shared"], seen["open"] = two is one, ray.is_initialized()
seen["ran"] = ray.get(ray.remote(lambda: 42).remote())
two.close()
seen["closed"], seen["address"] = not ray.is_initialized(), one.address
seen["still"] = [a == b for a, b in zip(before, surroundings())]
"""
    expected = {"shared": True, "open": True, "ran": 42, "closed": True, "address": cluster.address}
    kept = {"same": [True] * 4, "still": [True] * 4}
    assert seen_by(code, **cluster.environ, RAY_ADDRESS=None) == {**expected, **kept}


def test_what_the_user_has_initialised_is_used_and_stays(cluster: RunningCluster):
    code = f"""
import ray
ray.init({cluster.address!r})
one = connect()
one.close()
seen["kept"] = ray.is_initialized()
connect("10.9.8.7:1")
"""
    seen = seen_by(code, **cluster.environ)
    assert seen["kept"]
    kind, text = seen["error"]
    assert kind == "ConfigError"
    assert f"this process is connected to the Ray cluster at {cluster.address}" in text


@pytest.mark.parametrize(("mode", "token"), [("token", "wrong"), ("token", None), (None, None)])
def test_a_wrong_token_and_none_are_said_to_be_that(
    cluster: RunningCluster, mode: str | None, token: str | None, tmp_path: Path
):
    environ = {**cluster.environ, "RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": token, "HOME": str(tmp_path)}
    kind, text = seen_by(f"connect({cluster.address!r})", **environ)["error"]
    assert kind == "ConfigError"
    assert "is missing or wrong: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN" in text


def test_other_versions_are_named(cluster: RunningCluster):
    cluster.ask('metadata {"ray_version": "2.40.0", "python_version": "3.10.1"}')
    try:
        kind, text = seen_by(f"connect({cluster.address!r})", **cluster.environ)["error"]
    finally:
        cluster.ask("metadata {}")
    assert kind == "ConfigError"
    assert f"{cluster.address} has Ray 2.40.0, and this process" in text


@pytest.mark.slow
def test_a_machine_without_a_raylet_is_told_to_start_one():
    for cluster in run_cluster():
        cluster.ask("no raylet")
        kind, text = seen_by(f"connect({cluster.address!r})", **cluster.environ)["error"]
        assert kind == "ConfigError"
        assert f"run `ray start --address={cluster.address}` here" in text


@pytest.mark.slow
@pytest.mark.timeout(60)  # Ray alone waits for ever
def test_what_listens_and_is_no_head_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "some")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"something listens at {address}, but a process could not join"):
            connect(address)


# ---- a cluster of its own

LOCAL = """
import psutil
before = surroundings()
one = connect("local")
import ray
seen["same"] = [a == b for a, b in zip(before, surroundings())]
seen["ran"] = ray.get(ray.remote(lambda: 42).remote())
held = [psutil.Process(), *psutil.Process().children(recursive=True)]
listening = [link for one in held for link in one.net_connections("tcp") if link.status == "LISTEN"]
seen["addresses"] = sorted({link.laddr.ip.removeprefix("::ffff:") for link in listening})
seen["pids"] = [one.pid for one in held]
"""


@pytest.mark.parametrize("closed", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["closed", "script ends"])
def test_a_local_cluster_listens_on_loopback_and_leaves_nothing(closed: bool, tmp_path: Path):
    folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    left, held, link = (folder / f"muster-ray-{name}" for name in ("left", "held", "link"))
    for one in (left / "ray", held, folder / "other"):
        one.mkdir(parents=True)
    for one in (link, left / "ray" / "link"):
        one.symlink_to(folder / "other")
    (folder / "other" / "file").touch()
    lock = os.open(held, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # as the process does that it belongs to
    unset = {"RAY_AUTH_MODE": None, "RAY_AUTH_TOKEN": None, "RAY_TMPDIR": None, LOOPBACK: None}
    shared_memory, in_tmp = set(os.listdir("/dev/shm")), Path("/tmp/ray").exists()
    seen = seen_by(LOCAL + ("one.close()" if closed else ""), **unset, TMPDIR=str(folder), HOME=str(tmp_path))
    assert seen["same"] == [True] * 4
    assert (seen["ran"], seen["addresses"]) == (42, ["127.0.0.1"])
    assert list(tmp_path.iterdir()) == []  # no token at home
    os.close(lock)
    assert sorted(folder.iterdir()) == [held, link, folder / "other"]
    assert [*(folder / "other").iterdir()] == [folder / "other" / "file"]
    shutil.rmtree(folder)
    assert Path("/tmp/ray").exists() == in_tmp
    new = {name for name in set(os.listdir("/dev/shm")) - shared_memory if "ray" in name or "plasma" in name}
    assert new == set()
    deadline = time.monotonic() + 60
    while any(map(is_alive, seen["pids"])) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_alive, seen["pids"]))


@pytest.mark.slow
def test_a_local_cluster_is_refused_where_ray_may_listen_on_all_addresses():
    kind, text = seen_by("import ray; connect('local')", RAY_TMPDIR=None, **{LOOPBACK: None})["error"]
    assert kind == "ConfigError"
    assert f"Set {LOOPBACK}=0 before `import ray`" in text
