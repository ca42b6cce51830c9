"""Messages between the caller and one worker: everything that is not a step.

They are pickles, each behind its length, over an inherited socket pair. Only the processes at its two ends can reach
it. Here is also the clock of the caller's limits.
"""

from __future__ import annotations

import math
import pickle
import select
import socket
import struct
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from muster.transport.mail import dumps

_LENGTH = struct.Struct("<Q")
_SLICE_S = 0.05
# Read at once: at least, so that one call reads a whole message most often, and at most.
_LEAST_BYTES, _CHUNK_BYTES = 1 << 13, 1 << 20
# Fds for one call of sendmsg; the kernel takes at most 253.
_FDS_AT_ONCE = 250
_ANCILLARY_BYTES = socket.CMSG_LEN(_FDS_AT_ONCE * array("i").itemsize)
# Who waits looks every 50 ms, on a busy machine more rarely. Who takes longer does not wait, or was stopped.
_LONGEST_LOOK_S = 0.5

_looked_at = _watched_s = 0.0


def watched_s() -> float:
    """Seconds for which this process has waited for others, and looked every now and then: the clock of all limits.

    Whoever stops a machine, a container or a group of processes stops the workers, too: no limit counts the time.
    """
    global _looked_at, _watched_s
    now = time.monotonic()
    _watched_s += min(now - _looked_at, _LONGEST_LOOK_S)
    _looked_at = now
    return _watched_s


class ChannelClosed(Exception):
    """The other end is gone."""


def frame(pickled: bytes, head: bytes = b"") -> bytes:
    """A pickled message behind its length. head: what goes before, framed already."""
    return b"".join((head, _LENGTH.pack(len(pickled)), pickled))


class Channel:
    """One end of the channel between the caller and a worker.

    watch: called every 50 ms while a call of this end has to wait, with the seconds so far; it may raise to end the
        wait. Without it this end waits in the kernel, and no timeout ends that.
    shares_main: see `mail.dumps`.
    """

    def __init__(
        self, end: socket.socket, watch: Callable[[float], None] | None = None, *, shares_main: bool = False
    ) -> None:
        self._socket = end
        self._watch = watch
        self._shares_main = shares_main
        self._received = bytearray()  # what nobody has taken yet: whole messages, and a part of one
        self._received_fds: list[int] = []
        self._is_sending = False
        self.is_halfway = False  # whether half a message is on its way
        self._reader: int | None = None  # the thread that receives
        self.heard_at = 0.0  # watched_s() of the last bytes received
        end.setblocking(watch is None)

    def fileno(self) -> int:
        """The fd to poll: readable when there is a message, or a part of one."""
        return self._socket.fileno()

    def send(self, message: object, timeout_s: float | None = None, fds: Sequence[int] = ()) -> None:
        """Sends a message, and copies of `fds` along with it.

        Raises ChannelClosed, TimeoutError, and whatever `watch` raises.
        """
        self.send_frames(frame(dumps(message, shares_main=self._shares_main)), timeout_s, fds)

    def send_frames(self, frames: bytes, timeout_s: float | None = None, fds: Sequence[int] = ()) -> None:
        """Sends messages, each as `frame` returns it. Raises what `send` raises.

        TimeoutError is raised once the other end has taken nothing for `timeout_s`: then half a message may be on its
        way, and the channel takes no other; and where another such call has not ended, in another thread or below a
        signal handler.
        """
        if self._is_sending or self.is_halfway:
            raise TimeoutError
        self._is_sending = True
        try:
            left = memoryview(frames)
            while left:
                try:
                    if fds:  # not by socket.send_fds, which drops its flags before Python 3.14
                        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds[:_FDS_AT_ONCE]))]
                        sent = self._socket.sendmsg([left[:1]], ancillary, socket.MSG_NOSIGNAL)
                        fds = fds[_FDS_AT_ONCE:]
                    else:
                        sent = self._socket.send(left, socket.MSG_NOSIGNAL)
                    left = left[sent:]
                    self.is_halfway = len(left) > 0
                except BlockingIOError:
                    if not self._poll(select.POLLOUT, _deadline(timeout_s)):
                        raise TimeoutError from None
                except OSError as error:
                    raise ChannelClosed from error
        finally:
            self._is_sending = False

    def recv(self, timeout_s: float | None = None) -> Any:
        """The next message. Raises ChannelClosed, TimeoutError, and whatever `watch` raises.

        TimeoutError is raised if the message has not arrived as a whole within `timeout_s`; the part that has arrived
        is kept for the next call; and where another thread receives.
        """
        deadline, reader = _deadline(timeout_s), threading.get_ident()
        if self._reader not in (None, reader):
            raise TimeoutError
        outer, self._reader = self._reader, reader
        try:
            while not (end := self._fill()):
                if not self._poll(select.POLLIN, deadline):
                    raise TimeoutError
            received = self._received
            self._received = received[end:]
        finally:
            self._reader = outer
        return pickle.loads(memoryview(received)[_LENGTH.size : end])

    @property
    def holds_more(self) -> bool:
        """True where bytes have been read that belong to no message that was taken."""
        return bool(self._received)

    def take_fds(self) -> list[int]:
        """The fds that came with the messages so far, and were not taken yet; they belong to the taker."""
        fds, self._received_fds = self._received_fds, []
        return fds

    def close(self) -> None:
        self._socket.close()

    def _fill(self) -> int:
        """Reads what is there of the next message; returns where that ends, 0 until it is whole."""
        while True:
            known, end = len(self._received), _LENGTH.size
            if known >= end:
                end += int(_LENGTH.unpack_from(self._received)[0])
                if known >= end:
                    return end
            size = min(max(end - known, _LEAST_BYTES), _CHUNK_BYTES)
            try:
                part, ancillary, _, _ = self._socket.recvmsg(size, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return 0
            except OSError as error:
                raise ChannelClosed from error
            if not part:
                raise ChannelClosed
            self._received += part
            for _, _, rights in ancillary:
                self._received_fds += array("i", rights)
            self.heard_at = watched_s()

    def _poll(self, event: int, deadline: float) -> bool:
        """Returns whether `event` occurs before `watched_s` is the deadline. Raises what `watch` raises."""
        poller = select.poll()
        poller.register(self._socket, event)
        began = time.monotonic()
        while (left_s := deadline - watched_s()) > 0.0:
            if poller.poll(min(left_s, _SLICE_S) * 1000):
                return True
            assert self._watch is not None
            self._watch(time.monotonic() - began)
        return False


def _deadline(timeout_s: float | None) -> float:
    return math.inf if timeout_s is None else watched_s() + timeout_s
