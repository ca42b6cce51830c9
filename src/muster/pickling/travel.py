"""Pickles objects for other processes, or says which object cannot be sent, why, and what to write instead."""

from __future__ import annotations

import contextvars
import copy
import pickle
import textwrap
import types
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from muster.errors import CannotTravel
from muster.introspection import caller_stacklevel, module_name
from muster.pickling.culprits import Culprit, culprits_in, noted_in
from muster.pickling.main_module import MAIN_NAMES, by_name, is_only_here
from muster.pickling.probe import PickleAttempt, attempt
from muster.pickling.remedies import Remedy, remedy_for
from muster.pickling.user_call import MAKE_VEC, UserCall, called_as

# Together below the 5 s that a caller waits at most for an answer about an object that hangs.
_SILENCE_S = 2.5
_DIAGNOSIS_S = 1.0
_SHOWN = 5
# The pages about objects of some packages; `CannotTravel` has that of all others.
_PAGES = {"zmq": "problems/zeromq", "dmlab2d": "problems/melting-pot"}
_IMPORTING = (
    "a function as worker_init after which `import {}` works in each worker as it does here, such as one that extends "
    "sys.path or installs a finder."
)
_PLAIN = (type(None), type(...), bool, int, float, complex, str, bytes)


def dumps(
    value: Any,
    parts: dict[str, Any],
    *,
    start_method: str | None,
    big: list[pickle.PickleBuffer] | None = None,
    fds: list[int] | None = None,
    before: Sequence[Any] = (),
    lays_main: bool = False,
    forks: bool = False,
    call: UserCall = MAKE_VEC,
) -> bytes:
    """``value`` as a pickle.

    parts: what ``value`` and `before` are made of, by the names that messages use.  big, fds, before, lays_main,
    forks: see `attempt`.
    start_method: of the worker that receives it; None for one that runs already.  call: the user's call that wants it
    sent.
    Warns about objects that arrive as something else. Raises CannotTravel.
    """

    def pickled() -> PickleAttempt:
        with called_as(call):
            return attempt(
                value, silence_s=_SILENCE_S, before=before, lays_main=lays_main, forks=forks, big=big, fds=fds
            )

    outcome, named = pickled(), ""
    if outcome.error is not None and (named := _only_here_in(outcome.seen)):
        if big is not None:
            big.clear()
        context = contextvars.copy_context()
        context.run(by_name.set, True)
        by_names = context.run(pickled)
        if by_names.data is None:
            named = ""
        elif before or start_method is None:  # what has loaded them is worker_init
            outcome = by_names
    if outcome.data is None:
        with called_as(call):
            culprits = culprits_in(parts, limit_s=_DIAGNOSIS_S, known=[outcome], shares=fds is not None)
            said = _explain(culprits, start_method, call)
        if named:
            said += f"\n  Only this process knows {named}: its contents are sent. Or pass {_IMPORTING.format(named)}"
        packages = [one.type.partition(".")[0] for one in culprits if one.severity == "blocks"]
        pages = [_PAGES[package] for package in packages if package in _PAGES]
        raise CannotTravel(said, *pages[:1]) from outcome.error
    for culprit in noted_in(parts, outcome.noted) if outcome.noted else ():
        advice = _advice(remedy_for(culprit.obstacle, call, running=start_method is None))
        said = f"{culprit.path} ({culprit.type}): {culprit.reason}. {advice}"
        warnings.warn(said, UserWarning, stacklevel=caller_stacklevel())
    return outcome.data


def _only_here_in(seen: Sequence[Any]) -> str:
    """The names of the modules of classes, functions and modules that only this process knows, the script excepted."""
    code = [one for one in seen if issubclass(type(one), (type, types.FunctionType, types.ModuleType))]
    modules = (one.__name__ if isinstance(one, types.ModuleType) else module_name(one) for one in code)
    return ", ".join(dict.fromkeys(name for name in modules if name not in MAIN_NAMES and is_only_here(name)))


