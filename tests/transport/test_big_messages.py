"""Messages that do not fit into a pipe, to and from workers that stop reading or writing halfway."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import muster
from envs import Scripted
from muster.errors import WaitTimeout, WorkerDied, WorkerTimeout
from muster.transport.channel import Channel, ChannelClosed
from processes import kill_worker, stat_of
from slow import slow

BIG = b"x" * (16 << 20)
BOUND_S = 30.0
pytestmark = pytest.mark.usefixtures("leaves_nothing")


class Env(Scripted):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return np.full(3, len((options or {}).get("text", b"")), np.float32), {}

    def measure(self, text: bytes) -> int:
        return len(text)

    def give_and_stop(self, index: int) -> bytes:
        """Stops this process when a part of the answer has been sent, and the pipe is full."""
        if self.index == index:
            pid = os.getpid()
            threading.Timer(0.3, lambda: os.kill(pid, signal.SIGSTOP)).start()
        return BIG


def make(**options: Any) -> Any:
    return muster.make_vec(Env, 2, num_workers=2, **options)


def stop(envs: Any, worker: int) -> int:
    pid: int = envs.stats()["workers"][worker]["pid"]
    os.kill(pid, signal.SIGSTOP)
    return pid


def ask_for_half_an_answer(envs: Any, worker: int) -> int:
    """Returns once no more of it will come."""
    pid: int = envs.stats()["workers"][worker]["pid"]
    envs.call_async("give_and_stop", worker)
    while stat_of(pid)[0] != "T":
        time.sleep(0.01)
    return pid


def bounded(call: Callable[[], Any]) -> Any:
    start = time.monotonic()
    try:
        return call()
    finally:
        assert time.monotonic() - start < BOUND_S


@pytest.mark.parametrize("context", ["forkserver", *slow("fork")])
def test_big_messages_arrive_whole(context: str) -> None:
    with make(context=context) as envs:
        assert envs.reset(options={"text": BIG})[0][:, 0].tolist() == [len(BIG)] * 2
        assert envs.call("measure", BIG) == (len(BIG),) * 2
        envs.set_attr("text", [BIG, BIG + b"y"])
        assert [len(text) for text in envs.get_attr("text")] == [len(BIG), len(BIG) + 1]


SENDS: dict[str, Callable[[Any], Any]] = {
    "call": lambda envs: envs.call("measure", BIG),
    "set_attr": lambda envs: envs.set_attr("text", BIG),
    "reset": lambda envs: envs.reset(options={"text": BIG}),
}


@pytest.mark.parametrize("send", ["reset", *slow("call", "set_attr")])
def test_a_stopped_worker_is_replaced_over_what_is_sent_to_it(send: str) -> None:
    with make(step_timeout=2.0, on_failure="restart") as envs:
        envs.reset()
        stop(envs, 1)
        if send == "reset":
            assert bounded(lambda: SENDS[send](envs))[0][:, 0].tolist() == [len(BIG)] * 2
        elif send == "set_attr":
            bounded(lambda: SENDS[send](envs))
            assert envs.get_attr("text") == (BIG,) * 2
        else:
            with pytest.raises(WorkerTimeout, match="worker 1 .*step_timeout=2.0"):
                bounded(lambda: SENDS[send](envs))
        assert envs.call("measure", BIG) == (len(BIG),) * 2
        assert envs.stats()["restarts"] == 1


@pytest.mark.parametrize("send", SENDS)
def test_a_death_is_noticed_while_another_worker_does_not_read(send: str) -> None:
    envs = make()
    envs.reset()
    stopped = stop(envs, 0)
    kill_worker(envs, 1)
    with pytest.raises(WorkerDied, match="worker 1 .*SIGKILL"):
        bounded(lambda: SENDS[send](envs))
    assert not os.path.exists(f"/proc/{stopped}")


def test_half_an_answer_is_waited_for_no_longer_than_asked() -> None:
    with make() as envs:
        envs.reset()
        pid = ask_for_half_an_answer(envs, 1)
        with pytest.raises(WaitTimeout):
            bounded(lambda: envs.call_wait(timeout=0.5))
        os.kill(pid, signal.SIGCONT)
        assert [len(text) for text in envs.call_wait()] == [len(BIG)] * 2
        assert envs.call("measure", b"abc") == (3, 3)


def test_half_an_answer_ends_in_the_step_timeout() -> None:
    with make(step_timeout=2.0) as envs:
        envs.reset()
        ask_for_half_an_answer(envs, 1)
        with pytest.raises(WorkerTimeout, match=r"worker 1 .*answering call\('give_and_stop'\)"):
            bounded(envs.call_wait)


# ---- the channel itself


@pytest.fixture
def ends() -> Any:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_a_message_that_comes_in_parts(ends: tuple[socket.socket, socket.socket]) -> None:
    channel, writer = Channel(ends[0], lambda _: None), ends[1]
    other, sink = socket.socketpair()
    with other, sink:
        Channel(other).send({"answer": 42})
        data = sink.recv(1 << 16)
    for end in range(1, len(data)):
        writer.sendall(data[end - 1 : end])
        with pytest.raises(TimeoutError):
            channel.recv(0.0)
    writer.sendall(data[-1:] + data)
    assert channel.recv(0.0) == {"answer": 42}
    assert channel.recv(0.0) == {"answer": 42}
    with pytest.raises(TimeoutError):
        channel.recv(0.01)
    writer.close()
    with pytest.raises(ChannelClosed):
        channel.recv()


def test_sending_ends_when_nobody_reads_any_more(ends: tuple[socket.socket, socket.socket]) -> None:
    looked: list[float] = []
    channel = Channel(ends[0], looked.append)
    with pytest.raises(TimeoutError):
        channel.send(BIG, 0.3)
    assert looked
    with pytest.raises(TimeoutError):  # half a message is on its way, into which no other may go
        channel.send("small", 0.3)
    ends[1].close()
    with pytest.raises(ChannelClosed):
        Channel(ends[0], looked.append).send(BIG)
