"""Fixtures for every test: a check that the test leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from types import FunctionType, ModuleType
from typing import Any

import pytest

import programs
from muster.backends.process import ENV_PRELOADS
from muster.pool.launcher_client import LauncherClient
from processes import adopts_orphans, descendants, named_fd, shared_memory_of_others

# With this their asserts show the values that they compared, as those of test modules do.
pytest.register_assert_rewrite(
    "backend_under_test",
    "backend_contract",
    "step_contract",
    "info_contract",
    "error_contract",
    "multi_agent_contract",
    "env_api_contract",
    "pool_contract",
    "bare_loops",
    "row_checks",
)

_PATIENCE_S = 5.0

# A shell that runs this in the background, or nohup, has it ignore these, and so every process that it starts.
_HANDLERS = {signal.SIGINT: signal.default_int_handler, signal.SIGQUIT: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
for _number, _handler in _HANDLERS.items():
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)


gc.disable()  # until all modules are there: their objects stay, and each collection would look at them


def pytest_collection_finish() -> None:
    """Has collections look only at what tests make, and not at the modules; and PyTorch use one thread.

    Where other tests run meanwhile, its threads wait for each other at each small product of matrices.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@dataclass
class Holdings:
    """The things that this process holds and has started, each kind as a set of names."""

    processes: set[str]
    threads: set[str]
    fds: set[str]
    shared_memory: set[str]

    @classmethod
    def now(cls) -> Holdings:
        threads = {f"{thread.name} {thread.ident}" for thread in threading.enumerate()}
        shared_memory = set(os.listdir("/dev/shm"))
        if "PYTEST_XDIST_WORKER" in os.environ:
            # Python's named semaphores may belong to tests that run at the same time, and be mapped by no process.
            shared_memory = {name for name in shared_memory if not name.startswith("sem.mp-")}
        servers = programs.servers()
        held = {client._process.pid: named_fd(client._control.fileno()) for client in _held.values()}
        stay = servers | held  # for the tests that follow
        processes = {name for name, pid in descendants(os.getpid()).items() if pid not in stay}
        return cls(processes, threads, _open_fds() - set(stay.values()), shared_memory)

    def beyond(self, before: Holdings) -> dict[str, set[str]]:
        """The things that exist now and did not exist before, by kind."""
        more = {field.name: getattr(self, field.name) - getattr(before, field.name) for field in fields(self)}
        return {kind: names for kind, names in more.items() if names}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """The number of processes for ``--numprocesses logical``: more than cores, since many tests wait for processes."""
    return len(os.sched_getaffinity(0)) * 3 // 2


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Kills the programs that a test leaves running, most of all a test that has failed."""
    try:
        return (yield)
    finally:
        programs.end_all()


# What workers import, from light to heavy, and what has a test's module need more than the first layer.
_LAYERS = (
    (
        *ENV_PRELOADS,
        "muster.hosts.trial",
        "muster.vector.make",
        "pytest",
        "numpy.testing",
        "sample_envs",
        "pool_residents",
    ),
    (*programs.TORCH, "muster.rollout.replicas.replica"),
    ("torchrl.envs", "torchrl.collectors", "stable_baselines3"),
)
_OF_LAYER = {"torch.": 1, "tensordict.": 1, "muster.rollout.": 1, "muster.nn.": 1, "muster.algorithms.": 1}
_OF_LAYER |= {"torchrl.": 2, "stable_baselines3.": 2, "muster.interop.torchrl.": 2, "muster.interop.sb3.": 2}


@pytest.fixture(autouse=True)
def _layer(request: pytest.FixtureRequest) -> None:
    """Finds what the test's module imports: so do workers whose envs are from that module."""
    global _needed
    values = vars(request.module).values()
    found = {value.__name__ for value in values if isinstance(value, ModuleType)}
    found |= {value.__module__ for value in values if isinstance(value, type | FunctionType)}
    _needed = max(
        (layer for root, layer in _OF_LAYER.items() for name in found if f"{name}.".startswith(root)), default=0
    )


@pytest.fixture
def launchers_of_users(_layer: None) -> None:
    """Launchers import what front ends name, and no more."""
    global _needed
    _needed = _AS_NAMED


def _acquire_and_hold(method: str, threads: int, preloads: Sequence[str], *more: Any) -> LauncherClient:
    """A launcher, which is held through all later tests, as by a vector env that stays open.

    A new one takes 0.4 s of imports, and 3 s with PyTorch, as each worker does whose env is from a module that imports
    PyTorch. So there is one with all imports of each layer. Tests of a launcher's start and end use "spawn", programs,
    or other preloads: their launchers are their own.
    """
    layers = [layer for name in preloads for layer, names in enumerate(_LAYERS) if name in names]
    known = layers and len(layers) == len(preloads)
    if method == "forkserver" and os.getpid() == _HERE and known and _needed != _AS_NAMED:
        preloads = tuple(itertools.chain(*_LAYERS[: 1 + max(_needed, *layers)]))
        with LauncherClient._lock:  # two threads may start workers
            held = _held.get((threads, preloads, *more))
            if held is None or not held.is_usable():
                if held is not None:
                    held.release()
                _held[threads, preloads, *more] = _acquire(method, threads, preloads, *more)
    return _acquire(method, threads, preloads, *more)


def pytest_sessionfinish() -> None:
    """Lets go of the launchers that were held."""
    while _held:
        _held.popitem()[1].release()


_HERE, _AS_NAMED = os.getpid(), -1
_needed = 0
_held: dict[tuple[Any, ...], LauncherClient] = {}
_acquire = LauncherClient.acquire
LauncherClient.acquire = _acquire_and_hold  # type: ignore[method-assign,assignment]


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    """Fails if the test leaves a process, a thread, an fd or an entry in /dev/shm (semaphores are there, too)."""
    adopts_orphans()
    gc.collect()
    gc.freeze()  # so that the collections below look only at what the test makes, and not at all modules
    before = Holdings.now()
    yield
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        gc.collect()
        left = Holdings.now().beyond(before)
        if "shared_memory" in left:
            left["shared_memory"] -= shared_memory_of_others()
        if not any(left.values()):
            return
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {left}")
        time.sleep(0.02)


def _open_fds() -> set[str]:
    fds = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the fd that listed the folder
            fds.add(named_fd(fd))
    return fds


@pytest.fixture(autouse=True)
def _words_of_make_vec() -> None:
    """Undoes what a test may leave that interrupts ``called_as`` at any line: the words of another front end."""
    if user_call := sys.modules.get("muster.pickling.user_call"):
        user_call._current.set(user_call.MAKE_VEC)
