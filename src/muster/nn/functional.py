"""Calls of a module with parameters that are not its own, and targets for losses, without a copy of the module."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase  # type: ignore[import-untyped]  # ships no types
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from muster.errors import ConfigError, UsageError, WrongType

# The call that has swapped the tensors of a module: id(module) -> (process, thread, number of the call).
_holders: dict[int, tuple[int, int, int]] = {}
_call_numbers = itertools.count()


def functionalize(module: nn.Module) -> tuple[Callable[..., Any], dict[str, Tensor]]:
    """Returns ``call, params``: ``call(params, *args, **kwargs)`` is ``module(*args, **kwargs)`` with these tensors.

    module: an ``nn.Module``.

    ``params`` holds the module's own parameters and buffers by name, a tensor that has several names once; no copies,
    so that gradients and optimizers reach the module. ``call`` takes any mapping of these names, of the same or other
    tensors (stacked under ``torch.vmap``, targets, results of ``torch.func.grad``). A name that is left out keeps the
    module's own tensor; a tensor with several names is replaced under all of them. Buffers that the module writes
    to, such as the statistics of a batch norm, are written in ``params``, not in the module.

    Only what the module looks up during the call is replaced. Other references that the module keeps (``self.all =
    [self.weight]``) hold the old tensors. Blocks under ``torch.utils.checkpoint`` are computed again after the call,
    for their gradients, with the module's own tensors: checkpoint around ``call`` instead.

    The module is neither copied nor pickled, unless ``call`` itself is: the tensors are swapped in for the call and
    swapped back after it, on errors too. During the call every user of the module sees them, so that a second thread
    that calls gets UsageError.

    Raises WrongType for what is not an ``nn.Module``, UsageError for lazy modules that saw no input yet and, in
    ``call``, for names that the module does not have, for different tensors under the names of one tied tensor, and
    for replaced buffers that ``params`` cannot take.

    >>> import torch
    >>> from muster.nn import functionalize
    >>> call, params = functionalize(torch.nn.Linear(3, 2))
    >>> call({name: torch.ones_like(tensor) for name, tensor in params.items()}, torch.ones(1, 3)).tolist()
    [[4.0, 4.0]]
    """
    params = named_tensors(module)
    return _FunctionalCall(module, params), params


class _FunctionalCall:
    """The ``call`` that ``functionalize`` returns: an object, so that it is copied and pickled with its module."""

    def __init__(self, module: nn.Module, params: Mapping[str, Tensor]) -> None:
        self._module = module
        self._known = frozenset(name for name, _ in all_names(module))
        self._owners = tensor_owners(module)
        self._ties = ties(module)
        self._slots = _slots_of(module, params)
        inside = tuple(f"{path}." for path, part in module.named_modules() if isinstance(part, TensorDictBase))
        self._in_tensordicts = frozenset(name for name in self._known if name.startswith(inside))

    def __call__(self, params: Mapping[str, Tensor], /, *args: Any, **kwargs: Any) -> Any:
        tensors = params if isinstance(params, dict) else dict(params)
        # Tracing runs the swap symbolically, once: no other thread can see it, and it is not in the compiled code.
        if torch.compiler.is_compiling():
            y, replaced = self._run(tensors, args, kwargs)
        else:
            if not tensors.keys() <= self._known:
                raise UsageError(_unknown_names(self._module, tensors, self._known))
            with sole_use(self._module, self._owners):
                y, replaced = self._run(tensors, args, kwargs)
        if replaced:
            if not isinstance(params, MutableMapping):
                raise UsageError(
                    f"{type(self._module).__qualname__} replaced its buffers {sorted(replaced)[:4]}, and a "
                    f"{type(params).__qualname__} cannot take the new ones; give a dict"
                )
            params.update(replaced)
        return y

    def _run(
        self, tensors: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Tensor]]:
        if not self._slots:
            return call_with(self._module, tensors, self._ties, args, kwargs)
        provided = _by_place(self._module, tensors, self._ties)
        registered = {place: tensor for place, tensor in provided.items() if place not in self._in_tensordicts}
        with _replaced_tensordicts(self._slots, provided):
            y = functional_call(self._module, registered, args, kwargs, tie_weights=False)
        return y, _replaced(tensors, provided | registered, self._ties)


# Modules such as TorchRL's multi-agent networks keep their parameters in a TensorDict. `functional_call` replaces what
# modules register. A TensorDict returns tensors of its own, so that such a module would silently continue to use those;
# here the TensorDict itself is replaced for the call.


class _HeldTensorDict(NamedTuple):
    """An attribute that holds a TensorDict.  names: the module's name of the tensor at each of its keys."""

    owner: nn.Module
    attribute: str
    held: TensorDictBase
    names: dict[Any, str]


