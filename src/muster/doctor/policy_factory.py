"""Whether a policy factory builds the same policy each time, and the same as the one that exists. Needs PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muster.doctor import policy_calls
from muster.doctor.diagnosis import Finding, seconds
from muster.doctor.findings import about_early_end
from muster.errors import CannotTravel, UsageError
from muster.hosts.trial import TrialOutcome, Trials
from muster.pickling import find_shared
from muster.rollout.processes.policy_travel import pack_factory
from muster.rollout.weights import require_shapes

_TOPIC = "policy_factory"
_LONG_BUILD_S = 5.0
_SHOWN = 4
_TOLERANCE = 1e-6


class _Built(NamedTuple):
    """A policy. outputs: by key, {} if it was not called."""

    name: str
    layout: policy_calls.Layout
    outputs: dict[str, Tensor]


def judge_factory(factory: Callable[[], Any], policy: Any, env: Trials | None, timeout_s: float) -> list[Finding]:
    """Findings about two policies that ``factory`` builds in another process.

    They are compared with each other, or with ``policy`` where that is not None: by names, shapes and dtypes of their
    weights, and by their outputs on the env's observations with equal weights, from one seed of torch. ``policy`` is
    called here.  env: trials of one; None where none can be stepped: outputs are not compared then.
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
    weights = None
    if policy is not None:
        try:
            require_shapes(policy)
        except UsageError as error:
            return [Finding("warns", _TOPIC, f"nothing was compared: {error}")]
        weights = policy_calls.weights_of(policy)
    observed, uncalled = None, "no env could be played for that, see above"
    if env is not None:
        outcome = env.run(policy_calls.observe)
        observed, uncalled = outcome.results.get("observed"), outcome.problem
    outcome = Trials(None, timeout_s).run(
        policy_calls.build_and_call, factory=packed, observed=observed, weights=weights
    )
    return list(_findings(policy, outcome, observed, uncalled))


def _findings(policy: Any, outcome: TrialOutcome, observed: bytes | None, uncalled: str) -> Iterator[Finding]:
    """observed: what policies were called with.  uncalled: why they could not be called, in words, without that."""
    is_built = outcome.stage is None or not outcome.stage.startswith("building")
    yield from about_early_end(outcome, "warns" if is_built else "blocks", _TOPIC, "it")
    names = ("the first one", "the second one") if policy is None else ("what it builds",) * policy_calls.BUILDS
    built = [
        _Built(name, outcome.results[f"layout {number}"], outcome.results.get(f"outputs {number}", {}))
        for number, name in enumerate(names)
        if f"layout {number}" in outcome.results
    ]
    if policy is not None and built:
        outputs = {}
        try:
            outputs = {} if observed is None else policy_calls.outputs_of_original(policy, observed)
        except Exception as error:
            observed = None
            uncalled = f"policy, called on the env's observations, raised {type(error).__name__}: {error}"
        built.insert(0, _Built("policy", policy_calls.layout_of(policy), outputs))
    if len(built) > 1:
        reference, *others = built
        differing = next(((one.name, found) for one in others if (found := _differences(reference, one))), None)
        if differing is not None:
            more = f"; {len(differing[1]) - _SHOWN} more" if len(differing[1]) > _SHOWN else ""
            text = f"{differing[0]} differs from {reference.name}: {'; '.join(differing[1][:_SHOWN])}{more}"
            yield Finding("warns", _TOPIC, text)
        elif outcome.stage is None:
            which = "the same architecture each time" if policy is None else "the same architecture as policy"
            equal = f"{len(reference.layout)} weights with equal names and shapes"
            outputs_too = ", outputs equal to 1e-6 with equal weights" if reference.outputs else ""
            yield Finding("good", _TOPIC, f"it builds {which}: {equal}{outputs_too}")
    if observed is None:
        yield Finding("note", _TOPIC, f"outputs were not compared: {uncalled}")
    build_s = outcome.results.get("build_s", 0.0)
    if build_s > _LONG_BUILD_S:
        yield Finding("note", _TOPIC, f"it takes {seconds(build_s)} to build a policy, in each collector's process")


def _differences(expected: _Built, got: _Built) -> list[str]:
    """The differences between two policies, in words: of their weights, and of their outputs where both were called."""
    found = _of_layouts(expected.layout, got.layout)
    if not expected.outputs or not got.outputs:
        return found
    layouts = [
        {key: policy_calls.described(tensor.shape[1:], tensor) for key, tensor in one.outputs.items()}
        for one in (expected, got)
    ]
    found += [f"outputs: {text}" for text in _of_layouts(*layouts)]
    if found:
        return found
    unequal = {}
    for key, its in expected.outputs.items():
        mine, its = got.outputs[key].to(torch.float64), its.to(torch.float64)
        wrong = ~torch.isclose(mine, its, _TOLERANCE, _TOLERANCE, equal_nan=True)
        if wrong.any():
            unequal[key] = (mine - its).abs()[wrong].max().item()
    if not unequal:
        return []
    return [
        f"with equal weights {_listed(list(unequal))} differ by up to {max(unequal.values()):.1g}: something that "
        "they are computed with is neither a parameter nor a buffer"
    ]


def _of_layouts(expected: policy_calls.Layout, got: policy_calls.Layout) -> list[str]:
    """The differences of ``got`` from ``expected``."""
    found = []
    if missing := [name for name in expected if name not in got]:
        found.append(f"missing {_listed(missing)}")
    if unexpected := [name for name in got if name not in expected]:
        found.append(f"unexpected {_listed(unexpected)}")
    differing = [name for name in expected if name in got and got[name] != expected[name]]
    return found + [f"{name} is {got[name]}, expected {expected[name]}" for name in differing]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
