"""The environment of worker processes: variables that users set, the search path, the folder, the umask."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import FileFinder
from typing import Any

from muster.arguments import as_whole
from muster.errors import ConfigError

# The variables of one worker, by name; None unsets.
Variables = Mapping[str, str | int | None]
# The same for all workers, one for each, or a function from a worker's index to its variables.
WorkerEnv = Variables | Sequence[Variables] | Callable[[int], Variables]
# Checked variables.
Changes = dict[str, str | None]


def changes_of(worker_env: WorkerEnv | None, num_workers: int, *, worker: str = "worker") -> list[Changes]:
    """The changes to the environment of each worker. A function is called here, in the caller.

    worker: the name of one, for messages. Raises ConfigError.
    """
    if worker_env is None:
        return [{} for _ in range(num_workers)]
    if isinstance(worker_env, Mapping):
        return [_checked(worker_env, "worker_env")] * num_workers
    if isinstance(worker_env, (list, tuple)):
        if len(worker_env) != num_workers:
            raise ConfigError(
                f"worker_env is a list of {len(worker_env)} dicts, but the number of {worker}s is {num_workers}; give "
                f"one dict per {worker}, one dict for all, or a function of the {worker}'s index"
            )
        return [_checked(one, f"worker_env[{i}]") for i, one in enumerate(worker_env)]
    if callable(worker_env):
        return [_checked(worker_env(i), f"worker_env({i})") for i in range(num_workers)]
    raise ConfigError(
        f"worker_env must be a dict of environment variables, a list of one dict per {worker}, or a function of the "
        f"{worker}'s index that returns a dict, got {type(worker_env).__name__} {worker_env!r}"
    )


def first_changes(worker_env: WorkerEnv | None) -> Changes:
    """The changes for worker 0, where the number of workers is not known yet."""
    return changes_of(worker_env[:1] if isinstance(worker_env, (list, tuple)) else worker_env, 1)[0]


@dataclass(frozen=True)
class Surroundings:
    """The surroundings of a process at one moment, in which another one starts.

    environ: the environment.  path: ``sys.path``, see `search_path`.  folder: the working directory; None where it had
    been deleted.  umask: -1 where the kernel does not say.
    """

    environ: dict[str, str]
    path: list[Any]
    folder: str | None
    umask: int

    @classmethod
    def here(cls) -> Surroundings:
        """Those of this process."""
        return cls(dict(os.environ), search_path(), _working_directory(), _umask())

    def existing_folder(self) -> str | None:
        """The working directory; None where nobody can enter it now: the process then stays where its parent is."""
        return self.folder if self.folder is not None and os.access(self.folder, os.X_OK) else None

    def adopt(self) -> None:
        """Makes them this process's. Writes only what differs in the environment: a fork copies what it writes to."""
        for name in [name for name in os.environ if name not in self.environ]:
            del os.environ[name]
        for name, value in self.environ.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        if self.umask >= 0:
            os.umask(self.umask)
        if (folder := self.existing_folder()) is not None:
            os.chdir(folder)
        sys.path[:] = self.path


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _umask() -> int:
    # Not by os.umask, which sets another one meanwhile, for all threads.
    with open("/proc/self/status") as file:
        return next((int(line.split()[1], 8) for line in file if line.startswith("Umask:")), -1)


def changed(environ: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """A copy of an environment, with the changes made."""
    return {name: value for name, value in {**environ, **changes}.items() if value is not None}


def search_path() -> list[Any]:
    """``sys.path`` for another process. Relative folders are those that this process looks in.

    That is where they were when Python first looked there: a change of the working directory changes nothing.
    """
    return [_absolute(entry) for entry in sys.path]


def _absolute(entry: Any) -> Any:
    if not isinstance(entry, str) or not entry:  # the working directory, whatever that is at the moment
        return entry
    finder = sys.path_importer_cache.get(entry)
    if isinstance(finder, FileFinder):
        return finder.path
    return os.path.abspath(entry) if os.path.exists(entry) else entry  # or a name for a hook, as setuptools has them


def _checked(variables: Any, name: str) -> Changes:
    if not isinstance(variables, Mapping):
        raise ConfigError(
            f"{name} must be a dict of environment variables, got {type(variables).__name__} {variables!r}"
        )
    checked: Changes = {}
    for key, value in variables.items():
        if not isinstance(key, str) or not key or "=" in key or "\0" in key:
            raise ConfigError(
                f'{name}: the name of an environment variable must be a str that is not empty, without "=" and "\\0", '
                f"got {type(key).__name__} {key!r}"
            )
        text = value if (number := as_whole(value)) is None else str(number)
        if text is not None and (not isinstance(text, str) or "\0" in text):
            got = f"{type(value).__name__} {value!r}"
            raise ConfigError(
                f'{name}[{key!r}] must be a str without "\\0", an int, or None, which unsets it, got {got}'
            )
        checked[key] = text
    return checked
