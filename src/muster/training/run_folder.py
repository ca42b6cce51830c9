"""The folder that one training run fills: config.json, metrics.csv, TensorBoard's event files, checkpoint.safetensors.

Each file is complete at any moment: what grows does so by whole pieces; all else is written to another file, which then
replaces the old one. The folder may come from elsewhere: it is scanned for links as it is opened, and what is read fits
into memory.
"""

from __future__ import annotations

import csv
import fcntl
import io
import itertools
import json
import math
import os
import re
import secrets
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from muster.errors import ConfigError, MusterError, RunConfigError, UsageError
from muster.pickling.interrupts import Uninterrupted
from muster.pool.resources import memory_left
from muster.training.events import EventLog

CONFIG, METRICS, PLOT = "config.json", "metrics.csv", "learning_curve.png"
SUFFIX = ".safetensors"
CHECKPOINT, BEST = f"checkpoint{SUFFIX}", f"best{SUFFIX}"
OLD_CHECKPOINT = "checkpoint.pt"  # of Muster before its first release
COPIES = "checkpoints"  # the folder of the checkpoint's copies
_FILES = re.compile(
    r"config\.json|metrics(\.lost)?\.csv|logged\.jsonl|learning_curve\.png|.*\.safetensors|events\.out\.tfevents\..*"
)
_LOGS = re.compile(r"\.?wandb(-[\d-]+)?")
_ASIDE = re.compile(r"\.[\w.]+\.[0-9a-f]{16}\.tmp")  # what `replace_file` writes to


