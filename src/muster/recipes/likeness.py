"""The text of a recipe's parts that is the same in every program, by which states know which envs are alike."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping, Set
from typing import Any

import gymnasium as gym
import numpy as np

from muster.introspection import callable_name
from muster.recipes.gymnasium_ids import MakeGym
from muster.recipes.recipe import Recipe


def likeness(recipe: Recipe) -> str:
    """Equal for recipes that build the same env, as far as that can be seen. How an env is rendered does not count."""
    kwargs = {name: value for name, value in recipe.kwargs.items() if name != "render_mode"}
    return _text([recipe.name, _made_from(recipe.factory), kwargs, recipe.wrappers])


def space_text(space: gym.Space[Any]) -> str:
    """A space in words, without the address of a function, which the space of MiniGrid's missions shows."""
    return re.sub(" at 0x[0-9a-f]+", "", repr(space))


def _made_from(factory: Any) -> Any:
    if type(factory) is not MakeGym:
        return factory
    spec, known = factory.target, gym.registry.get(getattr(factory.target, "id", ""))
    if isinstance(spec, str) or known is None:  # not known here: it is what the name says
        return None
    own, usual = ([one.kwargs, one.max_episode_steps] for one in (spec, known))
    return None if _text(own) == _text(usual) else own


def _text(value: Any) -> str:
    """A value in words: equal for equal values of plain kinds, a name for others."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{_text(key)}: {_text(one)}' for key, one in value.items()))}}}"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return f"{value.dtype} {value.shape} {hashlib.blake2b(value.tobytes(), digest_size=8).hexdigest()}"
    if isinstance(value, (str, bytes, int, float, complex, type(None), np.generic)):
        return repr(value)
    if type(value) is functools.partial:
        return _text([value.func, value.args, value.keywords])
    if callable(value):
        return callable_name(value)
    return space_text(value) if isinstance(value, gym.Space) else type(value).__qualname__
