"""Whether a policy factory builds the same policy each time, everywhere, and the same as the one that exists."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from muster.doctor.diagnosis import Finding, Severity, seconds
from muster.doctor.policy_calls import (
    FACTORY,
    OBSERVED,
    Layout,
    calls_in,
    layout_of,
    outputs_of_original,
    write_weights,
)
from muster.doctor.policy_differences import layout_differences, output_differences
from muster.doctor.trials import building, observing
from muster.envs import resolve_foreign_id
from muster.errors import CannotTravel, RecipeError, UsageError
from muster.pickling import find_shared
from muster.recipes.recipe import make_recipes
from muster.rollout.processes.policy_travel import pack_factory
from muster.rollout.weights import require_shapes
from muster.workers.guarded import STARTING, PackedRecipes, TrialOutcome, run_guarded

_TOPIC = "policy_factory"
_LONG_BUILD_S = 5.0
_SHOWN = 4
# The trials that build policies, and the names of those that each builds.
_BUILDING = {"first": ("the first one", "the second one"), "second": ("the one in another process",)}


class _Built(NamedTuple):
    """A policy. calls: its outputs by key, from one seed, from the same again and from another; [] if uncalled."""

    name: str
    layout: Layout
    calls: list[dict[str, Tensor]]


def packed_recipe(
    env: Any, env_kwargs: Mapping[str, Any], wrappers: Sequence[Callable[[Any], Any]]
) -> PackedRecipes | None:
    """The recipe of one env for another process; None where there is none, or where it cannot travel."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the env's own diagnosis tells of them
        try:
            recipes = make_recipes(env, 1, env_kwargs, wrappers, resolve_foreign_id=resolve_foreign_id)
            return PackedRecipes.of(recipes, "spawn")
        except (RecipeError, CannotTravel):
            return None


