"""What multiprocessing shares between processes reaches workers, works in them, and is left as it was when they end."""

from __future__ import annotations

import functools
import gc
import io
import mmap
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing import shared_memory
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from reporting_envs import PutsAtClose, Reporting, making_its_own, send_through_the_last

import muster
from muster.pickling import find_shared

CTX = multiprocessing.get_context("spawn")


@pytest.mark.parametrize(
    ("context", "captured"), [("forkserver", False), pytest.param("spawn", True, marks=pytest.mark.slow)]
)
def test_four_envs_share_queue_counter_event_file_and_memory(context, captured, tmp_path: Path):
    path = tmp_path / "count"
    path.write_text("0")
    memory = shared_memory.SharedMemory(create=True, size=64)
    array = np.ndarray((8,), np.float64, memory.buf)
    things = {"queue": CTX.Queue(), "value": CTX.Value("i", 0), "event": CTX.Event(), "lock": CTX.Lock(), "path": path}
    things |= {"memory": memory, "others": [CTX.RLock(), CTX.Semaphore(2), CTX.Barrier(2), CTX.Condition()]}
    things["others"] += [CTX.BoundedSemaphore(2), CTX.Array("d", 3), CTX.RawValue("i", 3), CTX.SimpleQueue()]
    things["others"] += [CTX.JoinableQueue()]
    factory = (lambda: Reporting(**things)) if captured else Reporting
    kwargs = None if captured else things
    try:
        with muster.make_vec(factory, 4, num_workers=4, env_kwargs=kwargs, context=context) as envs:
            envs.reset()
            envs.step(np.full(4, 2500))
            assert (things["value"].value, path.read_text()) == (10_000, "4")
            assert array[:5].tolist() == [1, 2, 3, 4, 0]
            things["event"].set()
            assert envs.step(np.ones(4, int))[2].all()
        got = sorted(things["queue"].get(timeout=5) for _ in range(4))
        assert got == [(i, 2501.0) for i in range(4)]
    finally:
        del array
        memory.close()
        memory.unlink()


def is_set():
    event = CTX.Event()
    event.set()
    return event


def used_by(queue):
    """What has been put into a queue. Ends it."""
    queue.put(None)
    put = list(iter(lambda: queue.get(timeout=5), None))
    queue.close()
    return put


def test_no_trial_uses_the_queue_that_envs_share_with_the_caller(capfd, monkeypatch):
    monkeypatch.setattr("muster.pool.notices._said", set())
    queue = CTX.Queue(5)
    kwargs = {"queue": queue, "event": is_set(), "value": CTX.Value("i", 0)}
    with muster.make_vec(Reporting, 3, env_kwargs=kwargs, num_workers="auto") as envs:
        assert envs.stats()["processes"] == 3
        envs.reset()
        envs.step(np.ones(3, int))
    assert sorted(used_by(queue)) == [(i, 1.0) for i in range(3)]
    assert kwargs["value"].value == 3
    said = capfd.readouterr().err
    assert 'in 3 processes: the envs share env_kwargs["queue"] (multiprocessing.queues.Queue), ' in said
    assert "with this process: not tried" in said


def test_the_doctor_takes_one_step_with_a_queue():
    kwargs = {"queue": CTX.Queue(5), "event": is_set()}
    diagnosis = muster.diagnose(Reporting, env_kwargs=kwargs, soak_s=0.1, seconds=0.05)
    assert len(used_by(kwargs["queue"])) == 1
    (sharing,) = [one for one in diagnosis.findings if one.topic == "sharing"]
    assert sharing.severity == "warns"
    assert 'env_kwargs["queue"] (multiprocessing.queues.Queue)' in sharing.text
    assert "not soaked" in diagnosis.findings[-1].text
    assert not diagnosis.blocks
    assert all(one.problem.startswith("not run: its envs would use") for one in diagnosis.tried)
    assert diagnosis.recommendation.line.endswith("env_kwargs=env_kwargs)")


def on_a_raw_array():
    memory = shared_memory.SharedMemory(create=True, size=8)
    memory.unlink()
    return memory, np.ndarray(8, np.uint8, memory.buf)


