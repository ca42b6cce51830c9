"""The kinds of objects that cannot travel, or not as they are: why, what builds one in a worker, and what fork does."""

from __future__ import annotations

import _thread
import multiprocessing
import sys
import threading
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from socket import socket
from typing import Any, Literal

import numpy as np

from muster.introspection import attributes_of, module_name
from muster.pickling.user_call import current_call
from muster.pickling.walk import is_found_by_name

ByFork = Literal["safe", "risky", "breaks"]

HUGE_BYTES = 100 * 1000 * 1000
"""Arrays of at least this size are worth a warning: sending them takes their memory twice, and time."""


@dataclass(frozen=True)
class Kind:
    """The facts about one kind of object.

    reason: why it cannot be sent, or what arrives instead.
    inherited: what a forked worker gets.  by_fork: whether that is usable. risky: on conditions, which `inherited`
    names.  breaks: certainly not, so it must not be inherited at all.
    builder: the code of what builds one in a worker; empty where no code is known.  arguments: the code of the
    arguments that the builder takes; None where they are not known.
    instead: a sentence, what to do where something else than building it in the worker helps.
    refused: pickling it "works", but what arrives is broken.  silent: it travels, but arrives as something else.
    warns: like silent, and worth a warning on every start.
    shared: a worker uses what the caller uses: only where it inherits that by fork, or also where it is sent.
    changes: returns what the state of one object changes in these facts; None where the object travels as it is.
    """

    reason: str
    inherited: str
    by_fork: ByFork = "risky"
    builder: str = ""
    arguments: str | None = None
    instead: str = ""
    refused: bool = False
    silent: bool = False
    warns: bool = False
    shared: Literal["no", "by fork", "always"] = "no"
    changes: Callable[[Any], Mapping[str, Any] | None] | None = None


def kind_of(value: Any) -> Kind | None:
    """The kind of ``value``; None where nothing is known about it. Runs no code of ``value``."""
    for base in type(value).__mro__:
        kind = _KINDS.get(f"{module_name(base).partition('.')[0]}.{base.__name__}")
        if kind is not None:
            changes = {} if kind.changes is None else kind.changes(value)
            known = None if changes is None else replace(kind, **changes)
            is_left = known is not None and known.shared == "always" and current_call().far
            return replace(known, **_STAYS_HERE) if known is not None and is_left else known
    return None


def is_shared(value: Any) -> bool:
    """Whether a worker that receives `value` uses what this process uses: a queue, a pipe, memory, ..."""
    kind = kind_of(value)
    return kind is not None and kind.shared == "always"


_STAYS_HERE: dict[str, Any] = {
    "reason": "it exists on this machine alone",
    "instead": "Serve it here by host and port, with a multiprocessing.managers.BaseManager, say, and connect there, "
    "in a function of a module: muster.lazy(function) as an env's argument, or policy_factory",
    "refused": True,
}

# ---- the state of one object


def _safe(inherited: str) -> dict[str, Any]:
    return {"by_fork": "safe", "shared": "no", "inherited": inherited}


_CLOSED = _safe("it is closed here, and in each worker")


def _lock(lock: Any) -> dict[str, Any]:
    # An RLock has no locked() before Python 3.14, but its repr shows the state.
    kind: Any = _thread.RLock if issubclass(type(lock), _thread.RLock) else _thread.LockType
    if not kind.__repr__(lock).startswith("<locked"):
        return {}
    held = "the lock is held now, and nobody would ever release the copy in a worker: waiting for it hangs"
    return {"by_fork": "breaks", "inherited": held}


def _file(file: Any) -> dict[str, Any]:
    try:
        # The name of a temporary file may be a number, by which no code can open the file again.
        is_named = isinstance(file.name, str) and not file.name.startswith("<")
        opened: dict[str, Any] = {"arguments": f"{file.name!r}, {file.mode!r}" if is_named else None}
        is_closed = file.closed
    except Exception:  # closed or detached files raise; BytesIO-backed ones have no name
        opened, is_closed = {}, True
    streams = {
        name: getattr(sys, name) for name in ("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__")
    }
    named = next((name for name, stream in streams.items() if stream is file), "").strip("_")
    if named:
        opened["instead"] = f"Use sys.{named} in the env itself, for every process has one"
    buffers = [getattr(stream, "buffer", None) for stream in streams.values()]
    if named or any(file is one for one in (*buffers, *(getattr(one, "raw", None) for one in buffers))):
        return opened | _safe("workers inherit the standard streams, as all processes do")
    return opened | _CLOSED if is_closed else opened


