"""Deep copies of modules that hold what cannot be copied: weights of their own, or twins, which share the weights, too.

`copy.deepcopy` makes them, with a memo that says what is shared, and that has an empty module for each module inside.
So no module's ``__deepcopy__`` or ``__getstate__`` is asked.
"""

from __future__ import annotations

import collections
import copy
import functools
import gc
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase  # type: ignore[import-untyped]  # ships no types
from torch import Tensor, nn
from torch.nn.modules.module import _WrappedHook
from torch.utils.hooks import RemovableHandle

from muster.errors import UsageError, WrongType
from muster.introspection import type_name
from muster.pickling.interrupts import new_in_child

M = TypeVar("M", bound=nn.Module)

# What a copy has of its own, for the modules and tensors that may be inside; named tuples in addition.
_CONTAINERS = (list, tuple, dict, set, frozenset, collections.OrderedDict, collections.defaultdict, collections.deque)
_HOLDERS = (*_CONTAINERS, functools.partial, types.MethodType, _WrappedHook, RemovableHandle)
# Modules that can be copied whatever they are in.
_COPY_THEMSELVES = (TensorDictBase, torch.jit.ScriptModule)

_LOCK = new_in_child(threading.RLock())  # held as long as modules are copied as twins


class OwnMethod:
    """A special method that one object has in the place of its class's: ``vars(owner)[name] = OwnMethod(...)``.

    `copy` and `pickle` look for ``__deepcopy__`` and the like on the object first.
    method: the function that is called, with the owner and the arguments.

    The owner is referred to weakly: what holds hardware ends as early as without this method. A pickle holds None
    instead, so that the object that is made of it has its class's method again.
    """

    def __init__(self, owner: object, method: Callable[..., Any]) -> None:
        self._owner = weakref.ref(owner)
        self.method = method

    def __call__(self, *arguments: Any) -> Any:
        owner = self._owner()
        if owner is None:
            raise UsageError(
                "this is a shallow copy of an object that muster.nn.uncopyable or muster.nn.shared_on_copy was called "
                "with, and that has ended since; call the function with this one, too"
            )
        return self.method(owner, *arguments)

    def put_into(self, copied: object, name: str) -> None:
        """Gives ``copied``, a copy of the owner, the same method under ``name``."""
        vars(copied)[name] = OwnMethod(copied, self.method)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def shared_on_copy(policy: M) -> M:
    """Returns ``policy`` itself; from now on `copy.deepcopy` of it shares with it what cannot be copied.

    policy: an ``nn.Module``.

    For libraries that copy the modules that they are given, such as TorchRL's losses and
    ``torch.optim.swa_utils.AveragedModel``, and for policies that hold a socket, a lock, a device or a part that is
    marked by `uncopyable`. A copy has

    - modules of the same classes and tensors of its own, under the same names, with the modes (``train``, ``eval``) of
      the original; tensors that are tied are so in the copy, also with other parts of what is copied at the same time;
    - lists, tuples, dicts, sets, deques, TensorDicts, ``functools.partial`` and bound methods of its own;
    - everything else of the original, the very same object: sockets, locks, devices, generators, functions. A hardware
      call of a copy reaches the original's hardware, and what a copy keeps in such an object the original sees.

    So a function, a weak reference or an object that is no module still uses the original's weights if it keeps them
    (``self.helper = Helper(self.layer)``): make it a module. A copy is never closed or released: a ``__del__`` of a
    module's class is not called for its copies, nor are ``__getstate__``, ``__setstate__`` and ``__deepcopy__``.
    Copies can be copied.

    All else about ``policy`` stays as it is: calls, ``state_dict``, ``isinstance``, optimizers, and the mark
    `uncopyable`, which goes on refusing `pickle` and `copy.copy`. A module that is added to ``policy`` later is copied
    in the same way as long as ``policy`` itself is what is copied. Of a module that ``torch.compile`` has wrapped
    around ``policy``, `copy.deepcopy` gives a copy of ``policy``; call this function on the wrapper instead. Raises
    WrongType for what is not an ``nn.Module``.

    >>> import copy, threading, torch
    >>> from muster.nn import shared_on_copy
    >>> policy = torch.nn.Linear(3, 2)
    >>> policy.lock = threading.Lock()
    >>> copied = copy.deepcopy(shared_on_copy(policy))
    >>> copied.lock is policy.lock, copied.weight is policy.weight
    (True, False)
    """
    if not isinstance(policy, nn.Module):
        raise WrongType(
            f"expected a torch.nn.Module, got {type_name(policy)}: only a module's weights are known to be its own"
        )
    for module in policy.modules():
        # Parts too: a library may put them into modules of its own, and copy these.
        if not isinstance(module, _COPY_THEMSELVES):
            vars(module)["__deepcopy__"] = OwnMethod(module, shared_copy)
    return policy


