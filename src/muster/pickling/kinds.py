"""Kinds of objects that cannot travel, or not as they are: why, what to write instead, and what fork does."""

from __future__ import annotations

import _thread
import ctypes
import io
import random
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from mmap import mmap
from socket import socket
from typing import Any

import numpy as np

from muster.introspection import attributes_of, module_name
from muster.pickling.kind_facts import Kind
from muster.pickling.made_again import (
    generator_code,
    memory_map_code,
    socket_code,
    sqlite_code,
    zeromq_socket_code,
)
from muster.pickling.modules import is_found_by_name
from muster.pickling.owners import OWNERS
from muster.pickling.shared_kinds import MODULES, made_anew

HUGE_BYTES = 100 * 1000 * 1000
"""Arrays of at least this size are worth a warning: sending them takes their memory twice, and time."""


def kind_of(value: Any) -> Kind | None:
    """The kind of ``value``; None where nothing is known about it. Runs no code of ``value``."""
    bases = type(value).__mro__
    for base in bases:
        module = module_name(base)
        named = module.partition(".")[0], base.__name__
        describe = _BY_CLASS.get(base) or _BY_NAME.get(named) or OWNERS.get(named)
        if describe is not None:
            return describe(value)
        if module in MODULES:
            return replace(_SHARED, made_anew=made_anew(value))
    return None


_ZEROMQ_HANGS = "inherited by fork hangs: its I/O threads do not exist in the child"


def _zeromq_context(context: Any) -> Kind:
    reason = "a ZeroMQ context belongs to the threads of the process that made it"
    if _has_sockets(context):
        return Kind(reason, "zmq.Context", f"a ZeroMQ context {_ZEROMQ_HANGS}", by_fork="breaks")
    return Kind(
        reason,
        "zmq.Context",
        "a ZeroMQ context starts its I/O threads with its first socket: inherited by fork it works only if it has "
        "never had one, and each worker then has a context of its own",
    )


def _has_sockets(context: Any) -> bool:
    """Whether a ZeroMQ context, or the one that it shadows, has sockets. Reads pyzmq's own records of them."""
    while context is not None and not isinstance(context, int):
        attributes = attributes_of(context)
        if len(attributes.get("_sockets") or ()):
            return True
        context = attributes.get("_shadow_obj")
    return False


def _zeromq_socket(socket: Any) -> Kind:
    return Kind(
        "a ZeroMQ socket belongs to the threads of the process that made it",
        zeromq_socket_code(socket),
        f"a ZeroMQ socket {_ZEROMQ_HANGS}",
        by_fork="breaks",
    )


def _lock(code: str, show: Callable[[Any], str]) -> Callable[[Any], Kind]:
    def describe(lock: Any) -> Kind:
        # An RLock has no locked() before Python 3.14, but its repr shows the state.
        held = show(lock).startswith("<locked")
        return Kind(
            reason="a lock works only within the process that made it",
            lazy=code,
            inherited="the lock is held now, and nobody would ever release the copy in a worker: waiting for it hangs"
            if held
            else "each worker inherits a copy of the lock, free, which keeps out only its own threads",
            by_fork="breaks" if held else "safe",
        )

    return describe


def _text_file(file: Any) -> Kind | None:
    mode = str(vars(file).get("mode", "")) if hasattr(file, "__dict__") else ""
    if "r" not in mode and "+" not in mode:
        return _open_file(file)
    return replace(
        _open_file(file),
        reason="an open text file travels as an io.StringIO with a copy of its contents: no file, no later changes",
        warns=True,
    )


