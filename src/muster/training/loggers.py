"""The loggers of a run, other than metrics.csv and TensorBoard: Weights & Biases, and functions of the user's."""

from __future__ import annotations

import io
import json
import math
import os
import re
import secrets
import textwrap
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.markup import escape

from muster.errors import RunConfigError, UsageError, printable
from muster.extras import imports_for
from muster.recipes.named import callable_named
from muster.training.plan import IN_FOLDER
from muster.training.run_folder import METRICS, GrowingFile, new_folder, read_columns, read_file, reading, replace_file

LOGGED = "logged.jsonl"  # a line for each time that a logger has come further
_OPEN = re.compile(r"wandb-[\d-]+/wandb/offline-run-[\w-]+")  # offline records; no other path that a file may name


class Loggers:
    """Hands the rows of a run to its loggers, each row once and in order. For use in a ``with`` block.

    A logger takes no row back, so a row waits until a checkpoint holds it. What raises is said once, and gets its rows
    again after the next checkpoint. A run that goes on hands over what its loggers lack.

    names: as in `RunOptions.log`.  config: what wandb shows of the run.
    Raises what their imports raise, and UsageError where wandb cannot start.
    """

    def __init__(self, run: Path, names: Sequence[str], console: Console, *, config: Mapping[str, Any]) -> None:
        self._run, self._console, self._last, self._sent = run, console, 0, -1
        self._failed = set[str]()
        self._wandb: Any = None
        self._waiting: dict[str, deque[dict[str, float]]] = {name: deque() for name in names if name not in IN_FOLDER}
        self._calls: dict[str, Callable[[dict[str, float]], object]]
        self._calls = {name: callable_named(name) for name in self._waiting if name != "wandb"}
        if not self._waiting:
            return
        columns = read_columns(run)
        rows = list(zip(*(column.tolist() for column in columns.values()), strict=True))
        # Where the run begins again, what its loggers had received was another one's.
        kept = {name: mark for name, mark in _read_marks(run).items() if rows or not mark["steps"]}
        self._marks = {**{name: {"steps": 0} for name in self._calls}, **kept}
        if "wandb" in self._waiting:
            self._calls["wandb"] = self._start_wandb(config)
        with reading(run / METRICS):
            for row in rows:
                self.add(dict(zip(columns, row, strict=True)))
        lines = [json.dumps({"logger": name, **mark}) + "\n" for name, mark in self._marks.items()]
        replace_file(run / LOGGED, "".join(lines).encode())
        self._file = GrowingFile(run / LOGGED)

    def _start_wandb(self, config: Mapping[str, Any]) -> Callable[[dict[str, float]], object]:
        mark = self._marks.setdefault("wandb", {"steps": 0, "id": secrets.token_hex(4), "open": ""})
        # Records of a run that was killed lack what wandb had not written yet: the next ones have all of their rows.
        # They stay there, under a name that `wandb sync` leaves out: they may have what a callback has logged.
        records = self._run.resolve() / mark["open"]
        if _OPEN.fullmatch(mark["open"]) and records.resolve() == records:  # on no link
            with suppress(FileNotFoundError):
                records.rename(records.with_name(f"cut-{records.name}"))
        run = self._wandb = wandb_run(self._run, mark["id"], config=dict(config))
        mark["open"] = "/".join(Path(run.dir).parts[-4:-1])
        mark["steps"] = max(mark["steps"], run.step - 1)  # what the server has
        offline = f"wandb sync {Path(run.dir).parent}, once the run has ended"
        where = offline if _OPEN.fullmatch(mark["open"]) else run.url or "disabled"
        self._console.print(f"[dim]wandb: {escape(str(where))}[/]")
        return lambda row: run.log(row, step=int(row["steps"]))

    def add(self, row: Mapping[str, float]) -> None:
        """Notes a row of metrics.csv, unless it has been noted."""
        if row["steps"] > self._last:
            self._last = int(row["steps"])
            known = {name: value for name, value in row.items() if not math.isnan(value)}
            for name, waiting in self._waiting.items():
                if self._marks[name]["steps"] < self._last:
                    waiting.append({**known, "steps": self._last})

    def send(self, steps: int) -> None:
        """Hands over the rows up to ``steps``, which a checkpoint holds. Raises OSError for a full disk."""
        if steps == self._sent:
            return
        self._sent = steps
        for name, call in self._calls.items():
            waiting = self._waiting[name]
            while waiting and waiting[0]["steps"] <= steps and self._tries(name, call, dict(waiting[0])):
                reached = waiting.popleft()["steps"]
                if name != "wandb":  # which has them when it has finished
                    self._mark(name, steps=reached)

    def _tries(self, name: str, call: Callable[..., object], *arguments: Any) -> bool:
        """Calls, returns True if that succeeds, and says the first time that one does not."""
        try:
            call(*arguments)
            return True
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            said = f"the logger {name} raised {type(error).__name__}: {error} ({at.filename}, line {at.lineno})"
            then = "metrics.csv has all rows, and this logger is tried again after each checkpoint."
            if name not in self._failed:
                self._console.print(f"[yellow]{escape(printable(said))}. {then}[/]")
            self._failed.add(name)
            return False

    def _mark(self, name: str, **changed: Any) -> None:
        mark = self._marks[name] = {**self._marks[name], **changed}
        self._file.append((json.dumps({"logger": name, **mark}) + "\n").encode())

    def __enter__(self) -> Loggers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._wandb is not None and self._tries("wandb", self._wandb.finish, int(kind is not None)):
            next_row = self._waiting["wandb"][0]["steps"] if self._waiting["wandb"] else self._last + 1
            self._mark("wandb", open="", steps=next_row - 1)


