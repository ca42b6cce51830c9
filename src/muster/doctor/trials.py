"""What the doctor tries out in a process of its own. Each trial tells its results as it goes: it may not come back."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import inspect
import json
import os
import pickle
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, NoReturn

import numpy as np

from muster._core import EXIT_FDS_CLOSED, continue_without_parent, start_watchdog
from muster.doctor.api_checkers import check_api, name_api
from muster.doctor.measure import warmed_up
from muster.doctor.player import Player
from muster.envs.light_melting_pot import import_without_bots
from muster.errors import RecipeError
from muster.introspection import find_in
from muster.pickling import find_culprits
from muster.recipes.recipe import Recipe, WorkerInfo, unpack, worker_info_context
from muster.vector.make import make_vec
from muster.vector.multi_agent import MultiAgentVectorEnv
from muster.vector.vector_env import VectorEnv
from muster.workers.resources import own_memory_bytes

_ROWS = 60
_ENOUGH_S = 5.0
_ALIVE_EVERY_S = 0.2
_BIG_INFO_BYTES = 10_000
# The stage of the trial `line` in which its envs are stepped.
STEPPING_MANY = "stepping many of it"
_OUR_CODE = (os.path.dirname(os.path.dirname(__file__)), contextlib.__file__, importlib.__file__, "<frozen importlib")


class Teller:
    """Tells the doctor what is going on, as lines of JSON."""

    def __init__(self, fd: int) -> None:
        self._pipe = os.fdopen(fd, "w", buffering=1)
        self._alive_at = 0.0

    def stage(self, name: str | None) -> None:
        """What is tried next; None: nothing, all is done."""
        self._send("stage", name)

    def alive(self) -> None:
        """The stage takes long, but gets on."""
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
    """The process, from its command line; the packed recipe, of trials of an env that are given none, is on stdin.

    fd: where to tell.  doctor: a pidfd, with whose process this one ends.
    """
    os.set_inheritable(fd, False)  # what the env starts is not to keep the doctor waiting for the trial's end
    os.set_inheritable(doctor, False)
    continue_without_parent()
    start_watchdog(doctor)
    import_without_bots()
    faulthandler.enable(2, all_threads=True)
    teller = Teller(fd)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if trial in _WITHOUT_RECIPE:
                _WITHOUT_RECIPE[trial](teller, **options)
            else:
                teller.stage("unpacking the recipe")
                if recipe is None:
                    (recipe,) = unpack(sys.stdin.buffer.read())
                _TRIALS[trial](recipe, teller, **options)
        teller.stage(None)
    except BaseException as error:
        try:
            teller.raised(error)
        except OSError:
            os._exit(EXIT_FDS_CLOSED)
    # Not by way of the interpreter's own end, which threads of the env may keep from coming.
    os._exit(0)


def _own_traceback(error: BaseException) -> str:
    """The traceback from where the env's own code begins; nothing where it had no part in it."""
    told = traceback.TracebackException.from_exception(error)
    frames = [not frame.filename.startswith(_OUR_CODE) for frame in told.stack]
    if True not in frames:
        return ""
    del told.stack[: frames.index(True)]
    lines = "".join(told.format()).splitlines()
    return "\n".join(line for line in lines if line.strip(" ^~"))


def importing(teller: Teller, module_name: str) -> None:
    """Imports the module that the env is in."""
    teller.stage(f"importing the module {module_name}")
    importlib.import_module(module_name)


def judging(teller: Teller, module_name: str, name: str) -> None:
    """Builds a policy, or takes what is no function or class for one, and says whether it can be copied."""
    teller.stage(f"importing the module {module_name}")
    try:
        found = find_in(importlib.import_module(module_name), name)
    except RecipeError as error:
        teller.result("mistake", str(error))
        return
    teller.stage("building it")
    policy = found() if inspect.isroutine(found) or inspect.isclass(found) else found
    teller.stage("importing PyTorch")
    from muster.doctor.policy import judge_policy

    teller.stage("seeing whether it can be copied")
    finding, verdict = judge_policy(policy)
    teller.result("finding", asdict(finding))
    teller.result("verdict", asdict(verdict))