def _open_file(file: Any) -> Kind:
    name, mode = _file_name_and_mode(file)
    stream = next((name for name in ("stdin", "stdout", "stderr") if file is getattr(sys, name)), "")
    kind = Kind(
        reason="an open file belongs to the process that opened it",
        lazy="..." if stream else f"open, {name}, {mode}",
        instead=f"use sys.{stream} in the env itself, for every process has one" if stream else "",
        inherited="all workers would share one file position with the caller, and each write out what is buffered now",
        shared_by_fork=True,
    )
    if _belongs_to_all(file):
        ours = "workers inherit the standard streams, as all processes do"
        return replace(kind, by_fork="safe", shared_by_fork=False, inherited=ours)
    return replace(kind, by_fork="safe", shared_by_fork=False, inherited=_CLOSED) if _is_closed(file) else kind


_CLOSED = "it is closed here, and in each worker"


def _belongs_to_all(file: Any) -> bool:
    """Whether `file` is a standard stream, which every process shares with its parent, or a part of one."""
    streams = (sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__)
    buffers = [getattr(stream, "buffer", None) for stream in streams]
    return any(file is one for one in (*streams, *buffers, *(getattr(one, "raw", None) for one in buffers)))


def _is_closed(file: Any) -> bool:
    try:
        return bool(file.closed)
    except Exception:  # detached
        return True


def _file_name_and_mode(file: Any) -> tuple[str, str]:
    try:
        # The name of a temporary file may be a number, by which no code can open the file again.
        named = isinstance(file.name, str) and not file.name.startswith("<")
        return repr(file.name) if named else "path", repr(file.mode)
    except Exception:  # closed or detached files raise; BytesIO-backed ones have neither
        return "path", "mode"


def _socket(connection: Any) -> Kind:
    kind = replace(_SOCKET, lazy=socket_code(connection))
    is_closed = socket.fileno(connection) < 0
    return replace(kind, by_fork="safe", shared_by_fork=False, inherited=_CLOSED) if is_closed else kind


def _sqlite(connection: Any) -> Kind:
    return replace(_SQLITE, lazy=sqlite_code(connection))


def _library(library: Any) -> Kind:
    return replace(_LIBRARY, lazy=f"ctypes.CDLL, {attributes_of(library).get('_name')!r}")


def _generator(generator: Any) -> Kind:
    return Kind(
        reason="a generator's stack frame cannot be sent",
        lazy=generator_code(generator),
        inherited="every worker continues a copy of its own from where it stands now",
        by_fork="safe",
    )


def _array(array: Any) -> Kind | None:
    if _nbytes(array) < HUGE_BYTES or _dtype(array).hasobject:
        return None
    return _array_kind(
        f"{_megabytes(array)}, which are copied before workers start",
        inherited="workers inherit the memory, shared with the caller until one writes to it",
    )


def _memory_map(array: Any) -> Kind:
    kind = _array_kind(
        f"a memory map travels as a copy of its contents ({_megabytes(array)}): no file behind it",
        inherited="workers inherit the same mapping of the same file",
    )
    return replace(kind, lazy=memory_map_code(array) or kind.lazy)


def _array_kind(reason: str, inherited: str) -> Kind:
    return Kind(reason, 'np.load, "data.npy", mmap_mode="r"', inherited, by_fork="safe", warns=True)


def _megabytes(array: Any) -> str:
    return f"{_nbytes(array) / 1e6:.3g} MB"


# Read by ndarray's own descriptors, because a subclass may have properties of these names.
_nbytes: Callable[[Any], int] = np.ndarray.nbytes.__get__
_dtype: Callable[[Any], np.dtype[Any]] = np.ndarray.dtype.__get__


def _module(module: types.ModuleType) -> Kind | None:
    if is_found_by_name(module):
        return None
    return Kind(
        reason="a module that cannot be imported by its name travels by value: every worker gets a module of its own",
        lazy=f'importlib.import_module, "{module.__name__}"',
        inherited="workers inherit a copy of the module as it is now",
        by_fork="safe",
        warns=True,
    )


def _tensor(tensor: Any) -> Kind | None:
    if not tensor.is_cuda:
        return None
    return Kind(
        reason="a CUDA tensor travels as a copy through the host, and every worker opens a CUDA context for it",
        lazy="torch.load, path",
        inherited="CUDA cannot be used in a forked child of a process that uses it",
        by_fork="breaks",
        warns=True,
    )


