"""Trials of two envs at once, each in a process of its own: the things that both want, and the line that gives each its
own."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from muster.doctor import trials
from muster.doctor.diagnosis import Finding
from muster.doctor.fixes import NO_FIX, Fix, arguments_of, fixes_for
from muster.doctor.held import ADDRESSES, Held, Watch
from muster.hosts.trial import TrialOutcome, Trials
from muster.recipes.recipe import Recipe
from muster.vector.side_by_side import LEAST_S

_SHOWN = 4
_OF_ITS_OWN = "give the env an argument for it, so that each env can have its own"


@dataclass(frozen=True)
class Conflicts:
    """The outcome of two envs at once. pair: of their trial.  wanted: what both want.  fix: None where none is known.

    fails: whether they cannot both run; else they share without a word what is `wanted`.
    """

    pair: TrialOutcome = field(default_factory=TrialOutcome)
    wanted: tuple[Held, ...] = ()
    fix: Fix | None = None

    @property
    def fails(self) -> bool:
        return self.pair.stage is not None

    def findings(self) -> list[Finding]:
        """One finding where they conflict; none else."""
        shown = ", ".join(map(str, self.wanted[:_SHOWN])) + ", ..." * (len(self.wanted) > _SHOWN)
        same = f"two of it at once use the same {shown}, each in a process of its own"
        remedy = str(self.fix) if self.fix is not None else _OF_ITS_OWN if shown else None
        if self.fails:
            fails = f"two of it at once do not run: {self.pair.problem}"
            parts = [same if shown else "", fails, self.pair.detail]
            return [Finding("blocks", "at once", "\n".join(filter(None, parts)), remedy)]
        return [Finding("warns", "at once", same, remedy)] if shown else []


@dataclass(frozen=True)
class Watched:
    """A trial, and what each env held at its end, and what it has opened and bound: see `Watch`."""

    outcome: TrialOutcome
    held: Sequence[set[Held]]
    noted: Sequence[set[Held]]


def watched(env: Trials, trial: Callable[..., None], **options: Any) -> Watched:
    """Runs a trial that takes a `Watch`. options: its others; without `num_envs` it is of one env."""
    num_envs = options.get("num_envs", 1)
    with tempfile.TemporaryDirectory(prefix="muster-doctor-") as folder:
        watch = Watch(folder)
        outcome = env.run(trial, watch=watch, **options)
        noted = [watch.noted(i) for i in range(num_envs)]
    held = [{Held(*one) for one in things} for things in outcome.results.get("held", [()] * num_envs)]
    return Watched(outcome, held, noted)


def find_conflicts(
    env: Trials,
    recipe: Recipe,
    alone: tuple[Watched, Watched],
    form: Any,
    say: Callable[[str], None],
    arguments_alone: bool,
) -> Conflicts:
    """What two envs of `recipe` fight over, with a fix that has been seen to work.

    alone: two trials of one env.  form: the id, spec or factory.  say: called with the name of each stage.
    arguments_alone: whether a fix may change nothing but arguments.
    """

    def at_once(fix: Fix) -> Watched:
        # What hangs in a worker ends there, with its stack, before the trial does.
        limit_s = max(LEAST_S, env.stage_timeout_s)
        patient = replace(env, stage_timeout_s=limit_s + LEAST_S)
        return watched(patient, trials.at_once, num_envs=2, fix=fix, limit_s=limit_s)

    say("trying two of it at once, each in a process of its own")
    things = set.union(*(one.held[0] | one.noted[0] for one in alone))
    absent = {one for one in things if one.kind == "file" and not os.path.lexists(one.name)}
    began, pair = time.time(), at_once(NO_FIX)
    for one in absent.intersection(*[set.union(*pair.noted)] * (pair.outcome.stage is not None)):
        # Of an env that was killed since the other one failed: with its pid file it would never start.
        with contextlib.suppress(OSError):
            if os.stat(one.name).st_ctime >= began:
                os.unlink(one.name)
    by_one = alone[0].held[0] & alone[1].held[0]
    wanted = _shared(pair, by_one)
    if pair.outcome.stage is not None:
        wanted = set.intersection(*(one.held[0] | one.noted[0] for one in alone)) | set.intersection(*pair.noted)
    if not wanted:
        # A busy machine may have been too slow.
        return Conflicts((pair if pair.outcome.stage is None else at_once(NO_FIX)).outcome)
    for fix, of in fixes_for(sorted(wanted), arguments_of(form, recipe.kwargs), arguments_alone):
        say(f"trying two at once by {fix}")
        tried = at_once(fix)
        if tried.outcome.stage is None and not _shared(tried, by_one) & wanted:
            return Conflicts(pair.outcome, tuple(of), fix)
    return Conflicts(pair.outcome, tuple(sorted(wanted)))


def _shared(pair: Watched, alone: set[Held]) -> set[Held]:
    """What two envs that run have both, or one has in place of the other, whose server has given up."""
    caches = f"{os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')}/"
    written = {one for one in set.intersection(*pair.noted) if one.kind not in ADDRESSES}  # it may have another now
    shared = {
        one
        for one in set.intersection(*pair.held) | written
        if one.kind != "device" and not one.name.startswith(caches)
    }
    for kind in ADDRESSES:
        of_one, *of_pair = ({one for one in held if one.kind == kind} for held in (alone, *pair.held))
        for of_each in of_pair:
            shared |= of_one - of_each if len(of_each) < len(of_one) else set()
    return shared
