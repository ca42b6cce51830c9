"""Ray, which no other file of Muster imports: a connection to a cluster that can neither hang nor abort its caller.

`ray.init` waits for ever for an address where nothing answers, and ends its process by an abort where a token or a
raylet is missing. So the head's port is asked first, then a child process connects, and only then this process.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import importlib
import json
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster.errors import ClosedError, ConfigError
from muster.extras import require
from muster.pickling.interrupts import new_in_child
from muster.pool.worker_process import readable

_HEAD_S = 2.0  # between two looks at the head, and for its answer
_SETTLED_S, _AFTER_S = 15.0, 20.0
_CHILD_S = 20.0
_EMPTYING_S = 5.0
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0": 127.0.0.1 alone. Read as Ray is imported
_TOKEN = secrets.token_hex(32)  # of own clusters: a process keeps the first one that Ray has read
_FOLDER = "muster-ray-"
_LONGEST_FOLDER = 30  # the sockets below it have 65 more characters of the 107 that a socket's name may have
_STARTING = "`ray start --head --disable-usage-stats`"

# Each step of the child is a line of JSON. It has the classes of Ray's exceptions and not their texts; the alarm ends
# it where its parent cannot. Ray's own prints go to stderr.
_CHILD = """
import json, os, platform, signal, socket, sys
signal.alarm(60)
out = os.dup(1)
os.dup2(2, 1)
def say(**facts):
    os.write(out, json.dumps(facts).encode() + b"\\n")
def is_here(address):
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as one:
        try:
            one.bind((address, 0))
        except OSError:
            return False
    return True
try:
    import ray
    from ray._raylet import GcsClient
    head = GcsClient(address=sys.argv[1])
    known = head.internal_kv_get(b"CLUSTER_METADATA", b"cluster", timeout=10)
    say(cluster=json.loads(known or "{}"), ray_version=ray.__version__, python_version=platform.python_version())
    alive = [one.node_manager_address for one in head.get_all_node_info(timeout=10).values() if one.state == 0]
    say(alive=alive, here=[one for one in alive if is_here(one)])
    ray.init(sys.argv[1], log_to_driver=False)
    say(nodes=[one["NodeManagerAddress"] for one in ray.nodes() if one["Alive"]])
except BaseException as error:
    say(error=[one.__name__ for one in type(error).__mro__], text=str(error))
os._exit(0)
"""


RuntimeEnv = Mapping[str, Any] | None


class ConnectionLost(ClosedError):
    """The connection has ended. Its text says why."""


@dataclass(eq=False)
class Connection:
    """A process's connection to a Ray cluster, which all that use the cluster share.

    ray: the module.  address: of the cluster's head, ``host:port``.  folder: of a cluster that this connection has
    started.  is_own: `close` ends it; else it was there before.  runtime_env: what it was made with.
    """

    ray: Any
    address: str
    folder: str | None = None
    is_own: bool = True
    runtime_env: RuntimeEnv = None
    _users: int = field(default=1, init=False)
    _pid: int = field(default_factory=os.getpid, init=False)
    _lost: str = field(default="", init=False)
    _in_use: int = field(default=0, init=False)  # calls of Ray that are under way
    _calls: threading.Condition = field(default_factory=threading.Condition, init=False)
    _watched_until: float = field(default=math.inf, init=False)

    def __post_init__(self) -> None:
        self._job, self._raylet = self._job_here(), _raylet_here(self.ray)
        self._watch = threading.Thread(target=self._watch_cluster, name="muster-ray-head", daemon=True)
        self._watch.start()

    @contextlib.contextmanager
    def used(self, *, asks_head: bool = False) -> Iterator[Any]:
        """Encloses short calls of `ray`, the module, which is what it gives. Raises ConnectionLost.

        asks_head: true for calls that wait for the head; Ray ends this process where no answer comes.
        """
        gone = asks_head and not self.why_lost() and not self._head_answers()
        with self._calls:
            if self.why_lost() or gone or not self.is_there():
                raise ConnectionLost(self._lost or "this process's connection to Ray was ended, by ray.shutdown()")
            self._in_use += 1
        try:
            yield self.ray
        finally:
            with self._calls:
                self._in_use -= 1
                self._calls.notify_all()

    def is_there(self) -> bool:
        """True if this is still the process's connection."""
        return self.ray.is_initialized() and self._job_here() == self._job

    def _job_here(self) -> str:
        return str(self.ray.get_runtime_context().get_job_id())

    def why_lost(self) -> str:
        """Why the connection is of no use any more; empty where it is.

        Looked at before each call: without a raylet, Ray ends this process as it is handed a large object.
        """
        if not self._lost and readable([self._raylet], 0.0):
            self._lost = "this machine's Ray has ended"
        return self._lost

    def _head_answers(self) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(_host_and_port(self.address), _HEAD_S).close()
            return True
        return False

    def _watch_cluster(self) -> None:
        """Ends the connection where the head or the raylet is gone: else Ray ends this process, a minute after."""
        misses = 0
        while not self.why_lost():
            time.sleep(_HEAD_S / (1 + misses))
            if time.monotonic() > self._watched_until:
                return
            misses = 0 if self._head_answers() else misses + 1
            if misses == 2:
                self._lost = f"the cluster's head, at {self.address}, does not answer"
        with self._calls:
            self._calls.wait_for(lambda: not self._in_use)
            if self.is_there():
                self.ray.shutdown()

    def close(self) -> None:
        """Takes back one `connect`. The last one ends the connection, and a cluster that it has started."""
        if self.why_lost() or not self._head_answers():
            self._watch.join(_SETTLED_S)  # Ray's hooks for the end of a program would wait for the head
        with _lock:
            self._users -= 1
            if self._users == 0:
                self._end()

    def _end(self) -> None:
        global _shared
        _shared = None if _shared is self else _shared
        atexit.unregister(self._end)
        # A node may be lost a moment before the rest of the cluster.
        self._watched_until = time.monotonic() + (0.0 if self.is_own else _AFTER_S)
        if self._pid != os.getpid() or not self.is_own:  # a forked child has nothing of it
            return
        with self._calls:
            if self.is_there():
                self.ray.shutdown()
        deadline = time.monotonic() + _EMPTYING_S
        # Ray's helpers write their last lines after it.
        while self.folder is not None and os.path.exists(self.folder) and time.monotonic() < deadline:
            shutil.rmtree(self.folder, ignore_errors=True)
            time.sleep(0.05)