def _random(generator: Any) -> Kind:
    return Kind(
        reason="every worker gets a copy in the same state, so its envs repeat each other's draws",
        lazy="lambda: np.random.default_rng(muster.get_worker_info().env_index)",
        inherited="every worker inherits a copy in the same state",
        by_fork="safe",
        silent=True,
    )


def _ctypes_data(value: Any) -> Kind:
    return Kind(
        reason="a C pointer means nothing in another process",
        lazy="...",
        inherited="workers inherit a copy of the memory that it points to, at the same address",
        by_fork="safe",
    )


_SHARED = Kind(
    reason="what multiprocessing shares can be passed to a worker only when that starts",
    lazy="...",
    inherited="workers inherit this very object, shared with each other and the caller",
    by_fork="safe",
    shared_by_fork=True,
)
_SOCKET = Kind(
    reason="a socket belongs to the process that opened it",
    lazy="socket.create_connection, (host, port)",
    inherited="all workers would read from and write to one connection",
    shared_by_fork=True,
)
_SQLITE = Kind(
    reason="an SQLite connection belongs to the process that opened it",
    lazy="sqlite3.connect, path",
    inherited="SQLite forbids to use a connection in a forked child: the database file can be damaged",
    shared_by_fork=True,
)
_PIPE = Kind(
    reason="one end of a pipe can be passed to a worker only when that starts; later its number would be sent, which "
    "means another file in a worker",
    lazy="...",
    inherited="workers inherit this very end, shared with each other and the caller",
    by_fork="safe",
    refused=True,
    shared_by_fork=True,
)
_LIBRARY = Kind(
    reason="a loaded C library: its address would be sent, which means nothing in a worker",
    lazy='ctypes.CDLL, "lib.so"',
    inherited="workers inherit the library as it is now, initialised or not",
    by_fork="safe",
    refused=True,
)
_MAPPING = Kind(
    reason="a memory mapping belongs to the process that made it",
    lazy="mmap.mmap, fileno, length",
    inherited="workers inherit the same mapping; whether they see each other's writes depends on its flags",
    by_fork="safe",
    shared_by_fork=True,
)


def _always(kind: Kind) -> Callable[[Any], Kind | None]:
    return lambda value: kind


_BY_CLASS: dict[type, Callable[[Any], Kind | None]] = {
    _thread.LockType: _lock("threading.Lock", _thread.LockType.__repr__),
    _thread.RLock: _lock("threading.RLock", _thread.RLock.__repr__),
    io.TextIOWrapper: _text_file,
    io.BufferedReader: _open_file,
    io.BufferedWriter: _open_file,
    io.BufferedRandom: _open_file,
    io.FileIO: _open_file,
    socket: _socket,
    types.GeneratorType: _generator,
    types.CoroutineType: _generator,
    types.AsyncGeneratorType: _generator,
    types.ModuleType: _module,
    np.memmap: _memory_map,
    np.ndarray: _array,
    np.random.Generator: _random,
    np.random.RandomState: _random,
    random.Random: _random,
    ctypes.CDLL: _library,
    ctypes.Structure.__mro__[1]: _ctypes_data,
    mmap: _always(_MAPPING),
}

# The keys are topmost module and class: of optional packages, and of modules that are not worth importing for this.
_BY_NAME: dict[tuple[str, str], Callable[[Any], Kind | None]] = {
    ("zmq", "Context"): _zeromq_context,
    ("zmq", "Socket"): _zeromq_socket,
    ("torch", "Tensor"): _tensor,
    ("sqlite3", "Connection"): _sqlite,
    ("sqlite3", "Cursor"): _always(_SQLITE),
    ("multiprocessing", "_ConnectionBase"): _always(_PIPE),
}