@contextmanager
def copied_as_twins(*holders: object) -> Iterator[None]:
    """Lets `copy.deepcopy` make twins of the modules in ``holders``, until the context ends.

    A twin is a copy as `shared_on_copy` describes, which shares the tensors, too, until others are put into the twin
    (``TensorDict.to_module``); this leaves the module its own.

    holders: modules, or lists, tuples and dicts of these, at any depth; what else there is in them is passed over.
    Afterwards the modules are as before. Only one thread at a time is inside: others wait for it, as does the copying
    of these modules by other threads, which makes ordinary copies.
    """
    replaced: list[tuple[dict[str, Any], Any]] = []
    with _LOCK:
        try:
            for module in _modules_in(holders):
                attributes, method = vars(module), vars(module).get("__deepcopy__")
                if not isinstance(module, _COPY_THEMSELVES) and not isinstance(method, _MakesTwin):
                    replaced.append((attributes, method))
                    attributes["__deepcopy__"] = _MakesTwin(module, method)
            yield
        finally:
            for attributes, method in replaced:
                if method is None:
                    del attributes["__deepcopy__"]
                else:
                    attributes["__deepcopy__"] = method


class _MakesTwin(OwnMethod):
    """The ``__deepcopy__`` of a module inside `copied_as_twins`.  replaced: the one that it had of its own, or None."""

    def __init__(self, owner: nn.Module, replaced: Any) -> None:
        super().__init__(owner, functools.partial(_twin, threading.get_ident()))
        self._replaced = replaced

    def put_into(self, copied: object, name: str) -> None:
        """Gives ``copied`` what the owner had."""
        if isinstance(self._replaced, OwnMethod):
            self._replaced.put_into(copied, name)
        elif self._replaced is not None:
            vars(copied)[name] = self._replaced


def _twin(thread: int, module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A twin of ``module`` for the thread that asked for twins, an ordinary copy for others.  memo: of `deepcopy`."""
    if threading.get_ident() != thread:
        with _LOCK:  # until the module is as before
            return copy.deepcopy(module, memo)
    return shared_copy(module, memo, shares_tensors=True)


def _modules_in(holders: object) -> Iterator[nn.Module]:
    rest, seen = [holders], set()
    while rest:
        value = rest.pop()
        if isinstance(value, nn.Module):
            yield from value.modules()
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            rest += value.values() if isinstance(value, dict) else value


def shared_copy(module: nn.Module, memo: dict[int, Any], *, shares_tensors: bool = False) -> nn.Module:
    """A copy of ``module`` as `shared_on_copy` describes.  memo: that of `copy.deepcopy`."""
    if id(module) not in memo:
        for original, copied in _fill(memo, module, shares_tensors):
            attributes = dict(vars(original))
            attributes.pop("_compiled_call_impl", None)  # what `original.compile()` made computes with the original
            for name, value in attributes.items():
                if isinstance(value, OwnMethod):
                    value.put_into(copied, name)
                else:
                    vars(copied)[name] = copy.deepcopy(value, memo)
            set_state = type(original).__setstate__
            if set_state.__module__.startswith("torch."):
                set_state(copied, vars(copied))  # wrappers of `torch.compile` and recurrent layers refer to their parts
    copied_module: nn.Module = memo[id(module)]
    return copied_module


def _fill(memo: dict[int, Any], module: nn.Module, shares_tensors: bool) -> list[tuple[Any, Any]]:
    """Enters what a copy of ``module`` shares, and an empty copy of each module inside.

    Returns these modules with their empty copies.
    """
    pairs: list[tuple[Any, Any]] = []
    tensordicts, seen = [], set()
    rest: list[Any] = [module]
    while rest:
        value: Any = rest.pop()
        if id(value) in memo or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.jit.ScriptModule):
            continue
        if isinstance(value, nn.Module):
            kind: Any = type(value)
            memo[id(value)] = object.__new__(_without_end(kind))
            pairs.append((value, memo[id(value)]))
            rest += vars(value).values()
        elif isinstance(value, TensorDictBase):
            tensordicts.append(value)
            rest += value.values(True, True)
        elif type(value) in _HOLDERS or (isinstance(value, tuple) and hasattr(value, "_make")):
            rest += gc.get_referents(value)
        elif shares_tensors or not (isinstance(value, Tensor) and value.is_leaf):  # torch copies leaves alone
            memo[id(value)] = value
    for value in tensordicts:  # would make their copies without the memo
        made = value.apply(functools.partial(copy.deepcopy, memo=memo), filter_empty=False)
        memo[id(value)] = made.lock_() if value.is_locked else made
    return pairs


def _reduced_as(copied: Any, cls: Any, protocol: Any) -> Any:
    """The reduction of ``copied`` for pickle: its state, and the class that can be found by its name."""
    reduced = cls.__reduce_ex__(copied, protocol)
    if isinstance(reduced, tuple) and reduced[1] == (type(copied),):
        return object.__new__, (cls,), *reduced[2:]
    return reduced


def _nothing(copied: nn.Module) -> None:
    """Releases nothing: what a copy holds is the original's."""


@functools.cache
def _without_end(cls: Any) -> Any:
    """The class itself; a subclass without its ``__del__`` where it has one."""
    if getattr(cls, "__del__", _nothing) is _nothing:
        return cls
    names: dict[str, Any] = {"__del__": _nothing, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    names["__reduce_ex__"] = functools.partialmethod(_reduced_as, cls)
    return types.new_class(cls.__name__, (cls,), exec_body=lambda namespace: namespace.update(names))
