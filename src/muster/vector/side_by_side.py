"""The trial of two envs side by side in one process: whether each is what it is alone, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from muster.envs.player import Player
from muster.hosts.env_facts import check_one_per_process
from muster.hosts.trial import Reporter, TrialOutcome, Trials
from muster.pool.launcher_client import LauncherClient
from muster.pool.resources import own_memory_bytes
from muster.pool.worker import seed_globals
from muster.recipes.recipe import Recipe
from muster.worker_info import WorkerInfo, worker_info_context

ROWS = 64
BUILDING_SECOND, STEPPING_BOTH = "building a second one in the same process", "stepping two of it in one process"
# Of an env alone, before an info counts as one that repeats: two short times may be equal by chance.
_RUNS_ALONE = 3


@dataclass(frozen=True)
class SideBySide:
    """The outcomes of playing two envs, each alone in a process, then both in one; those up to a failure.

    changed_info: the place of an info that differs beside another env; None where none does, or only as times do.
    again: the outcomes of playing an env alone once more, to find that out.
    """

    alone: tuple[TrialOutcome, ...]
    together: TrialOutcome
    changed_info: str | None = None
    again: tuple[TrialOutcome, ...] = ()

    @property
    def disturbed(self) -> str | None:
        """The reason why the envs may not share a process; None where each was what it is alone, or is not known."""
        if self.unknown is not None:
            return None
        if "digests" not in self.together.results:
            return f"only one may live in a process: {self.together.problem}"
        if [one.results["digest"] for one in self.alone] != self.together.results["digests"]:
            changes = "a trajectory changes"
        elif self.changed_info is not None:
            changes = f"{self.changed_info} changes"
        else:
            return None
        return f"two in one process disturb each other: {changes} when another env is stepped in between"

    @property
    def unknown(self) -> str | None:
        """The reason why it is not known whether the envs may share a process."""
        failed = next((one for one in (*self.alone, *self.again) if "digest" not in one.results), None)
        both = self.together
        if failed is None and "digests" not in both.results and both.stage not in (BUILDING_SECOND, STEPPING_BOTH):
            failed = both
        return None if failed is None else f"whether several may live in one process is not known: {failed.problem}"


@LauncherClient.kept()
def try_side_by_side(pair: Trials, rows: int = ROWS) -> SideBySide:
    """Plays two envs for `rows` rows, each alone and then both in turns. pair: trials of their recipes."""
    # One after the other: what two processes cannot have at once, such as a port or the only licence, may still be had
    # by one, and by the same env in all of its trials.
    alone: list[TrialOutcome] = []
    for which in (0, 1):
        alone.append(pair.run(play_alone, rows=rows, which=which))
        if "digest" not in alone[-1].results:
            return SideBySide(tuple(alone), TrialOutcome())
    tried = SideBySide(tuple(alone), pair.run(play_together, rows=rows))
    if tried.unknown is not None or tried.disturbed is not None:
        return tried
    return _with_infos(tried, lambda which: pair.run(play_alone, rows=rows, which=which))


def _with_infos(tried: SideBySide, play_again: Callable[[int], TrialOutcome]) -> SideBySide:
    """`tried`, with what the infos show. play_again: plays one of the envs alone, in another process."""
    again: list[TrialOutcome] = []
    for which, one in enumerate(tried.alone):
        alone, beside = one.results["infos"], tried.together.results["infos"][which]
        changed = [place for place in {**alone, **beside} if alone.get(place) != beside.get(place)]
        for _ in range(_RUNS_ALONE - 1):
            if not changed:
                break
            again.append(play_again(which))
            if "digest" not in again[-1].results:
                return replace(tried, again=tuple(again))
            repeated = again[-1].results["infos"]
            changed = [place for place in changed if alone.get(place) == repeated.get(place)]
        if changed:
            return replace(tried, changed_info=changed[0], again=tuple(again))
    return replace(tried, again=tuple(again))


def play_alone(first: Recipe, second: Recipe, reporter: Reporter, rows: int, which: int) -> None:
    """The trial that plays one of two envs in a process of its own, and reports its digests."""
    reporter.stage("building it")
    seed_globals(0)  # an env that draws from the global generators repeats alone, and not beside another
    with built((first, second)[which]) as env:
        reporter.stage("stepping it")
        player = Player(env, reporter.alive)
        _play([player], [which], rows)
        reporter.result("infos", player.info_digests)
        reporter.result("digest", player.digest)
        reporter.stage("closing it")


def play_together(first: Recipe, second: Recipe, reporter: Reporter, rows: int) -> None:
    """The trial that plays two envs in turns in one process, and reports the digests of each."""
    reporter.stage("building the first of two in one process")
    seed_globals(0)
    with built(first) as one:
        players = [Player(one, reporter.alive)]
        reporter.stage(BUILDING_SECOND)
        before = own_memory_bytes()
        with built(second) as other:
            check_one_per_process(other, 2)
            players.append(Player(other, reporter.alive))
            reporter.stage(STEPPING_BOTH)
            _play(players, [0, 1], rows)
            reporter.result("env_bytes", max(0, own_memory_bytes() - before))
            reporter.result("infos", [player.info_digests for player in players])
            reporter.result("digests", [player.digest for player in players])
            reporter.stage("closing two of it in one process")


def _play(players: Sequence[Player], seeds: Sequence[int], rows: int) -> None:
    """Plays the envs in turns, with a second reset halfway."""
    for player, seed in zip(players, seeds, strict=True):
        player.reset(seed)
    for row in range(rows):
        for player in players:
            player.play_row(resets=row == rows // 2)


@contextlib.contextmanager
def built(recipe: Recipe) -> Iterator[Any]:
    """An env of `recipe`, closed at the end of the context."""
    with worker_info_context(WorkerInfo(recipe.env_index, 0, 1, 1, seed=0)):
        made = recipe.build()
    yield made.env
    made.env.close()
    made.release(2.0)
