"""Messages between the caller and one worker: everything that is not a step.

They are pickles, each behind its length, over an inherited socket pair. Only the processes at its two ends can reach
it.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from muster.transport.mail import dumps

_LENGTH = struct.Struct("<Q")
_SLICE_S = 0.05
_CHUNK_BYTES = 1 << 20
# Fds for one call of sendmsg; the kernel takes at most 253.
_FDS_AT_ONCE = 250
_ANCILLARY_BYTES = socket.CMSG_LEN(_FDS_AT_ONCE * array("i").itemsize)


class ChannelClosed(Exception):
    """The other end is gone."""


class Channel:
    """One end of the channel between the caller and a worker.

    watch: called every 50 ms while a call of this end has to wait; it may raise to end the wait.
    shares_main: see `mail.dumps`.
    """

    def __init__(
        self, end: socket.socket, watch: Callable[[], None] | None = None, *, shares_main: bool = False
    ) -> None:
        self._socket = end
        self._watch = watch
        self._shares_main = shares_main
        self._received = bytearray()  # of a message that has not arrived as a whole
        self._received_fds: list[int] = []
        self.heard_at = 0.0  # time.monotonic() of the last bytes received
        end.setblocking(False)

    def fileno(self) -> int:
        """The fd to poll: readable when there is a message, or a part of one."""
        return self._socket.fileno()

    def send(self, message: object, timeout_s: float | None = None, fds: Sequence[int] = ()) -> None:
        """Sends a message, and copies of `fds` along with it.

        Raises ChannelClosed, TimeoutError, and whatever `watch` raises.
        """
        self.send_bytes(dumps(message, shares_main=self._shares_main), timeout_s, fds)

    def send_bytes(self, data: bytes, timeout_s: float | None = None, fds: Sequence[int] = ()) -> None:
        """Sends a message that is pickled already. Raises what `send` raises.

        TimeoutError is raised once the other end has taken nothing for `timeout_s`: then half a message is on its way,
        and the channel cannot be used any more.
        """
        view = memoryview(_LENGTH.pack(len(data)) + data)
        while view:
            try:
                if fds:  # not socket.send_fds, which drops its flags before Python 3.14
                    rights = array("i", fds[:_FDS_AT_ONCE])
                    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
                    view = view[self._socket.sendmsg([view[:1]], ancillary, socket.MSG_NOSIGNAL) :]
                    fds = fds[_FDS_AT_ONCE:]
                else:
                    view = view[self._socket.send(view, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                if not self._poll(select.POLLOUT, timeout_s):
                    raise TimeoutError from None
            except OSError as error:
                raise ChannelClosed from error

    def recv(self, timeout_s: float | None = None) -> Any:
        """The next message. Raises ChannelClosed, TimeoutError, and whatever `watch` raises.

        TimeoutError is raised if the message has not arrived as a whole within `timeout_s`; the part that has arrived
        is kept for the next call.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._fill():
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._poll(select.POLLIN, left_s):
                raise TimeoutError
        message, self._received = self._received, bytearray()
        return pickle.loads(memoryview(message)[_LENGTH.size :])

    def take_fds(self) -> list[int]:
        """The fds that came with the messages so far, and were not taken yet; they belong to the taker."""
        fds, self._received_fds = self._received_fds, []
        return fds

    def close(self) -> None:
        self._socket.close()

    def _fill(self) -> bool:
        """Reads the part of the next message that is there; True once the message is whole."""
        while missing := self._missing():
            try:
                part, ancillary, _, _ = self._socket.recvmsg(
                    min(missing, _CHUNK_BYTES), _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return False
            except OSError as error:
                raise ChannelClosed from error
            if not part:
                raise ChannelClosed
            self._received += part
            for _, _, rights in ancillary:
                self._received_fds += array("i", rights)
            self.heard_at = time.monotonic()
        return True

    def _missing(self) -> int:
        """Bytes of the next message that have not arrived, as far as its length is known."""
        known = len(self._received)
        if known < _LENGTH.size:
            return _LENGTH.size - known
        (length,) = _LENGTH.unpack_from(self._received)
        return int(_LENGTH.size + length - known)

    def _poll(self, event: int, timeout_s: float | None) -> bool:
        """Whether `event` occurs within `timeout_s`. Raises what `watch` raises."""
        poller = select.poll()
        poller.register(self._socket, event)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            slices = [one for one in (left_s, None if self._watch is None else _SLICE_S) if one is not None]
            if poller.poll(min(slices) * 1000 if slices else None):
                return True
            if left_s == 0.0:
                return False
            if self._watch is not None:
                self._watch()
