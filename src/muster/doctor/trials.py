"""The doctor's trials: `Trials` runs each in a process of its own."""

from __future__ import annotations

import inspect
import os
import statistics
import tempfile
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from muster._core import Doing
from muster.doctor.api_checkers import check_api, name_api
from muster.doctor.findings import judge_policy
from muster.doctor.fixes import Fix, arguments_of
from muster.doctor.held import Held, files_in, held
from muster.doctor.measure import make_envs, warmed_up
from muster.envs.player import Player
from muster.errors import RecipeError
from muster.hosts.trial import Reporter
from muster.introspection import find_in
from muster.pool.resources import cpu_s, own_memory_bytes
from muster.recipes.named import parse_name
from muster.recipes.recipe import Recipe
from muster.vector.replaying import replay_problem
from muster.vector.side_by_side import built

_ROWS = 60
_ROWS_AT_ONCE = 20
_ROWS_FOR_TAILS, _TAILS_S = 1000, 3.0  # after the others: what takes long once in some hundred steps is seen
_ENOUGH_S = 5.0
# The stage of the trial `stepping_many` in which its envs are stepped.
STEPPING_MANY = "stepping many of it"


def importing(reporter: Reporter, target: str) -> types.ModuleType:
    """Imports the module that holds what ``module:name`` or ``file.py:name`` names, and returns it."""
    named = parse_name(target)
    assert named is not None
    reporter.stage(f"importing the module {named.module}")
    return named.import_module()


def judging(reporter: Reporter, target: str) -> None:
    """Reports whether a policy can be copied. It names a function or class that builds it, or the policy itself."""
    module = importing(reporter, target)
    try:
        found = find_in(module, target.rpartition(":")[2])
    except RecipeError as error:
        reporter.result("mistake", str(error))
        return
    reporter.stage("building it")
    policy = found() if inspect.isroutine(found) or inspect.isclass(found) else found
    reporter.stage("seeing whether it can be copied")
    reporter.result("judged", judge_policy(policy))


def behaviour(recipe: Recipe, reporter: Reporter, watch: Callable[[], None] = lambda: None) -> None:
    """Builds one env, plays it, and reports its behaviour and its costs. watch: called first."""
    watch()
    threads, before = _threads(), own_memory_bytes()
    reporter.result("worker_bytes", before)
    reporter.stage("building it")
    started = time.perf_counter()
    arguments = arguments_of(recipe)
    reporter.result("arguments", arguments)
    importing_s = time.perf_counter() - started
    held_before = _held_with(arguments)
    started = time.perf_counter()
    with built(recipe) as env:
        reporter.result("build_s", importing_s + time.perf_counter() - started)
        reporter.result("api", name_api(env))
        player = Player(env, reporter.alive)
        reporter.result("one_per_process", bool((getattr(env, "metadata", None) or {}).get("one_per_process")))
        reporter.stage("resetting it")
        player.reset(0)
        reporter.stage("stepping it")
        reporter.result("digest", player.play(0, _ROWS, enough_s=_ENOUGH_S))
        rows = player.rows
        reporter.result("rows", rows)
        reporter.result("env_bytes", max(0, own_memory_bytes() - before))
        reporter.result("threads_started", max(0, _threads() - threads))
        reporter.result("changes_action", player.changes_action)
        reporter.result("digest_again", player.play(0, rows))
        reporter.result("digest_other", player.play(1, rows))
        started, spent_s = time.perf_counter(), cpu_s()
        player.play(2, _ROWS_FOR_TAILS, enough_s=_TAILS_S)
        reporter.result("waiting", max(0.0, 1 - (cpu_s() - spent_s) / (time.perf_counter() - started)))
        # The first step of all may compile, or load, what the others only use.
        for kind, durations_s in (("step", player.steps_s[1:]), ("reset", player.resets_s)):
            reporter.result(f"{kind}_median_s", statistics.median(durations_s))
            reporter.result(f"{kind}_mean_s", statistics.fmean(durations_s))
            reporter.result(f"{kind}_p99_s", float(np.percentile(durations_s, 99)))
            reporter.result(f"{kind}_longest_s", max(durations_s))
        reporter.result("obs_bytes", player.obs_bytes())
        reporter.result("held", [sorted(_held_with(arguments) - held_before)])
        reporter.stage("checking it by its API's own checker")
        refused, warned = check_api(env)
        reporter.result("refused", refused)
        reporter.result("warned", warned)
        reporter.stage("closing it")