def _text_file(file: Any) -> dict[str, Any]:
    mode = str(vars(file).get("mode", "")) if hasattr(file, "__dict__") else ""
    if "r" not in mode and "+" not in mode:
        return _file(file)
    reason = "an open text file travels as an io.StringIO with a copy of its contents: no file, no later changes"
    return {**_file(file), "reason": reason, "warns": True}


def _socket(connection: Any) -> dict[str, Any]:
    return _CLOSED if socket.fileno(connection) < 0 else {}


def _zeromq_context(context: Any) -> dict[str, Any]:
    """Reads pyzmq's own records of the sockets of a context, or of the one that it shadows."""
    while context is not None and not isinstance(context, int):
        attributes = attributes_of(context)
        if len(attributes.get("_sockets") or ()):
            return {"by_fork": "breaks", "inherited": f"a ZeroMQ context {_ZEROMQ_HANGS}"}
        context = attributes.get("_shadow_obj")
    return {}


_ZEROMQ_HANGS = "inherited by fork hangs: its I/O threads do not exist in the child"


def _generator(generator: Any) -> dict[str, Any]:
    code = next(code for name in ("gi", "cr", "ag") if (code := getattr(generator, f"{name}_code", None)) is not None)
    if not generator.__qualname__.isidentifier():
        return {}  # no function of a module makes it
    takes_nothing = not code.co_argcount and not code.co_kwonlyargcount
    return {"builder": generator.__qualname__, "arguments": "" if takes_nothing else None}


def _module(module: types.ModuleType) -> dict[str, Any] | None:
    return None if is_found_by_name(module) else {"arguments": f'"{module.__name__}"'}


# Read by ndarray's own descriptors, because a subclass may have properties of these names.
_nbytes: Callable[[Any], int] = np.ndarray.nbytes.__get__
_dtype: Callable[[Any], np.dtype[Any]] = np.ndarray.dtype.__get__


def _array(array: Any) -> dict[str, Any] | None:
    if _nbytes(array) < HUGE_BYTES or _dtype(array).hasobject:
        return None
    return {"reason": f"{_megabytes(array)}, which are copied before workers start"}


def _memory_map(array: Any) -> dict[str, Any]:
    return {"reason": f"a memory map travels as a copy of its contents ({_megabytes(array)}): no file behind it"}


def _megabytes(array: Any) -> str:
    return f"{_nbytes(array) / 1e6:.3g} MB"


def _c_data(value: Any) -> dict[str, Any]:
    # A RawValue or RawArray lies in memory of multiprocessing.
    return {"shared": "always"} if "_wrapper" in attributes_of(value) else {}


def _started_thread(thread: Any) -> dict[str, Any]:
    if thread is threading.current_thread() or thread is threading.main_thread():
        return _safe("each worker goes on in a copy of the thread that started it")
    try:
        started, alive = threading.Thread.ident.__get__(thread) is not None, threading.Thread.is_alive(thread)
    except Exception:  # of a subclass that has not called __init__
        started = alive = False
    if alive:
        return {}
    left = "has ended" if started else "has not been started, and may be started there"
    return _safe(f"each worker inherits a thread of its own that {left}")


def _executor(executor: Any) -> dict[str, Any]:
    attributes, kind = attributes_of(executor), type(executor)
    builder = f"concurrent.futures.{kind.__name__}" if module_name(kind).startswith("concurrent.futures.") else ""
    built = {"builder": builder}
    if attributes.get("_shutdown") is True or attributes.get("_shutdown_thread") is True:
        return built | _safe("each worker inherits an executor that has been shut down")
    if any(attributes.get(one) for one in ("_threads", "_processes", "_executor_manager_thread")):
        return {**built, "by_fork": "breaks"}
    if "_threads" in attributes:
        return built | _safe("each worker inherits an executor of its own, which has started no thread yet")
    if "_processes" in attributes:
        shared = "workers would share the queues of an executor that each starts anew: their tasks and results mix"
        return {**built, "inherited": shared}
    return built


def _pool(pool: Any) -> dict[str, Any]:
    is_closed = attributes_of(pool).get("_state") in ("CLOSE", "TERMINATE")
    return _safe("each worker inherits a pool that has been closed") if is_closed else {}


