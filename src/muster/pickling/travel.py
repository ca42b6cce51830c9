"""Pickles objects for other processes, or says which object cannot be sent, why, and what to write instead."""

from __future__ import annotations

import pickle
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from muster.errors import CannotTravel
from muster.introspection import caller_stacklevel
from muster.pickling.culprits import Culprit, culprits_in, fork_hazards, inherited_hazards, noted_in
from muster.pickling.probe import attempt

# Together below the 5 s that a caller waits at most for an answer about an object that hangs.
_SILENCE_S = 2.5
_DIAGNOSIS_S = 1.0
_SHOWN = 5
# Arguments that are named with their subscript.
_SUBSCRIPTED = ("env_kwargs", "wrappers", "env[", "args", "kwargs", "values")
_PLAIN = (type(None), type(...), bool, int, float, complex, str, bytes)


def dumps(
    value: Any,
    parts: dict[str, Any],
    *,
    start_method: str,
    big: list[pickle.PickleBuffer] | None = None,
    fds: list[int] | None = None,
    inheritable: bool = True,
) -> bytes:
    """``value`` as a pickle.

    parts: what ``value`` is made of, by the names that messages use.  big, fds: see `attempt`.
    inheritable: whether a worker that is forked now would not need the pickle.
    Warns about objects that arrive as something else. Raises CannotTravel.
    """
    outcome = attempt(value, silence_s=_SILENCE_S, big=big, fds=fds)
    if outcome.data is None:
        culprits = culprits_in(parts, limit_s=_DIAGNOSIS_S, known=[outcome], shares=fds is not None)
        raise CannotTravel(_explain(culprits, start_method, parts if inheritable else None)) from outcome.error
    for culprit in noted_in(parts, outcome.noted) if outcome.noted else ():
        warnings.warn(
            f"{culprit.path} ({culprit.type}): {culprit.reason}. Build it in the worker instead:\n"
            f"{textwrap.indent(culprit.remedy, '    ')}",
            UserWarning,
            stacklevel=caller_stacklevel(),
        )
    return outcome.data


def is_plain(value: Any) -> bool:
    """Whether ``value`` is made of numbers, strings, arrays and builtin containers only, which always travel."""
    try:
        return _is_plain(value)
    except RecursionError:  # nested too deeply, or in itself
        return False


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind in _PLAIN or issubclass(kind, np.generic):
        return True
    if kind is np.ndarray:
        return not value.dtype.hasobject
    if kind is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return kind in (list, tuple, set, frozenset) and all(map(_is_plain, value))


def check_inheritable(parts: dict[str, Any]) -> None:
    """Raises CannotTravel for `parts` that a forked worker must not inherit; warns about those that are risky there."""
    forbidden, risky = inherited_hazards(parts)
    if forbidden:
        lines = [f'{_argument(forbidden[0].path)} cannot be inherited by a worker (context="fork").']
        raise CannotTravel("\n".join([*lines, *_found(forbidden), _instead(forbidden[0])]))
    if risky:
        lines = ['context="fork" is no way out here:', *_found(risky), _instead(risky[0])]
        warnings.warn("\n".join(lines), UserWarning, stacklevel=caller_stacklevel())


def _explain(culprits: Sequence[Culprit], start_method: str, parts: dict[str, Any] | None) -> str:
    """The message about culprits, at least one of which blocks: paths, reasons, the remedy, and whether fork helps.

    parts: the objects that the culprits were found in; None leaves out the remarks about fork and the serial backend.
    """
    blocking = [culprit for culprit in culprits if culprit.severity == "blocks"]
    lines = [f'{_argument(blocking[0].path)} cannot be sent to a worker (context="{start_method}").']
    lines += [*_found(blocking), _instead(blocking[0])]
    if parts is not None:
        lines += ["  " + _about_fork(blocking, parts), '  backend="serial" hands over this very object.']
    return "\n".join(lines)


def _found(culprits: Sequence[Culprit]) -> list[str]:
    lines = [f"  {culprit.path}: {culprit.type}: {culprit.reason}" for culprit in culprits[:_SHOWN]]
    return lines if len(culprits) <= _SHOWN else [*lines, f"  and {len(culprits) - _SHOWN} more"]


def _instead(culprit: Culprit) -> str:
    return f"  Build it in the worker instead:\n{textwrap.indent(culprit.remedy, ' ' * 6)}"


def _argument(path: str) -> str:
    """The argument of ``make_vec`` that a path starts with."""
    end = path.find("]") + 1 if path.startswith(_SUBSCRIPTED) else path.find(".")
    return path[:end] if end > 0 else path


def _about_fork(blocking: Sequence[Culprit], parts: dict[str, Any]) -> str:
    unsafe = next((culprit for culprit in blocking if not culprit.fork_is_safe), None)
    if unsafe is not None and unsafe.inherited is None:
        return f'Whether context="fork" would be safe for a {unsafe.type} is not known.'
    if unsafe is not None:
        return f'context="fork" is no way out here: {unsafe.inherited}.'
    for hazard in fork_hazards(parts):
        return f'context="fork" is no way out here: {hazard.path}: {hazard.reason}.'
    return f'context="fork" would be safe here: {blocking[0].inherited}.'