def replay(recipe: Recipe, reporter: Reporter, rows: int, watch: Callable[[], None] = lambda: None) -> None:
    """Plays the rows of `behaviour` again, in another process, and reports their digest. watch: called first."""
    watch()
    reporter.stage("building it")
    arguments = arguments_of(recipe)
    held_before = _held_with(arguments)
    with built(recipe) as env:
        reporter.stage("stepping it")
        reporter.result("digest", Player(env, reporter.alive).play(0, rows))
        reporter.result("held", [sorted(_held_with(arguments) - held_before)])


def playing_again(
    recipe: Recipe, reporter: Reporter, counts: Sequence[int], watch: Callable[[], None] = lambda: None
) -> None:
    """Reports why so many envs in one process cannot be played again; empty where they can. watch: called first."""
    watch()
    for count in counts:
        reporter.stage("playing it again")
        with make_envs(recipe, count, backend="serial", replayable=True) as envs:
            where = "alone" if count == 1 else "with another in its process"
            reporter.append("played", (where, replay_problem(envs)))


def _held_with(arguments: Mapping[str, int | str]) -> set[Held]:
    """The things that this process and its children hold, and the files that lie where an env may put some."""
    folders = [value for value in arguments.values() if isinstance(value, str)]
    return held(os.getpid()) | files_in([os.getcwd(), tempfile.gettempdir(), *folders])


def at_once(
    recipe: Recipe, reporter: Reporter, num_envs: int, watch: Callable[[], None], fix: Fix, limit_s: float
) -> None:
    """Runs envs, each in a process of its own, and reports what each holds while all run.

    watch: called in each process first.  limit_s: seconds for their start, and for a step.
    """
    recipe, options = fix.apply(recipe)
    options |= dict.fromkeys(("start_timeout", "step_timeout", "close_timeout"), limit_s)
    reporter.stage(f"building {num_envs} of it at once", Doing.NOTHING)
    with make_envs(recipe, num_envs, num_workers=num_envs, worker_init=watch, **options) as envs:
        reporter.stage(f"stepping {num_envs} of it at once", Doing.NOTHING)
        envs.reset(seed=0)
        for _ in range(_ROWS_AT_ONCE):
            envs.step(envs.sample_actions())
            reporter.alive()
        reporter.result("held", [sorted(held(worker["pid"])) for worker in envs.stats()["workers"]])
        reporter.stage(f"closing {num_envs} of it at once", Doing.NOTHING)


def stepping_many(
    recipe: Recipe, reporter: Reporter, num_envs: int, options: dict[str, Any], seconds: float, fix: Fix
) -> None:
    """Runs many envs by the options of a line that the doctor may recommend, and reports their speed."""
    reporter.stage("building many of it", Doing.NOTHING)
    started = time.perf_counter()
    recipe, more = fix.apply(recipe)
    with make_envs(recipe, num_envs, **options, **({} if "backend" in options else more)) as envs:
        reporter.result("start_s", time.perf_counter() - started)
        reporter.stage(STEPPING_MANY, Doing.NOTHING)
        steps_per_s = warmed_up(envs)(seconds)
        stats = envs.stats()
        reporter.result("episodes", sum(worker["resets"] for worker in stats["workers"]) - num_envs)
        reporter.result("env_steps", stats["env_steps"])
        reporter.result("steps_per_s", steps_per_s)
        reporter.stage("closing many of it", Doing.NOTHING)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))
