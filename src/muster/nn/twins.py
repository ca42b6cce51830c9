"""Twins of modules, for libraries that copy a module only to put other tensors into the copy."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from muster.nn.own_methods import OwnMethod
from muster.nn.shared_copies import COPY_THEMSELVES, shared_copy

_LOCK = threading.RLock()  # held as long as modules are changed
_ABSENT = object()


@contextmanager
def copied_as_twins(*holders: object, warns: bool = False) -> Iterator[None]:
    """Lets `copy.deepcopy` make twins of the modules in ``holders``, until the context ends.

    A twin is a module of the same classes with dicts of parameters, buffers, submodules and hooks of its own, and a
    mode (``train``, ``eval``) of its own. All else is shared with the module: what cannot be copied, and the tensors
    too, until others are put into the twin (``TensorDict.to_module``), which leaves the module its own. Bound methods,
    hooks, lists and other containers that hold parts of the module hold the twin's, as in copies of `shared_on_copy`.

    A function (a closure, say) or an object that is no module, but keeps a part of the module, is shared: it computes
    with the module's tensors, whichever the twin has, and on their device. warns: tell of it by a UserWarning.
    ``TensorDictParams`` and scripted modules inside are copied as ever, their tensors with them.

    holders: modules, or lists, tuples and dicts of these, at any depth; what else there is in them is passed over.
    Afterwards the modules are as before, after an exception with the tensors that they had. Only one thread at a time
    is inside: others wait for it, as does the copying of these modules by other threads, which makes ordinary copies.
    """
    before: list[_Before] = []
    with _LOCK:
        try:
            for module in [module for whole in _modules_in(holders) for module in whole.modules()]:
                if not isinstance(vars(module).get("__deepcopy__"), _MakesTwin):
                    before.append(_Before(module))
                    if not isinstance(module, COPY_THEMSELVES):
                        hook = _MakesTwin(module, before[-1].attributes.get("__deepcopy__", _ABSENT), warns)
                        vars(module)["__deepcopy__"] = hook
            yield
        except BaseException:
            for one in before:
                one.restore()
            raise
        finally:
            for one in before:
                one.restore_hook()


class _Before:
    """A module's attributes and what is registered in it, as they are now."""

    def __init__(self, module: nn.Module) -> None:
        self.attributes = dict(vars(module))
        self._module = module
        registered = (self.attributes.get(name) for name in ("_parameters", "_buffers", "_modules"))
        self._registered = [(items, dict(items)) for items in registered if isinstance(items, dict)]

    def restore(self) -> None:
        """Puts all back: an exception inside ``to_module`` leaves the other tensors in the module."""
        for now, then in [*self._registered, (vars(self._module), self.attributes)]:
            now.clear()
            now.update(then)

    def restore_hook(self) -> None:
        """Puts the module's own ``__deepcopy__`` back."""
        if "__deepcopy__" in self.attributes:
            vars(self._module)["__deepcopy__"] = self.attributes["__deepcopy__"]
        else:
            vars(self._module).pop("__deepcopy__", None)


class _MakesTwin(OwnMethod):
    """The ``__deepcopy__`` of a module inside `copied_as_twins`.  replaced: the one that it had of its own."""

    def __init__(self, owner: nn.Module, replaced: Any, warns: bool) -> None:
        super().__init__(owner, functools.partial(_copied, warns, threading.get_ident()))
        self._replaced = replaced

    def put_into(self, copied: object, name: str) -> None:
        """Gives ``copied`` what the owner had."""
        if isinstance(self._replaced, OwnMethod):
            self._replaced.put_into(copied, name)
        elif self._replaced is not _ABSENT:
            vars(copied)[name] = self._replaced


def _copied(warns: bool, thread: int, module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A twin of ``module`` for the thread that asked for twins, an ordinary copy for others.  memo: of `deepcopy`."""
    if threading.get_ident() != thread:
        with _LOCK:  # until the module is as before
            return copy.deepcopy(module, memo)
    for part in module.modules():
        for tensor in [*part._parameters.values(), *part._buffers.values()]:
            memo.setdefault(id(tensor), tensor)
    return shared_copy(module, memo, warns=warns)


def _modules_in(holders: object) -> Iterator[nn.Module]:
    rest, seen = [holders], set()
    while rest:
        value = rest.pop()
        if isinstance(value, nn.Module):
            yield value
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            rest += value.values() if isinstance(value, dict) else value