SENT = {
    "multiprocessing.synchronize.Lock": CTX.Lock,
    "multiprocessing.sharedctypes.SynchronizedArray": lambda: CTX.Array("i", 2),
    "ctypes.c_int": lambda: CTX.RawValue("i", 2),
    "multiprocessing.connection.Connection": lambda: CTX.Pipe()[0],
    "multiprocessing.shared_memory.SharedMemory": lambda: on_a_raw_array()[0],
}
INHERITED = {
    **SENT,
    "multiprocessing.queues.SimpleQueue": multiprocessing.get_context("fork").SimpleQueue,
    "socket.socket": socket.socket,
    "_io.FileIO": lambda: io.FileIO(os.open(os.devnull, os.O_RDWR)),
    "mmap.mmap": lambda: mmap.mmap(-1, 8),
    "numpy.ndarray": lambda: on_a_raw_array()[1],
    "torch.Tensor": lambda: pytest.importorskip("torch").zeros(2).share_memory_(),
}


@pytest.mark.parametrize(
    ("kind", "by_fork"), [*((kind, False) for kind in SENT), *((kind, True) for kind in INHERITED)]
)
def test_what_workers_share_with_the_caller_is_named(kind, by_fork):
    thing = (INHERITED if by_fork else SENT)[kind]()
    parts = {"factory": functools.partial(Reporting, others=[3, thing]), "env_kwargs": {"lazy": muster.lazy(id, thing)}}
    assert f'factory.keywords["others"][1] ({kind})' in find_shared(parts, by_fork=by_fork)
    if isinstance(thing, (socket.socket, io.FileIO)):
        thing.close()


def test_a_manager_s_proxy_is_shared():
    with CTX.Manager() as manager:
        for by_fork in (False, True):
            assert "ListProxy" in find_shared({"env_kwargs": {"list": manager.list()}}, by_fork=by_fork)


def test_what_workers_have_copies_of_is_not_shared(tmp_path):
    np.save(tmp_path / "data.npy", np.zeros(4))
    data = [np.load(tmp_path / "data.npy", mmap_mode=mode) for mode in ("r", "c")]
    parts = {"a": [threading.Lock(), np.zeros(3), sys.stderr, sys.__stderr__], "b": making_its_own, "c": CTX}
    assert find_shared(parts | {"d": np.asarray(data[0])}, by_fork=True) == ""
    assert find_shared({"data": data, "b": making_its_own}, by_fork=False) == ""
    with Path(__file__).open() as file:
        assert find_shared({"file": file}, by_fork=False) == ""  # it travels as a copy


@pytest.mark.parametrize("backend", ["process", "serial"])
def test_the_end_of_a_pipe_stays_open_in_an_env_made_by_id(backend):
    gym.register("Reporting-v0", entry_point=Reporting)
    reader, writer = multiprocessing.Pipe(duplex=False)
    try:
        with muster.make_vec("Reporting-v0", 2, backend=backend, env_kwargs={"pipe": writer}) as envs:
            gc.collect()  # a copy of the end that was dropped closes it
            envs.reset()
            envs.step(np.array([1, 1]))
            assert [sum_ for _, sum_ in (reader.recv() for _ in range(2))] == [1.0, 1.0]
        writer.send("still open here")
        assert reader.recv() == "still open here"
    finally:
        reader.close()
        writer.close()
        del gym.registry["Reporting-v0"]


def test_the_other_end_of_a_pipe_is_told_when_all_have_closed_theirs():
    ours, theirs = CTX.Pipe()
    envs = muster.make_vec(Reporting, 1, env_kwargs={"pipe": theirs})
    theirs.close()
    envs.reset()
    envs.step(np.array([3]))
    assert ours.recv() == (0, 3.0)
    os.kill(envs.stats()["workers"][0]["pid"], signal.SIGKILL)
    with pytest.raises(EOFError):  # the vector env holds no copy, although nobody has closed it yet
        ours.recv()
    envs.close()
    ours.close()


def test_a_replacement_gets_them_again():
    ours, theirs = CTX.Pipe()
    value = CTX.Value("i", 0)
    kwargs = {"pipe": theirs, "value": value}
    with muster.make_vec(Reporting, 1, env_kwargs=kwargs, on_failure="restart") as envs:
        theirs.close()
        envs.reset()
        envs.step(np.array([3]))
        os.kill(envs.stats()["workers"][0]["pid"], signal.SIGKILL)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not (envs.step(np.array([5]))[1] == 5.0).all():
            pass
        assert ours.recv() == (0, 3.0)
        assert ours.recv() == (0, 5.0)
        assert value.value == 8
    with pytest.raises(EOFError):
        ours.recv()
    ours.close()