class RunFolder:
    """Writes a run's files into ``path``, which is created, and keeps other processes from doing so meanwhile.

    Where the disk is full, metrics are kept for the next time.
    resume: goes on with the run in ``path``; call ``drop_metrics_after`` before anything is appended.

    Raises UsageError where ``path`` holds a run already that has a checkpoint, where with ``resume`` it holds none, and
    where another process is training there; ConfigError as `require_local`.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        require_local(path)
        self.path = path
        self.metrics_path, self.checkpoint_path, self.plot_path = path / METRICS, path / CHECKPOINT, path / PLOT
        self._config: dict[str, Any] = {}
        self._columns: list[str] = []
        self._kept: list[dict[str, Any]] = []  # rows that the file does not have yet
        self._last_step = -1
        self._events: EventLog | None = None
        if resume:
            require_run(path)
        else:
            _make(path)
        self._lock = _lock(path)
        try:
            if not resume:  # of two runs that start here at once, only one has the lock
                require_none(path)
                replace_file(path / METRICS, b"")
            for folder in ("", COPIES):
                for aside in files_in(path, folder, _ASIDE):
                    (path / aside).unlink(missing_ok=True)  # of a process that was killed
            self._metrics_file = GrowingFile(path / METRICS)
        except BaseException:
            os.close(self._lock)
            raise

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Writes ``config`` as JSON; TensorBoard shows its values that are no dicts among the hparams."""
        self._config = dict(config)
        replace_file(self.path / CONFIG, (json.dumps(config, indent=2) + "\n").encode())

    def append_metrics(self, row: Mapping[str, float], scalars: Mapping[str, float] | None = None) -> None:
        """Appends a line to metrics.csv, and ``scalars`` (by ``group/name``) for TensorBoard; ``row`` has "steps".

        The first row names the columns, and a later one may add some; nan becomes an empty field, and so does what a
        row lacks. A row that is there already is left out. What an OSError keeps out is written by the next call.
        """
        with Uninterrupted():
            self._append(row, scalars)

    def _append(self, row: Mapping[str, float], scalars: Mapping[str, float] | None) -> None:
        step = int(row["steps"])
        if step > self._last_step:
            after, self._last_step = self._last_step, step
            self._kept.append({name: "" if math.isnan(value) else value for name, value in row.items()})
            if scalars is not None:
                if self._events is None:
                    options = {name: value for name, value in self._config.items() if not isinstance(value, dict)}
                    self._events = EventLog(self.path, after_step=after, options=options)
                self._events.add(scalars, step)
        columns = list(dict.fromkeys([*self._columns, *itertools.chain(*self._kept)]))
        if columns == self._columns:
            self._metrics_file.append(_csv([row.get(name) for name in columns] for row in self._kept))
        else:
            self._rewrite(columns, [*_read_rows(self.path)[1], *self._kept])
        self._kept = []
        if self._events is not None:
            with naming(self.path):
                self._events.write_out()

    def drop_metrics_after(self, steps: int) -> dict[str, str]:
        """Drops the rows of metrics.csv beyond ``steps``, which the checkpoint lacks. Returns the last row left."""
        columns, rows = _read_rows(self.path)
        with reading(self.metrics_path):
            rows = [row for row in rows if int(row["steps"]) <= steps]
        self._rewrite(columns, rows)
        self._last_step = steps
        return rows[-1] if rows else {}

    def begin_again(self) -> str:
        """Drops all rows of metrics.csv, for want of states; returns the name of the file that has them, "" for none.

        They are kept where they are more than the first: then it had saved states, or found no room for them.
        """
        metrics, lost = read_file(self.metrics_path), self.path / "metrics.lost.csv"
        if keeps := not _is_early(metrics):
            replace_file(lost, (read_file(lost) if lost.exists() else b"") + metrics)
        self.drop_metrics_after(0)
        return lost.name if keeps else ""

    def _rewrite(self, columns: list[str], rows: list[dict[str, str]]) -> None:
        """Replaces metrics.csv by one of these columns and rows, where what a row lacks is an empty field."""
        table: list[list[Any]] = [columns, *([row.get(name) for name in columns] for row in rows)]
        replace_file(self.metrics_path, _csv(table if columns else []))
        self._columns, self._kept = columns, []
        self._metrics_file = GrowingFile(self.metrics_path)

    def save_checkpoint(self, content: bytes, name: str = CHECKPOINT) -> None:
        """Saves what `packed` has made of a state as the file ``name``."""
        with suppress(OSError):  # no checkpoint is to be there without its rows, unless they cannot be written
            self._metrics_file.sync()
        (self.path / name).parent.mkdir(exist_ok=True)
        replace_file(self.path / name, content)

    def close(self) -> None:
        with Uninterrupted(), ExitStack() as closing:  # an interrupt in its queue would keep the events' writer
            if self._lock >= 0:
                closing.callback(os.close, self._lock)
                self._lock = -1
            if self._events is not None:
                closing.callback(self._events.close)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_columns(run: Path) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """The columns of metrics.csv of the run in the folder ``run``, [R] each, nan where a row has no value.

    Raises UsageError where there is something else in the file than of a run.
    """
    names, rows = _read_rows(run)
    with reading(run / METRICS):
        return {name: np.array([float(row[name] or "nan") for row in rows]) for name in names}


def _read_rows(run: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """The columns and the rows of metrics.csv."""
    with reading(run / METRICS):
        text = read_file(run / METRICS).decode()
        whole = text[: text.rfind("\n") + 1]  # a machine that stopped may leave half a line
        reader = csv.DictReader(io.StringIO(whole, newline=""))
        return list(reader.fieldnames or []), list(reader)


def as_word(path: Path) -> str:
    """The path as one word of a shell, which is no option."""
    return shlex.quote(f"./{path}" if str(path).startswith("-") else str(path))


def new_folder(parent: Path, name: str) -> Path:
    """Makes a folder that is called ``name`` (any text, an env id for example), with the time in its name."""
    plain = "".join(char if char.isalnum() or char in "-_." else "-" for char in name)
    stamp = f"{plain}-{datetime.now():%Y%m%d-%H%M%S}"
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):  # not looked for beforehand: several runs may begin at this moment
        with suppress(FileExistsError):
            path = parent / (stamp if number == 1 else f"{stamp}-{number}")
            path.mkdir()
            break
    return path


