"""The process in which a trial runs, as `run_guarded` starts it. Results are reported one by one: it may never end."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from muster._core import EXIT_FDS_CLOSED, set_death_signal, start_watchdog
from muster.envs.light_melting_pot import import_without_bots
from muster.pickling.main_module import Init, MainModule, run_once
from muster.pool.inherit_in_worker import finish_queues, take_over
from muster.recipes.recipe import Recipe, unpack
from muster.worker_info import WorkerInfo, worker_info_context

_ALIVE_EVERY_S = 0.2
_OUR_CODE = (os.path.dirname(os.path.dirname(__file__)), contextlib.__file__, importlib.__file__, "<frozen importlib")


class Reporter:
    """Reports a trial's progress and results to the process that started it, as lines of JSON."""

    def __init__(self, fd: int) -> None:
        self._pipe = os.fdopen(fd, "w", buffering=1)
        self._alive_at = 0.0

    def stage(self, name: str | None) -> None:
        """Reports the name of the next stage; None after the last."""
        self._send("stage", name)

    def alive(self) -> None:
        """Reports, at most every 0.2 s, that the stage makes progress although it takes long."""
        if time.monotonic() > self._alive_at:
            self._alive_at = time.monotonic() + _ALIVE_EVERY_S
            self._send("alive")

    def result(self, name: str, value: Any) -> None:
        self._send("result", name, value)

    def append(self, name: str, value: Any) -> None:
        """Reports one more of the results `name`, which shows that the stage makes progress."""
        self._send("append", name, value)

    def raised(self, error: BaseException) -> None:
        self._send("raised", f"raised {type(error).__name__}: {error}", _own_traceback(error))

    def _send(self, *message: Any) -> None:
        self._pipe.write(json.dumps(message) + "\n")


def main(
    trial: str,
    fd: int,
    guard: int,
    options: dict[str, Any],
    packed: bool,
    inherited_fds: Sequence[int],
    recipes: Sequence[Recipe] = (),
    init: Init | None = None,
) -> NoReturn:
    """Calls the function ``module:name`` that is the trial with `recipes`, a Reporter and `options`; never returns.

    fd: the pipe to report to.  guard: pidfd of the process that has started this one; the trial ends with it.
    packed: whether the recipes come from stdin.  inherited_fds: the resource tracker's, if there is one.
    init: called first; packed recipes bring their own.
    """
    # Otherwise processes that the env starts would hold the pipe, and the guard would wait for them.
    for one in (fd, guard, *inherited_fds):
        os.set_inheritable(one, False)
    set_death_signal(signal.SIGCONT)  # the watchdog cannot run while this process is stopped
    start_watchdog(guard)
    import_without_bots()
    faulthandler.enable(2, all_threads=True)
    reporter = Reporter(fd)
    module, _, name = trial.partition(":")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function = getattr(importlib.import_module(module), name)
            if packed:
                reporter.stage("unpacking the recipe")
                MainModule.install()
                inherited, set_up, data = pickle.load(sys.stdin.buffer)
                take_over(inherited, inherited_fds)
                if set_up is not None:
                    set_up.apply()
                recipes = unpack(data, run=initialise)
                if set_up is not None:
                    set_up.complete()
            elif init is not None:
                initialise(init)
            function(*recipes, reporter, **options)
            finish_queues()
        reporter.stage(None)
    except BaseException as error:
        try:
            reporter.raised(error)
        except OSError:
            os._exit(EXIT_FDS_CLOSED)
        finish_queues()
    # The process ends at once: threads of the env may keep the interpreter's own shutdown from ending.
    os._exit(0)


def initialise(init: Init) -> None:
    """Calls `worker_init`, as in worker 0."""
    with worker_info_context(WorkerInfo(None, 0, 1, 1, None)):
        run_once(init)


def _own_traceback(error: BaseException) -> str:
    """The traceback from the first frame of the env's own code on; "" where no frame is of that code."""
    described = traceback.TracebackException.from_exception(error)
    frames = [not frame.filename.startswith(_OUR_CODE) for frame in described.stack]
    if True not in frames:
        return ""
    del described.stack[: frames.index(True)]
    lines = "".join(described.format()).splitlines()
    return "\n".join(line for line in lines if line.strip(" ^~"))