_lock = new_in_child(threading.RLock())
_shared: Connection | None = None


def connect(address: str | None = "auto", runtime_env: RuntimeEnv = None) -> Connection:
    """A connection of this process, for the use of `ray`.

    address: the head's ``host:port``; ``"auto"`` or None for RAY_ADDRESS, else this machine's cluster; ``"local"`` for
    a new one on 127.0.0.1, which ends with the connection. What is initialised counts before "auto" and "local": a
    process has one cluster at a time.
    runtime_env: as for `ray.init`; of a connection that is there already, nothing changes it.

    Raises ImportError where Ray is not installed, ConfigError where there is no way to connect.
    """
    global _shared
    require("cluster='ray' needs", "muster-rl[ray]", "ray")
    with _lock:
        if _shared is not None and not _shared.is_there():
            _shared = None  # somebody else has called ray.shutdown()
        if _shared is None:
            _shared = _connect(address, runtime_env)
            atexit.register(_shared._end)  # before Ray's own, which Ray's import has registered
        else:
            _require_same(_shared.address, address, is_local=_shared.folder is not None)
            _shared._users += 1
        return _shared


def this_node() -> str:
    """The id of the node that this process of Ray's is on."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def _raylet_here(ray: Any) -> int:
    """A pidfd of this machine's raylet, which listens at a socket; -1 where that is not known."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as one:
        one.connect(ray._private.worker._global_node.raylet_socket_name)
        pid, _, _ = struct.unpack("3i", one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return os.pidfd_open(pid)
    return -1


def _connect(address: str | None, runtime_env: RuntimeEnv) -> Connection:
    if (there := sys.modules.get("ray")) is not None and there.is_initialized():
        return _initialised(there, address)
    if address == "local":
        return _start(runtime_env)
    if address is None or address == "auto":
        address = _of_environment() or _of_this_machine()
    _require_port(address)
    _try_in_child(address)
    with contextlib.ExitStack() as undone, _kept_surroundings():
        import ray

        undone.callback(ray.shutdown)
        try:
            ray.init(address, runtime_env=runtime_env, log_to_driver=False, logging_level=logging.WARNING)
        except ValueError as error:
            raise ConfigError(f"Ray refuses runtime_env={runtime_env!r}: {error}") from error
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"this process cannot connect to the Ray cluster at {address}, and a child of it could: {error}. Set "
                f"RAY_AUTH_MODE, RAY_AUTH_TOKEN and {_LOOPBACK} before `import ray`"
            ) from error
        undone.pop_all()
        return Connection(ray, _address_here(ray), runtime_env=runtime_env)