def require_run(path: Path) -> None:
    """Raises UsageError where ``path`` holds no run, and as `scan`. One that was killed early has no checkpoint yet."""
    scan(path)
    for name in (CONFIG, METRICS):
        if not (path / name).is_file():
            raise UsageError(f"{path} holds no run: it has no {name}. Runs are made by muster train.")


def read_config(path: Path) -> dict[str, Any]:
    """The config of the run in the folder ``path``. Raises RunConfigError where it is no dict in JSON."""
    require_run(path)
    text = read_file(path / CONFIG)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunConfigError(f"{path / CONFIG} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise RunConfigError(f"{path / CONFIG} is no run's: it holds a {type(config).__name__}, not a dict.")
    return config


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Encloses code that reads a file of a run. Raises UsageError where there is something else in it than of a run."""
    try:
        yield
    except (LookupError, TypeError, ValueError, OverflowError, RuntimeError, AttributeError, csv.Error) as error:
        if isinstance(error, MusterError):
            raise
        words = f"{type(error).__name__}: {error}".split()  # torch's text has many lines
        raise UsageError(f"{file} is not that of the run in config.json: {' '.join(words)}") from None


@contextmanager
def naming(file: Path, *, aside: Path | str | None = None) -> Iterator[None]:
    """Encloses code that writes a file, and names the file in an OSError that names none, or the file ``aside``."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename not in (None, aside and str(aside)):
            raise
        raise OSError(error.errno, error.strerror, str(file)) from None


def require_local(path: Path) -> None:
    """Raises ConfigError for an address such as ``s3://bucket/run``, which would become a folder called ``s3:``.

    Raises it also for a path that is no UTF-8.
    """
    if re.search("[\udc80-\udcff]", str(path.absolute())):
        raise ConfigError("run_dir", "a folder with a path of UTF-8, as TensorBoard and wandb take no other", str(path))
    scheme, *rest = path.parts or ("",)
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]+:", scheme):
        expected = f"a folder of this machine, also a mounted one; when the run has ended, copy it to {scheme}//"
        raise ConfigError("run_dir", expected, "/".join([f"{scheme}/", *rest]))


def holds_run(path: Path) -> bool:
    """True if there is a run in the folder that can be gone on with. Raises as `scan`."""
    scan(path)
    return (path / CONFIG).is_file() and (path / METRICS).is_file()


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UsageError(f"{path} is a file, not a folder, or lies in one; choose another run folder.") from None


def states_in(path: Path) -> list[str]:
    """The names, relative to ``path``, of the newest state, the best, and copies, also where these are no files.

    Raises UsageError where there is only a state of a form that is not read any more.
    """
    if os.path.lexists(path / OLD_CHECKPOINT) and not os.path.lexists(path / CHECKPOINT):
        raise UsageError(
            f"{path} is a run of an older version of Muster: its {OLD_CHECKPOINT} is a pickle, and states are "
            f"{CHECKPOINT} now. Train it anew, in another folder."
        )
    return [name for name in (CHECKPOINT, BEST) if os.path.lexists(path / name)] + copies_in(path)


def require_none(path: Path) -> None:
    """Raises UsageError where the folder holds a run, but for one that was killed before its first checkpoint.

    Raises also as `scan`.
    """
    scan(path)
    states = states_in(path)
    with suppress(UsageError):
        rows = read_file(path / METRICS) if (path / METRICS).exists() else b""
        is_own = {"algorithm", "preset"} <= read_config(path).keys() if (path / CONFIG).exists() else not rows
        if not states and is_own and _is_early(rows):
            return
    raise UsageError(
        f"{path} already holds a run; choose another run folder, remove that one, or go on with it: "
        f"muster train --resume {as_word(path)}"
    )


def _is_early(metrics: bytes) -> bool:
    """True for those of a run that was killed early: the columns, and one row."""
    return metrics.count(b"\n") <= 2