def _slots_of(module: nn.Module, tensors: Mapping[str, Tensor]) -> list[_HeldTensorDict]:
    """The attributes inside ``module`` with a TensorDict that holds some of ``tensors``."""
    name_of = {id(tensor): name for name, tensor in tensors.items()}
    slots = []
    for owner in module.modules():
        if isinstance(owner, TensorDictBase):
            continue
        for attribute, held in [*vars(owner).items(), *owner._modules.items()]:
            if isinstance(held, TensorDictBase):
                names = {key: name_of[id(leaf)] for key, leaf in held.items(True, True) if id(leaf) in name_of}
                if names:
                    slots.append(_HeldTensorDict(owner, attribute, held, names))
    return slots


@contextmanager
def _replaced_tensordicts(slots: Sequence[_HeldTensorDict], tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Replaces each slot's TensorDict by one with ``tensors``, until the context ends."""
    before = [dict(vars(slot.owner)) for slot in slots]
    try:
        for slot in slots:
            replacement = TensorDict({}, batch_size=slot.held.batch_size)
            for key, leaf in slot.held.items(True, True):
                replacement[key] = tensors.get(slot.names.get(key, ""), leaf)
            # An instance's own attribute is found before a registered submodule of that name.
            vars(slot.owner)[slot.attribute] = replacement
        yield
    finally:
        for slot, attributes in zip(slots, before, strict=True):
            if slot.attribute in attributes:
                vars(slot.owner)[slot.attribute] = attributes[slot.attribute]
            else:
                vars(slot.owner).pop(slot.attribute, None)


def call_with(
    module: nn.Module, tensors: Mapping[str, Tensor], tied: Mapping[str, Sequence[str]],
    args: Sequence[Any], kwargs: dict[str, Any] | None = None,
) -> tuple[Any, dict[str, Tensor]]:  # fmt: skip
    """Returns ``module(*args, **kwargs)`` with ``tensors`` as its own, and by name the buffers that it replaced.

    tied: what ``ties(module)`` returns. Raises UsageError where ``tensors`` has different ones for one tied tensor.
    """
    provided = _by_place(module, tensors, tied)
    # torch's own tie_weights swaps a module with two paths twice, and leaves the provided tensors in it.
    y = functional_call(module, provided, tuple(args), kwargs, tie_weights=False)
    return y, _replaced(tensors, provided, tied)


def _by_place(module: nn.Module, tensors: Mapping[str, Tensor], tied: Mapping[str, Sequence[str]]) -> dict[str, Tensor]:
    """The tensors by every place where they are registered. Raises UsageError where a place gets two tensors."""
    if not tied:
        return dict(tensors)
    provided: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for place in tied.get(name, (name,)):
            if provided.setdefault(place, tensor) is not tensor:
                names = [other for other in tensors if place in tied.get(other, (other,))]
                raise UsageError(
                    f"{names} are names of one tensor of {type(module).__qualname__}, and were given different ones; "
                    "give one of them (if they were separated since, functionalize the module again)"
                )
    return provided


def _replaced(
    tensors: Mapping[str, Tensor], after: Mapping[str, Tensor], tied: Mapping[str, Sequence[str]]
) -> dict[str, Tensor]:
    """The tensors that a call has put in the place of ``tensors``, by name; a tied one counts at any of its places."""
    return {
        name: after[place]
        for name, tensor in tensors.items()
        for place in tied.get(name, (name,))
        if after[place] is not tensor
    }


def ties(module: nn.Module) -> dict[str, list[str]]:
    """The places where tied tensors are registered, by each name of a tensor; every module and attribute once."""
    places: dict[Tensor, list[str]] = {}
    for path, part in module.named_modules():  # once for a module with several paths
        for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
            if tensor is not None:
                places.setdefault(tensor, []).append(f"{path}.{name}" if path else name)
    return {name: places[tensor] for name, tensor in all_names(module) if places.get(tensor, [name]) != [name]}


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of ``module`` by name, each tensor once. Raises WrongType and UsageError."""
    if not isinstance(module, nn.Module):
        raise WrongType(
            f"expected a torch.nn.Module, got {type(module).__qualname__}; wrap the callable in a module first"
        )
    tensors: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in tensors.items():
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise UsageError(
                f"{name!r} of {type(module).__qualname__} has no shape yet: it belongs to a lazy module. Call the "
                "module once on an input, then try again"
            )
    return tensors


def all_names(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of ``module``, with all names of each: a tied tensor has several."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def tensor_owners(module: nn.Module) -> list[nn.Module]:
    """The modules inside ``module``, itself included, that hold a tensor."""
    return [one for one in module.modules() if [*one.parameters(recurse=False), *one.buffers(recurse=False)]]


@contextmanager
def sole_use(module: nn.Module, owners: Iterable[nn.Module]) -> Iterator[None]:
    """Reserves the tensors of ``owners`` for this thread, which may nest its calls; another thread gets UsageError."""
    me = (os.getpid(), threading.get_ident(), next(_call_numbers))
    taken: list[int] = []
    try:
        for key in map(id, owners):
            holder = _holders.setdefault(key, me)  # atomic: of two threads, one sees the other's entry
            if holder[0] != me[0]:  # left by a thread of the process that this one was forked from
                _holders[key] = holder = me
            if holder is me:
                taken.append(key)
            elif holder[1] != me[1]:
                raise UsageError(
                    f"{type(module).__qualname__} is being called with other parameters in thread {holder[1]}; its "
                    "tensors are swapped until that call ends. Call it from one thread at a time (hold a lock around "
                    "the calls), or give each thread a module of its own"
                )
        yield
    finally:
        for key in taken:
            del _holders[key]


def _unknown_names(module: nn.Module, tensors: Mapping[str, Tensor], known: frozenset[str]) -> str:
    unknown = sorted(tensors.keys() - known)
    close = get_close_matches(unknown[0], known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"it has {sorted(known)[:8]}"
    return f"{type(module).__qualname__} has no tensor named {', '.join(map(repr, unknown[:4]))}; {hint}"


class TargetParams:
    """A copy of a module's parameters and buffers that follows them slowly; the module itself is not copied.

    ``target(*args)`` is ``module(*args)`` with the target's tensors: no gradient reaches them, while gradients still
    reach the arguments. ``update(tau)`` moves them towards the module (Lillicrap et al. 2015, arXiv:1509.02971),
    ``hard_update()`` makes them equal (Mnih et al. 2015, doi:10.1038/nature14236).

    module: an ``nn.Module``.

    params: the tensors by the names that they have in the module, one for all the names of a tied tensor.
    Raises what `functionalize` raises; like its calls, a target is not for two threads at a time, nor for gradients
    through blocks under ``torch.utils.checkpoint`` inside the module, which recompute with the module's own tensors.

    >>> import torch
    >>> from muster.nn import TargetParams
    >>> module = torch.nn.Linear(3, 1)
    >>> target = TargetParams(module)
    >>> before = torch.nn.init.zeros_(target.params["bias"]), torch.nn.init.ones_(module.bias)
    >>> target.update(tau=0.25)
    >>> target.params["bias"].tolist()
    [0.25]
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.hard_update()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the module's output for ``*args, **kwargs``, with the target's parameters and buffers."""
        return self._call(self.params, *args, **kwargs)

    @torch.no_grad()
    def update(self, tau: float) -> None:
        """Sets each parameter to ``(1 - tau) * target + tau * module``, and buffers to the module's.

        Buffers are no weights: averaged statistics of a batch norm would lag, and counters cannot be averaged.
        Raises ConfigError for a ``tau`` outside [0, 1], UsageError where the module changed its tensors' layout.
        """
        if not 0.0 <= tau <= 1.0:
            raise ConfigError(f"tau={tau} is not in [0, 1]; a usual value is 0.005")
        sources = named_tensors(self._module)
        self._require_same_layout(sources)
        for name, source in sources.items():
            if isinstance(source, nn.Parameter) and (source.is_floating_point() or source.is_complex()):
                self.params[name].lerp_(source, tau)
            else:
                self.params[name].copy_(source)

    def hard_update(self) -> None:
        """Makes the target equal to the module, on the module's device, with new tensors."""
        self._call, own = functionalize(self._module)  # again: layers and ties may have changed
        self.params: dict[str, Tensor] = {name: tensor.detach().clone() for name, tensor in own.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """The target's tensors by the module's names; ``module.load_state_dict`` takes them where none are tied."""
        return dict(self.params)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copies ``state`` into the target's tensors, from other devices and dtypes too.

        Raises UsageError, before anything is copied, where names or shapes differ or a tensor has no values.
        """
        self._require_same_layout(state, convert=True)
        for name, tensor in state.items():
            self.params[name].copy_(tensor)

    def _require_same_layout(self, other: Mapping[str, Tensor], *, convert: bool = False) -> None:
        if other.keys() != self.params.keys():
            names = sorted(other.keys() ^ self.params.keys())
            raise UsageError(f"the target and its source differ in {names[:8]}; hard_update() starts afresh")
        for name, tensor in other.items():
            mine = self.params[name]
            alike = (tensor.shape, tensor.layout, tensor.is_meta) == (mine.shape, mine.layout, mine.is_meta)
            if not alike or not (convert or (tensor.device, tensor.dtype) == (mine.device, mine.dtype)):
                raise UsageError(
                    f"{name!r} is {_layout(mine)} in the target, but {_layout(tensor)} in its source; hard_update() "
                    "starts afresh from the module"
                )


def _layout(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} on {tensor.device}, {tensor.dtype}, {tensor.layout}"