def _initialised(ray: Any, address: str | None) -> Connection:
    if ray.util.client.ray.is_connected():
        raise ConfigError(_proxied("the address that this process has given to ray.init"))
    found = _address_here(ray)
    _require_same(found, address)
    return Connection(ray, found, is_own=False)


def _require_same(found: str, address: str | None, *, is_local: bool = False) -> None:
    """Raises ConfigError where `address` is of another cluster than `found`, to which this process is connected.

    is_local: whether it has started that.
    """
    if address in ("auto", None) or (address == "local" and is_local):
        return
    if address == "local":
        raise ConfigError(
            f"address='local' would start a cluster, and this process is connected to the one at {found}, of which it "
            "can have one at a time. Leave the address out, or call ray.shutdown() first"
        )
    theirs, (host, port) = _host_and_port(found), _host_and_port(str(address))
    with contextlib.suppress(OSError):
        addresses = {str(one[4][0]) for one in socket.getaddrinfo(host, port)}
        # Ray gives the name "localhost", and 127.0.0.1, the machine's own address.
        if port == theirs[1] and (theirs[0] in addresses or addresses & {"127.0.0.1", "::1"}):
            return
    raise ConfigError(
        f"address={address!r}, and this process is connected to the Ray cluster at {found}. Leave the address out, or "
        "call ray.shutdown() first"
    )


def _address_here(ray: Any) -> str:
    return str(ray.get_runtime_context().gcs_address)


def _proxied(named: str) -> str:
    return (
        f"{named} is of Ray's client, ray://, which sends a copy of each batch through a process in between. Run the "
        "script on a machine of the cluster, with the head's own address, such as address='10.0.0.1:6379'"
    )


def _of_environment() -> str | None:
    """The address in RAY_ADDRESS. Raises ConfigError for what is no address."""
    address = os.environ.get("RAY_ADDRESS")
    if not address or address == "auto":
        return None
    try:
        _host_and_port(address)
    except ConfigError as error:
        raise ConfigError(f"{error.naming('the variable RAY_ADDRESS')}") from None
    return address


def _of_this_machine() -> str:
    """The address of the cluster that runs on this machine, where it is the user's."""
    # The places are Ray's, which joins whatever it finds there.
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    file = Path(folder, "ray", "ray_current_cluster")
    try:
        owner, address = file.stat().st_uid, file.read_text().strip()
    except FileNotFoundError:
        raise ConfigError(
            f"no Ray cluster is known here: {file} does not exist, and RAY_ADDRESS is not set. Start one with "
            f"{_STARTING}, give address='host:port' of one, or address='local'"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{file}, which names this machine's Ray cluster, cannot be read: {error.strerror}. Set RAY_ADDRESS or "
            "give address='host:port'"
        ) from error
    if owner != os.geteuid():
        raise ConfigError(
            f"the Ray cluster on this machine, at {address}, is another user's: {file} belongs to uid {owner}, not to "
            f"{os.geteuid()}. Set RAY_ADDRESS or give address='{address}' to join it all the same; "
            "address='local' starts one of your own"
        )
    return address


def _host_and_port(address: str) -> tuple[str, int]:
    if address.startswith("ray://"):
        raise ConfigError(_proxied(f"address={address!r}"))
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError("address", "'auto', 'local' or the head's 'host:port', such as '10.0.0.1:6379'", address)
    return host.strip("[]"), int(port)


def _require_port(address: str) -> None:
    try:
        socket.create_connection(_host_and_port(address), 5.0).close()
    except OSError as error:
        raise ConfigError(
            f"the Ray cluster at {address} cannot be reached: {error}. Start its head with {_STARTING}; on another "
            "machine, look whether a firewall lets the port through"
        ) from error


def _try_in_child(address: str) -> None:
    """Has a child process connect. Raises ConfigError where it does not get through."""
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        command = [sys.executable, "-P", "-c", _CHILD, address]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        facts: dict[str, Any] = {}
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=printed, timeout=_CHILD_S, env=environ
            )
            out, facts["died"] = done.stdout, done.returncode != 0  # not of its own
        except subprocess.TimeoutExpired as expired:
            out = expired.stdout or b""
        printed.seek(0)
        last = next((line for line in reversed(printed.read().splitlines()) if line.strip()), "")
    for line in out.splitlines():
        facts |= json.loads(line)
    if "nodes" not in facts:
        raise ConfigError(_why_not(address, facts, last))


