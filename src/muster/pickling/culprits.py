"""Finds the objects that cannot travel, or would arrive as something else, with their paths and remedies."""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import pickle
import time
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gymnasium.envs.registration import EnvSpec

from muster.errors import CannotTravel
from muster.pickling.kinds import Kind, kind_of
from muster.pickling.probe import PickleAttempt, attempt
from muster.pickling.public_names import shown_type
from muster.pickling.remedies import BUILD, Obstacle, remedy_for
from muster.pickling.running_calls import Running
from muster.pickling.shared_kinds import is_shared
from muster.pickling.user_call import MAKE_VEC, UserCall
from muster.pickling.walk import Edge, Walk, deepest_trail

_MAX_CULPRITS = 10
_SILENCE_S = 1.0
_HEAP_TYPE_FLAG = 1 << 9
# The number of levels from which on the recursion limit is a plausible reason, and how many of them a path shows.
_DEEP = 100
_SHOWN_LEVELS = 4
_DEEPEST_S = 0.5
_ALONE_S = 0.2
# Objects that lead from an argument to what it is made of.
_HOLDERS = (types.FunctionType, types.MethodType, functools.partial, type, abc.ABCMeta, EnvSpec)


@dataclass(frozen=True)
class Culprit:
    """An object that cannot be sent, or that would arrive as something else.

    path: the place of the object, ``factory.<closure>.server._context``.  type: its class, with module.
    reason: why it cannot be sent, or what arrives instead of it.  remedy: code to write instead.  lead: what that does.
    severity: it ``"blocks"`` sending, or arrives ``"silently_wrong"``.
    inherited: what a forked worker would get, None where that is not known.
    fork_is_safe: whether that is known to be usable.  may_work_by_fork: whether it may be, as the user uses it.
    """

    path: str
    type: str
    reason: str
    remedy: str
    severity: Literal["blocks", "silently_wrong"]
    inherited: str | None = None
    fork_is_safe: bool = False
    lead: str = BUILD
    may_work_by_fork: bool = False


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
    call: UserCall | Running = MAKE_VEC,
) -> list[Culprit]:
    """The culprits among several named objects. Of those that block, the ones that are nearest to an argument first.

    known: failures that were found before.  shares: the receiver can receive what multiprocessing shares, too.
    call: the user's call, for remedies.
    """
    deadline = time.monotonic() + limit_s
    failures = list(known)
    # One failure before the walk, which may use up the time, and the others after it.
    if not failures and (first := _next_failure(parts, failures, deadline, shares)) is not None:
        failures = [first]
    walk = Walk(parts, limit_s=max(limit_s / 4, deadline - time.monotonic()))
    known_kinds = ((value, kind) for value in walk if (kind := kind_of(value)) is not None)
    silent = [(value, kind) for value, kind in known_kinds if kind.silent or kind.warns]
    while failures and len(failures) < _MAX_CULPRITS and _can_be_left_out(failures[-1], walk):
        another = _next_failure(parts, failures, deadline, shares)
        if another is None or another.out_of_time:
            break
        failures.append(another)
    obstacles = [_obstacle(failure, walk) for failure in failures]
    found = [
        _blocking(failure, one, _in_one_argument(one, obstacles), walk, call)
        for failure, one in zip(failures, obstacles, strict=True)
    ]
    blocking = {culprit.path: culprit for culprit in found}
    # What a class or function brings along from its module comes last.
    nearest = sorted(blocking.values(), key=lambda culprit: culprit.path.count("<global>"))
    return nearest + [_silently_wrong(Obstacle(walk.trail(value), kind), (), call) for value, kind in silent]


def noted_in(parts: dict[str, Any], noted: Iterable[Any], call: UserCall | Running = MAKE_VEC) -> list[Culprit]:
    """The culprits for the objects that pickling has `noted`."""
    walk = Walk(parts, limit_s=1.0)
    wanted = {id(value) for value in noted}
    found = [(value, kind_of(value)) for value in walk if id(value) in wanted]
    return [_silently_wrong(Obstacle(walk.trail(value), kind), (), call) for value, kind in found if kind is not None]


def fork_hazards(parts: dict[str, Any]) -> list[Culprit]:
    """The objects that a forked worker would inherit but could not use."""
    walk = Walk(parts, limit_s=0.5, inherited=True)
    return [hazard for _, hazard in _unsafe_under_fork(walk, MAKE_VEC)]


