"""Objects in the place of functions that build envs: envs that exist already, and an `EnvCreator`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tensordict import TensorDict, TensorDictBase  # type: ignore[import-untyped]  # it ships no py.typed
from torch import Tensor
from torchrl.envs import EnvBase, EnvCreator

from muster.errors import CannotTravel, ConfigError
from muster.interop.torchrl.columns import Columns
from muster.introspection import type_name
from muster.recipes.existing_env import find_existing_env
from muster.recipes.sources import constructor_of, factory_example, what_blocks


def given(env: EnvBase, **kwargs: Any) -> EnvBase:
    """The env that a user has handed over in the place of a function. Raises ConfigError."""
    if kwargs:
        raise ConfigError("create_env_kwargs must be empty if envs are passed in the place of functions")
    return env


def explained(fns: Sequence[Any], label: str) -> CannotTravel | None:
    """The error for the first env among `fns`, or in one of them, that exists already and cannot travel; None for none.

    label: the name of function `{}` in messages.
    """
    for i, fn in enumerate(fns):
        held = (label.format(i), fn) if isinstance(fn, EnvBase) else find_existing_env(fn, label.format(i))
        if held is None or not isinstance(held[1], EnvBase):
            continue
        path, env = held
        if lines := what_blocks(env, path):
            return CannotTravel(
                f"{path} is an env that exists already ({type_name(env)}), and cannot be sent to a worker:{lines}\n"
                f"Every env is built where it runs; hand over a function that builds it:\n"
                f"{factory_example(constructor_of(env))}"
            )
    return None


class SharedCreator:
    """The factory for an `EnvCreator`; its envs share its state wherever they are. Made by `sharing`."""

    def __init__(self, creator: Any) -> None:
        self._creator = creator
        columns = Columns(TensorDict({str(i): tensor for i, tensor in enumerate(_tensors(creator.state_dict()))}))
        self._rows = columns.rows(columns.tree)
        weakref.finalize(self, columns.close)
        self._move(columns.tree)

    def __call__(self, **kwargs: Any) -> EnvBase:
        self._move(self._rows.mapped())
        return self._creator(**kwargs)

    def _move(self, shared: TensorDictBase) -> None:
        """Has the creator's tensors use the memory and the values of `shared`."""
        for tensor, place in zip(_tensors(self._creator.state_dict()), shared.values(), strict=True):
            tensor.set_(place)


# By the id of the creator, which lives as long as what is made of it.
_made: weakref.WeakValueDictionary[int, SharedCreator] = weakref.WeakValueDictionary()


def sharing(creator: Any) -> Any:
    """The factory to send to workers in the place of a user's: that of an `EnvCreator` shares the state, if any."""
    if not isinstance(creator, EnvCreator) or not any(True for _ in _tensors(creator.state_dict())):
        return creator
    return _made.get(id(creator)) or _made.setdefault(id(creator), SharedCreator(creator))


def _tensors(state: Any) -> Iterator[Tensor]:
    """The tensors in a state dict, in order; those of TensorDicts are shared by TorchRL itself."""
    for value in state.values() if isinstance(state, Mapping) and not isinstance(state, TensorDictBase) else ():
        if isinstance(value, Tensor):
            yield value
        else:
            yield from _tensors(value)
