"""How objects that cannot travel were made, as far as they know it themselves: the arguments of a ``muster.lazy``."""

from __future__ import annotations

import inspect
import sys
from socket import AF_INET, AF_INET6, socket
from typing import Any

from muster.introspection import attributes_of

_MOST_CHARACTERS = 120
_PLAIN = (type(None), bool, int, float, str, bytes)
_CONNECTING = ("REQ", "DEALER", "SUB", "PUSH")


def is_short(value: Any) -> bool:
    """Whether `value` is plain, and short enough to be written out."""
    parts = value if type(value) in (list, tuple) else [value]
    return all(type(part) in _PLAIN for part in parts) and len(repr(value)) <= _MOST_CHARACTERS


def socket_code(connection: Any) -> str:
    """The code for a socket that is connected to the same address."""
    try:
        if connection.family in (AF_INET, AF_INET6):
            return f"socket.create_connection, {socket.getpeername(connection)[:2]!r}"
    except OSError:  # it is not connected
        pass
    return "socket.create_connection, (host, port)"


def sqlite_code(connection: Any) -> str:
    """The code for a connection to the same database."""
    sqlite3: Any = sys.modules["sqlite3"]
    try:
        cursor = sqlite3.Connection.cursor(connection)
        cursor.row_factory = None
        file = cursor.execute("PRAGMA database_list").fetchall()[0][2]
        cursor.close()
    except Exception:  # it is closed, or belongs to another thread
        return "sqlite3.connect, path"
    return f"sqlite3.connect, {file or ':memory:'!r}"


def zeromq_socket_code(socket: Any) -> str:
    """The code for a ZeroMQ socket of the same type, connected to the same address where that type connects."""
    zmq: Any = sys.modules["zmq"]
    try:
        name = zmq.SocketType(zmq.Socket.get(socket, zmq.TYPE)).name
        address = zmq.Socket.get(socket, zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
    except Exception:  # it is closed
        name, address = "REQ", ""
    made = f"zmq.Context.instance().socket(zmq.{name})"
    if name not in _CONNECTING or not address:
        return f"lambda: {made}"
    return f"lambda: (made := {made}, made.connect({address!r}))[0]"


def generator_code(generator: Any) -> str:
    """The code for a generator of the same function, with its arguments where it has not started."""
    kind = next(kind for kind in ("gi", "cr", "ag") if hasattr(generator, f"{kind}_code"))
    code, frame = getattr(generator, f"{kind}_code"), getattr(generator, f"{kind}_frame")
    if not code.co_name.isidentifier():
        return "..."  # of a generator expression
    flags = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if not names and not code.co_flags & flags:
        return str(code.co_name)
    arguments = {} if frame is None else frame.f_locals
    known = all(name in arguments and is_short(arguments[name]) for name in names)
    started = kind == "gi" and inspect.getgeneratorstate(generator) != inspect.GEN_CREATED
    if not known or started or kind != "gi" or code.co_flags & flags:
        return f"{code.co_name}, ..."
    return ", ".join([code.co_name, *(f"{name}={arguments[name]!r}" for name in names)])


def memory_map_code(array: Any) -> str:
    """The code that maps the same part of the same file; empty where that is not known."""
    known = attributes_of(array)
    file, mode, offset = (known.get(name) for name in ("filename", "mode", "offset"))
    if file is None or array.dtype.hasobject or not array.flags.c_contiguous:
        return ""
    kind = array.dtype.str
    return f'np.memmap, {str(file)!r}, "{kind}", "{mode}", {offset}, {array.shape}'