def _pool_result(result: Any) -> dict[str, Any]:
    event = attributes_of(attributes_of(result).get("_event"))
    return _safe("each worker inherits a copy of the result, which is there") if event.get("_flag") else {}


def _manager(manager: Any) -> dict[str, Any]:
    left = _safe("each worker inherits a manager of its own, which has no process")
    return {} if "_process" in attributes_of(manager) else left


def _popen(process: Any) -> dict[str, Any]:
    ended = _safe("each worker inherits a handle on a process that has ended")
    return {} if attributes_of(process).get("returncode") is None else ended


def _process(process: Any) -> dict[str, Any]:
    if process is not multiprocessing.current_process():
        return {}
    own = "a process object belongs to its own process"
    return {"reason": own, "builder": "multiprocessing.current_process", "arguments": ""}


# ---- the table

_LOCK = Kind(
    "a lock works only within the process that made it",
    "each worker inherits a copy of the lock, free, which keeps out only its own threads",
    by_fork="safe",
    builder="threading.Lock",
    arguments="",
    changes=_lock,
)
_FILE = Kind(
    "an open file belongs to the process that opened it",
    "all workers would share one file position with the caller, and each write out what is buffered now",
    builder="open",
    shared="by fork",
    changes=_file,
)
_SQLITE = Kind(
    "an SQLite connection belongs to the process that opened it",
    "SQLite forbids to use a connection in a forked child: the database file can be damaged",
    builder="sqlite3.connect",
    shared="by fork",
)
_GENERATOR = Kind(
    "a generator's stack frame cannot be sent",
    "every worker continues a copy of its own from where it stands now",
    by_fork="safe",
    changes=_generator,
)
_ARRAY = Kind(
    "",
    "workers inherit the memory, shared with the caller until one writes to it",
    by_fork="safe",
    builder="numpy.load",
    arguments='"data.npy", mmap_mode="r"',
    warns=True,
    changes=_array,
)
_RANDOM = Kind(
    "every worker gets a copy in the same state, so its envs repeat each other's draws",
    "every worker inherits a copy in the same state",
    by_fork="safe",
    builder="lambda: numpy.random.default_rng(muster.get_worker_info().env_index)",
    arguments="",
    silent=True,
)
_POOL = Kind(
    "the workers of a pool, and the threads that hand out its tasks, belong to the process that started them",
    "workers would inherit the object, but not its threads: what it is given to do hangs",
    by_fork="breaks",
    builder="multiprocessing.Pool",
    refused=True,
    changes=_pool,
)
_RESULT = Kind(
    "the result of a pool's task comes to the process that has given the task",
    "the result would never come to a worker: waiting for it hangs",
    by_fork="breaks",
    refused=True,
    changes=_pool_result,
)
_CHILD = Kind(
    "a child process belongs to the process that started it",
    "workers would inherit a handle on a process that is not their child, so they cannot wait for it",
    refused=True,
)
_SHARED = Kind(
    "what multiprocessing shares reaches a worker only when that starts, and from the fork context only a forked one",
    "workers inherit this very object, shared with each other and the caller",
    by_fork="safe",
    instead='Make it in a context that can start fresh processes, multiprocessing.get_context("forkserver"), and hand '
    "it over before the workers start",
    shared="always",
)
# A proxy, or memory that has a name. They travel.
_NAMED = replace(_SHARED, reason="it stands for something that other processes find by its name", instead="")

_SHARED_CLASSES = ("Queue", "SimpleQueue", "SemLock", "Condition", "Event", "Barrier", "SynchronizedBase")