def behaviour(recipe: Recipe, teller: Teller) -> None:
    """Builds one env and looks at how it behaves."""
    threads, before = _threads(), own_memory_bytes()
    teller.result("worker_bytes", before)
    teller.stage("building it")
    started = time.perf_counter()
    with _built(recipe) as env:
        teller.result("build_s", time.perf_counter() - started)
        teller.result("api", name_api(env))
        player = Player(env, teller.alive)
        teller.result("one_per_process", bool((getattr(env, "metadata", None) or {}).get("one_per_process")))
        teller.stage("looking for what in it cannot travel")
        teller.result("culprits", [[c.path, c.type, c.reason, c.severity] for c in find_culprits(env, "env")])
        teller.stage("resetting it")
        player.reset(0)
        teller.stage("stepping it")
        teller.result("digest", player.play(0, _ROWS, enough_s=_ENOUGH_S))
        rows = player.rows
        teller.result("rows", rows)
        teller.result("env_bytes", max(0, own_memory_bytes() - before))
        teller.result("threads", max(0, _threads() - threads))
        teller.result("reuses_buffers", player.reuses_buffers)
        teller.result("changes_action", player.changes_action)
        teller.result("costly_infos", _costly(player.infos))
        teller.result("digest_again", player.play(0, rows))
        teller.result("digest_other", player.play(1, rows))
        teller.result("step_median_s", statistics.median(player.steps_s))
        teller.result("reset_median_s", statistics.median(player.resets_s))
        teller.result("obs_bytes", player.obs_bytes())
        teller.stage("checking it by its API's own checker")
        refused, warned = check_api(env)
        teller.result("refused", refused)
        teller.result("warned", warned)
        teller.stage("closing it")


def replay(recipe: Recipe, teller: Teller, rows: int) -> None:
    """Plays the same rows as `behaviour` in another process."""
    teller.stage("building it")
    with _built(recipe) as env:
        teller.stage("stepping it")
        teller.result("digest", Player(env, teller.alive).play(0, rows))


def pair(recipe: Recipe, teller: Teller, rows: int) -> None:
    """Lets two envs live in one process, and step in turns."""
    teller.stage("building the first of two in one process")
    with _built(recipe) as first:
        one = Player(first, teller.alive)
        one.play(0, rows)
        teller.stage("building a second one in the same process")
        before = own_memory_bytes()
        with _built(recipe) as second:
            other = Player(second, teller.alive)
            other.play(1, rows)
            teller.result("env_bytes", max(0, own_memory_bytes() - before))
            teller.stage("stepping two of it in one process")
            teller.result("digest", one.play(0, rows, meanwhile=lambda: other.step_some(1)))
            teller.stage("closing two of it in one process")


def line(recipe: Recipe, teller: Teller, num_envs: int, options: dict[str, Any], seconds: float) -> None:
    """Runs many envs as a line would that the doctor may recommend."""
    teller.stage("building many of it")
    started = time.perf_counter()
    with make_envs(recipe, num_envs, **options) as envs:
        teller.result("start_s", time.perf_counter() - started)
        teller.stage(STEPPING_MANY)
        steps_per_s = warmed_up(envs)(seconds)
        stats = envs.stats()
        teller.result("episodes", sum(worker["resets"] for worker in stats["workers"]) - num_envs)
        teller.result("env_steps", stats["env_steps"])
        teller.result("steps_per_s", steps_per_s)
        teller.stage("closing many of it")


def make_envs(recipe: Recipe, num_envs: int, **options: Any) -> VectorEnv | MultiAgentVectorEnv:
    """The vector env of envs of a recipe. options: of `make_vec`."""
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
    """Threads of this process, native ones too."""
    return len(os.listdir("/proc/self/task"))


def _costly(infos: list[dict[str, Any]]) -> list[list[Any]]:
    """What in the infos is no plain number, or big: [key, type, bytes of its pickle or -1]."""
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
