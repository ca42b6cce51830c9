"""Trials of two envs at once, each in a process of its own: the things that both want, and the line that gives each its
own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from muster.doctor import trials
from muster.doctor.diagnosis import Finding
from muster.doctor.fixes import NO_FIX, TURNS, Fix, fixes_for
from muster.doctor.held import ADDRESSES, Held, HeldRecorder
from muster.hosts.trial import TrialOutcome, Trials
from muster.vector.side_by_side import LEAST_S

_SHOWN = 4
_OF_ITS_OWN = "give the env an argument for it, or set the variable that it reads, and ask again"


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
            parts = [same if shown else "", f"two of it at once do not run: {self.pair.problem}", self.pair.detail]
            return [Finding("blocks", "at once", "\n".join(filter(None, parts)), remedy)]
        return [Finding("warns", "at once", same, remedy)] if shown else []


def watched(env: Trials, trial: Callable[..., None], **options: Any) -> TrialOutcome:
    """The outcome of a trial that takes a `HeldRecorder`. options: its others; without `num_envs` it is of one env.

    Its results have the things of each env: "held" at its end, and "noted", which it has opened and bound.
    """
    num_envs = options.get("num_envs", 1)
    with tempfile.TemporaryDirectory(prefix="muster-doctor-") as folder:
        watch = HeldRecorder(folder)
        outcome = env.run(trial, watch=watch, **options)
        noted = [watch.noted(i) for i in range(num_envs)]
    held = [{Held(*one) for one in things} for things in outcome.results.get("held", [()] * num_envs)]
    outcome.results |= {"held": held, "noted": noted}
    return outcome


def leftovers(alone: Sequence[TrialOutcome]) -> list[str]:
    """The files and sockets that each env takes away when it is closed, such as pid files.

    An env that was killed leaves its own, so that no other one starts.
    """
    return [
        one.name for one in _of_each(alone) if one.kind in ("file", "Unix socket") and not os.path.lexists(one.name)
    ]


def _of_each(alone: Sequence[TrialOutcome]) -> set[Held]:
    return set.intersection(*(one.results["held"][0] | one.results["noted"][0] for one in alone))


def find_conflicts(
    env: Trials, alone: Sequence[TrialOutcome], say: Callable[[str], None], arguments_alone: bool
) -> Conflicts:
    """The things that two envs fight over, with a fix that has been seen to work.

    alone: trials of one, `behaviour` and `replay`.  say: called with the name of each stage.
    arguments_alone: whether a fix may change nothing but arguments.
    """

    def at_once(fix: Fix) -> TrialOutcome:
        # What hangs in a worker ends there, with its stack, before the trial does.
        limit_s = max(LEAST_S, env.stage_timeout_s)
        patient = replace(env, stage_timeout_s=limit_s + LEAST_S)
        return watched(patient, trials.at_once, num_envs=2, fix=fix, limit_s=limit_s)

    say("trying two of it at once, each in a process of its own")
    pair = at_once(NO_FIX)
    wanted = _shared(pair, alone)
    if pair.stage is not None:
        if not arguments_alone and at_once(TURNS).stage is None:
            again = at_once(NO_FIX)  # a busy machine may have been too slow
            return Conflicts(again) if again.stage is None else Conflicts(pair, fix=TURNS)
        wanted = _of_each(alone) | set.intersection(*pair.results["noted"])
    if not wanted:
        # A busy machine may have been too slow.
        return Conflicts(pair if pair.stage is None else at_once(NO_FIX))
    for fix, of in fixes_for(sorted(wanted), alone[0].results["arguments"], arguments_alone):
        say(f"trying two at once by {fix}")
        tried = at_once(fix)
        if tried.stage is None and not _shared(tried, alone) & wanted:
            return Conflicts(pair, tuple(of), fix)
    return Conflicts(pair, tuple(sorted(wanted)))


def _shared(pair: TrialOutcome, alone: Sequence[TrialOutcome]) -> set[Held]:
    """The things that two running envs have both, or one of them where the other's server has given up."""
    held, noted = (set.intersection(*pair.results[name]) for name in ("held", "noted"))
    caches = f"{os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')}/"
    # Of addresses that were bound, each may have another one now.
    both = held | {one for one in noted if one.kind not in ADDRESSES}
    shared = {one for one in both if one.kind != "device" and not one.name.startswith(caches)}
    for kind in ADDRESSES:
        one, again, *of_pair = (
            {thing for thing in things if thing.kind == kind}
            for outcome in (*alone, pair)
            for things in outcome.results["held"]
        )
        for of_each in of_pair:
            # Each may also have addresses that the kernel chooses.
            shared |= (one & again) - of_each if len(of_each) < min(len(one), len(again)) else set()
    return shared