def inherited_hazards(parts: dict[str, Any], call: UserCall) -> tuple[list[Culprit], list[Culprit]]:
    """The objects that a forked worker must not inherit at all, and those that it inherits at its own risk.

    Parts of an object that is listed are not listed again.
    """
    walk = Walk(parts, limit_s=0.5, inherited=True)
    forbidden: list[Culprit] = []
    risky: list[Culprit] = []
    met: list[str] = []
    for kind, hazard in _unsafe_under_fork(walk, call):
        if kind.breaks_under_fork:
            forbidden.append(hazard)
        elif not hazard.path.startswith(tuple(met)):
            met.append(f"{hazard.path}.")  # a file holds its buffer, and the buffer holds another file
            if not kind.idle:
                risky.append(hazard)
    return forbidden, risky


def _unsafe_under_fork(walk: Walk, call: UserCall) -> list[tuple[Kind, Culprit]]:
    known = [(value, kind) for value in walk if (kind := kind_of(value)) is not None and not kind.fork_is_safe]
    obstacles = [Obstacle(walk.trail(value), kind) for value, kind in known]
    return [
        (kind, dataclasses.replace(_silently_wrong(one, obstacles, call), severity="blocks", reason=kind.inherited))
        for one, (_, kind) in zip(obstacles, known, strict=True)
    ]


