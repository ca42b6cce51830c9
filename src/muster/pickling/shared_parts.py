"""The objects that a process which receives them shares with this one: what it does to them is done here, too."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from muster.introspection import attributes_of, module_name
from muster.pickling.kinds import kind_of
from muster.pickling.probe import attempt
from muster.pickling.remedies import shown_type
from muster.pickling.walk import Walk

_SILENCE_S = 1.0
_WALK_S = 1.0
_SHOWN = 3


def find_shared(parts: dict[str, Any], *, by_fork: bool) -> str:
    """The objects in `parts`, for messages, that a worker would share with this process; "" where there are none.

    Queues, locks, pipes and memory of multiprocessing, and proxies. by_fork: the worker inherits the parts: then also
    files, connections and memory that is mapped for all. Runs no code of the objects but what pickling them runs.
    """
    walk = Walk(parts, limit_s=_WALK_S, inherited=by_fork)
    if by_fork:
        found = [value for value in walk if _is_one_under_fork(value)]
    else:
        fds: list[int] = []
        big: list[pickle.PickleBuffer] = []  # their memory is not copied
        found = attempt(list(parts.values()), silence_s=_SILENCE_S, big=big, fds=fds).shared
        if not found:
            return "an open file descriptor" if fds else ""
        for _ in walk:
            pass
    ids = {id(value) for value in found}
    shown = []
    for value in found:
        trail = walk.trail(value) or [(f"what {next(iter(parts))} holds", value)]
        is_part = any(id(holder) in ids for _, holder in trail[:-1])  # such as the lock of a queue
        if not is_part:
            shown.append(f"{trail[-1][0]} ({shown_type(value)})")
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more


def _is_one_under_fork(value: Any) -> bool:
    kind = type(value)
    if issubclass(kind, np.ndarray):
        return _is_mapped(value)
    if (module_name(kind).partition(".")[0], kind.__name__) in (("torch", "Tensor"), ("torch", "Parameter")):
        return bool(value.is_shared() and not value.is_cuda)
    return _is_inherited_itself(value)


def _is_inherited_itself(value: Any) -> bool:
    known = kind_of(value)
    return known is not None and known.shared != "no"


def _is_mapped(array: np.ndarray[Any, Any]) -> bool:
    """Returns whether an array can be written to, and lies in a mapping that is not copied when one writes."""
    if not np.ndarray.flags.__get__(array).writeable:
        return False
    base: Any = array
    while issubclass(type(base), np.ndarray):
        if attributes_of(base).get("mode") == "c":
            return False
        base = np.ndarray.base.__get__(base)
    return _is_inherited_itself(base.obj if type(base) is memoryview else base)
