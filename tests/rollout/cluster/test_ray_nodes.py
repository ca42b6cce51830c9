"""MultiCollector on a Ray cluster of several raylets of this machine: batches, what is told, losses, ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_clusters import LOOPBACK, RunningCluster, needs_ray, run_cluster

import programs
from processes import descendants, is_alive

pytestmark = [needs_ray, pytest.mark.timeout(240)]
DRIVERS = Path(__file__).with_name("ray_drivers.py")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    yield from run_cluster(3)


def start(cluster, name, *words, **options):
    environ = {**os.environ, **cluster.environ}
    return programs.start(DRIVERS, name, cluster.address, *words, env=environ, imports=programs.TORCH, **options)


def lines(program):
    """What the program says, line by line. What Ray prints among it is left out."""
    for line in program.stdout:
        if line.startswith("{"):
            yield json.loads(line)


def result_of(cluster, name, *words):
    """What a driver has returned, and its stderr."""
    with start(cluster, name, *words) as program:
        out, err = program.communicate(timeout=200)
    said = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert said, err
    assert "returned" in said[-1], err
    return said[-1]["returned"], err


def test_batches_on_two_nodes_are_those_of_home(cluster):
    seen, err = result_of(cluster, "equal_to_home")
    assert seen == {"same": True, "told": True, "nodes": [["up", 2], ["up", 2]]}
    assert f"3 collectors on 2 nodes of the Ray cluster at {cluster.address}: 2 on " in err


@pytest.mark.slow
def test_a_node_host_that_is_killed_is_replaced_and_envs_are_closed_at_the_end(cluster, tmp_path):
    path = tmp_path / "closed"
    seen, _ = result_of(cluster, "told_and_lost", path)
    printed = [[f"node {i} ({socket.gethostname()}): printed", i] for i in range(2)]
    assert sorted(seen["records"]) == [["from 0", 0], ["from 1", 1], *printed]
    index, cause, note = seen["failed"]
    assert (index, cause) == (0, "ZeroDivisionError")
    assert "On node 0 (" in note
    assert seen["noticed_s"] < 5
    assert seen["present"] == [True, False]
    assert len(seen["warned"]) == 1
    assert "is lost: Ray says: The actor is dead because its worker process has died" in seen["warned"][0]
    assert not seen["left"]
    assert (seen["actions"], seen["versions"], seen["told"]) == ([7], [2], ["a", "b"])
    assert seen["threads"] == "1"
    assert sorted(path.read_text().split()) == ["0", "1"]
    assert not is_alive(seen["pid"])


@pytest.mark.slow
def test_a_node_that_is_silent_is_lost(cluster):
    seen, _ = result_of(cluster, "silent")
    assert 3 <= seen["noticed_s"] < 10
    assert "nothing was heard from it for 3" in seen["warned"]


@pytest.mark.slow
def test_a_node_may_go_and_another_come():
    for cluster in run_cluster(3):
        with start(cluster, "node_goes_and_comes", stdin=-1) as program:
            said = lines(program)
            for _ in range(2):
                (verb, what), *_ = next(said).items()
                cluster.ask(f"{verb} {what}")
                program.stdin.write("done\n")
                program.stdin.flush()
            seen = next(said)["returned"]
            program.wait()
        assert seen["others"]
        assert seen["masked"]
        assert seen["up"] == ["up", "up"]
        assert "is lost" in seen["warned"][0]
        said = "node 1 has not begun in 10 s: it asks for 1 CPU. Free of that: "
        assert any(said in one for one in seen["warned"]), seen["warned"]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("what", "driver", "text"),
    [
        ("no head", ["restart"], "the cluster's head, at {address}, does not answer"),
        ("no raylet", ["restart"], "this machine's Ray has ended"),
        ("no head+hosts", ["raise"], " is lost: "),
        ("no head+hosts", ["raise", "user"], " is lost: "),
        ("no head+hosts", ["restart", "user"], " is lost: "),
        (f"signal {signal.SIGTERM:d}", ["raise"], " is lost: "),
        (f"signal {signal.SIGUSR1:d}", ["restart", "user"], " is lost: "),
    ],
)
def test_the_process_outlives_the_head_its_own_raylet_and_the_whole_cluster(what, driver, text):
    for cluster in run_cluster(3):
        with start(cluster, "goes_on", *driver) as program:
            said = lines(program)
            assert next(said) == {"ready": True}
            cluster.ask(what)
            seen = next(said)["returned"]
            assert program.wait() == 0
        assert text.format(address=cluster.address) in seen["error"]
        assert seen["noticed_s"] < 25
        assert seen["state"] == ["batches", "frames", "next_traj_id", "policy"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_stays_of_a_driver_that_is_ended(cluster, number):
    before = shared_memory()
    with start(cluster, "collects") as program:
        pids = next(lines(program))["pids"]
        program.send_signal(number)
        program.wait(20)
        assert ended(pids, 2)
    assert shared_memory() <= before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_stays_of_a_local_cluster_either(number, tmp_path):
    unset = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_TMPDIR", LOOPBACK)
    environ = {name: value for name, value in os.environ.items() if name not in unset}
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")
    environ |= {"TMPDIR": folder, "HOME": str(tmp_path)}
    before = shared_memory()
    with programs.start(DRIVERS, "collects", "local", env=environ, imports=programs.TORCH) as program:
        pids = next(lines(program))["pids"]
        all_pids = descendants(program.pid).values()
        program.send_signal(number)
        program.wait(20)
        assert ended(pids, 2)
        assert ended(all_pids, 70)  # two of Ray's helpers look after their raylet once a minute
    assert shared_memory() <= before
    assert bool(os.listdir(folder)) == (number != signal.SIGINT)
    shutil.rmtree(folder)


def shared_memory():
    """What Ray and Muster have there."""
    return {name for name in os.listdir("/dev/shm") if "plasma" in name or "ray" in name or "muster" in name}


def ended(pids, within_s):
    deadline = time.monotonic() + within_s
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(is_alive, pids))


@pytest.mark.slow
def test_wishes_that_no_node_meets_are_said_and_then_an_error(cluster):
    seen, err = result_of(cluster, "refused", "no room")
    said = "node 0 has not begun in 10 s: it asks for 2 CPU and 1 dongle. Free of that: 127.0.0.1 has "
    assert said in err
    kind, text = seen["error"]
    assert kind == "ConfigError"
    assert "node 0 has not begun in 12" in text
    assert seen["s"] < 25


@pytest.mark.slow
def test_wishes_and_placement_groups_are_followed(cluster):
    seen, _ = result_of(cluster, "wishes")
    assert seen["nodes"] == [0, 1, 1]
    assert seen["in_group"] == 2
    assert seen["shapes"] == [[1, 16]]
    assert seen["frames"] == 18 + 6 * 16  # 16 frames of 3 envs are 6 steps


@pytest.mark.slow
def test_more_nodes_than_collectors_are_refused(cluster):
    seen, _ = result_of(cluster, "refused", "many")
    assert seen["error"][1].startswith("num_collectors=2 cannot be split between 3 nodes")


@pytest.mark.slow
def test_a_module_that_nodes_lack_is_named_with_ways_out_that_work(cluster, tmp_path):
    seen, _ = result_of(cluster, "lacks_a_module", tmp_path)
    assert f"needs module 'only_here' (from {tmp_path}/own.zip/only_here.py), which node " in seen["errors"][0]
    assert f"RayCluster(runtime_env={{'working_dir': '{tmp_path}/own.zip'}})" in seen["errors"][0]
    assert seen["shape"] == [2, 8]
