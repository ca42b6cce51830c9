"""The mark on a policy that must stay where it is: neither copied, nor pickled, nor sent to another process.

The mark is an attribute named ``uncopyable`` on an object or its class. Collectors and losses look for it on a policy
and on every module inside it; objects that were marked by the function `uncopyable` also refuse `copy` and `pickle`.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar, overload

from torch import nn

from muster.errors import UNCOPYABLE_PAGE, CannotTravel, WrongType
from muster.introspection import caller_stacklevel, class_name, type_name
from muster.nn.shared_copies import OwnMethod

T = TypeVar("T")

# A class's `__reduce_ex__` is what pickle, and without the other two also `copy`, ask for.
_OF_CLASSES = ("__reduce_ex__", "__deepcopy__", "__copy__")
# `copy.copy` asks the class alone, but the class's `__reduce_ex__` asks the object for its `__getstate__`.
_OF_OBJECTS = ("__reduce_ex__", "__deepcopy__", "__getstate__")


class UncopyableMark(NamedTuple):
    """A mark, and the place where it was found, as `uncopyable_mark` returns it.

    path: from the policy to the marked object, as in ``policy.encoder.0``.  type_name: qualified name of its class.
    reason: the string that it was marked with, or "".  where: the file and line that marked it, "" if not known.

    >>> import torch
    >>> from muster.nn import uncopyable, uncopyable_mark
    >>> policy = torch.nn.Sequential(uncopyable(torch.nn.Linear(3, 2), "drives the arm over USB"))
    >>> mark = uncopyable_mark(policy)
    >>> mark.path, mark.reason
    ('policy.0', 'drives the arm over USB')
    """

    path: str
    type_name: str
    reason: str
    where: str = ""


@dataclass(frozen=True)
class Mark:
    """The value of the attribute ``uncopyable``, as `uncopyable` sets it.

    type_name: the marked class, or that of the marked object.  reason, where: as in `UncopyableMark`.
    is_module: whether the object is a module of torch's: its weights can be saved without it.
    """

    type_name: str
    reason: str = ""
    where: str = ""
    is_module: bool = False

    def __str__(self) -> str:
        return self.reason or "marked as uncopyable"


class MarkOfObject(Mark):
    """The mark on one object. It refuses to be copied with the object's attributes.

    Functions and classes that torch makes later, such as those of parametrized layers, ask none of an object's methods.
    The mark on a class travels: policy factories of scripts send their classes by value.
    """

    def __reduce_ex__(self, protocol: object) -> Any:
        raise _refusal(self)


@overload
def uncopyable(target: str) -> Callable[[T], T]: ...
@overload
def uncopyable(target: T, reason: str = "") -> T: ...
def uncopyable(target: object, reason: str = "") -> object:
    """Marks a class or an object that must stay where it is, and returns it: it can neither be copied nor pickled.

    target: a class, for all its instances, or one object; or the reason, of a decorator of a class.
    reason: why it must stay, for messages.

    ``@uncopyable`` or ``@uncopyable("drives the arm over USB")`` above a class marks all its instances;
    ``uncopyable(policy)`` or ``uncopyable(self, "drives the arm over USB")`` marks one object. ``uncopyable = False``
    takes the mark back, in a subclass or on an object.

    From then on `copy.deepcopy`, `copy.copy` and every pickler raise CannotTravel, with the reason and what to write
    instead, as soon as they reach the object, also inside something else. `copy.copy` raises as well, since two objects
    would hold one connection, and the first to end would close it. All that leaves the object where it is works as
    before: calls, ``state_dict``, ``to``, ``torch.compile``, `functionalize`, `TargetParams`, collectors, wrappers.
    `shared_on_copy` lets `copy.deepcopy` through.

    Of a class, the special methods that copy and pickle are replaced by ones that look for the mark first; an object
    gets some of its own, which hide its class's. A plain attribute (``self.uncopyable = "drives the arm"``, or in the
    class's body) has no such effect: Muster's collectors, losses and doctor see it, other code does not. Neither is a
    subclass kept from bringing a ``__deepcopy__`` of its own.

    Raises WrongType for an object that takes no attributes.

    >>> import copy, torch
    >>> from muster.nn import uncopyable
    >>> policy = uncopyable(torch.nn.Linear(3, 2), "drives the arm over USB")
    >>> copy.deepcopy(policy)
    Traceback (most recent call last):
    muster.errors.CannotTravel: torch.nn.modules.linear.Linear is marked as uncopyable...
    """
    if isinstance(target, str):
        return functools.partial(uncopyable, reason=target)
    frame = sys._getframe(caller_stacklevel() - 1)
    where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    if isinstance(target, type):
        target.uncopyable = Mark(class_name(target), reason, where)  # type: ignore[attr-defined]  # the mark is new
        for name in _OF_CLASSES:
            if hasattr(target, name):
                setattr(target, name, _guarded(target, name))
        return target
    try:
        weakref.ref(target)
        attributes = vars(target)
    except TypeError:
        attributes = None
    if attributes is None or inspect.ismethod(target):
        raise WrongType(
            f"an object of type {type_name(target)} cannot be marked: it takes no attributes. Mark its class, or the "
            "object that holds it"
        )
    attributes["uncopyable"] = MarkOfObject(type_name(target), reason, where, isinstance(target, nn.Module))
    for name in _OF_OBJECTS:
        if hasattr(type(target), name):
            attributes.setdefault(name, OwnMethod(target, functools.partial(_unless_marked, name)))
    return target


def is_uncopyable(policy: object) -> bool:
    """Returns whether a policy, or a module inside it, is marked as uncopyable.

    policy: a module, another object, or a method of one.

    >>> import torch
    >>> from muster.nn import is_uncopyable, uncopyable
    >>> policy = torch.nn.Sequential(torch.nn.Linear(3, 2))
    >>> is_uncopyable(policy), is_uncopyable(torch.nn.Sequential(uncopyable(policy)))
    (False, True)
    """
    return uncopyable_mark(policy) is not None


def uncopyable_mark(policy: object) -> UncopyableMark | None:
    """The first mark on a policy or on a module inside it, an `UncopyableMark`; None where there is none.

    policy: as for `is_uncopyable`.

    >>> from muster.nn import uncopyable, uncopyable_mark
    >>> @uncopyable("drives the arm over USB")
    ... class Arm:
    ...     pass
    >>> uncopyable_mark(Arm()).reason
    'drives the arm over USB'
    """
    return next((mark for mark, _ in marked_parts(policy)), None)


def marked_parts(policy: object) -> Iterator[tuple[UncopyableMark, object]]:
    """The marks on ``policy`` and on the modules inside it, each with the marked object."""
    for path, part in _parts(policy):
        if (mark := own_mark(part)) is not None:
            yield UncopyableMark(path, mark.type_name, mark.reason, mark.where), part


def own_mark(part: object) -> Mark | None:
    """The mark on this very object, or on its class; None where there is none, and for classes themselves."""
    if isinstance(part, type):
        return None
    # Read without __getattr__: wrappers such as TensorDictModule forward unknown names to what they wrap, and the mark
    # would be reported at the wrong path.
    value = getattr(part, "__dict__", {}).get("uncopyable", getattr(type(part), "uncopyable", False))
    if isinstance(value, Mark):
        return replace(value, type_name=type_name(part), is_module=isinstance(part, nn.Module))
    if isinstance(value, bool | str) and value is not False:
        return Mark(type_name(part), value if isinstance(value, str) else "")
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


def _guarded(cls: type, name: str) -> Callable[..., Any]:
    """The class's method of that name, which raises first where the object is marked."""
    own = vars(cls).get(name)

    @functools.wraps(getattr(cls, name))
    def method(self: Any, *arguments: Any) -> Any:
        if (mark := own_mark(self)) is not None:
            raise _refusal(mark)
        inherited = getattr(super(cls, self), name) if own is None else own.__get__(self)
        return inherited(*arguments)

    return method