def _why_not(address: str, facts: dict[str, Any], last: str) -> str:
    """The reason why a child did not connect. facts: what it said.  last: its last line on stderr."""
    # Where it is to have a token and has none, Ray ends it at its first call.
    ended = facts.get("died") and "cluster" not in facts and os.environ.get("RAY_AUTH_MODE") == "token"
    if ended or "AuthenticationError" in facts.get("error", ()):
        return (
            f"the Ray cluster at {address} lets nobody in without its token, and the one here is missing or wrong: set "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, to what the cluster was started with, before `import ray`"
        )
    for key, name in (("ray_version", "Ray"), ("python_version", "Python")):
        theirs = facts.get("cluster", {}).get(key)
        if theirs is not None and theirs != facts[key]:
            return (
                f"the Ray cluster at {address} has {name} {theirs}, and this process {facts[key]}. Ray needs the same "
                "version on all machines: install it on one side"
            )
    if not facts.get("here", True):
        return (
            f"no raylet runs on this machine, which a process needs to join the Ray cluster at {address} (its nodes: "
            f"{', '.join(facts['alive']) or 'none'}): run `ray start --address={address}` here"
        )
    told = facts.get("text") or last
    if "cluster" in facts and address.startswith(("127.", "localhost")):
        told += (
            ". In place of 127.0.0.1 Ray asks this machine's own address: give the one that `ray start` printed, or "
            f"set {_LOOPBACK}=0 before `import ray`, where the cluster has it"
        )
    return (
        f"something listens at {address}, but a process could not join a Ray cluster there in {_CHILD_S:.0f} s. "
        f"Look with `ray status --address={address}`. Ray's last words: {told or 'none'}"
    )


def _start(runtime_env: RuntimeEnv) -> Connection:
    """A cluster of this process's own, on 127.0.0.1 alone and behind a token, with its files in a folder of its own."""
    folder = _make_folder()
    with contextlib.ExitStack() as undone, _kept_surroundings():
        undone.callback(shutil.rmtree, folder, ignore_errors=True)
        if "ray" not in sys.modules:
            os.environ.setdefault("RAY_AUTH_MODE", "token")  # later, Ray sets it itself, and says so
        os.environ.setdefault("RAY_AUTH_TOKEN", _TOKEN)  # else Ray writes one into the user's home
        own = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": folder, "RAY_worker_niceness": "0"}
        os.environ |= {_LOOPBACK: "0", **own}
        import ray

        if importlib.import_module("ray._private.ray_constants").ENABLE_RAY_CLUSTER:
            raise ConfigError(
                "address='local' starts Ray on 127.0.0.1 alone, which Ray decides as it is imported, and here it was "
                f"imported before. Set {_LOOPBACK}=0 before `import ray`, or call ray.init() yourself and leave the "
                "address out"
            )
        undone.callback(ray.shutdown)
        try:
            ray.init(
                "local",
                runtime_env=runtime_env,
                log_to_driver=False,
                include_dashboard=False,
                logging_level=logging.WARNING,
            )
        except (Exception, SystemExit) as error:
            raise ConfigError(f"Ray cannot start a cluster on this machine: {error}") from error
        undone.pop_all()
        return Connection(ray, _address_here(ray), folder, runtime_env=runtime_env)


def _make_folder() -> str:
    """A folder for a cluster, locked as long as this process lives; removes those of processes that are gone."""
    above = next(one for one in (tempfile.gettempdir(), "/tmp") if len(one) <= _LONGEST_FOLDER)
    for left in Path(above).glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError):  # in use, or a link
            if left.lstat().st_uid == os.geteuid():
                os.close(_locked(left))
                shutil.rmtree(left, ignore_errors=True)
    made = tempfile.mkdtemp(prefix=f".{_FOLDER}", dir=above)  # by another name, until it is locked
    _locked(made)
    folder = made.replace(f".{_FOLDER}", _FOLDER)
    os.rename(made, folder)
    return folder


def _locked(folder: Path | str) -> int:
    with contextlib.ExitStack() as undone:
        fd = os.open(folder, os.O_DIRECTORY | os.O_NOFOLLOW)
        undone.callback(os.close, fd)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        undone.pop_all()
    return fd


@contextlib.contextmanager
def _kept_surroundings() -> Iterator[None]:
    """Puts back what Ray's import and `ray.init` change of the process: hooks, the handler of SIGTERM, variables."""
    hook, environ, handler = sys.excepthook, dict(os.environ), signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        sys.excepthook = hook
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)
        for name in os.environ.keys() - environ.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in environ.items() if os.environ.get(name) != value})
        # The copies that Ray has of other packages stay, for Ray, behind those of the user.
        sys.path.sort(key=lambda folder: folder.endswith(os.path.join("ray", "thirdparty_files")))
