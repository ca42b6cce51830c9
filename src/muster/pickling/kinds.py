"""The kinds of objects that cannot travel, or not as they are: why, and what builds one in a worker."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from muster.introspection import attributes_of, module_name
from muster.pickling.user_call import current_call
from muster.pickling.walk import is_found_by_name

HUGE_BYTES = 100 * 1000 * 1000
"""Arrays of at least this size are worth a warning: sending them takes their memory twice, and time."""


@dataclass(frozen=True)
class Kind:
    """The facts about one kind of object.

    reason: why it cannot be sent, or what arrives instead.
    builder: the code of what builds one in a worker; empty where no code is known.  arguments: the code of the
    arguments that the builder takes; None where they are not known.
    instead: a sentence, what to do where something else than building it in the worker helps.
    refused: pickling it "works", but what arrives is broken.  silent: it travels, but arrives as something else.
    warns: like silent, and worth a warning on every start.
    shared: a worker uses what the caller uses: only where it inherits that by fork, or also where it is sent.
    changes: returns what the state of one object changes in these facts; None where the object travels as it is.
    """

    reason: str
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
    """Returns whether a worker that receives `value` uses what this process uses: a queue, a pipe, memory, ..."""
    kind = kind_of(value)
    return kind is not None and kind.shared == "always"


_STAYS_HERE: dict[str, Any] = {
    "reason": "it exists on this machine alone",
    "instead": "Serve it here by host and port, with a multiprocessing.managers.BaseManager, say, and connect there, "
    "in a function of a module: muster.lazy(function) as an env's argument, or policy_factory",
    "refused": True,
}

# ---- the state of one object


def _file(file: Any) -> dict[str, Any]:
    streams = {
        name: getattr(sys, name) for name in ("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__")
    }
    if named := next((name.strip("_") for name, stream in streams.items() if stream is file), ""):
        return {"shared": "no", "instead": f"Use sys.{named} in the env itself, for every process has one"}
    buffers = [getattr(stream, "buffer", None) for stream in streams.values()]
    if any(file is one or file is getattr(one, "raw", None) for one in buffers):
        return {"shared": "no"}
    try:
        # The name of a temporary file may be a number: no code can open the file again by it.
        is_named = isinstance(file.name, str) and not file.name.startswith("<")
        return {"arguments": f"{file.name!r}, {file.mode!r}" if is_named else None}
    except Exception:  # closed or detached files raise; BytesIO-backed ones have no name
        return {}


def _text_file(file: Any) -> dict[str, Any]:
    mode = str(vars(file).get("mode", "")) if hasattr(file, "__dict__") else ""
    if "r" not in mode and "+" not in mode:
        return _file(file)
    reason = "an open text file travels as an io.StringIO with a copy of its contents: no file, no later changes"
    return {**_file(file), "reason": reason, "warns": True}


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


# ---- the table

_LOCK = Kind("a lock works only within the process that made it", builder="threading.Lock", arguments="")
_FILE = Kind("an open file belongs to the process that opened it", builder="open", shared="by fork", changes=_file)
_SQLITE = Kind(
    "an SQLite connection belongs to the process that opened it", builder="sqlite3.connect", shared="by fork"
)
_GENERATOR = Kind("a generator's stack frame cannot be sent", changes=_generator)
_ARRAY = Kind("", builder="numpy.load", arguments='"data.npy", mmap_mode="r"', warns=True, changes=_array)
_RANDOM = Kind(
    "every worker gets a copy in the same state, so its envs repeat each other's draws",
    builder="lambda: numpy.random.default_rng(muster.get_worker_info().env_index)",
    arguments="",
    silent=True,
)
_POOL = Kind(
    "the workers of a pool, and the threads that hand out its tasks, belong to the process that started them",
    builder="multiprocessing.Pool",
    refused=True,
)
_EXECUTOR = Kind("the threads or processes of an executor belong to the process that started them", refused=True)
_CHILD = Kind("a child process belongs to the process that started it", refused=True)
_SHARED = Kind(
    "what multiprocessing shares reaches a worker only when that starts, and from the fork context only a forked one",
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
        "a socket belongs to the process that opened it", builder="socket.create_connection", shared="by fork"
    ),
    **dict.fromkeys(("sqlite3.Connection", "sqlite3.Cursor"), _SQLITE),
    "zmq.Context": Kind(
        "a ZeroMQ context belongs to the threads of the process that made it", builder="zmq.Context", arguments=""
    ),
    "zmq.Socket": Kind("a ZeroMQ socket belongs to the threads of the process that made it"),
    **dict.fromkeys(("builtins.generator", "builtins.coroutine", "builtins.async_generator"), _GENERATOR),
    "builtins.module": Kind(
        "a module that cannot be imported by its name travels by value: every worker gets a module of its own",
        builder="importlib.import_module",
        warns=True,
        changes=_module,
    ),
    "numpy.ndarray": _ARRAY,
    "numpy.memmap": replace(_ARRAY, changes=_memory_map),
    **dict.fromkeys(("numpy.Generator", "numpy.RandomState", "random.Random"), _RANDOM),
    "torch.Tensor": Kind(
        "a CUDA tensor travels as a copy through the host, and every worker opens a CUDA context for it",
        builder="torch.load",
        warns=True,
        changes=lambda tensor: {} if tensor.is_cuda else None,
    ),
    "ctypes.CDLL": Kind(
        "a loaded C library: its address would be sent, which means nothing in a worker",
        builder="ctypes.CDLL",
        refused=True,
        changes=lambda library: {"arguments": repr(attributes_of(library).get("_name"))},
    ),
    "_ctypes._CData": Kind("a C pointer means nothing in another process", changes=_c_data),
    "mmap.mmap": Kind("a memory mapping belongs to the process that made it", builder="mmap.mmap", shared="by fork"),
    "threading.Thread": Kind("a thread runs only in the process that started it", refused=True),
    "subprocess.Popen": replace(_CHILD, builder="subprocess.Popen"),
    "concurrent.Executor": _EXECUTOR,
    **{
        f"concurrent.{name}": replace(_EXECUTOR, builder=f"concurrent.futures.{name}")
        for name in ("ThreadPoolExecutor", "ProcessPoolExecutor")
    },
    "multiprocessing.BaseProcess": _CHILD,
    "multiprocessing.Pool": _POOL,
    "multiprocessing.ThreadPool": replace(_POOL, builder="multiprocessing.pool.ThreadPool"),
    "multiprocessing.BaseManager": Kind(
        "the process of a manager belongs to the process that started it", refused=True
    ),
    "multiprocessing.Listener": Kind(
        "a listener's socket belongs to the process that opened it",
        builder="multiprocessing.connection.Listener",
        refused=True,
    ),
    "multiprocessing._ConnectionBase": Kind(
        "one end of a pipe can be passed to a worker only when that starts; later its number would be sent, which "
        "means another file in a worker",
        refused=True,
        shared="always",
    ),
    **{f"multiprocessing.{name}": _SHARED for name in _SHARED_CLASSES},
    **{f"multiprocessing.{name}": _NAMED for name in ("BaseProxy", "SharedMemory", "ShareableList")},
}
