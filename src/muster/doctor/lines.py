"""Runs the lines that the doctor could recommend, each for a moment in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from muster.doctor.advice import Candidate
from muster.doctor.diagnosis import Recommendation, TriedLine, seconds
from muster.doctor.trials import STEPPING_MANY, stepping_many
from muster.hosts.trial import PackedRecipes, TrialOutcome, run_guarded
from muster.pickling import fork_hazards
from muster.recipes.recipe import Recipe

_LONG_BUILD_S = 5.0


def try_lines(
    lines: Sequence[Candidate],
    recipe: PackedRecipes | Recipe,
    build_s: float | None,
    timeout_s: float,
    run_s: float,
    shared: str = "",
) -> tuple[list[TriedLine], list[TrialOutcome]]:
    """The lines, each with its env steps a second or its problem, and the outcomes of the trials that were run.

    The first line alone is run where building one env takes long, and where its envs die or hang as they are stepped;
    not so where the trial runs in a fork, which may be the cause.

    recipe: packed, or a Recipe if it cannot be sent.  build_s: seconds to build one env, if known.
    shared: what the envs share with this process, in words; then no line is run.
    """
    why = ""
    if isinstance(recipe, Recipe) and (hazards := fork_hazards(recipe.parts())):
        why = f"not run: its process would inherit {hazards[0].path}, see above"
    elif shared:
        why = "not run: its envs would use what they share with this process, see above"
    if why:
        return [TriedLine(one.advice.line, problem=why) for one in lines], []
    recipes = [recipe] if isinstance(recipe, Recipe) else recipe
    limit_s = max(timeout_s, 2 * run_s)
    tried: list[TriedLine] = []
    outcomes: list[TrialOutcome] = []
    for one in lines:
        if outcomes and build_s is not None and build_s > _LONG_BUILD_S:
            tried.append(TriedLine(one.advice.line, problem=f"not run: one env takes {seconds(build_s)} to build"))
            continue
        options = {"num_envs": one.advice.num_envs, "options": dict(one.options), "seconds": run_s}
        outcome = run_guarded(stepping_many, recipes, stage_timeout_s=limit_s, options=options)
        outcomes.append(outcome)
        steps_per_s = outcome.results.get("steps_per_s")
        tried.append(TriedLine(one.advice.line, steps_per_s, None if steps_per_s else outcome.problem.headline))
        if build_s is None and "start_s" in outcome.results:
            build_s = outcome.results["start_s"] * max(1, one.advice.num_workers) / one.advice.num_envs
        if isinstance(recipe, PackedRecipes) and is_fatal(outcome):
            break
    return tried, outcomes


def is_fatal(outcome: TrialOutcome) -> bool:
    """Whether the envs of a line died or hung as they were stepped."""
    return outcome.stage == STEPPING_MANY


def pick(lines: Sequence[Candidate], tried: Sequence[TriedLine]) -> Recommendation | None:
    """The fastest of the lines; the first where none was run to its end, None where there are none."""
    if not lines:
        return None
    speeds = [one.steps_per_s or 0.0 for one in tried] or [0.0]
    best = max(speeds)
    return replace(lines[speeds.index(best)].advice, steps_per_s=best or None)
