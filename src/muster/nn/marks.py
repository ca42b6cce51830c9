"""The mark on a policy that must stay where it is: neither copied, nor pickled, nor sent to another process.

The mark is an attribute named ``uncopyable`` on an object or its class: True, or a string that gives the reason.
Collectors and losses look for it on a policy and on every module inside it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar, overload

from torch import nn

T = TypeVar("T")


class UncopyableMark(NamedTuple):
    """A mark, and the place where it was found.

    path: from the policy to the marked object, as in ``policy.encoder.0``.  type_name: qualified name of its class.
    reason: the string that it was marked with, or "".
    """

    path: str
    type_name: str
    reason: str


@overload
def uncopyable(target: str) -> Callable[[T], T]: ...
@overload
def uncopyable(target: T) -> T: ...
def uncopyable(target: object) -> object:
    """Marks a class or an object that must stay where it is, and returns it.

    ``@uncopyable`` or ``@uncopyable("drives the arm over USB")`` above a class marks all its instances;
    ``uncopyable(policy)`` marks one object, as ``policy.uncopyable = "the reason"`` does. A subclass takes the mark
    back with ``uncopyable = False``.
    """
    if isinstance(target, str):
        reason = target

        def mark(marked: T) -> T:
            marked.uncopyable = reason  # type: ignore[attr-defined]  # a new attribute is the mark
            return marked

        return mark
    target.uncopyable = True  # type: ignore[attr-defined]  # a new attribute is the mark
    return target


def is_uncopyable(policy: object) -> bool:
    """Whether ``policy``, or a module inside it, is marked as uncopyable."""
    return uncopyable_mark(policy) is not None


def uncopyable_mark(policy: object) -> UncopyableMark | None:
    """The first mark on ``policy`` or on a module inside it; None where there is none."""
    for path, part in _parts(policy):
        # Read without __getattr__: wrappers such as TensorDictModule forward unknown names to what they wrap, and the
        # mark would be reported at the wrong path.
        value = getattr(part, "__dict__", {}).get("uncopyable", getattr(type(part), "uncopyable", False))
        if isinstance(value, bool | str) and value is not False:
            return UncopyableMark(
                path, f"{type(part).__module__}.{type(part).__qualname__}", value if isinstance(value, str) else ""
            )
    return None


def _parts(policy: object) -> Iterator[tuple[str, object]]:
    path = "policy"
    if inspect.ismethod(policy):
        policy, path = policy.__self__, "policy.__self__"
    if not isinstance(policy, nn.Module):
        yield path, policy
        return
    for name, module in policy.named_modules():
        yield f"{path}.{name}" if name else path, module
