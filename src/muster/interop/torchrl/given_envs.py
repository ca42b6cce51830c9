"""What users hand over in the place of functions that build envs: envs that exist already, and an `EnvCreator`."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tensordict import TensorDict, TensorDictBase  # type: ignore[import-untyped]  # it ships no py.typed
from torch import Tensor
from torchrl.envs import EnvBase, EnvCreator, TransformedEnv

from muster.errors import CannotTravel, ConfigError
from muster.interop.torchrl.columns import Columns
from muster.introspection import type_name
from muster.pickling import is_plain
from muster.recipes.existing_env import find_existing_env
from muster.recipes.sources import factory_example, what_blocks


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
                f"{factory_example(constructor(env))}"
            )
    return None


def constructor(env: EnvBase) -> str:
    """The code that builds an env like `env`, as far as it shows."""
    if isinstance(env, TransformedEnv):
        return f"{type(env).__name__}({constructor(env.base_env)}, ...)"
    takes = inspect.signature(type(env).__init__).parameters
    kwargs = {name: value for name, value in getattr(env, "_constructor_kwargs", {}).items() if name in takes}
    written = [f"{name}={value!r}" if is_plain(value) else f"{name}=..." for name, value in kwargs.items()]
    return f"{type(env).__name__}({', '.join(written) or '...'})"


class SharedCreator:
    """The factory for an `EnvCreator`, whose envs share its state wherever they are. Made by `sharing`."""

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
        """Has the creator's tensors use the memory of `shared`, whose values count."""
        for tensor, place in zip(_tensors(self._creator.state_dict()), shared.values(), strict=True):
            tensor.set_(place)


# By the id of the creator, which lives as long as what is made of it.
_made: weakref.WeakValueDictionary[int, SharedCreator] = weakref.WeakValueDictionary()


def sharing(creator: Any) -> Any:
    """The factory to send to workers in the place of a user's: that of an `EnvCreator` shares the state, if any."""
    if not isinstance(creator, EnvCreator) or not any(True for _ in _tensors(creator.state_dict())):
        return creator
    made = _made.get(id(creator))
    if made is None:
        made = _made[id(creator)] = SharedCreator(creator)
    return made


def _tensors(state: Any) -> Iterator[Tensor]:
    """The tensors in a state dict, in order; those of TensorDicts are shared by TorchRL itself."""
    for value in state.values() if isinstance(state, Mapping) and not isinstance(state, TensorDictBase) else ():
        if isinstance(value, Tensor):
            yield value
        else:
            yield from _tensors(value)
