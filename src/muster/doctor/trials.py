"""The doctor's trials, each in a process of its own. Results are reported one by one: a trial may never return."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import inspect
import json
import os
import pickle
import signal
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, NoReturn

import numpy as np

from muster._core import EXIT_FDS_CLOSED, set_death_signal, start_watchdog
from muster.doctor.api_checkers import check_api, name_api
from muster.doctor.measure import warmed_up
from muster.doctor.player import Player
from muster.envs.light_melting_pot import import_without_bots
from muster.errors import RecipeError
from muster.introspection import find_in
from muster.pickling import find_culprits
from muster.recipes.recipe import Recipe, unpack
from muster.vector.make import make_vec
from muster.vector.multi_agent import MultiAgentVectorEnv
from muster.vector.vector_env import VectorEnv
from muster.worker_info import WorkerInfo, worker_info_context
from muster.workers.resources import own_memory_bytes

_ROWS = 60
_ENOUGH_S = 5.0
_ALIVE_EVERY_S = 0.2
_BIG_INFO_BYTES = 10_000
# The stage of the trial `line` in which its envs are stepped.
STEPPING_MANY = "stepping many of it"
_OUR_CODE = (os.path.dirname(os.path.dirname(__file__)), contextlib.__file__, importlib.__file__, "<frozen importlib")


class Reporter:
    """Reports a trial's progress and results to the doctor, as lines of JSON."""

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

    def raised(self, error: BaseException) -> None:
        self._send("raised", f"raised {type(error).__name__}: {error}", _own_traceback(error))

    def _send(self, *message: Any) -> None:
        self._pipe.write(json.dumps(message) + "\n")


def main(trial: str, fd: int, doctor: int, options: dict[str, Any], recipe: Recipe | None = None) -> NoReturn:
    """Runs one trial; never returns. Where the trial needs a recipe and `recipe` is None, a packed one is on stdin.

    fd: the pipe to report to.  doctor: pidfd of the doctor's process; the trial ends with it.
    """
    # Otherwise processes that the env starts would hold the pipe, and the doctor would wait for them.
    os.set_inheritable(fd, False)
    os.set_inheritable(doctor, False)
    set_death_signal(signal.SIGCONT)  # the watchdog cannot run while this process is stopped
    start_watchdog(doctor)
    import_without_bots()
    faulthandler.enable(2, all_threads=True)
    reporter = Reporter(fd)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if trial in _WITHOUT_RECIPE:
                _WITHOUT_RECIPE[trial](reporter, **options)
            else:
                reporter.stage("unpacking the recipe")
                if recipe is None:
                    (recipe,) = unpack(sys.stdin.buffer.read())
                _TRIALS[trial](recipe, reporter, **options)
        reporter.stage(None)
    except BaseException as error:
        try:
            reporter.raised(error)
        except OSError:
            os._exit(EXIT_FDS_CLOSED)
    # The process ends at once: threads of the env may keep the interpreter's own shutdown from ending.
    os._exit(0)


def _own_traceback(error: BaseException) -> str:
    """The traceback from the first frame of the env's own code on; "" where no frame is of that code."""
    described = traceback.TracebackException.from_exception(error)
    frames = [not frame.filename.startswith(_OUR_CODE) for frame in described.stack]
    if True not in frames:
        return ""
    del described.stack[: frames.index(True)]
    lines = "".join(described.format()).splitlines()
    return "\n".join(line for line in lines if line.strip(" ^~"))


def importing(reporter: Reporter, module_name: str) -> None:
    """Imports the module that holds the env's factory."""
    reporter.stage(f"importing the module {module_name}")
    importlib.import_module(module_name)


def judging(reporter: Reporter, module_name: str, name: str) -> None:
    """Reports whether a policy can be copied. `name` is a function or class that builds it, or the policy itself."""
    reporter.stage(f"importing the module {module_name}")
    try:
        found = find_in(importlib.import_module(module_name), name)
    except RecipeError as error:
        reporter.result("mistake", str(error))
        return
    reporter.stage("building it")
    policy = found() if inspect.isroutine(found) or inspect.isclass(found) else found
    reporter.stage("importing PyTorch")
    from muster.doctor.policy import judge_policy

    reporter.stage("seeing whether it can be copied")
    finding, verdict = judge_policy(policy)
    reporter.result("finding", asdict(finding))
    reporter.result("verdict", asdict(verdict))


