"""``get_worker_info().unique_index``: a number that no other env of a program has at that time."""

from __future__ import annotations

import errno
import functools
import os
import secrets
from pathlib import Path
from typing import Any

import pytest

import muster
import programs
from muster.errors import EnvError, UsageError
from muster.pool.unique_indices import TREE, UniqueIndices
from muster.worker_info import WorkerInfo
from processes import kill_worker
from sample_envs import Counter
from served_envs import BASE, Served, here, indices, unique_indices
from slow import slow

pytestmark = [pytest.mark.usefixtures("leaves_nothing"), pytest.mark.timeout(120)]
WAYS: list[Any] = [
    {"num_workers": 2},
    {"caller_steps": True},
    {"backend": "thread", "num_workers": 2},
    {"backend": "serial"},
    *slow({"num_workers": 2, "context": "fork"}, {"num_workers": 2, "context": "spawn"}),
]


@pytest.fixture(autouse=True)
def _is_a_tree_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vector envs that other tests leave open have numbers, too."""
    monkeypatch.setenv(TREE, str(secrets.randbits(40)))


@pytest.mark.parametrize("ways", WAYS, ids=str)
def test_each_env_has_the_lowest_number_that_is_free(ways: dict[str, Any]) -> None:
    with muster.make_vec(Counter, 2, backend="serial") as second:
        first = muster.make_vec(Counter, 3, **ways)
        assert (second.call(indices), first.call(indices)) == (((0, 0), (1, 1)), ((0, 2), (1, 3), (2, 4)))
        second.close()
        with muster.make_vec(Counter, 3, **ways) as third:
            assert third.call(indices) == ((0, 0), (1, 1), (2, 5))
            first.close()
    with muster.make_vec(Counter, 3, **ways) as envs:
        assert unique_indices(envs) == [0, 1, 2]


@pytest.mark.parametrize("own_process", [False, True])
def test_what_replaces_a_worker_or_an_env_keeps_the_number(own_process: bool) -> None:
    options: Any = {"num_workers": 2} if own_process else {"num_workers": 1}
    with (
        muster.make_vec(Served, 2, backend="serial") as before,
        muster.make_vec(Served, 2, on_failure="restart", **options) as envs,
    ):
        before.reset()
        envs.reset()
        kill_worker(envs, 0)
        while "restarted" not in envs.step([0, 0])[4]:
            pass
        before.close()
        envs.reset()
        assert envs.call("port") == (BASE + 2, BASE + 3)


class Nest(Counter):
    """Has a vector env of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = muster.make_vec(Counter, 2)

    def all(self) -> list[int]:
        return [here().unique_index, *unique_indices(self.inner)]

    def close(self) -> None:
        self.inner.close()


def test_envs_within_envs() -> None:
    with muster.make_vec(Nest, 2) as envs:
        assert sorted(envs.call("all")[0] + envs.call("all")[1]) == [0, 1, 2, 3, 4, 5]


CALLER = """
import muster, time
envs = muster.make_vec("CartPole-v1", 3, num_workers=1)
print(envs.call(lambda env, i: muster.get_worker_info().unique_index), flush=True)
time.sleep(100)
"""


def test_a_caller_that_is_killed_gives_its_numbers_back() -> None:
    with programs.start("-c", CALLER) as program:
        assert program.stdout.readline() == "(0, 1, 2)\n"
        with muster.make_vec(Counter, 1, backend="serial") as envs:
            assert unique_indices(envs) == [3]
        program.kill()
        program.wait()
    with muster.make_vec(Counter, 1, backend="serial") as envs:
        assert unique_indices(envs) == [0]


def test_a_fork_neither_gives_numbers_back_nor_keeps_them() -> None:
    ours, others = UniqueIndices(), UniqueIndices()
    assert ours.take(2) == (0, 1)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        ours.release()
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    assert others.take(1) == (2,)
    ours.release()
    assert ours.take(2) == (0, 1)
    os.close(write)
    os.waitpid(pid, 0)
    ours.release()
    others.release()


def note_number(env_folder: str) -> None:
    Path(env_folder, str(here().unique_index)).touch()


def test_worker_init_has_the_number_of_the_workers_first_env(tmp_path: Path) -> None:
    init = functools.partial(note_number, str(tmp_path))
    with muster.make_vec(Counter, 4, num_workers=2, worker_init=init):
        assert sorted(os.listdir(tmp_path)) == ["0", "2"]


def test_without_an_env_there_is_no_number() -> None:
    with pytest.raises(UsageError, match="a number that envs have, and this code runs for none$"):
        _ = WorkerInfo(None, 0, 1, 1, None).unique_index
    assert muster.get_worker_info() is None


class Taken(Counter):
    def reset(self, **arguments: Any) -> Any:
        raise OSError(errno.EADDRINUSE, "Address already in use")


def test_the_error_of_a_taken_port_is_right_for_who_has_the_number_in_it() -> None:
    with muster.make_vec(Taken, 1, backend="serial") as envs, pytest.raises(EnvError) as caught:
        envs.reset()
    said = str(caught.value)
    assert "Add muster.get_worker_info().unique_index to the port" in said
    assert "If the env does that, another program listens there: begin at another number, or bind port 0." in said
    assert "env_index" not in said.replace("unique_index", "")


def test_two_side_by_side_in_a_trial_have_their_own() -> None:
    with muster.make_vec(Served, 4, num_workers="auto") as envs:
        assert envs.stats()["processes"] < 4
        envs.reset()
        assert len({*envs.call("port")}) == 4


@pytest.mark.slow
def test_a_training_with_evaluations_and_envs_with_ports(tmp_path: Path) -> None:
    (tmp_path / "served.py").write_text(
        """
import socket, gymnasium, muster

class Served(gymnasium.Wrapper):
    def __init__(self, port):
        super().__init__(gymnasium.make("CartPole-v1"))
        self.server = socket.create_server(("127.0.0.1", port))
    def close(self):
        self.server.close()
        super().close()

def make():
    return Served(21_100 + muster.get_worker_info().unique_index)
"""
    )
    words = ["train", "served.py:make", "--num-envs=3", "--total-steps=600", "--num-steps=100", "--eval-every=200"]
    done = programs.run("-m", "muster", *words, "--eval-episodes=2", cwd=tmp_path, fresh=True, check=True)
    assert "eval" in done.stdout + done.stderr
