"""Finds the objects that cannot travel, or would arrive as something else, with their paths and remedies."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from muster.errors import CannotTravel
from muster.pickling.kinds import is_shared, kind_of
from muster.pickling.probe import PickleAttempt, attempt
from muster.pickling.remedies import Obstacle, shown_type
from muster.pickling.walk import Edge, Walk

_MAX_CULPRITS = 10
_SILENCE_S = 1.0
_MAKER_S = 0.5
_ALONE_S = 0.2
_CONTAINERS = (dict, list, tuple, set, frozenset)


Severity = Literal["blocks", "silently_wrong"]


@dataclass(frozen=True)
class Culprit:
    """An object that cannot be sent, or that would arrive as something else.

    path: the place of the object, ``factory.<closure>.server._context``.  type: its class, with module.
    reason: why it cannot be sent, or what arrives instead of it.
    severity: it ``"blocks"`` sending, or arrives ``"silently_wrong"``.
    obstacle: the object, for `remedy_for`.
    """

    path: str
    type: str
    reason: str
    severity: Severity
    obstacle: Obstacle


def find_culprits(obj: Any, name: str = "factory", *, limit_s: float = 2.0) -> list[Culprit]:
    """The objects that keep ``obj`` from being sent to another process as it is, blocking ones first; [] if none does.

    Runs no property, and no other code of the objects than pickling them runs. Returns after ``limit_s`` seconds at
    most, with what was found by then.
    """
    return culprits_in({name: obj}, limit_s=limit_s)


def culprits_in(
    parts: dict[str, Any],
    *,
    limit_s: float,
    known: Sequence[PickleAttempt] = (),
    shares: bool = False,
) -> list[Culprit]:
    """The culprits among several named objects. Of those that block, the ones that are nearest to an argument first.

    known: failures that were found before.  shares: the receiver can receive what multiprocessing shares, too.
    """
    deadline = time.monotonic() + limit_s
    failures = list(known)
    # One failure before the walk, which may use up the time, and the others after it.
    if not failures and (first := _next_failure(parts, (), deadline, shares)) is not None:
        failures = [first]
    walk = Walk(parts, limit_s=max(limit_s / 4, deadline - time.monotonic()))
    known_kinds = ((value, kind) for value in walk if (kind := kind_of(value)) is not None)
    silent = [(value, kind) for value, kind in known_kinds if kind.silent or kind.warns]
    obstacles = [_obstacle(failure, walk, shares) for failure in failures]
    while failures and len(failures) < _MAX_CULPRITS and _can_be_left_out(failures[-1], obstacles):
        skip = [one.trail[-1][1] for one in obstacles] + [failure.failed for failure in failures]
        another = _next_failure(parts, skip, deadline, shares)
        if another is None or another.out_of_time:
            break
        failures.append(another)
        obstacles.append(_obstacle(another, walk, shares))
    found = [
        _culprit(one, "silently_wrong" if failure.out_of_time else "blocks", _reason(failure, one))
        for failure, one in zip(failures, obstacles, strict=True)
    ]
    blocking = {culprit.path: culprit for culprit in found}
    # What a class or function brings along from its module comes last.
    nearest = sorted(blocking.values(), key=lambda culprit: culprit.path.count("<global>"))
    return nearest + [
        _culprit(Obstacle(walk.trail(value), kind), "silently_wrong", kind.reason) for value, kind in silent
    ]


def noted_in(parts: dict[str, Any], noted: Iterable[Any]) -> list[Culprit]:
    """The culprits for the objects that pickling has `noted`."""
    walk = Walk(parts, limit_s=1.0)
    wanted = {id(value) for value in noted}
    found = [Obstacle(walk.trail(value), kind_of(value)) for value in walk if id(value) in wanted]
    return [_culprit(one, "silently_wrong", one.kind.reason) for one in found if one.kind is not None]


def _next_failure(parts: dict[str, Any], without: Sequence[Any], deadline: float, shares: bool) -> PickleAttempt | None:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        return None
    silence_s = min(_SILENCE_S, left_s)
    outcome = attempt(
        list(parts.values()), silence_s=silence_s, limit_s=left_s, skip=set(map(id, without)), fds=_fds(shares)
    )
    return None if outcome.data is not None else outcome


def _fds(shares: bool) -> list[int] | None:
    return [] if shares else None


def _can_be_left_out(failure: PickleAttempt, obstacles: Sequence[Obstacle]) -> bool:
    # Pickling cannot skip a builtin container.
    last = obstacles[-1].trail[-1][1]
    again = any(one.trail[-1][1] is last for one in obstacles[:-1])
    return not failure.out_of_time and not _is_too_deep(failure.error) and not again and type(last) not in _CONTAINERS


def _obstacle(failure: PickleAttempt, walk: Walk, shares: bool) -> Obstacle:
    """The object that failed, with the way to it; or the one that holds it, where it was only made to be pickled."""
    trail: list[Edge] = walk.trail(failure.failed)
    shared = next((i for i, (_, holder) in enumerate(trail) if is_shared(holder)), None)
    if shared is not None:  # not the parts of a queue, but the queue
        trail = trail[: shared + 1]
    if failure.out_of_time or _is_too_deep(failure.error):
        # The whole argument is too large; the object at which the limit was reached is only one of many.
        name, root = next(iter(walk.parts.items()))
        trail = [_part_that_fails(walk.parts, shares) if _is_too_deep(failure.error) else (name, root)]
    trail = trail or _way_to_maker(failure, walk, shares)
    return Obstacle(trail, kind_of(trail[-1][1]))


def _way_to_maker(failure: PickleAttempt, walk: Walk, shares: bool) -> list[Edge]:
    """The way to the object that has made the one that failed, by __reduce__ or __getstate__.

    Pickling goes depth first: that object holds, or is, the last one that both pickling and `walk` have reached.
    """
    deadline = time.monotonic() + _MAKER_S
    trail = next((trail for value in reversed(failure.seen) if (trail := walk.trail(value))), [])
    while trail and time.monotonic() < deadline and not _fails(trail[-1][1], shares):
        trail.pop()
    return trail or [_part_that_fails(walk.parts, shares)]


def _part_that_fails(parts: Mapping[str, Any], shares: bool) -> tuple[str, Any]:
    return next((part for part in parts.items() if _fails(part[1], shares)), next(iter(parts.items())))


def _fails(value: Any, shares: bool) -> bool:
    return attempt(value, silence_s=_ALONE_S, limit_s=_ALONE_S, fds=_fds(shares)).data is None


def _culprit(one: Obstacle, severity: Severity, reason: str) -> Culprit:
    path, value = one.trail[-1]
    return Culprit(path, shown_type(value), reason, severity, one)


def _reason(failure: PickleAttempt, one: Obstacle) -> str:
    error, value, kind = failure.error, one.trail[-1][1], one.kind
    if failure.out_of_time:
        return "it is so large that there was no time to pickle it to the end; the rest was not looked at"
    if error is None:
        return "pickling it hangs: its __getstate__ or __reduce__ did not come back in time"
    if _is_too_deep(error):
        return "it is nested too deeply to be pickled, or its __reduce__ makes ever more objects (RecursionError)"
    if kind is not None and kind.refused:
        return kind.reason
    if isinstance(error, CannotTravel):
        return error.headline
    said = f"{type(error).__name__}: {str(error) or '(no message)'}"
    if failure.failed is not value and not is_shared(value):
        made = kind_of(failure.failed)
        why = f"{made.reason} ({said})" if made is not None else said
        return f"what its __reduce__ or __getstate__ returns holds a {shown_type(failure.failed)}: {why}"
    return f"{kind.reason} ({said})" if kind is not None else said


def _is_too_deep(error: BaseException | None) -> bool:
    # cloudpickle turns the RecursionError into a PicklingError.
    return isinstance(error, RecursionError) or (
        isinstance(error, pickle.PicklingError) and isinstance(error.__cause__, RecursionError)
    )