def behaviour(recipe: Recipe, reporter: Reporter) -> None:
    """Builds one env, plays it, and reports its behaviour and its costs."""
    threads, before = _threads(), own_memory_bytes()
    reporter.result("worker_bytes", before)
    reporter.stage("building it")
    started = time.perf_counter()
    with _built(recipe) as env:
        reporter.result("build_s", time.perf_counter() - started)
        reporter.result("api", name_api(env))
        player = Player(env, reporter.alive)
        reporter.result("one_per_process", bool((getattr(env, "metadata", None) or {}).get("one_per_process")))
        reporter.stage("looking for what in it cannot travel")
        reporter.result("culprits", [[c.path, c.type, c.reason, c.severity] for c in find_culprits(env, "env")])
        reporter.stage("resetting it")
        player.reset(0)
        reporter.stage("stepping it")
        reporter.result("digest", player.play(0, _ROWS, enough_s=_ENOUGH_S))
        rows = player.rows
        reporter.result("rows", rows)
        reporter.result("env_bytes", max(0, own_memory_bytes() - before))
        reporter.result("threads", max(0, _threads() - threads))
        reporter.result("reuses_buffers", player.reuses_buffers)
        reporter.result("changes_action", player.changes_action)
        reporter.result("costly_infos", _costly(player.infos))
        reporter.result("digest_again", player.play(0, rows))
        reporter.result("digest_other", player.play(1, rows))
        for kind, durations_s in (("step", player.steps_s), ("reset", player.resets_s)):
            reporter.result(f"{kind}_median_s", statistics.median(durations_s))
            reporter.result(f"{kind}_p99_s", float(np.percentile(durations_s, 99)))
        reporter.result("obs_bytes", player.obs_bytes())
        reporter.stage("checking it by its API's own checker")
        refused, warned = check_api(env)
        reporter.result("refused", refused)
        reporter.result("warned", warned)
        reporter.stage("closing it")


def replay(recipe: Recipe, reporter: Reporter, rows: int) -> None:
    """Plays the rows of `behaviour` again, in another process, and reports their digest."""
    reporter.stage("building it")
    with _built(recipe) as env:
        reporter.stage("stepping it")
        reporter.result("digest", Player(env, reporter.alive).play(0, rows))


def pair(recipe: Recipe, reporter: Reporter, rows: int) -> None:
    """Steps two envs in turns in one process, and reports whether the first one's trajectory changes."""
    reporter.stage("building the first of two in one process")
    with _built(recipe) as first:
        one = Player(first, reporter.alive)
        one.play(0, rows)
        reporter.stage("building a second one in the same process")
        before = own_memory_bytes()
        with _built(recipe) as second:
            other = Player(second, reporter.alive)
            other.play(1, rows)
            reporter.result("env_bytes", max(0, own_memory_bytes() - before))
            reporter.stage("stepping two of it in one process")
            reporter.result("digest", one.play(0, rows, meanwhile=other.play_row))
            reporter.stage("closing two of it in one process")


def line(recipe: Recipe, reporter: Reporter, num_envs: int, options: dict[str, Any], seconds: float) -> None:
    """Runs many envs by the options of a line that the doctor may recommend, and reports their speed."""
    reporter.stage("building many of it")
    started = time.perf_counter()
    with make_envs(recipe, num_envs, **options) as envs:
        reporter.result("start_s", time.perf_counter() - started)
        reporter.stage(STEPPING_MANY)
        steps_per_s = warmed_up(envs)(seconds)
        stats = envs.stats()
        reporter.result("episodes", sum(worker["resets"] for worker in stats["workers"]) - num_envs)
        reporter.result("env_steps", stats["env_steps"])
        reporter.result("steps_per_s", steps_per_s)
        reporter.stage("closing many of it")


def make_envs(recipe: Recipe, num_envs: int, **options: Any) -> VectorEnv | MultiAgentVectorEnv:
    """A vector env of `num_envs` envs of the recipe. options: those of `make_vec`."""
    return make_vec(recipe.factory, num_envs, env_kwargs=dict(recipe.kwargs), wrappers=recipe.wrappers, **options)


_WITHOUT_RECIPE: dict[str, Callable[..., None]] = {"importing": importing, "judging": judging}
_TRIALS: dict[str, Callable[..., None]] = {"behaviour": behaviour, "replay": replay, "pair": pair, "line": line}


@contextlib.contextmanager
def _built(recipe: Recipe) -> Iterator[Any]:
    with worker_info_context(WorkerInfo(recipe.env_index, 0, 1, 1, seed=0)):
        built = recipe.build()
    yield built.env
    built.env.close()
    built.release(2.0)


def _threads() -> int:
    """The number of threads of this process, native ones included."""
    return len(os.listdir("/proc/self/task"))


def _costly(infos: list[dict[str, Any]]) -> list[list[Any]]:
    """The values of infos that are big or no plain number, as [key, type, bytes of the pickle or -1]."""
    costly: dict[str, list[Any]] = {}
    for info in infos:
        for key, value in info.items():
            plain = isinstance(value, (bool, int, float, np.number, np.bool_))
            array = isinstance(value, np.ndarray) and not value.dtype.hasobject and value.nbytes < _BIG_INFO_BYTES
            if plain or array:
                continue
            try:
                length = len(pickle.dumps(value))
            except Exception:
                length = -1
            costly[str(key)] = [str(key), type(value).__name__, length]
    return list(costly.values())
