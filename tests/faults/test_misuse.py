"""Calls that make no sense: each a named error, after which the next correct call works."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from operator import methodcaller as does
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import muster
import programs
from envs import Scripted
from muster.errors import (
    ActionError,
    CannotTravel,
    ClosedError,
    EnvError,
    NotPendingError,
    PendingError,
    UsageError,
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


class Env(Scripted):
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

    def exits(self) -> None:
        sys.exit(2)

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


# ---- one table: what was done before, the calls, their error, and what it says

WRONG_ACTIONS = (
    *(np.zeros(1, np.int64), np.zeros(3, np.int64), np.zeros((2, 1), np.int64), np.zeros(2)),
    *(np.array([0, 2]), np.array([-1, 0]), None, ["left", "right"]),
)
WRONG_IDS = ([2], [-1], [0, 0], [0.5], [[0]], "0", [])
NO_TIMES = ("soon", float("nan"), True, [1])
NO_TIME = "timeout must be a number of seconds or None"
# None of them is allowed while envs owe an answer.
VERBS = [does("step", ACTIONS), does("send", ACTIONS), does("send", [0], [1]), does("reset"), does("call", "index")]
VERBS += [does("set_attr", "x", 1)]


def seeds(*wrong: Any) -> list[Any]:
    return [does("reset", seed=seed) for seed in wrong]


def masks(*wrong: Any) -> list[Any]:
    return [does("reset", options={"reset_mask": mask}) for mask in wrong]


MISUSES: dict[str, tuple[list[Any], list[tuple[list[Any], type[Exception], str | None]]]] = {
    "before the first reset": (
        [],
        [
            ([does("step", ACTIONS)], UsageError, "reset"),
            ([*map(does, ("recv", "step_wait", "call_wait"))], NotPendingError, None),
        ],
    ),
    "after a reset": (
        [does("reset")],
        [
            ([does(verb, actions) for actions in WRONG_ACTIONS for verb in ("step", "send")], ActionError, None),
            ([does("send", np.zeros(len(ids), np.int64), ids) for ids in WRONG_IDS], ActionError, "env_ids"),
            ([does("send", [0, 0], [1])], ActionError, "expected 1 actions, one for each env, got 2 rows"),
            (seeds(-1, [1], [1, 2, 3], [1, -2]), ValueError, "seed"),
            (seeds("one", 1.5, [1, "two"], True), UsageError, "seed"),
            (masks([True, False], np.ones(2)), TypeError, "reset_mask"),
            (masks(np.ones(3, bool), np.zeros(2, bool)), ValueError, "reset_mask"),
            ([does("reset", options=3)], UsageError, "options=.* must be a dict or None, got 3"),
            ([does("call", 3)], UsageError, "takes the name of a method or attribute.* got 3"),
            ([does("get_attr", "no_such_attribute")], EnvError, "env 0 .*AttributeError"),
            ([does("call", "fail")], EnvError, "env 0 .*LookupError: no such thing"),
            ([does("call", "exits")], EnvError, "env 0 .*SystemExit: 2"),
            ([does("set_attr", "index", [1, 2, 3])], ValueError, "2 values"),
        ],
    ),
    "while a step is pending": (
        [does("reset"), does("send", ACTIONS)],
        [
            (VERBS, PendingError, None),
            ([does("recv", min_envs=3)], NotPendingError, "wait for 1 to 2"),
            (
                [does("recv", min_envs=wrong) for wrong in ("a", 1.5, True)],
                UsageError,
                "min_envs=.* must be an int",
            ),
            (
                [does(wait, timeout=no) for no in NO_TIMES for wait in ("recv", "step_wait", "close")],
                UsageError,
                NO_TIME,
            ),
        ],
    ),
    "while a call is pending": (
        [does("reset"), does("call_async", "index")],
        [(VERBS, PendingError, None), ([does("call_wait", timeout="soon")], UsageError, NO_TIME)],
    ),
    "after close": ([does("reset"), does("close")], [([*VERBS[:5], does("recv"), does("stats")], ClosedError, None)]),
}


@pytest.mark.parametrize("moment", MISUSES)
def test_a_misuse_is_a_named_error_and_changes_nothing(moment: str, envs: Any) -> None:
    before, misuses = MISUSES[moment]
    for call in before:
        call(envs)
    for calls, error, said in misuses:
        for call in calls:
            with pytest.raises(error, match=said):
                pytest.fail(f"{call}: {call(envs)}")
    if moment == "while a step is pending":
        assert envs.recv(min_envs=np.int64(2), timeout=float("inf")).obs[:, 2].tolist() == [1, 1]
    if moment == "while a call is pending":
        assert envs.call_wait(timeout=np.float32(60.0)) == (0, 1)
    if moment == "after close":
        envs.close(timeout=float("inf"))
    else:
        check_in_step(envs)


WRONG_NUMBERS = {
    "start_timeout": (0, -1.0, None, "soon", float("nan"), True),
    "step_timeout": (0, -1.0, "soon", float("nan")),
    "close_timeout": (0, -1.0, "60", True),
    "max_restarts": (-1, 1.5, None, "often"),
    "threads_per_worker": (0, 1.5, None),
}


@pytest.mark.parametrize("name", WRONG_NUMBERS)
def test_options_that_are_no_sensible_numbers(name: str) -> None:
    for value in WRONG_NUMBERS[name]:
        with pytest.raises(ValueError, match=f"{name} must be a .*number"):
            pytest.fail(f"{value}: {muster.make_vec(Env, 2, **{name: value})}")


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


@pytest.mark.parametrize(
    "blocks", [lambda envs, gate: envs.step(ACTIONS), lambda envs, gate: envs.call("wait_for", str(gate))]
)
def test_from_two_threads(blocks: Callable[[Any, Path], Any], remote: Any, gate: Path) -> None:
    remote.reset(options={"gate": str(gate)})
    thread = threading.Thread(target=blocks, args=(remote, gate))
    thread.start()
    wait_for_both(gate)
    for call in VERBS:
        with pytest.raises(UsageError, match="thread|owe|pending"):
            call(remote)
    gate.touch()
    thread.join()
    check_in_step(remote)


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
        "import os, sys, muster, numpy as np\n"
        "from envs import Scripted\n"
        "envs = muster.make_vec(Scripted, 2, num_workers=2); envs.reset()\n"
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
