"""Checks of the arguments that users pass to a vector env, made before anything else is done with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from muster.arguments import as_whole
from muster.errors import ActionError, ConfigError, SpecMismatch, UsageError, WrongType
from muster.spaces.compare import first_difference
from muster.spaces.tree import Array, Space

# 11.6 days: poll, which takes milliseconds as a C int, cannot wait for more than 24.8 days.
_LONGEST_S = 1e6


def seeds_of(seed: Any, ids: Array) -> list[int | None]:
    """The seeds of envs `ids`: ``seed + i`` for env i, or those of the list. Raises UsageError, ConfigError."""
    num_envs = len(ids)
    if seed is None:
        return [None] * num_envs
    seeds: list[int | None]
    if (first := as_whole(seed)) is not None:
        seeds = [first + i for i in ids.tolist()]
    elif isinstance(seed, (list, tuple, np.ndarray)):
        seeds = [as_whole(one) for one in seed]
        if wrong := [one for one, whole in zip(seed, seeds, strict=True) if whole is None is not one]:
            raise UsageError(f"seed must be an int, got {wrong[0]!r}")
    else:
        raise UsageError(f"seed must be an int, a list of {num_envs} ints or None, got {seed!r}")
    if len(seeds) != num_envs:
        raise ConfigError(f"expected {num_envs} seeds, one for each env (num_envs), got {len(seeds)}")
    if any(one is not None and one < 0 for one in seeds):
        raise ConfigError(f"seeds must not be negative, got {seed!r}")
    return seeds


def reset_mask_of(mask: Any, num_envs: int) -> npt.NDArray[np.bool_]:
    """`mask` if it is a bool array ``[N]`` that selects something. Raises WrongType, ConfigError, as Gymnasium does."""
    name = "`options['reset_mask']`"
    if not isinstance(mask, np.ndarray):
        raise WrongType(f"{name} must be a numpy array, got {type(mask)}")
    if mask.shape != (num_envs,):
        raise ConfigError(f"{name} must have shape `({num_envs},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise WrongType(f"{name} must have `dtype=np.bool_`, got {mask.dtype}")
    if not mask.any():
        expected = "must contain a boolean array with at least one True value"
        raise ConfigError(f"{name} {expected}, got reset_mask={mask}; leave it out to reset all")
    return mask


def env_ids_of(env_ids: Any, num_envs: int) -> npt.NDArray[np.int64]:
    """The ids as int64 ``[n]``, if they are distinct and below `num_envs`. Raises ActionError."""
    ids = np.asarray(env_ids)
    if ids.ndim == 1 and ids.size == 0:
        raise ActionError("env_ids is empty: name some envs, or leave it out for all of them")
    if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
        raise ActionError(f"env_ids must be a list of distinct ints, got {env_ids!r}")
    if ids.min() < 0 or ids.max() >= num_envs or len(np.unique(ids)) != len(ids):
        raise ActionError(f"env_ids must be distinct and below num_envs={num_envs}, got {env_ids!r}")
    return np.ascontiguousarray(ids, np.int64)


def values_of(name: str, values: Any, numbers: Sequence[int]) -> dict[int, Any]:
    """By env, what `set_attr` gives them: ``values[i]`` of a list or tuple, else `values`. Raises ConfigError.

    numbers: of all envs.
    """
    if not isinstance(values, (list, tuple)):
        return dict.fromkeys(numbers, values)
    if len(values) != len(numbers):
        raise ConfigError(f"set_attr({name!r}): expected {len(numbers)} values, one an env, got {len(values)}")
    return dict(zip(numbers, values, strict=True))


def require_options(options: Any) -> None:
    """Raises UsageError for options of a reset that are neither a dict nor None."""
    if options is not None and not isinstance(options, dict):
        raise UsageError(f"reset(options=...) must be a dict or None, got {options!r}")


def require_count(min_envs: Any) -> None:
    """Raises UsageError for a `min_envs` that is neither an int nor None."""
    if min_envs is not None and as_whole(min_envs) is None:
        raise UsageError(f"recv(min_envs=...) must be an int or None, got {min_envs!r}")


def timeout_of(timeout: Any) -> float | None:
    """`timeout` in seconds, from 0 to `_LONGEST_S`, which is practically for ever; None for None. Raises UsageError."""
    if timeout is None:
        return None
    is_number = isinstance(timeout, (int, float, np.integer, np.floating)) and not isinstance(timeout, bool)
    if not is_number or timeout != timeout:
        raise UsageError(f"timeout must be a number of seconds or None, got {timeout!r}")
    return min(max(0.0, float(timeout)), _LONGEST_S)


def require_callable(name: Any) -> None:
    """Raises UsageError if `name` is neither the name of an attribute nor a function to call with an env."""
    if not isinstance(name, str) and not callable(name):
        raise UsageError(
            f"call() takes the name of a method or attribute, or a function of (env, env_index); got {name!r}"
        )


def require_agreement(
    observation_spaces: Sequence[Space], action_spaces: Sequence[Space], *, bounds: bool, action_bounds: bool = True
) -> None:
    """Raises SpecMismatch for the first env with other spaces than env 0.

    bounds, action_bounds: whether the bounds of observation spaces, and of action spaces, have to agree.
    """
    for path, all_spaces, with_bounds in (
        ("observation", observation_spaces, bounds),
        ("action", action_spaces, action_bounds),
    ):
        for env, space in enumerate(all_spaces):
            found = first_difference(all_spaces[0], space, path, bounds=with_bounds)
            if found is None:
                continue
            hint = ""
            if path == "action":
                hint = "; make them alike with a wrapper, such as gymnasium.wrappers.RescaleAction for bounds"
            elif first_difference(all_spaces[0], space, path, bounds=False) is None:
                hint = '; if that is meant, use observation_mode="different"'
            raise SpecMismatch(
                f"env {env} differs from env 0 in {found.path}: {found.field} is {found.got}, "
                f"expected {found.expected}{hint}",
                env_index=env,
            )


def is_replaced(envs: Any, *names: str) -> bool:
    """True if a subclass has replaced one of the methods `names` of a vector env of Muster's."""
    sources = (getattr(getattr(type(envs), name), "__globals__", {}) for name in names)
    return any(not source.get("__name__", "").startswith("muster.") for source in sources)
