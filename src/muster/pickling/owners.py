"""Kinds of objects that own threads or processes, which no other process has: threads, pools, executors, managers."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from muster.introspection import attributes_of, module_name
from muster.pickling.kind_facts import Kind
from muster.pickling.made_again import is_short

_THREAD = Kind(
    reason="a thread runs only in the process that started it",
    lazy="...",
    inherited="workers would inherit the object, but not its thread: what waits for it hangs",
    refused=True,
)
_EXECUTOR = Kind(
    reason="the threads or processes of an executor belong to the process that started them",
    lazy="...",
    inherited="workers would inherit the object, but not its threads: what is submitted to it hangs",
    refused=True,
)
_POOL = Kind(
    reason="the workers of a pool, and the threads that hand out its tasks, belong to the process that started them",
    lazy="multiprocessing.Pool",
    inherited="workers would inherit the object, but not its threads: what it is given to do hangs",
    by_fork="breaks",
    refused=True,
)
_RESULT = Kind(
    reason="the result of a pool's task comes to the process that has given the task",
    lazy="...",
    inherited="the result would never come to a worker: waiting for it hangs",
    by_fork="breaks",
    refused=True,
)
_FUTURE = Kind(
    reason="the result of a future comes to the process that has submitted the task",
    lazy="concurrent.futures.Future",
    inherited="a result that is set in the caller never comes to a worker, which would wait for it forever",
)
_MANAGER = Kind(
    reason="the process of a manager belongs to the process that started it",
    lazy="multiprocessing.Manager",
    inherited="workers would use the manager's process by the caller's handle; only the caller can end it, and an end "
    "of the caller ends it for all",
    refused=True,
)
_LISTENER = Kind(
    reason="a listener's socket belongs to the process that opened it",
    lazy="multiprocessing.connection.Listener, ...",
    inherited="all workers would take connections from one socket, each those that it comes to first",
    refused=True,
)
_CHILD = Kind(
    reason="a child process belongs to the process that started it",
    lazy="subprocess.Popen, ...",
    inherited="workers would inherit a handle on a process that is not their child, so they cannot wait for it",
    refused=True,
)


def _thread(thread: Any) -> Kind:
    if thread is threading.current_thread() or thread is threading.main_thread():
        return replace(_THREAD, by_fork="safe", inherited="each worker goes on in a copy of the thread that started it")
    try:
        started, alive = threading.Thread.ident.__get__(thread) is not None, threading.Thread.is_alive(thread)
    except Exception:  # of a subclass that has not called __init__
        started = alive = False
    if alive:
        return _THREAD
    left = "has ended" if started else "has not been started, and may be started there"
    return replace(_THREAD, by_fork="safe", inherited=f"each worker inherits a thread of its own that {left}")


def _executor(executor: Any) -> Kind:
    name = type(executor).__name__
    attributes = attributes_of(executor)
    kind = _EXECUTOR
    if module_name(type(executor)).startswith("concurrent.futures."):
        most = attributes.get("_max_workers")
        kind = replace(kind, lazy=f"concurrent.futures.{name}" + (f", {most}" if type(most) is int else ""))
    if attributes.get("_shutdown") is True or attributes.get("_shutdown_thread") is True:
        return replace(kind, by_fork="safe", inherited="each worker inherits an executor that has been shut down")
    if any(attributes.get(one) for one in ("_threads", "_processes", "_executor_manager_thread")):
        return replace(kind, by_fork="breaks")
    if "_threads" in attributes:
        unused = "each worker inherits an executor of its own, which has started no thread yet"
        return replace(kind, by_fork="safe", inherited=unused)
    if "_processes" in attributes:
        shared = "workers would share the queues of an executor that each starts anew: their tasks and results mix"
        return replace(kind, inherited=shared)
    return kind


def _pool(pool: Any) -> Kind:
    attributes = attributes_of(pool)
    name = "multiprocessing.pool.ThreadPool" if _is_a(pool, "ThreadPool") else "multiprocessing.Pool"
    count = attributes.get("_processes")
    kind = replace(_POOL, lazy=f"{name}, {count}" if type(count) is int else name)
    if attributes.get("_state") in ("CLOSE", "TERMINATE"):
        return replace(kind, by_fork="safe", inherited="each worker inherits a pool that has been closed")
    return kind


def _pool_result(result: Any) -> Kind:
    event = attributes_of(attributes_of(result).get("_event"))
    if event.get("_flag"):
        return replace(_RESULT, by_fork="safe", inherited="each worker inherits a copy of the result, which is there")
    return _RESULT


def _future(future: Any) -> Kind | None:
    return _FUTURE if attributes_of(future).get("_state") in ("PENDING", "RUNNING") else None


def _manager(manager: Any) -> Kind:
    kind = _MANAGER if _is_a(manager, "SyncManager") else replace(_MANAGER, lazy="...")
    if "_process" in attributes_of(manager):
        return kind
    return replace(kind, by_fork="safe", inherited="each worker inherits a manager of its own, which has no process")


def _popen(process: Any) -> Kind:
    command = attributes_of(process).get("args")
    kind = replace(_CHILD, lazy=f"subprocess.Popen, {command!r}") if is_short(command) else _CHILD
    if attributes_of(process).get("returncode") is not None:
        return replace(kind, by_fork="safe", inherited="each worker inherits a handle on a process that has ended")
    return kind


def _process(process: Any) -> Kind:
    if process is not multiprocessing.current_process():
        return replace(_CHILD, lazy="...")
    return replace(_CHILD, lazy="multiprocessing.current_process", reason="a process object belongs to its own process")


def _is_a(value: Any, name: str) -> bool:
    """Whether multiprocessing's class of that name is among the classes of `value`."""
    named = (base for base in type(value).__mro__ if base.__name__ == name)
    return any(module_name(base).startswith("multiprocessing.") for base in named)


# By topmost module and class, since not all are worth importing for this.
OWNERS: dict[tuple[str, str], Callable[[Any], Kind | None]] = {
    ("threading", "Thread"): _thread,
    ("subprocess", "Popen"): _popen,
    ("concurrent", "Executor"): _executor,
    ("concurrent", "Future"): _future,
    ("multiprocessing", "BaseProcess"): _process,
    ("multiprocessing", "Pool"): _pool,
    ("multiprocessing", "ApplyResult"): _pool_result,
    ("multiprocessing", "IMapIterator"): lambda iterator: _RESULT,
    ("multiprocessing", "BaseManager"): _manager,
    ("multiprocessing", "Listener"): lambda listener: _LISTENER,
}
