"""The folder that one training run fills: config.json, metrics.csv, TensorBoard's event files, checkpoint.pt.

Each file is complete at any moment: the CSV grows by whole lines; config and checkpoint are written to another file,
which then replaces the old one.
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import math
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from muster.errors import MusterError, UsageError
from muster.training.events import EventWriter


class RunFolder:
    """Writes a run's files into ``path``, which is created, and keeps other processes from doing so meanwhile.

    resume: goes on with the run in ``path``; call ``drop_metrics_after`` before anything is appended.

    Raises UsageError where ``path`` holds a run already, where with ``resume`` it holds none, and where another process
    is training there.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.path = path
        self.config_path, self.metrics_path = path / "config.json", path / "metrics.csv"
        self.checkpoint_path, self.plot_path = path / "checkpoint.pt", path / "learning_curve.png"
        self._config: dict[str, Any] = {}
        self._columns: list[str] = []
        self._last_step = -1
        self._events: EventWriter | None = None
        if resume:
            require_run(path)
        else:
            self._create()
        self._lock = _lock(path)
        self._metrics_file: TextIO = self.metrics_path.open("a", newline="", encoding="utf-8")

    def _create(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # Created exclusively: of two runs that start here at once, only one gets the folder.
            self.metrics_path.open("x").close()
        except FileExistsError:
            if not self.path.is_dir():
                raise UsageError(f"{self.path} is a file, not a folder; choose another run folder.") from None
            raise UsageError(
                f"{self.path} already holds a run; choose another run folder, remove that one, or go on with it: "
                f"muster train --resume {as_word(self.path)}"
            ) from None

    @classmethod
    def create(cls, parent: Path, name: str) -> RunFolder:
        """A new folder for a run called ``name``, see `new_folder`."""
        return cls(new_folder(parent, name))

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Writes ``config`` as JSON; TensorBoard shows its values that are no dicts among the hparams."""
        self._config = dict(config)
        text = json.dumps(config, indent=2) + "\n"
        _replace(self.config_path, lambda file: file.write(text.encode()))

    def append_metrics(self, row: Mapping[str, float], scalars: Mapping[str, float] | None = None) -> None:
        """Appends a line to metrics.csv, and ``scalars`` (by ``group/name``) for TensorBoard; ``row`` has "steps".

        The first row names the columns, and a later one may add some; nan becomes an empty field, and so does what a
        row lacks. A row that is there already is left out.
        """
        step = int(row["steps"])
        if step <= self._last_step:
            return
        with naming(self.metrics_path):
            if not self._columns:
                self._columns = list(row)
                csv.writer(self._metrics_file).writerow(self._columns)
            elif new := [name for name in row if name not in self._columns]:
                self._rewrite([*self._columns, *new], self._rows()[1])
            values = [row.get(name, math.nan) for name in self._columns]
            csv.writer(self._metrics_file).writerow(["" if math.isnan(value) else value for value in values])
            after, self._last_step = self._last_step, step
            self._metrics_file.flush()
            if scalars is not None:
                if self._events is None:
                    options = {name: value for name, value in self._config.items() if not isinstance(value, dict)}
                    self._events = EventWriter(self.path, after_step=after, options=options)
                self._events.add(scalars, step)

    def drop_metrics_after(self, steps: int) -> dict[str, str]:
        """Drops the rows of metrics.csv beyond ``steps``, which the checkpoint lacks. Returns the last row left."""
        columns, rows = self._rows()
        with reading(self.metrics_path):
            rows = [row for row in rows if int(row["steps"]) <= steps]
        self._rewrite(columns, rows)
        self._last_step = steps
        return rows[-1] if rows else {}

    def _rows(self) -> tuple[list[str], list[dict[str, str]]]:
        """The columns and the rows of metrics.csv."""
        with reading(self.metrics_path):
            text = self.metrics_path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]  # a process that was killed may leave half a line
        reader = csv.DictReader(io.StringIO(whole, newline=""))
        return list(reader.fieldnames or []), list(reader)

    def _rewrite(self, columns: list[str], rows: list[dict[str, str]]) -> None:
        """Replaces metrics.csv by one of these columns and rows, where what a row lacks is an empty field."""
        kept = io.StringIO(newline="")
        if columns:
            writer = csv.DictWriter(kept, columns)
            writer.writeheader()
            writer.writerows(rows)
        _replace(self.metrics_path, lambda file: file.write(kept.getvalue().encode()))
        self._metrics_file.close()
        self._metrics_file = self.metrics_path.open("a", newline="", encoding="utf-8")
        self._columns = columns

    def save_checkpoint(self, state: Mapping[str, Any], name: str = "checkpoint.pt") -> None:
        """Saves ``state`` (state dicts, tensors, plain values), for ``torch.load(path, weights_only=True)``.

        name: the file's, or its path in the folder.
        """
        import torch

        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        held = io.BytesIO()  # torch would have an error of its own for a disk that is full
        torch.save(dict(state), held)
        _replace(path, lambda file: file.write(held.getbuffer()))

    def close(self) -> None:
        with naming(self.metrics_path), ExitStack() as closing:
            if self._lock >= 0:
                closing.callback(os.close, self._lock)
                self._lock = -1
            if self._events is not None:
                closing.callback(self._events.close)
            closing.callback(self._metrics_file.close)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def as_word(path: Path) -> str:
    """The path as one word of a shell, which is no option."""
    return shlex.quote(f"./{path}" if str(path).startswith("-") else str(path))


def new_folder(parent: Path, name: str) -> Path:
    """Makes a folder that is called ``name`` (any text, an env id for example), with the time in its name."""
    plain = "".join(char if char.isalnum() or char in "-_." else "-" for char in name)
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    parent.mkdir(parents=True, exist_ok=True)
    path, number = parent / f"{plain}-{stamp}", 1
    while True:  # not looked for beforehand: several runs may begin at this moment
        with suppress(FileExistsError):
            path.mkdir()
            return path
        number += 1
        path = parent / f"{plain}-{stamp}-{number}"


def require_run(path: Path) -> None:
    """Raises UsageError where ``path`` holds no run with a checkpoint."""
    for name in ("config.json", "metrics.csv", "checkpoint.pt"):
        if not (path / name).is_file():
            raise UsageError(f"{path} holds no run: it has no {name}. Runs are made by muster train.")


def read_config(path: Path) -> dict[str, Any]:
    """The config of the run in the folder ``path``. Raises UsageError where it is no dict in JSON."""
    require_run(path)
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path / 'config.json'} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise UsageError(f"{path / 'config.json'} is no run's: it holds a {type(config).__name__}, not a dict.")
    return config


def read_checkpoint(path: Path, file: Path | None = None) -> dict[str, Any]:
    """The checkpoint of the run in the folder ``path``. No code in it is executed. Raises UsageError.

    file: another one than the newest.
    """
    import torch

    require_run(path)
    file = file or path / "checkpoint.pt"
    try:
        state: dict[str, Any] = torch.load(file, weights_only=True)
    except Exception as error:  # torch's text is about its own arguments, and about trust
        raise UsageError(f"{file} is no checkpoint of muster train: {type(error).__name__}") from None
    return state


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Encloses code that reads a file of a run. Raises UsageError where there is something else in it than of a run."""
    try:
        yield
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        if isinstance(error, MusterError):
            raise
        words = f"{type(error).__name__}: {error}".split()  # torch's text has many lines
        raise UsageError(f"{file} is not that of the run in config.json: {' '.join(words)}") from None


@contextmanager
def naming(file: Path, *, aside: Path | None = None) -> Iterator[None]:
    """Encloses code that writes a file, and names the file in an OSError that names none, or the file ``aside``."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename not in (None, aside and str(aside)):
            raise
        raise OSError(error.errno, error.strerror, str(file)) from None


def _lock(path: Path) -> int:
    """A lock on the folder that ends with the process, in whatever way the process ends."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        raise UsageError(f"{path} is in use: another process is training there. Wait for it, or stop it.") from None
    return folder


def _replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    aside = path.with_name(path.name + ".tmp")
    try:
        with naming(path), aside.open("wb") as file:
            write(file)
        os.replace(aside, path)
    except OSError:
        with suppress(OSError):
            aside.unlink()  # half a file on a disk that may be full
        raise
