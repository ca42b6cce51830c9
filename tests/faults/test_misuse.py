"""Calls that make no sense: each a named error, after which the next correct call works."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from faulty_envs import CountingEnv

import muster
import programs
from muster.errors import (
    ActionError,
    CannotTravel,
    ClosedError,
    EnvError,
    NotPendingError,
    PendingError,
    UsageError,
    WaitTimeout,
)
from processes import named_fd
from slow import slow

ACTIONS = np.zeros(2, np.int64)


def refuse() -> None:
    raise OSError("not in this process")


class Cutting:
    """A part of an observation that removes the parts after it as it is read."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        del self.parts[1:]
        return np.zeros(1, np.float32)


class Cut(gymnasium.Env[Any, Any]):
    """Observes a list that shrinks while it is read, in its third step; cuts the slab where `call` asks for that."""

    observation_space = gymnasium.spaces.Tuple([gymnasium.spaces.Box(0, 1, (1,))] * 3)
    action_space = gymnasium.spaces.Discrete(2)
    steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return [np.zeros(1, np.float32)] * 3, {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        obs, info = self.reset()
        if self.steps == 3:
            obs[0] = Cutting(obs)
        return obs, 0.0, False, False, info

    def cut_slab(self) -> str:
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of the listing itself
                if "muster-slab" in named_fd(fd):
                    try:
                        os.ftruncate(int(fd), os.fstat(int(fd)).st_size - 1)
                    except PermissionError as error:
                        return str(error)
        return "not refused"


class NotRebuilt:
    """An object that can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return refuse, ()


class Env(CountingEnv):
    """Waits in its first step until the file ``options["gate"]`` exists, and makes the file ``gate-INDEX`` before."""

    def step(self, action: Any) -> Any:
        gate = (self.options or {}).get("gate")
        if self.steps == 0 and gate:
            self.wait_for(gate)
        return super().step(action)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.options = options
        return super().reset(seed=seed)

    def give_lock(self) -> Any:
        return threading.Lock()

    def give_not_rebuilt(self) -> Any:
        return NotRebuilt()

    def echo(self, value: Any) -> Any:
        return value

    def fail(self) -> None:
        raise LookupError("no such thing")

    def wait_for(self, gate: str) -> str:
        Path(f"{gate}-{self.index}").touch()
        while not Path(gate).exists():
            time.sleep(0.01)
        return "went through"


@pytest.fixture(params=["process", *slow("thread", "serial")])
def backend(request: Any) -> str:
    name: str = request.param
    return name


@pytest.fixture
def envs(backend: str) -> Iterator[Any]:
    options = {} if backend == "serial" else {"num_workers": 2}
    with muster.make_vec(Env, 2, backend=backend, **options) as envs:
        yield envs


@pytest.fixture
def remote() -> Iterator[Any]:
    with muster.make_vec(Env, 2, num_workers=2) as envs:
        yield envs


def check_in_step(envs: Any) -> None:
    """Asserts that the start of an episode is right in every row."""
    obs, _ = envs.reset()
    episode = obs[0, 1]
    for step in range(1, 4):
        obs = envs.step(ACTIONS)[0]
        np.testing.assert_array_equal(obs, [[0, episode, step], [1, episode, step]])
    assert envs.call("echo", 7) == (7, 7)


WRONG_NUMBERS = {
    "start_timeout": (0, -1.0, None, "soon", float("nan"), True),
    "step_timeout": (0, -1.0, "soon", float("nan")),
    "max_restarts": (-1, 1.5, None, "often"),
    "threads_per_worker": (0, 1.5, None),
}


@pytest.mark.parametrize("name", WRONG_NUMBERS)
def test_options_that_are_no_sensible_numbers(name: str) -> None:
    for value in WRONG_NUMBERS[name]:
        with pytest.raises(ValueError, match=f"{name} must be a .*number"):
            pytest.fail(f"{value}: {muster.make_vec(Env, 2, **{name: value})}")


WRONG_ACTIONS = {
    "too few": np.zeros(1, np.int64),
    "too many": np.zeros(3, np.int64),
    "shape": np.zeros((2, 1), np.int64),
    "float": np.zeros(2),
    "beyond": np.array([0, 2]),
    "below": np.array([-1, 0]),
    "None": None,
    "words": ["left", "right"],
}


def test_actions(envs: Any) -> None:
    envs.reset()
    for name, actions in WRONG_ACTIONS.items():
        with pytest.raises(ActionError):
            pytest.fail(f"{name}: {envs.step(actions)}")
        with pytest.raises(ActionError):
            envs.send(actions)
    check_in_step(envs)


def test_env_ids(envs: Any) -> None:
    envs.reset()
    for ids in ([2], [-1], [0, 0], [], [0.5], [[0]]):
        with pytest.raises(ActionError, match="env_ids"):
            envs.send(np.zeros(len(ids), np.int64), ids)
    check_in_step(envs)


def test_order_of_calls(envs: Any) -> None:
    with pytest.raises(UsageError, match="reset"):
        envs.step(ACTIONS)
    with pytest.raises(NotPendingError):
        envs.recv()
    with pytest.raises(NotPendingError):
        envs.step_wait()
    with pytest.raises(NotPendingError):
        envs.call_wait()
    envs.reset()
    envs.send(ACTIONS)
    calls = (
        lambda: envs.step(ACTIONS),
        lambda: envs.send(ACTIONS),
        lambda: envs.send([0], [1]),
        envs.reset,
        lambda: envs.call("index"),
        lambda: envs.set_attr("x", 1),
    )
    for call in calls:
        with pytest.raises(PendingError):
            call()
    with pytest.raises(NotPendingError):
        envs.recv(min_envs=3)
    np.testing.assert_array_equal(envs.recv().obs[:, 2], 1)
    envs.call_async("index")
    for call in calls:
        with pytest.raises(PendingError):
            call()
    assert envs.call_wait() == (0, 1)
    check_in_step(envs)


def test_disabled_autoreset_needs_a_reset() -> None:
    with muster.make_vec("CartPole-v1", 2, backend="serial", autoreset_mode="disabled") as envs:
        envs.reset(seed=0)
        ended = np.zeros(2, bool)
        while not ended.any():
            ended = envs.step(ACTIONS)[2]
        with pytest.raises(UsageError, match="reset_mask"):
            envs.step(ACTIONS)
        envs.reset(options={"reset_mask": ended})
        envs.step(ACTIONS)


def test_seeds_and_masks(envs: Any) -> None:
    for seed in (-1, [1], [1, 2, 3], "one", 1.5, [1, "two"], [1, -2], True):
        with pytest.raises((ValueError, UsageError), match="seed"):
            envs.reset(seed=seed)
    for mask in ([True, False], np.ones(3, bool), np.ones(2), np.zeros(2, bool)):
        with pytest.raises((ValueError, TypeError), match="reset_mask"):
            envs.reset(options={"reset_mask": mask})
    check_in_step(envs)


def test_arguments_of_another_type(envs: Any) -> None:
    envs.reset()
    with pytest.raises(UsageError, match="options=.* must be a dict or None, got 3"):
        envs.reset(options=3)
    with pytest.raises(UsageError, match="takes the name of a method or attribute.* got 3"):
        envs.call(3)
    with pytest.raises(ActionError, match="env_ids is empty"):
        envs.send([], env_ids=[])
    envs.send(ACTIONS)
    for wrong in ("a", 1.5, True):
        with pytest.raises(UsageError, match="min_envs=.* must be an int or None"):
            envs.recv(min_envs=wrong)
    for wrong in ("soon", float("nan"), True, [1]):
        for wait in (envs.recv, envs.step_wait, envs.close):
            with pytest.raises(UsageError, match="timeout must be a number of seconds or None"):
                wait(timeout=wrong)
    envs.recv(min_envs=np.int64(2), timeout=float("inf"))
    envs.call_async("index")
    with pytest.raises(UsageError, match="timeout must be a number of seconds or None"):
        envs.call_wait(timeout="soon")
    envs.call_wait(timeout=np.float32(60.0))
    check_in_step(envs)
    envs.close(timeout=float("inf"))


def test_attributes(envs: Any) -> None:
    with pytest.raises(EnvError, match="env 0 .*AttributeError"):
        envs.get_attr("no_such_attribute")
    with pytest.raises(EnvError, match="env 0 .*LookupError: no such thing"):
        envs.call("fail")
    with pytest.raises(ValueError, match="2 values"):
        envs.set_attr("index", [1, 2, 3])
    check_in_step(envs)


def test_what_cannot_travel(remote: Any) -> None:
    with pytest.raises(CannotTravel, match="lock"):
        remote.call("give_lock")
    with pytest.raises(CannotTravel, match="not in this process"):
        remote.call("give_not_rebuilt")
    with pytest.raises(CannotTravel, match="lock"):
        remote.call("echo", threading.Lock())
    with pytest.raises(CannotTravel, match="lock"):
        remote.set_attr("thing", {"deep": threading.Lock()})
    with pytest.raises(CannotTravel, match="lock"):
        remote.reset(options={"lock": threading.Lock()})
    check_in_step(remote)


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    return tmp_path / "gate"


def wait_for_both(gate: Path) -> None:
    """Returns once both envs wait at the gate."""
    while not all(Path(f"{gate}-{env}").exists() for env in (0, 1)):
        time.sleep(0.01)


def test_waiting_too_short_loses_nothing(remote: Any, gate: Path) -> None:
    remote.reset(options={"gate": str(gate)})
    remote.send(ACTIONS)
    with pytest.raises(WaitTimeout):
        remote.recv(timeout=0.01)
    gate.touch()
    np.testing.assert_array_equal(remote.recv().obs[:, 2], 1)
    gate.unlink()
    remote.call_async("wait_for", str(gate))
    with pytest.raises(WaitTimeout):
        remote.call_wait(timeout=0.01)
    gate.touch()
    assert remote.call_wait() == ("went through", "went through")
    check_in_step(remote)


def test_after_close(envs: Any) -> None:
    envs.reset()
    envs.close()
    for call in (lambda: envs.step(ACTIONS), envs.reset, envs.recv, lambda: envs.call("index"), envs.stats):
        with pytest.raises(ClosedError):
            call()


def test_from_two_threads(remote: Any, gate: Path) -> None:
    remote.reset(options={"gate": str(gate)})
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(remote.step(ACTIONS)))
    thread.start()
    wait_for_both(gate)
    for call in (lambda: remote.step(ACTIONS), remote.reset, lambda: remote.call("index"), lambda: remote.recv(2)):
        with pytest.raises(UsageError, match="thread|owe"):
            call()
    gate.touch()
    thread.join()
    np.testing.assert_array_equal(results[0][0][:, 2], 1)
    check_in_step(remote)


def test_calls_from_two_threads(remote: Any, gate: Path) -> None:
    thread = threading.Thread(target=remote.call, args=("wait_for", str(gate)))
    thread.start()
    wait_for_both(gate)
    for call in (lambda: remote.step(ACTIONS), remote.reset, lambda: remote.set_attr("x", 1)):
        with pytest.raises(PendingError):
            call()
    gate.touch()
    thread.join()
    check_in_step(remote)


def test_closed_by_another_thread(remote: Any, gate: Path) -> None:
    remote.reset(options={"gate": str(gate)})
    errors: list[Exception] = []

    def step() -> None:
        try:
            remote.step(ACTIONS)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    wait_for_both(gate)
    remote.close(terminate=True)
    thread.join(30.0)
    assert [type(error) for error in errors] == [ClosedError]


def test_in_a_forked_child(envs: Any) -> None:
    envs.reset()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with pytest.raises(ClosedError, match="forked"):
                envs.step(ACTIONS)
            with pytest.raises(ClosedError, match="forked"):
                envs.reset()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    check_in_step(envs)


def test_a_forked_child_that_exits_leaves_the_workers_alone() -> None:
    program = (
        "import os, sys, faulty_envs, muster, numpy as np\n"
        "envs = muster.make_vec(faulty_envs.CountingEnv, 2, num_workers=2); envs.reset()\n"
        "pid = os.fork()\n"
        "if pid == 0: sys.exit(0)\n"  # runs the functions that are registered with atexit
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "assert envs.step(np.zeros(2, np.int64))[0][:, 2].tolist() == [1, 1]\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    programs.run("-c", program, env={**os.environ, "PYTHONPATH": path}, check=True)


@pytest.mark.parametrize("options", [{"backend": "serial"}, {"num_workers": 1}], ids=["serial", "process"])
def test_an_observation_that_shrinks_while_it_is_read_is_refused(options: dict[str, Any]) -> None:
    with muster.make_vec(Cut, 2, **options) as envs:
        envs.reset()
        for _ in range(2):
            envs.step(ACTIONS)
        with pytest.raises(EnvError, match="expected a tuple of length 3"):
            envs.step(ACTIONS)
        envs.step(ACTIONS)


def test_no_process_can_cut_the_slab() -> None:
    with muster.make_vec(Cut, 2, num_workers=1) as envs:
        assert all("not permitted" in answer for answer in envs.call("cut_slab"))


_MAPS_FULL = """
import mmap
import muster

maps, protections = [], (mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE)  # neighbours that are alike become one
try:
    while True:
        maps.append(mmap.mmap(-1, mmap.PAGESIZE, prot=protections[len(maps) % 2]))
except OSError:
    pass
try:
    muster.make_vec("CartPole-v1", 1, **OPTIONS)
except muster.errors.MusterError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    "options", [{"backend": "thread", "num_workers": 1}, {"num_workers": 1}], ids=["thread", "process"]
)
def test_a_process_without_room_for_mappings_is_told_the_limit(options: dict[str, Any]) -> None:
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    if limit > 1 << 18:
        pytest.skip(f"vm.max_map_count={limit} takes long to fill")
    # A thread that has ended leaves its stack for the next one, which then finds no memory to begin with.
    warm = "import threading; one = threading.Thread(target=int); one.start(); one.join()\n"
    out = programs.run("-c", f"{warm}OPTIONS = {options}\n{_MAPS_FULL}", check=True).stdout
    assert re.match(
        rf"LimitReached .*Resource temporarily unavailable|NotEnoughMemory .*vm\.max_map_count={limit}", out
    ), out