def lagging(run: Path, names: Sequence[str], steps: int) -> list[str]:
    """The loggers of the run in the folder ``run`` that lack rows up to ``steps``."""
    marks = _read_marks(run)
    return [name for name in names if name not in IN_FOLDER and marks.get(name, {"steps": 0})["steps"] < steps]


def log_film(run: Path, film: Path) -> None:
    """Adds a film to the wandb run of the run in the folder ``run``, where it has one. Raises as `wandb_run`."""
    mark = _read_marks(run).get("wandb")
    if mark is not None:
        require_login(["wandb"])
        logged = wandb_run(run, mark["id"])
        import wandb

        logged.log({"film": wandb.Video(str(film), format="mp4")}, step=max(logged.step, mark["steps"] + 1))
        logged.finish()


def wandb_run(run: Path, run_id: str, **options: Any) -> Any:
    """The wandb run of that id, in a new folder in ``run``.

    Raises ImportError without wandb, UsageError where it fails. Whoever made ``run``, or the working directory, has no
    say in where wandb sends and writes.
    """
    folder = new_folder(run, "wandb")
    options |= {"project": os.environ.get("WANDB_PROJECT", "muster"), "dir": folder, "id": run_id}
    options["name"] = printable(run.resolve().name)
    options["mode"] = os.environ.get("WANDB_MODE")  # which may have been set after wandb's first start in this process
    with _wandb() as wandb:
        # A run that the user has begun stays the user's.
        settings = wandb.Settings(console="off", silent=True, reinit="create_new")
        if any(os.path.lexists(run / name) for name in (".git", "HEAD")):  # git would run what that configures
            settings.disable_git = True
        return wandb.init(**options, settings=settings, resume="allow")


def require_login(names: Sequence[str]) -> None:
    """Raises as `wandb_run` where wandb is among the loggers ``names``, is to send what it gets, and has no login."""
    if "wandb" not in names:
        return
    with _wandb() as wandb:
        mode = os.environ.get("WANDB_MODE") or wandb.setup().settings.mode
        if mode in ("offline", "dryrun", "disabled") or wandb.run is not None:
            return
        with redirect_stderr(io.StringIO()):  # what it says goes with the error
            if not wandb.login(prompt=False):
                raise wandb.Error("nobody is logged in")


@contextmanager
def _wandb() -> Iterator[Any]:
    """The package, set up. Raises as `wandb_run`."""
    with imports_for("--log wandb needs", "muster-rl[loggers]", "wandb"):
        import wandb
    try:
        with patch.object(wandb.Settings, "settings_workspace", os.devnull):  # that of the working directory
            wandb.setup()
        yield wandb
    except (wandb.Error, ValueError) as error:  # the latter for an id or a path that it does not take
        why = textwrap.shorten(str(error), 500).rstrip(".")
        kind = RunConfigError if isinstance(error, ValueError) else UsageError
        raise kind(f"wandb does not start: {why}. Run `wandb login`, or set WANDB_MODE=offline") from None


def _read_marks(run: Path) -> dict[str, dict[str, Any]]:
    """How far each logger of the run has come: its last line that is whole."""
    if not (run / LOGGED).exists():
        return {}
    with reading(run / LOGGED):
        lines = read_file(run / LOGGED).decode().rpartition("\n")[0].splitlines()
        marks = {str(mark.pop("logger")): mark for mark in map(json.loads, lines)}
        for name, mark in marks.items():
            mark |= {"steps": int(mark["steps"])}
            mark |= {key: str(mark[key]) for key in ("id", "open") if name == "wandb"}
        return marks