def judge_factory(
    factory: Callable[[], Any], policy: Any, recipe: PackedRecipes | None, timeout_s: float
) -> list[Finding]:
    """Findings about the policies that ``factory`` builds, twice in one process and once in another.

    They are compared with each other, or with ``policy`` where that is not None: by names and shapes of their weights,
    and by their outputs on the env's observations with equal weights. ``policy`` is called here.
    recipe: packed; None where no env can be built: outputs are not compared then.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            packed = pack_factory(factory, "spawn")
        except CannotTravel as error:
            return [Finding("blocks", _TOPIC, str(error))]
        if shared := find_shared({"policy_factory": factory}, by_fork=False):
            text = f"not tried: the policies would use what it shares with this process: {shared}"
            return [Finding("warns", _TOPIC, text)]
    with tempfile.TemporaryDirectory(prefix="muster-policy-") as name:
        folder = Path(name)
        (folder / FACTORY).write_bytes(packed)
        if policy is not None:
            try:
                require_shapes(policy)
            except UsageError as error:
                return [Finding("warns", _TOPIC, f"nothing was compared: {error}")]
            write_weights(policy, folder)
        options = {"folder": name}
        uncalled = "no env could be played for that, see above"
        if recipe is not None:
            outcome = run_guarded(observing, recipe, stage_timeout_s=timeout_s, options=options)
            uncalled = "" if (folder / OBSERVED).exists() else f"{outcome.stage}, it {outcome.how}"
        outcomes: dict[str, TrialOutcome] = {}
        for trial, names in _BUILDING.items():
            wanted = {**options, "name": trial, "builds": len(names)}
            outcomes[trial] = run_guarded(building, None, stage_timeout_s=timeout_s, options=wanted)
            if outcomes[trial].stage is not None:
                break
        built = [one for trial, outcome in outcomes.items() for one in _built(trial, outcome, folder)]
        return list(_findings(policy, built, list(outcomes.values()), folder, uncalled))


def _built(trial: str, outcome: TrialOutcome, folder: Path) -> Iterator[_Built]:
    for number, name in enumerate(_BUILDING[trial]):
        if (layout := outcome.results.get(f"layout {number}")) is not None:
            yield _Built(name, layout, calls_in(folder, f"{trial} {number}"))


def _findings(
    policy: Any, built: list[_Built], outcomes: list[TrialOutcome], folder: Path, uncalled: str
) -> Iterator[Finding]:
    """uncalled: why the policies could not be called, in words; "" if they were."""
    ended = next((outcome for outcome in outcomes if outcome.stage is not None), None)
    if ended is not None:
        yield _about_end(ended)
    if built:
        reference, others = built[0], built[1:]
        if policy is not None:
            reference, others = _Built("policy", layout_of(policy), []), built
            if not uncalled:
                try:
                    reference.calls.append(outputs_of_original(policy, folder))
                except Exception as error:
                    uncalled = f"policy, called on the env's observations, raised {type(error).__name__}: {error}"
        steady = all(not output_differences(*one.calls[:2]) for one in built if one.calls)
        yield from _about_differences(reference, others, steady)
        if built[0].calls:
            yield from _about_randomness(built[0].calls, steady, outcomes[0].results["random"])
        if ended is None and not any(_differences(reference, one, steady) for one in others):
            yield _about_equality(reference, policy, bool(reference.calls) and steady)
    if uncalled:
        yield Finding("note", _TOPIC, f"outputs were not compared: {uncalled}")
    build_s = outcomes[0].results.get("build_s", 0.0)
    if build_s > _LONG_BUILD_S:
        yield Finding("note", _TOPIC, f"it takes {seconds(build_s)} to build a policy, in each collector's process")


def _about_end(outcome: TrialOutcome) -> Finding:
    if outcome.stage == STARTING:  # none of its code has run
        return Finding("warns", _TOPIC, f"{outcome.stage}, a trial {outcome.how}", outcome.detail or None)
    severity: Severity = "blocks" if str(outcome.stage).startswith("building") else "warns"
    return Finding(severity, _TOPIC, f"{outcome.stage}, it {outcome.how}", outcome.detail or None)


def _differences(reference: _Built, one: _Built, steady: bool) -> list[str]:
    found = layout_differences(reference.layout, one.layout)
    if reference.calls and one.calls:
        found += output_differences(reference.calls[0], one.calls[0], values=steady and not found)
    return found


def _about_differences(reference: _Built, others: list[_Built], steady: bool) -> Iterator[Finding]:
    differing: dict[str, list[str]] = {}
    for one in others:
        if found := _differences(reference, one, steady):
            more = f"; {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            differing.setdefault("; ".join(found[:_SHOWN]) + more, []).append(one.name)
    for text, names in differing.items():
        which = "what it builds" if len(names) == len(others) > 1 else " and ".join(names)
        yield Finding("warns", _TOPIC, f"{which} differs from {reference.name}: {text}")


def _about_randomness(calls: list[dict[str, Tensor]], steady: bool, layers: list[str]) -> Iterator[Finding]:
    """calls, steady: outputs of one policy, and whether they are equal from one seed of torch.  layers: random ones."""
    once, _, other = calls
    if layers:
        text = f"{', '.join(layers[:_SHOWN])} in training mode: its outputs are random. Call eval() in the factory"
        yield Finding("warns", _TOPIC, f"{text}, unless that is wanted")
    if not steady:
        text = "outputs differ from call to call, also from one seed of torch: it draws from a generator of its own, or"
        yield Finding("note", _TOPIC, f"{text} keeps a state. So their values were not compared")
    elif drawn := [key for key in once if output_differences({key: once[key]}, {key: other[key]})]:
        yield Finding("note", _TOPIC, f"{', '.join(drawn)}: drawn in each call, equal from one seed of torch")


def _about_equality(reference: _Built, policy: Any, were_compared: bool) -> Finding:
    weights = reference.layout
    which = "the same architecture as policy" if policy is not None else "the same architecture, in another process too"
    outputs = ", outputs equal to 1e-6 with equal weights" if were_compared else ""
    return Finding("good", _TOPIC, f"it builds {which}: {len(weights)} weights with equal names and shapes{outputs}")
