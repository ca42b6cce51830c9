"""Envs of which two fight over something of the machine, as real simulators do."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from patients import Patient

import muster

# A simulator as a program of its own: it says its name, and fails as programs do.
_SERVER = """
import os, socket, sys
kind, port, size, ready = sys.argv[1], *map(int, sys.argv[2:])
print(f"simulator on port {port}")
server = socket.socket(type=socket.SOCK_DGRAM if kind == "udp" else socket.SOCK_STREAM)
server.bind(("127.0.0.1", port))
if kind == "tcp":
    server.listen()
world = bytearray(b"x") * size
os.write(ready, b"!")
sys.stdin.read()
"""


# A daemon that no Python code watches, with a pid file.
_DAEMON = """
set -o noclobber
if ! echo $$ > "$0/sim.pid"; then echo "simulator runs already, see sim.pid"; exit 1; fi
echo ready >&3
read end
rm "$0/sim.pid"
"""


def start(command: Callable[[int], list[str]]) -> tuple[subprocess.Popen[bytes], bool]:
    """A simulator's process, and whether it has said by an fd, which its command is made with, that it runs."""
    ready, to_env = os.pipe()
    process = subprocess.Popen(command(to_env), pass_fds=[to_env], stdin=subprocess.PIPE)
    os.close(to_env)
    has_started = os.read(ready, 1)
    os.close(ready)
    return process, bool(has_started)


class Served(Patient):
    """Has a server on a port. waits: for ever, where that has ended; else it says so, and of UDP it learns nothing."""

    def __init__(self, port: int, kind: str = "tcp", server_bytes: int = 0, waits: bool = False) -> None:
        super().__init__()
        of_server = [sys.executable, "-c", _SERVER, kind, str(port), str(server_bytes)]
        self.server, has_started = start(lambda fd: [*of_server, str(fd)])
        if kind == "udp":
            self.client = socket.socket(type=socket.SOCK_DGRAM)
            self.client.sendto(b"hello", ("127.0.0.1", port))
        elif not has_started:
            time.sleep(1000 * waits)
            raise RuntimeError("the simulator has ended")

    def close(self) -> None:
        self.server.communicate()


class Single(Patient):
    """Leaves a pid file, as daemons do, and refuses to start where there is one."""

    def __init__(self, folder: str = "") -> None:
        super().__init__()
        self.pid_file = Path(folder or tempfile.gettempdir(), "muster-test-simulator.pid")
        if self.pid_file.exists():
            raise RuntimeError(f"a simulator runs already, see {self.pid_file.name}")
        self.pid_file.write_text(str(os.getpid()))

    def close(self) -> None:
        self.pid_file.unlink()


class Daemon(Patient):
    """Has a daemon that refuses to start where another one's pid file is."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.daemon, has_started = start(lambda fd: ["bash", "-c", f"exec 3>&{fd}; {_DAEMON}", folder])
        if not has_started:
            raise RuntimeError("the daemon has ended")

    def close(self) -> None:
        self.daemon.communicate()


class Exclusive(Patient):
    """Cannot be built while another one is, as what makes contexts of a GPU."""

    def __init__(self, lock: str) -> None:
        super().__init__()
        with Path(lock).open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            time.sleep(1.0)


class Logging(Patient):
    """Appends to one log file, which it keeps open."""

    def __init__(self, log: str) -> None:
        super().__init__()
        self.log = Path(log).open("a")  # noqa: SIM115

    def close(self) -> None:
        self.log.close()


def make_single() -> Single:
    return Single()


def make_by_index(port: int, **kwargs: Any) -> Served:
    return Served(port + muster.get_worker_info().env_index, **kwargs)
