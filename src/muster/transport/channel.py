"""Messages between the caller and one worker: everything that is not a step.

Pickles over an inherited socket pair, each behind its length. Only the two processes at its ends can reach it.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from muster.transport.mail import dumps

_LENGTH = struct.Struct("<Q")
_SLICE_MS = 50


class ChannelClosed(Exception):
    """The other end is gone."""


class Channel:
    """One end. `watch(waited_s)` is called while a call of this end has to wait, and may raise to end the wait.

    shares_main: see `mail.dumps`.
    """

    def __init__(
        self, end: socket.socket, watch: Callable[[float], None] | None = None, *, shares_main: bool = False
    ) -> None:
        self._socket = end
        self._watch = watch
        self._shares_main = shares_main
        end.setblocking(False)

    @classmethod
    def pair(cls) -> tuple[socket.socket, socket.socket]:
        """The two ends, for a Channel each."""
        return socket.socketpair()

    def fileno(self) -> int:
        """For polling: readable when there is a message."""
        return self._socket.fileno()

    def send(self, message: object) -> None:
        """Raises ChannelClosed, and whatever `watch` raises."""
        self.send_bytes(dumps(message, shares_main=self._shares_main))

    def send_bytes(self, data: bytes) -> None:
        """As `send`, for what is pickled already."""
        view = memoryview(_LENGTH.pack(len(data)) + data)
        while view:
            try:
                view = view[self._socket.send(view, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                self._poll(select.POLLOUT, None)
            except OSError as error:
                raise ChannelClosed from error

    def recv(self, timeout_s: float | None = None) -> Any:
        """The next message. Raises TimeoutError before anything is read, ChannelClosed, and what `watch` raises."""
        if not self._poll(select.POLLIN, timeout_s):
            raise TimeoutError
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return pickle.loads(self._read(length))

    def close(self) -> None:
        self._socket.close()

    def _read(self, length: int) -> bytes:
        parts = []
        while length:
            try:
                part = self._socket.recv(min(length, 1 << 20))
            except BlockingIOError:
                self._poll(select.POLLIN, None)
                continue
            except OSError as error:
                raise ChannelClosed from error
            if not part:
                raise ChannelClosed
            parts.append(part)
            length -= len(part)
        return b"".join(parts)

    def _poll(self, event: int, timeout_s: float | None) -> bool:
        poller = select.poll()
        poller.register(self._socket, event)
        start = time.monotonic()
        while True:
            left = None if timeout_s is None else max(0.0, start + timeout_s - time.monotonic())
            slice_ms: float | None = None if self._watch is None else _SLICE_MS
            if left is not None:
                slice_ms = left * 1000 if slice_ms is None else min(left * 1000, slice_ms)
            if poller.poll(slice_ms):
                return True
            if self._watch is not None:
                self._watch(time.monotonic() - start)
            if left == 0.0:
                return False