def named_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The arguments of a call, by the names that messages use."""
    named = {f"{prefix}args[{i}]": one for i, one in enumerate(args)}
    return named | {f'{prefix}kwargs["{key}"]': one for key, one in kwargs.items()}


class Unpickler(pickle.Unpickler):
    """Pickle's unpickler, which says what it has looked for in a module that is not found here."""

    def find_class(self, module: str, global_name: str, /) -> Any:
        try:
            return super().find_class(module, global_name)
        except (ImportError, AttributeError) as error:
            said = f"{global_name} of the module {module} ({type(error).__name__}: {error})"
            lacks = error.name if isinstance(error, ImportError) else None  # another that this one imports
            kind = ModuleNotFoundError if isinstance(error, ModuleNotFoundError) else ImportError
            raise kind(said, name=lacks or module) from error


def not_rebuilt(what: str, error: BaseException, instead: str) -> CannotTravel:
    """The error for something that could be sent, but not made anew where it arrived. instead: what to do, in words."""
    if isinstance(error, ImportError) and error.name:
        return CannotTravel(
            f"{what} cannot be rebuilt there: the worker does not find {error}\n"
            f"  Pass {_IMPORTING.format(error.name)}\n"
            "  Or define what is missing in a module that every process finds."
        )
    return CannotTravel(
        f"{what} cannot be rebuilt there: {type(error).__name__}: {error}\n"
        "  What its __reduce__ or __getstate__ gave does not make it anew.\n"
        f"  {instead}"
    )


def is_plain(value: Any) -> bool:
    """Returns whether ``value`` is made of numbers, strings, arrays and builtin containers alone: those travel."""
    try:
        return _is_plain(value)
    except RecursionError:  # nested too deeply, or in itself
        return False


def copied_if_plain(value: Any) -> Any:
    """A copy of plain data, which nobody else changes; anything else itself."""
    return copy.deepcopy(value) if is_plain(value) else value


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind in _PLAIN or issubclass(kind, np.generic):
        return True
    if kind is np.ndarray:
        return not value.dtype.hasobject
    if kind is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return kind in (list, tuple, set, frozenset) and all(map(_is_plain, value))


def _explain(culprits: Sequence[Culprit], start_method: str | None, call: UserCall) -> str:
    """The message about culprits that block, at least one: paths, reasons, the remedy, and other ways out."""
    blocking = [culprit for culprit in culprits if culprit.severity == "blocks"]
    argument, _ = blocking[0].obstacle.argument()
    if start_method is None or call.far:
        where = "other machines" if call.far else "a worker that runs already"
        lines = [f"{argument} cannot be sent to {where}.", *_found(blocking)]
        return "\n".join([*lines, _instead(blocking, call, running=start_method is None)])
    how = call.context.format(method=start_method)
    lines = [f"{argument} cannot be sent to a worker ({how}).", *_found(blocking), _instead(blocking, call)]
    fork = call.context.format(method="fork")
    lines += [
        f"  {fork} copies all objects. Nobody looks at what a fork breaks: threads, held locks, CUDA.",
        f"  {call.in_process} hands over this very object.",
    ]
    return "\n".join(lines)


def _found(culprits: Sequence[Culprit]) -> list[str]:
    lines = [f"  {culprit.path}: {culprit.type}: {culprit.reason}" for culprit in culprits[:_SHOWN]]
    return lines if len(culprits) <= _SHOWN else [*lines, f"  and {len(culprits) - _SHOWN} more"]


def _instead(culprits: Sequence[Culprit], call: UserCall, *, running: bool = False) -> str:
    by_lead: dict[str, dict[str, None]] = {}
    for culprit in culprits[:_SHOWN]:
        remedy = remedy_for(culprit.obstacle, call, running=running)
        by_lead.setdefault(remedy.lead, {}).update(dict.fromkeys(remedy.code.splitlines()))
    remedies = (Remedy(lead, "\n".join(lines)) for lead, lines in by_lead.items())
    return "\n".join(textwrap.indent(_advice(remedy), "  ") for remedy in remedies)


def _advice(remedy: Remedy) -> str:
    return f"{remedy.lead}:\n{textwrap.indent(remedy.code, ' ' * 4)}" if remedy.code else f"{remedy.lead}."
