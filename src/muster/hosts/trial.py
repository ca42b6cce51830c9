"""Trials: functions that are called in a process of their own, which a crash, a hang or an exit in the env may end."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from muster._core import EXIT_FDS_CLOSED, Doing
from muster.envs.light_melting_pot import import_without_bots
from muster.errors import WorkerDied, WorkerTimeout, how_ended
from muster.pickling.main_module import Init
from muster.pool.deaths import Nouns
from muster.pool.environment import WorkerEnv
from muster.pool.limits import AT_ONCE, Limit, Limits
from muster.pool.messages import Failed
from muster.pool.notices import starts_unsaid
from muster.pool.output import QUIET
from muster.pool.place import Plan
from muster.pool.pool import Pool
from muster.pool.set_up import NO_INIT, ChosenInit, Processes
from muster.pool.verbs import Answered, Hooks
from muster.pool.watch import env_lines
from muster.pool.worker import Here, Resident
from muster.pool.worker_process import print_at_once
from muster.recipes.recipe import Recipe, pack, unpack
from muster.worker_info import WorkerInfo

STARTING = "starting Python"
"""The stage in which no code of the trial has run yet."""

# What trials import, in the launcher that forks their processes.
_PRELOADS = ("muster.hosts.trial", "muster.vector.make")
_HASH_SEED = 1
# What an env is in, by the first words of stages; in others it is called.
_DOING = dict.fromkeys(("importing", "unpacking", "building"), Doing.BUILDING)
_DOING |= {"resetting": Doing.RESETTING, "stepping": Doing.STEPPING}
# A trial has the limit of a stage, which is no argument of its user's.
_NOUNS = Nouns("trial", step_timeout="")
_ALIVE_EVERY_S = 0.2
# What is printed has reached the file by then.
_PRINTED_S = 0.05
_SAID_BYTES, _SAID_LINES = 4096, 12
_OUR_CODE = (os.path.dirname(os.path.dirname(__file__)), contextlib.__file__, importlib.__file__, "<frozen importlib")


class TrialRaised(NamedTuple):
    """The exception that has ended a trial, in words. detail: its traceback, from the env's own code on."""

    how: str
    detail: str

    @classmethod
    def of(cls, error: BaseException) -> TrialRaised:
        return cls(f"raised {type(error).__name__}: {error}", _own_traceback(error))

    def after(self, fd: int) -> TrialRaised:
        """The same, with the last lines of the file that keeps what was printed."""
        time.sleep(_PRINTED_S)
        said = os.pread(fd, _SAID_BYTES, max(0, os.fstat(fd).st_size - _SAID_BYTES)).decode(errors="replace")
        last = "\n".join(said.splitlines()[-_SAID_LINES:])
        return self._replace(detail=f"{self.detail}\nPrinted last:\n{last}".lstrip()) if last else self


@dataclass
class TrialOutcome:
    """The results that a trial has reported. stage: the one in which it ended early, None if it came to its end.

    how: the early end in words: an exception, a signal, an exit code or a hang.  hung: whether it was a hang.
    late: whether it was ended because it took too long, whatever it reported.
    detail: the traceback, or the last lines of the trial's stderr with its Python stack.
    """

    results: dict[str, Any] = field(default_factory=dict)
    stage: str | None = None
    how: str = ""
    hung: bool = False
    late: bool = False
    detail: str = ""

    @property
    def problem(self) -> str:
        """The early end, in words."""
        return f"{self.stage}, it {self.how}"

    def take(self, report: Any) -> None:
        """Takes what the trial's `Reporter` has sent."""
        match report:
            case "stage", name:
                self.stage = name
            case "result", name, value:
                self.results[name] = value
            case "append", name, value:
                self.results.setdefault(name, []).append(value)


class Reporter:
    """Reports a trial's progress and results to the process that started it; each report renews the stage's time."""

    def __init__(self, here: Here) -> None:
        self._report, self._activity = here.report, here.activity
        self._doing, self._alive_at = Doing.BUILDING, 0.0

    def stage(self, name: str, doing: int | None = None) -> None:
        """Reports the name of the next stage. doing: NOTHING where the trial itself waits for envs, and says so."""
        self._doing = _DOING.get(name.split()[0], Doing.TALKING) if doing is None else doing
        self._activity.put(self._doing, 0)
        self._report(("stage", name))

    def alive(self, resets: bool = False) -> None:
        """Reports, at most every 0.2 s, that the stage makes progress although it takes long. resets: what is next."""
        self._activity.put(Doing.RESETTING if resets else self._doing, 0)
        if time.monotonic() > self._alive_at:
            self._alive_at = time.monotonic() + _ALIVE_EVERY_S
            self._report(None)

    def result(self, name: str, value: Any) -> None:
        """Reports a result, of builtin types: what an env has made may not exist in the other process."""
        self._report(("result", name, value))

    def append(self, name: str, value: Any) -> None:
        """Reports one more of the results `name`."""
        self._report(("append", name, value))


