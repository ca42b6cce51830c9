"""The trial of two envs side by side in one process: whether each is what it is alone, bit for bit."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from muster.envs.player import Player
from muster.hosts.env_facts import check_one_per_process, is_awaited
from muster.hosts.trial import Reporter, TrialOutcome, Trials
from muster.pool.launcher_client import LauncherClient
from muster.pool.resources import own_memory_bytes
from muster.pool.unique_indices import UniqueIndices
from muster.pool.worker import seed_globals
from muster.recipes.recipe import Recipe
from muster.worker_info import WorkerInfo, get_worker_info, worker_info_context

ROWS = 64
BUILDING_SECOND, STEPPING_BOTH = "building a second one in the same process", "stepping two of it in one process"
# Of an env alone, before it or an info counts as one that repeats: two short times may be equal by chance.
_RUNS_ALONE = 3
# Two in turns may take so many times as long as one alone, and so many seconds.
TIMES_ALONE, LEAST_S = 3, 10.0


@dataclass(frozen=True)
class SideBySide:
    """The outcome of playing two envs, each alone in a process, then both in one.

    together: that of both; of nothing where it has not come to that.
    disturbed: the reason why the envs may not share a process; None where each was what it is alone, or is not known.
    unknown: the reason why it is not known whether they may.
    """

    together: TrialOutcome
    disturbed: str | None = None
    unknown: str | None = None


class _NotKnown(Exception):
    """A trial has ended early, for a reason that says nothing about two envs in one process."""


@LauncherClient.kept()
def try_side_by_side(pair: Trials, rows: int = ROWS, *, gives_up: bool = False) -> SideBySide:
    """Plays two envs for `rows` rows, each alone and then both in turns. pair: trials of their recipes.

    gives_up: ends what takes much longer with both than with one.
    """
    together, one_s = TrialOutcome(), 0.0

    def play_one(which: int) -> dict[str, Any]:
        nonlocal one_s
        start = time.monotonic()
        outcome = pair.run(play_alone, rows=rows, which=which)
        one_s = max(one_s, time.monotonic() - start)
        if "digest" not in outcome.results:
            raise _NotKnown(outcome.problem)
        return outcome.results

    try:
        # One after the other: what two processes cannot have at once, such as a port or the only licence, may still be
        # had by one, and by the same env in all of its trials.
        alone = [play_one(0), play_one(1)]
        most_s = max(LEAST_S, TIMES_ALONE * one_s) if gives_up else math.inf
        together = pair.run(play_together, rows=rows, most_s=most_s)
        if "digests" in together.results:
            changed = _changed(alone, together.results, play_one)
        elif together.late:
            raise _NotKnown(f"{together.problem}, {TIMES_ALONE} times what one alone took, and at least {LEAST_S:g} s")
        elif together.stage in (BUILDING_SECOND, STEPPING_BOTH):
            return SideBySide(together, f"only one may live in a process: {together.problem}")
        else:
            raise _NotKnown(together.problem)
    except _NotKnown as early:
        return SideBySide(together, unknown=f"whether several may live in one process is not known: {early}")
    if changed is None:
        return SideBySide(together)
    disturbed = f"two in one process disturb each other: {changed} changes when another env is stepped in between"
    return SideBySide(together, disturbed)


def _changed(
    alone: Sequence[dict[str, Any]], together: dict[str, Any], play_one: Callable[[int], dict[str, Any]]
) -> str | None:
    """The difference that another env makes, in words: the trajectory, or an info that repeats where the env is alone.

    alone, together: the results of playing.  play_one: plays one of the envs alone, in another process.
    Raises _NotKnown for a trajectory that does not repeat where the env is alone.
    """
    for which, results in enumerate(alone):
        if results["digest"] == together["digests"][which]:
            continue
        if any(play_one(which)["digest"] != results["digest"] for _ in range(_RUNS_ALONE - 1)):
            raise _NotKnown("alone, too, its trajectory differs from run to run, by the same seed and actions")
        return "a trajectory"
    for which, results in enumerate(alone):
        infos, beside = results["infos"], together["infos"][which]
        changed: list[str] = [place for place in {**infos, **beside} if infos.get(place) != beside.get(place)]
        for _ in range(_RUNS_ALONE - 1):
            if changed:
                repeated = play_one(which)["infos"]
                changed = [place for place in changed if infos.get(place) == repeated.get(place)]
        if changed:
            return changed[0]
    return None


def play_alone(first: Recipe, second: Recipe, reporter: Reporter, rows: int, which: int) -> None:
    """The trial that plays one of two envs in a process of its own, and reports its digests."""
    reporter.stage("building it")
    seed_globals(0)  # an env that draws from the global generators repeats alone, and not together with another
    with built((first, second)[which], which) as env:
        reporter.stage("stepping it")
        player = Player(env, reporter.alive)
        _play([player], [get_worker_info()], [which], rows)
        reporter.result("infos", player.info_digests)
        reporter.result("digest", player.digest)
        reporter.stage("closing it")


def play_together(first: Recipe, second: Recipe, reporter: Reporter, rows: int) -> None:
    """The trial that plays two envs in turns in one process, and reports the digests of each."""
    reporter.stage("building the first of two in one process")
    seed_globals(0)
    with built(first) as one:
        players, infos = [Player(one, reporter.alive)], [get_worker_info()]
        reporter.stage(BUILDING_SECOND)
        before = own_memory_bytes()
        with built(second) as other:
            check_one_per_process(other, 2)
            players.append(Player(other, reporter.alive))
            infos.append(get_worker_info())
            reporter.stage(STEPPING_BOTH)
            _play(players, infos, [0, 1], rows)
            reporter.result("env_bytes", max(0, own_memory_bytes() - before))
            reporter.result("infos", [player.info_digests for player in players])
            reporter.result("digests", [player.digest for player in players])
            reporter.stage("closing two of it in one process")


def _play(players: Sequence[Player], infos: Sequence[WorkerInfo | None], seeds: Sequence[int], rows: int) -> None:
    """Plays the envs in turns, with a second reset halfway. infos: what each sees of itself."""
    for player, info, seed in zip(players, infos, seeds, strict=True):
        with worker_info_context(info):
            player.reset(seed)
    for row in range(rows):
        for player, info in zip(players, infos, strict=True):
            with worker_info_context(info):
                player.play_row(resets=row == rows // 2)


@contextlib.contextmanager
def built(recipe: Recipe, which: int = 0) -> Iterator[Any]:
    """An env of `recipe`, closed at the end of the context. which: of those that a trial may run at once."""
    indices = UniqueIndices()
    own = indices.take(which + 1)[-1:]  # alone the same as together with others
    info = WorkerInfo(recipe.env_index, 0, 1, 1, seed=0, unique_indices=own)
    with worker_info_context(info), contextlib.ExitStack() as ends:
        made = recipe.build()
        env: Any = made.env
        if is_awaited(env):
            from muster.hosts.waiting import Awaited, InLoop  # with asyncio, which takes a while to import

            loop = InLoop()
            ends.callback(loop.end)
            env = Awaited(env, functools.partial(loop.called, info))
        yield env
        env.close()
        made.release(2.0)
    indices.release()
