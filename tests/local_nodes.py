"""The second engine: node hosts as processes of this machine, in fresh interpreters, over socket pairs."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from muster.pool.engine import Engine, Host, HostGone, Parcel, Site, Ticket
from muster.pool.far_worker import FarWorker, Meet, Ping, opened, parcel_of
from muster.pool.messages import Build

_LENGTH = struct.Struct("<Q")


def content_of(order: Parcel) -> Any:
    """The content of an order: that of its message, or the message itself where it has none."""
    head, *parcel = order
    message = pickle.loads(head)
    return message if isinstance(message, Meet | Ping | Build) else opened(parcel)


def with_content(order: Parcel, content: object) -> Parcel:
    """The same order with another content."""
    return [order[0], *parcel_of(content)]


def send(to: socket.socket, message: Any) -> None:
    data = pickle.dumps(message, protocol=5)
    to.sendall(_LENGTH.pack(len(data)))
    to.sendall(data)


def as_bytes(parcel: Parcel) -> Parcel:
    head, *buffers = parcel
    return [head, *map(bytearray, buffers)]


def received(come_from: socket.socket) -> Any:
    """The next message. Raises EOFError."""

    def take(count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            got = come_from.recv_into(view)
            if not got:
                raise EOFError
            view = view[got:]
        return data

    return pickle.loads(take(_LENGTH.unpack(take(_LENGTH.size))[0]))


class LocalHost(Host):
    numbers = itertools.count()

    def __init__(self, index: int) -> None:
        self.index = index
        self.end, other = socket.socketpair()
        self._sending = threading.Lock()
        self.gone = False
        with other:
            # Not this process's stdin: a test may read that.
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(other.fileno())], pass_fds=[other.fileno()], stdin=subprocess.DEVNULL
            )
        self._send((sys.path, f"local-{index}"))

    def _send(self, message: Any) -> None:
        with contextlib.suppress(OSError), self._sending:  # where it has ended, the next read says so
            send(self.end, message)

    def ask(self, order: Parcel, *, beside: bool = False) -> Ticket:
        ticket = next(self.numbers), self
        self._send((ticket[0], as_bytes(order), beside))
        return ticket

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.gone = True
        self.end.close()


class LocalNodes(Engine):
    """Node hosts on this machine. hosts: all that were started, in that order."""

    name = "this machine"

    def __init__(
        self, nodes: int = 2, *, node_timeout: float = 15.0, min_nodes: int = 1, collectors: Sequence[int] = ()
    ) -> None:
        self.node_timeout, self.min_nodes = node_timeout, min_nodes
        self._places = [Site(collectors=collectors[i] if collectors else None) for i in range(nodes)]
        self.hosts: list[LocalHost] = []
        self._came: dict[Ticket, Parcel] = {}
        self._using = threading.RLock()

    def places(self, most: int) -> Sequence[Site]:
        return self._places[:most]

    def start(self, index: int, collectors: int) -> Host:
        self.hosts.append(LocalHost(index))
        return self.hosts[-1]

    def wait(self, tickets: Collection[Ticket], timeout_s: float) -> Mapping[Ticket, Parcel | HostGone]:
        until = time.monotonic() + timeout_s
        while True:
            with self._using:
                came = self._take(tickets, min(0.02, max(0.0, until - time.monotonic())))
            if came or time.monotonic() >= until:
                return came

    def _take(self, tickets: Collection[Ticket], timeout_s: float) -> dict[Ticket, Parcel | HostGone]:
        by_end = {host.end: host for host in self.hosts if not host.gone}
        timeout_s = 0.0 if any(ticket in self._came for ticket in tickets) else timeout_s
        if not by_end:
            time.sleep(timeout_s)
        while ready := select.select([*by_end], [], [], timeout_s)[0]:
            timeout_s = 0.0
            for end in ready:
                host = by_end[end]
                try:
                    number, data = received(end)
                    self._came[number, host] = data
                except (EOFError, OSError):
                    host.gone = True
                    del by_end[end]
        came: dict[Ticket, Parcel | HostGone] = {
            ticket: self._came.pop(ticket) for ticket in tickets if ticket in self._came
        }
        for ticket in tickets:
            if ticket not in came and ticket[1].gone:
                came[ticket] = HostGone(f"its process has ended (exit code {ticket[1].process.wait()})")
        return came

    def close(self) -> None:
        with self._using:
            for host in self.hosts:
                host.end.close()
                host.gone = True
            for host in self.hosts:
                try:
                    host.process.wait(10.0)
                except subprocess.TimeoutExpired:
                    host.kill()


def serve(end: socket.socket) -> None:
    """Runs a node host until the driver's end is closed."""
    sys.path[:], name = received(end)
    host = FarWorker(name, name)
    orders: list[tuple[int, Parcel]] = []
    there, sending = threading.Condition(), threading.Lock()

    def reply(number: int, answer: Parcel) -> None:
        with sending, contextlib.suppress(OSError):
            send(end, (number, as_bytes(answer)))

    def read() -> None:
        while True:
            try:
                number, order, beside = received(end)
            except (EOFError, OSError):
                host.close()
                os._exit(0)
            if beside:
                threading.Thread(target=lambda n=number, o=order: reply(n, host.answer_beside(o)), daemon=True).start()
            else:
                with there:
                    orders.append((number, order))
                    there.notify()

    threading.Thread(target=read, daemon=True).start()
    while True:
        with there:
            there.wait_for(lambda: orders)
            number, order = orders.pop(0)
        reply(number, host.answer(order))


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