class Trial(Resident):
    """Calls the function that is the trial. Its answer is None, or how the trial has raised.

    plan: the recipes, or how rebuilding them has raised.
    """

    @classmethod
    def prepare(cls) -> None:
        os.environ["PYTHONUNBUFFERED"] = "1"  # of Python programs that an env starts
        print_at_once()
        os.dup2(2, 1)  # what is printed is kept with the last words
        import_without_bots()

    @classmethod
    def unpack(cls, data: bytes, here: Here, initialise: Callable[[Init], None]) -> Sequence[Recipe] | TrialRaised:
        packed = super().unpack(data, here, initialise)
        if packed is None:
            return ()
        Reporter(here).stage("unpacking the recipe")
        try:
            return unpack(packed, run=initialise)
        except BaseException as error:
            return TrialRaised.of(error)

    def __init__(self, plan: Sequence[Recipe] | TrialRaised, here: Here) -> None:
        self._recipes, self._reporter, self._said = plan, Reporter(here), here.files["tail"]

    def answer(self, question: tuple[Callable[..., object], dict[str, Any]]) -> TrialRaised | None:
        trial, options = question
        if isinstance(self._recipes, TrialRaised):
            return self._recipes
        try:
            trial(*self._recipes, self._reporter, **options)
        except BaseException as error:
            return TrialRaised.of(error).after(self._said)
        return None


class TrialFailed(Exception):
    """Raised for what a trial's process reports before the trial begins."""


class _Owner(Hooks):
    def raised(self, place: int, failed: Failed) -> BaseException:
        return TrialFailed(f"raised {failed.type_name}: {failed.message}", failed.traceback)


def pack_for_trials(recipes: Sequence[Recipe], start_method: str, init: Init | None = None) -> bytes:
    """The recipes for trials, as `pack` packs them, with its warnings and errors.

    They share nothing with this process: ask `shared_by` before a trial.
    """
    return pack(recipes, start_method=start_method, fds=[], init=init)  # fds are for what is shared


@dataclass(frozen=True)
class Trials:
    """Trials of some recipes, each in a new process. Nobody gets what it prints and logs.

    recipes: as `pack_for_trials` packs them, None where the trials take none. Recipes that are not packed cannot be
    sent: then each trial runs in a fork of this process.
    stage_timeout_s: limit for each stage of a trial, and for each row that it plays.
    worker_env, init: as for workers.
    leftovers: files that an env leaves where it is killed, and without which the next one starts. A trial that has
        failed unlinks those that are younger than itself.
    """

    recipes: bytes | Sequence[Recipe] | None
    stage_timeout_s: float
    worker_env: WorkerEnv | None = None
    init: ChosenInit = NO_INIT
    leftovers: Sequence[str] = ()

    def run(
        self, trial: Callable[..., object], *, hash_seed: int = _HASH_SEED, most_s: float = math.inf, **options: Any
    ) -> TrialOutcome:
        """Calls ``trial(*recipes, reporter, **options)`` in a new process, and returns its outcome.

        trial: a function of a module.  hash_seed: of Python's ``hash``, unless the process is a fork of this one.
        most_s: the time after which the trial is ended, whatever it reports.
        """
        began, ends = time.time(), time.monotonic() + most_s
        outcome = TrialOutcome(stage=STARTING)
        pool = Pool(
            "muster.hosts.trial:Trial",
            [Plan(self.recipes, WorkerInfo(None, 0, 1, 1, None))],
            Processes(
                "forkserver" if self.recipes is None or isinstance(self.recipes, bytes) else "fork",
                worker_env=self.worker_env,
                init=self.init,
                preloads=_PRELOADS,
                hash_seed=hash_seed,
                are_apart=True,
                output=QUIET,
            ),
            _Owner(),
            Limits(self.stage_timeout_s),
            reported=outcome.take,
            nouns=_NOUNS,
        )
        try:
            with starts_unsaid(), warnings.catch_warnings():
                # Of a fork Python warns since locks that other threads hold stay held there: a trial that needs one of
                # these locks hangs, and is ended.
                warnings.simplefilter("ignore")
                pool.start()
            asked = pool.round()
            asked.ask({0: (trial, options)}, "at work", Limit(self.stage_timeout_s, "the time of a stage"))
            if not asked.wait(timeout_s=None if most_s == math.inf else max(0.0, ends - time.monotonic())):
                outcome.late, outcome.how = True, f"took over {most_s:.3g} s"
                return outcome
            [raised] = [one.content for one in asked.answers.values() if isinstance(one, Answered)]
            if raised is None:
                outcome.stage = None
            else:
                outcome.how, outcome.detail = raised
        except WorkerTimeout as error:
            outcome.hung, outcome.how = True, f"hung for {self.stage_timeout_s:g} s"
            own = env_lines((error.stack or "").splitlines())
            outcome.detail = "\n".join(["It is here, most recent call first:", *own] if own else [])
        except WorkerDied as error:
            outcome.how, outcome.detail = _how_ended(error.exit_code), error.last_words
        except TrialFailed as error:
            outcome.how, outcome.detail = error.args
        finally:
            pool.close(AT_ONCE)
            for path in self.leftovers if outcome.stage is not None else ():
                with contextlib.suppress(OSError):
                    if os.stat(path).st_ctime >= began:
                        os.unlink(path)
        return outcome


def _how_ended(exit_code: int | None) -> str:
    if exit_code == EXIT_FDS_CLOSED:
        return "closed file descriptors that it had not opened (os.closerange and the like)"
    how = how_ended(exit_code)
    return f"was {how}" if exit_code is not None and exit_code < 0 else f"ended the process ({how})"


def _own_traceback(error: BaseException) -> str:
    """The traceback from the first frame of the env's own code on; "" where no frame is of that code."""
    described = traceback.TracebackException.from_exception(error)
    frames = [not frame.filename.startswith(_OUR_CODE) for frame in described.stack]
    if True not in frames:
        return ""
    del described.stack[: frames.index(True)]
    return "\n".join(line for line in "".join(described.format()).splitlines() if line.strip(" ^~"))
