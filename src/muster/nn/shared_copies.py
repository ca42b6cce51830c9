"""Deep copies of modules that hold what cannot be copied: weights of their own, everything else shared."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import sys
import types
import warnings
import weakref
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase  # type: ignore[import-untyped]  # ships no types
from torch import Tensor, nn
from torch.nn.modules.module import _WrappedHook
from torch.utils.hooks import RemovableHandle

from muster.errors import WrongType
from muster.introspection import attributes_of, caller_stacklevel, type_name
from muster.nn.own_methods import OwnMethod

M = TypeVar("M", bound=nn.Module)

# What torch keeps in each module: its dicts of tensors, submodules and hooks. A copy has its own, with the same hooks.
_TORCHS_OWN = frozenset(vars(nn.Module())) - {"training"}
_CONTAINERS = (list, tuple, dict, set, frozenset, collections.OrderedDict, collections.defaultdict, collections.deque)
# Modules that keep their tensors elsewhere than in their dicts of tensors, and know how to copy these.
COPY_THEMSELVES: tuple[Any, ...] = (TensorDictBase, torch.jit.ScriptModule)


def shared_on_copy(policy: M) -> M:
    """Returns ``policy`` itself, of which `copy.deepcopy` makes modules that share with it what cannot be copied.

    For libraries that copy the modules that they are given, such as TorchRL's losses and
    ``torch.optim.swa_utils.AveragedModel``, and for policies that hold a socket, a lock, a device or a part that is
    marked by `uncopyable`. A copy has

    - modules of the same classes, with parameters, buffers and modes (``train``, ``eval``) of its own, under the same
      names; parameters that are tied are so in the copy, also with other parts of what is copied at the same time;
    - every other attribute of the original, the very same object: sockets, locks, devices, plain tensors, generators,
      lists of other things. A hardware call of a copy reaches the original's hardware, and what a copy keeps in such
      an object the original sees. Where a list, tuple, set, dict, ``functools.partial``, bound method or weak reference
      holds a parameter, a buffer or a module of the policy, the copy has one of its own, which holds the copy's.

    So a function or an object that is no module still uses the original's weights if it keeps them (``self.helper =
    Helper(self.layer)``), of which a UserWarning tells: make it a module. A copy is never closed or released: a
    ``__del__`` of a module's class is not called for its copies, nor are ``__getstate__``, ``__setstate__`` and
    ``__deepcopy__``. Copies can be copied.

    All else about ``policy`` stays as it is: calls, ``state_dict``, ``isinstance``, optimizers, and the mark
    `uncopyable`, which goes on refusing `pickle` and `copy.copy`. A module that is added to ``policy`` later is copied
    in the same way as long as ``policy`` itself is what is copied. Of a module that ``torch.compile`` has wrapped
    around ``policy``, `copy.deepcopy` gives a copy of ``policy``; call this function on the wrapper instead. Raises
    WrongType for what is not an ``nn.Module``.
    """
    if not isinstance(policy, nn.Module):
        raise WrongType(
            f"expected a torch.nn.Module, got {type_name(policy)}: only a module's weights are known to be its own"
        )
    for module in policy.modules():
        # Parts too: a library may put them into modules of its own, and copy these.
        if not isinstance(module, COPY_THEMSELVES):
            vars(module)["__deepcopy__"] = OwnMethod(module, shared_copy)
    return policy


def shared_copy(module: M, memo: dict[int, Any], *, warns: bool = True) -> M:
    """A copy of ``module`` as `shared_on_copy` describes. memo: that of `copy.deepcopy`, {} for a new one.

    Tensors that the memo has for the module's are taken as they are.  warns: whether the warning is given.
    """
    if id(module) not in memo:
        _Copying(memo, warns).add(module)
    copied: M = memo[id(module)]
    return copied


class _Copying:
    """Copies of modules that refer to each other. memo: by id of an original its copy."""

    def __init__(self, memo: dict[int, Any], warns: bool) -> None:
        self._memo = memo
        self._warns = warns
        self._inside: set[int] = set()  # ids of the containers that are being looked into
        self._keepers: list[Any] = []  # objects in the attribute at hand that are shared, and hold what was copied

    def add(self, module: nn.Module) -> None:
        """Enters copies of ``module`` and of all modules inside it into the memo."""
        new = [part for part in module.modules() if id(part) not in self._memo]
        # Copies without attributes, and all tensors, come first: attributes may refer to any of them.
        for part in new:
            if isinstance(part, COPY_THEMSELVES):
                self._add_complete(part)
        bare = [(part, self._add_bare(part)) for part in new if id(part) not in self._memo]
        for part, copied in bare:
            self._fill(copied, part)

    def _add_complete(self, module: nn.Module) -> None:
        if id(module) in self._memo:
            return
        copied: Any = copy.deepcopy(module, self._memo)
        pairs: list[tuple[Any, Any]] = list(zip(module.modules(), copied.modules(), strict=True))
        if isinstance(module, TensorDictBase):  # makes its copy without the memo
            pairs += [(leaf, copied[key]) for key, leaf in module.items(True, True)]
        self._memo.update((id(original), one) for original, one in pairs)

    def _add_bare(self, module: nn.Module) -> nn.Module:
        cls: Any = type(module)
        copied: nn.Module = _new(_without_end(cls))
        self._memo[id(module)] = copied
        for name in _TORCHS_OWN & vars(module).keys():
            value = vars(module)[name]
            vars(copied)[name] = copy.copy(value)
            if isinstance(value, dict):  # a handle of a hook refers to the dict that the hook is in
                self._memo[id(value)] = vars(copied)[name]
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            copy.deepcopy(tensor, self._memo)
        return copied

    def _fill(self, copied: nn.Module, original: nn.Module) -> None:
        for name, value in vars(original).items():
            if name in _TORCHS_OWN:
                if isinstance(value, dict):
                    vars(copied)[name].update((key, self._own(item)) for key, item in value.items())
            elif isinstance(value, OwnMethod):
                value.put_into(copied, name)
            else:
                vars(copied)[name] = self._own(value)
            if self._keepers and self._warns:
                _warn_of(self._keepers.pop(), f"{type(original).__qualname__}.{name}")
            self._keepers.clear()
        dynamo = sys.modules.get("torch._dynamo.eval_frame")
        if dynamo is not None and isinstance(original, dynamo.OptimizedModule):
            _set_state(copied, vars(copied))  # makes its `forward`, a closure over the module that it wraps

    def _own(self, value: Any) -> Any:
        """The counterpart of an attribute's value in the copy: ``value`` itself where it refers to nothing copied."""
        if id(value) in self._memo:
            return self._memo[id(value)]
        kind = type(value)
        if isinstance(value, nn.Module):
            if self._belongs(value):
                self.add(value)
            return self._memo.get(id(value), value)
        if kind in _CONTAINERS or (isinstance(value, tuple) and hasattr(value, "_make")):
            return self._own_container(value)
        if kind is types.MethodType:
            owner = self._own(value.__self__)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if kind is functools.partial:
            whole = (value.func, value.args, value.keywords)
            func, args, keywords = own = self._own_container(whole)
            return value if own is whole else functools.partial(func, *args, **keywords)
        if kind is weakref.ref and value() is not None:
            target = self._own(value())
            return value if target is value() else weakref.ref(target)
        if isinstance(value, _WrappedHook | RemovableHandle):
            state = value.__getstate__()
            own = self._own_container(state)
            return value if own is state else _set_state(_new(kind), own)
        if isinstance(value, TensorDictBase) and any(id(leaf) in self._memo for leaf in value.values(True, True)):
            return value.apply(self._own)
        if self._holds_originals(value):
            self._keepers.append(value)
        return value

    def _belongs(self, module: nn.Module) -> bool:
        """Whether a module that is not registered is made of what is copied, or was meant to be copied so itself."""
        parts = [*module.modules(), *module.parameters(), *module.buffers()]
        return _is_shared_on_copy(module) or any(id(part) in self._memo for part in parts)

    def _holds_originals(self, value: Any) -> bool:
        if isinstance(value, types.FunctionType):
            held = _cell_contents(value)
        else:
            held = [] if isinstance(value, type) else list(attributes_of(value).values())
        return any(isinstance(one, nn.Module | Tensor) and id(one) in self._memo for one in held)

    def _own_container(self, value: Any) -> Any:
        if id(value) in self._inside:
            return value
        self._inside.add(id(value))
        try:
            if isinstance(value, dict):
                return self._own_dict(value)
            elements = [self._own(item) for item in value]
        finally:
            self._inside.discard(id(value))
        if all(mine is item for mine, item in zip(elements, value, strict=True)):
            return value
        if isinstance(value, collections.deque):
            return collections.deque(elements, value.maxlen)
        return value._make(elements) if hasattr(value, "_make") else type(value)(elements)

    def _own_dict(self, value: dict[Any, Any]) -> dict[Any, Any]:
        items = {self._own(key): self._own(item) for key, item in value.items()}
        if all(key in value and value[key] is item for key, item in items.items()):
            return value
        own = copy.copy(value)  # of the same class, with the factory of a defaultdict
        own.clear()
        own.update(items)
        return own