def _lock(path: Path) -> int:
    """A lock on the folder that ends with the process, in whatever way the process ends."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        raise UsageError(f"{path} is in use: another process is training there. Wait for it, or stop it.") from None
    return folder


def scan(run: Path) -> None:
    """Raises UsageError for a link among Muster's names in the folder, and where one is no file, or no folder.

    The path ``run`` may have links. Nothing is looked at again: files may be swapped while they are used.
    """
    for folder in (run, run / COPIES):
        with suppress(FileNotFoundError, NotADirectoryError):
            for path in folder.iterdir():
                kind = "folder" if path == run / COPIES else "file" if _FILES.fullmatch(path.name) else ""
                if path.is_symlink() and (kind or _LOGS.fullmatch(path.name)):
                    raise UsageError(
                        f"{path} is a link, and none is followed inside a run folder. Put there what it leads to; for "
                        "another disk, move the whole folder there"
                    )
                if kind and not (path.is_dir() if kind == "folder" else path.is_file()):
                    raise UsageError(f"{path} is no {kind}. Remove it, or choose another run folder.")


def read_file(path: Path) -> bytes:
    """The content of a run's file. Raises RunConfigError where memory does not hold it.

    There is memory for 32 times the content, which lists in lists and rows of a table take.
    """
    require_room(path, 32 * path.stat().st_size)
    return path.read_bytes()


def files_in(run: Path, folder: str, names: re.Pattern[str]) -> list[str]:
    """The sorted names, relative to ``run``, of the files in a folder of the run that match.

    folder: relative to ``run``, "" for the run's own.
    """
    there = (run / folder).iterdir() if (run / folder).is_dir() else ()
    found = sorted(path for path in there if names.fullmatch(path.name) and path.is_file())
    return [str(path.relative_to(run)) for path in found]


def copies_in(run: Path) -> list[str]:
    """The names, relative to ``run``, of the copies of checkpoints, in the order of their steps."""
    return files_in(run, COPIES, re.compile(r"\d{12,}\.safetensors"))


def replace_file(path: Path, content: bytes | memoryview) -> None:
    """Writes a file as a whole, synced before it replaces the old one, or a link."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with naming(path, aside=aside):
            with open(aside, "xb", buffering=0) as file:
                _write_at(file.fileno(), content, 0)
                os.fsync(file.fileno())
            os.replace(aside, path)
    except BaseException:
        with suppress(OSError):
            aside.unlink()  # half a file on a disk that may be full
        raise
    with suppress(OSError):  # not every file system can
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_named(path: Path, content: bytes) -> None:
    """Writes what a user has named: in the place of a file or of a link, but into a pipe or a device."""
    if path.absolute().parent == Path("/dev") or not (path.is_symlink() or path.is_file() or not path.exists()):
        with naming(path), open(path, "wb") as file:
            file.write(content)
    else:
        replace_file(path, content)


class GrowingFile:
    """A file of a run that grows by whole pieces."""

    def __init__(self, path: Path) -> None:
        self._path, self._size = path, path.stat().st_size

    def append(self, piece: bytes) -> None:
        """Writes a piece behind the others. Raises OSError, which leaves the file as it was."""
        with naming(self._path), open(self._path, "r+b", buffering=0) as file:
            try:
                _write_at(file.fileno(), piece, self._size)
            except OSError:
                file.truncate(self._size)
                raise
        self._size += len(piece)

    def sync(self) -> None:
        """Waits until what was written is on the disk. Raises OSError."""
        with naming(self._path), open(self._path, "rb") as file:
            os.fsync(file.fileno())


def _write_at(file: int, content: bytes | memoryview, start: int) -> None:
    """Writes all of the content. Once more, after an interrupt, changes nothing."""
    written, view = 0, memoryview(content)
    while written < len(view):
        written += os.pwrite(file, view[written:], start + written)


def require_room(path: Path, size: int) -> None:
    """Raises RunConfigError where no memory holds so many bytes, which the file asks for."""
    left, limit = memory_left()
    if size > left:
        room = f"{size:,} bytes, and {left:,} are left ({limit})"
        raise RunConfigError(f"{path} asks for more memory than there is: {room}.")


def _csv(rows: Iterable[Iterable[object]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()