def _next_failure(
    parts: dict[str, Any], known: Sequence[PickleAttempt], deadline: float, shares: bool
) -> PickleAttempt | None:
    """The first failure when pickling without the objects that failed before; None if nothing fails in time."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        return None
    skip = {id(failure.failed) for failure in known}
    silence_s = min(_SILENCE_S, left_s)
    fds: list[int] | None = [] if shares else None
    outcome = attempt(list(parts.values()), silence_s=silence_s, limit_s=left_s, skip=skip, fds=fds)
    return None if outcome.data is not None else outcome


def _can_be_left_out(failure: PickleAttempt, walk: Walk) -> bool:
    """Whether pickling can go on without the object that failed.

    An object that a __getstate__ makes cannot be left out: it is a new one each time.
    """
    return not failure.out_of_time and not _is_too_deep(failure.error) and bool(walk.trail(failure.failed))


def _obstacle(failure: PickleAttempt, walk: Walk) -> Obstacle:
    """The object that failed, with the way to it."""
    trail: list[Edge] = walk.trail(failure.failed)
    shared = next((i for i, (_, holder) in enumerate(trail) if is_shared(holder)), None)
    if shared is not None:  # not the parts of a queue, but the queue
        trail = trail[: shared + 1]
    if failure.out_of_time or _is_too_deep(failure.error):
        # The whole argument is too large; the object at which the limit was reached is only one of many.
        name, root = next(iter(walk.parts.items()))
        trail = [_part_that_fails(walk.parts) if _is_too_deep(failure.error) else (name, root)]
    if not trail:
        where = (
            "in what a __reduce__ or __getstate__ in it returns" if walk.complete else "too large to say where in it"
        )
        trail = [(f"{next(iter(walk.parts))} ({where})", failure.failed)]
    return Obstacle(trail, kind_of(trail[-1][1]))


def _in_one_argument(one: Obstacle, obstacles: Sequence[Obstacle]) -> list[Obstacle]:
    return [other for other in obstacles if other.trail[0][1] is one.trail[0][1]]


def _blocking(
    failure: PickleAttempt, one: Obstacle, together: Sequence[Obstacle], walk: Walk, call: UserCall | Running
) -> Culprit:
    error = failure.error
    if _is_too_deep(error) and (found := _too_deep(walk.parts, call)) is not None:
        return found
    path, value = one.trail[-1]
    kind = one.kind
    remedy = remedy_for(one, together, call)
    # What refuses to travel at all, such as a policy that is marked to stay, has no business in a fork either.
    plain = kind is None and not isinstance(error, CannotTravel) and _is_plain_python(type(value))
    return Culprit(
        path=path,
        type=shown_type(value),
        reason=_reason(failure, kind),
        remedy=remedy.code,
        lead=remedy.lead,
        severity="silently_wrong" if failure.out_of_time else "blocks",
        inherited=kind.inherited if kind else "workers inherit a copy of it as it is now" if plain else None,
        fork_is_safe=kind.fork_is_safe if kind else plain,
        may_work_by_fork=kind is not None and kind.may_work_by_fork,
    )


def _too_deep(parts: Mapping[str, Any], call: UserCall | Running) -> Culprit | None:
    """The culprit that is nested deeper than pickling can follow; None where a __reduce__ makes the depth instead."""
    steps = deepest_trail(parts, limit_s=_DEEPEST_S)
    # Not the function that holds the nested objects, but the first of these objects.
    first = next((i for i, (_, value) in enumerate(steps) if type(value) not in _HOLDERS), 0)
    if len(steps) - first < _DEEP:
        return None
    paths = list(itertools.accumulate(part for part, _ in steps[: first + _SHOWN_LEVELS]))
    trail = list(zip(paths, (value for _, value in steps), strict=False))[: first + 1]
    value = steps[first][1]
    plain = _is_plain_python(type(value))
    remedy = remedy_for(Obstacle(trail, None), [Obstacle(trail, None)], call)
    return Culprit(
        path=f"{paths[-1]}...",
        type=shown_type(value),
        reason=f"it is nested too deeply to be pickled: at least {len(steps) - first:,} levels",
        remedy=remedy.code,
        lead=remedy.lead,
        severity="blocks",
        inherited="workers inherit a copy of it as it is now" if plain else None,
        fork_is_safe=plain,
    )


def _part_that_fails(parts: Mapping[str, Any]) -> tuple[str, Any]:
    def fails(value: Any) -> bool:
        return attempt(value, silence_s=_ALONE_S, limit_s=_ALONE_S).data is None

    return next((part for part in parts.items() if fails(part[1])), next(iter(parts.items())))


def _silently_wrong(one: Obstacle, others: Sequence[Obstacle], call: UserCall | Running) -> Culprit:
    path, value = one.trail[-1]
    kind = one.kind
    assert kind is not None
    remedy = remedy_for(one, _in_one_argument(one, others) or [one], call)
    return Culprit(
        path=path,
        type=shown_type(value),
        reason=kind.reason,
        remedy=remedy.code,
        lead=remedy.lead,
        severity="silently_wrong",
        inherited=kind.inherited,
        fork_is_safe=kind.fork_is_safe,
        may_work_by_fork=kind.may_work_by_fork,
    )


def _reason(failure: PickleAttempt, kind: Kind | None) -> str:
    error = failure.error
    if failure.out_of_time:
        return "it is so large that there was no time to pickle it to the end; the rest was not looked at"
    if error is None:
        return "pickling it hangs: its __getstate__ or __reduce__ did not come back in time"
    if _is_too_deep(error):
        return "pickling it never ends: its __reduce__ or __getstate__ makes ever more objects (RecursionError)"
    if kind is not None and kind.refused:
        return kind.reason
    if isinstance(error, CannotTravel):
        return error.headline
    said = f"{type(error).__name__}: {str(error) or '(no message)'}"
    if kind is not None and kind.made_anew and "fork context" in said:
        return f"it belongs to multiprocessing's fork context, in which fresh processes cannot find it ({said})"
    return f"{kind.reason} ({said})" if kind is not None else said


def _is_too_deep(error: BaseException | None) -> bool:
    # cloudpickle turns the RecursionError into a PicklingError.
    return isinstance(error, RecursionError) or (
        isinstance(error, pickle.PicklingError) and isinstance(error.__cause__, RecursionError)
    )


def _is_plain_python(kind: type) -> bool:
    """Whether instances of `kind` hold only Python objects: a fork copies those, while C++ parts may hold threads."""
    for base in kind.__mro__:
        if base in (object, list, dict, tuple, set, frozenset, BaseException, Exception):
            continue
        made_in_c = not base.__flags__ & _HEAP_TYPE_FLAG or type(base) not in (type, abc.ABCMeta)
        slots = sum(type(member) is types.MemberDescriptorType for member in vars(base).values())
        # An attribute dict and weak references take two pointers, each slot one; C structs take more.
        room = base.__base__.__basicsize__ + 8 * (2 + slots) if base.__base__ is not None else 0
        if made_in_c or base.__basicsize__ > room:
            return False
    return True