def _cell_contents(function: types.FunctionType) -> list[Any]:
    contents = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            contents.append(cell.cell_contents)
    return contents


def _warn_of(keeper: Any, place: str) -> None:
    what = "a function" if isinstance(keeper, types.FunctionType) else f"an object of class {type(keeper).__qualname__}"
    warnings.warn(
        f"copies of this policy share {place} with it, where {what} holds a part of the policy: what that computes, it "
        "computes with the original's weights. Make it an nn.Module, or have it look the part up in each call",
        UserWarning,
        stacklevel=caller_stacklevel(),
    )


def _is_shared_on_copy(module: nn.Module) -> bool:
    hook = vars(module).get("__deepcopy__")
    return isinstance(hook, OwnMethod) and hook.method is shared_copy


def _new(kind: Any) -> Any:
    return kind.__new__(kind)


def _set_state(made: Any, state: Any) -> Any:
    made.__setstate__(state)
    return made


def _nothing(copied: nn.Module) -> None:
    """Releases nothing: what a copy holds is the original's."""


def _reduced_as(copied: Any, cls: Any, protocol: Any) -> Any:
    """What pickle makes ``copied`` from: its state, and the class that can be found by its name."""
    reduced = cls.__reduce_ex__(copied, protocol)
    if isinstance(reduced, tuple) and reduced[1] == (type(copied),):
        return _new, (cls,), *reduced[2:]
    return reduced


@functools.cache
def _without_end(cls: Any) -> Any:
    """The class itself; a subclass without its ``__del__`` where it has one."""
    if getattr(cls, "__del__", _nothing) is _nothing:
        return cls
    names: dict[str, Any] = {"__del__": _nothing, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    names["__reduce_ex__"] = functools.partialmethod(_reduced_as, cls)
    return types.new_class(cls.__name__, (cls,), exec_body=lambda namespace: namespace.update(names))