def test_memory_that_running_envs_are_given_outlives_them(capfd):
    script = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent)]!r}
from multiprocessing import shared_memory
import numpy as np, muster
from reporting_envs import Reporting
envs = muster.make_vec(Reporting, 2, num_workers=2)
memory = shared_memory.SharedMemory(create=True, size=64)
envs.reset()
envs.call("use", memory)
envs.close()
other = shared_memory.SharedMemory(memory.name)
print(np.ndarray((8,), np.float64, other.buf)[:3].tolist())
other.close()
memory.close()
memory.unlink()
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.stderr) == ("[1.0, 1.0, 0.0]\n", "")


SCRIPT = f"""
import sys, time
sys.path[:0] = {[str(Path(__file__).parent)]!r}
import multiprocessing
from multiprocessing import shared_memory
import numpy as np, muster
from reporting_envs import Reporting
if __name__ == "__main__":
    ctx = multiprocessing.get_context("forkserver")
    memory = shared_memory.SharedMemory(create=True, size=64)
    queue = ctx.Queue()
    print(memory.name, queue._rlock._semlock.name, flush=True)
    for _ in range(2):
        things = {{"queue": queue, "memory": memory}}
        envs = muster.make_vec(Reporting, 2, num_workers=2, env_kwargs=things)
        envs.reset()
        print("started", flush=True)
        if "die" in sys.argv:
            time.sleep(60)
        envs.close()
    print(np.ndarray((8,), np.float64, memory.buf)[:3].tolist())
    memory.close()
    memory.unlink()
"""


def files_of(line: str) -> list[Path]:
    memory, semaphore = line.split()
    return [Path("/dev/shm", memory), Path("/dev/shm", f"sem.{semaphore.strip('/')}")]


def test_nothing_is_lost_leaked_or_said_when_workers_end(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    names, *said = ran.stdout.splitlines()
    assert (said, ran.stderr) == (["started", "started", "[1.0, 2.0, 0.0]"], "")
    assert not any(file.exists() for file in files_of(names))


def test_nothing_stays_behind_a_caller_that_was_killed(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, str(script), "die"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        files = files_of(process.stdout.readline())
        assert process.stdout.readline() == "started\n"
        assert all(file.exists() for file in files)
        process.kill()
    deadline = time.monotonic() + 10
    while any(file.exists() for file in files) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [file for file in files if file.exists()] == []


def test_what_was_put_last_is_written_out_at_the_end():
    queue = CTX.Queue()
    with muster.make_vec(PutsAtClose, 1, env_kwargs={"queue": queue}) as envs:
        envs.reset()
    assert [queue.get(timeout=5) for _ in range(30)] == [(i, "x" * 1000) for i in range(30)]


def test_vector_envs_leave_no_fd_open():
    queue = CTX.Queue()
    counts = []
    gc.collect()
    with muster.make_vec(Reporting, 1):  # keeps the launcher
        for _ in range(5):
            ours, theirs = CTX.Pipe()
            with muster.make_vec(Reporting, 1, env_kwargs={"pipe": theirs, "queue": queue}, on_failure="restart"):
                pass
            ours.close()
            theirs.close()
            counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[-1] == counts[0]


def test_more_fds_than_one_message_takes():
    pipes = [CTX.Pipe() for _ in range(150)]
    try:
        with muster.make_vec(Reporting, 1, env_kwargs={"others": [end for pipe in pipes for end in pipe]}) as envs:
            envs.reset()
            envs.call(send_through_the_last)
        assert [ours.recv() for ours, _ in pipes[-1:]] == ["hello"]
    finally:
        for pipe in pipes:
            for end in pipe:
                end.close()


def test_under_fork_a_used_queue_works(recwarn):
    queue = multiprocessing.get_context("fork").Queue()
    queue.put("mine")  # its thread runs now, here and not in the workers
    event = is_set()
    kwargs = {"queue": queue, "event": event}
    with muster.make_vec(Reporting, 2, num_workers=2, env_kwargs=kwargs, context="fork") as envs:
        envs.reset()
        envs.step(np.array([1, 2]))
    assert sorted(map(str, (queue.get(timeout=5) for _ in range(3)))) == ["(0, 1.0)", "(1, 2.0)", "mine"]
    assert [str(one.message) for one in recwarn] == []