# By topmost module and class, since not all are worth importing for this. Subclasses are of the same kind.
_KINDS = {
    "_thread.lock": _LOCK,
    "_thread.RLock": replace(_LOCK, builder="threading.RLock"),
    "_io.TextIOWrapper": replace(_FILE, changes=_text_file),
    **dict.fromkeys(("_io.BufferedReader", "_io.BufferedWriter", "_io.BufferedRandom", "_io.FileIO"), _FILE),
    "socket.socket": Kind(
        "a socket belongs to the process that opened it",
        "all workers would read from and write to one connection",
        builder="socket.create_connection",
        shared="by fork",
        changes=_socket,
    ),
    **dict.fromkeys(("sqlite3.Connection", "sqlite3.Cursor"), _SQLITE),
    "zmq.Context": Kind(
        "a ZeroMQ context belongs to the threads of the process that made it",
        "a ZeroMQ context starts its I/O threads with its first socket: inherited by fork it works only if it has "
        "never had one, and each worker then has a context of its own",
        builder="zmq.Context",
        arguments="",
        changes=_zeromq_context,
    ),
    "zmq.Socket": Kind(
        "a ZeroMQ socket belongs to the threads of the process that made it",
        f"a ZeroMQ socket {_ZEROMQ_HANGS}",
        by_fork="breaks",
    ),
    **dict.fromkeys(("builtins.generator", "builtins.coroutine", "builtins.async_generator"), _GENERATOR),
    "builtins.module": Kind(
        "a module that cannot be imported by its name travels by value: every worker gets a module of its own",
        "workers inherit a copy of the module as it is now",
        by_fork="safe",
        builder="importlib.import_module",
        warns=True,
        changes=_module,
    ),
    "numpy.ndarray": _ARRAY,
    "numpy.memmap": replace(_ARRAY, inherited="workers inherit the same mapping of the same file", changes=_memory_map),
    **dict.fromkeys(("numpy.Generator", "numpy.RandomState", "random.Random"), _RANDOM),
    "torch.Tensor": Kind(
        "a CUDA tensor travels as a copy through the host, and every worker opens a CUDA context for it",
        "CUDA cannot be used in a forked child of a process that uses it",
        by_fork="breaks",
        builder="torch.load",
        warns=True,
        changes=lambda tensor: {} if tensor.is_cuda else None,
    ),
    "ctypes.CDLL": Kind(
        "a loaded C library: its address would be sent, which means nothing in a worker",
        "workers inherit the library as it is now, initialised or not",
        by_fork="safe",
        builder="ctypes.CDLL",
        refused=True,
        changes=lambda library: {"arguments": repr(attributes_of(library).get("_name"))},
    ),
    "_ctypes._CData": Kind(
        "a C pointer means nothing in another process",
        "workers inherit a copy of the memory that it points to, at the same address",
        by_fork="safe",
        changes=_c_data,
    ),
    "mmap.mmap": Kind(
        "a memory mapping belongs to the process that made it",
        "workers inherit the same mapping; whether they see each other's writes depends on its flags",
        by_fork="safe",
        builder="mmap.mmap",
        shared="by fork",
    ),
    "threading.Thread": Kind(
        "a thread runs only in the process that started it",
        "workers would inherit the object, but not its thread: what waits for it hangs",
        refused=True,
        changes=_started_thread,
    ),
    "subprocess.Popen": replace(_CHILD, builder="subprocess.Popen", changes=_popen),
    "concurrent.Executor": Kind(
        "the threads or processes of an executor belong to the process that started them",
        "workers would inherit the object, but not its threads: what is submitted to it hangs",
        refused=True,
        changes=_executor,
    ),
    "concurrent.Future": Kind(
        "the result of a future comes to the process that has submitted the task",
        "a result that is set in the caller never comes to a worker, which would wait for it forever",
        builder="concurrent.futures.Future",
        arguments="",
        changes=lambda future: {} if attributes_of(future).get("_state") in ("PENDING", "RUNNING") else None,
    ),
    "multiprocessing.BaseProcess": replace(_CHILD, changes=_process),
    "multiprocessing.Pool": _POOL,
    "multiprocessing.ThreadPool": replace(_POOL, builder="multiprocessing.pool.ThreadPool"),
    "multiprocessing.ApplyResult": _RESULT,
    "multiprocessing.IMapIterator": replace(_RESULT, changes=None),
    "multiprocessing.BaseManager": Kind(
        "the process of a manager belongs to the process that started it",
        "workers would use the manager's process by the caller's handle; only the caller can end it, and an end of the "
        "caller ends it for all",
        refused=True,
        changes=_manager,
    ),
    "multiprocessing.Listener": Kind(
        "a listener's socket belongs to the process that opened it",
        "all workers would take connections from one socket, each those that it comes to first",
        builder="multiprocessing.connection.Listener",
        refused=True,
    ),
    "multiprocessing._ConnectionBase": Kind(
        "one end of a pipe can be passed to a worker only when that starts; later its number would be sent, which "
        "means another file in a worker",
        "workers inherit this very end, shared with each other and the caller",
        by_fork="safe",
        refused=True,
        shared="always",
    ),
    **{f"multiprocessing.{name}": _SHARED for name in _SHARED_CLASSES},
    **{f"multiprocessing.{name}": _NAMED for name in ("BaseProxy", "SharedMemory", "ShareableList")},
}