def _unless_marked(name: str, owner: object, *arguments: Any) -> Any:
    """Calls the class's method of that name. Raises where the mark was not taken back."""
    if (mark := own_mark(owner)) is not None:
        raise _refusal(mark)
    result = getattr(type(owner), name)(owner, *arguments)
    if name == "__getstate__" and isinstance(result, dict):
        return {key: value for key, value in result.items() if not isinstance(value, OwnMethod)}
    return result


def _refusal(mark: Mark) -> CannotTravel:
    name = "that_object" if isinstance(mark, MarkOfObject) else mark.type_name.rpartition(".")[2]
    where = f" in {mark.where}" if mark.where else ""
    reason = f": {mark.reason}" if mark.reason else ""
    saved = (
        "  - to save it, save its weights: torch.save(policy.state_dict(), path), and to go on from there "
        "policy.load_state_dict(torch.load(path))\n"
    )
    return CannotTravel(
        f"{mark.type_name} is marked as uncopyable{where}{reason}. It stays where it is, neither copied nor pickled\n"
        "What to do instead:\n"
        "  - collectors call it where it is; for one in each process give them policy_factory=, which builds it there, "
        f"or call muster.rebuild_with({name}, factory) where only a part of the policy is marked\n"
        "  - losses and target networks need no copy: muster.nn.functionalize(policy), muster.nn.TargetParams(policy)\n"
        "  - for a library that copies the policy itself, hand over muster.nn.shared_on_copy(policy): its copies have "
        "weights of their own, and share everything else\n"
        f"{saved if mark.is_module else ''}"
        "  - if it can be copied after all, take the mark off: uncopyable = False",
        UNCOPYABLE_PAGE,
    )
