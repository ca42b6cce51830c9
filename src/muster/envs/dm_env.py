"""dm_env's single-agent API behind Gymnasium's."""

from __future__ import annotations

import inspect
import random
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from muster.envs.attributes import Adapting, chain, get_through
from muster.errors import SpecMismatch
from muster.spaces.tree import Space

# The metadata key that says that the envs may report discounts in their infos.
DISCOUNTS = "reports_discounts"
# New in Gymnasium 1.3.
_DISCRETE_TAKES_DTYPE = "dtype" in inspect.signature(spaces.Discrete).parameters


def is_dm_env(env: Any) -> bool:
    """Returns whether `env` speaks dm_env's API, for one agent or several."""
    return all(callable(getattr(env, name, None)) for name in ("reset", "step", "observation_spec", "action_spec"))


class DmEnv(Adapting, gymnasium.Env[Any, Any]):
    """A dm_env env. Its last step terminates the episode where the discount is 0, and truncates it otherwise.

    A discount that differs from what this says, 0 where the step terminates the episode and 1 everywhere else, is
    reported as ``info["discount"]``: it may be 0 in the middle of an episode, after a loss of life for example.
    dm_env has no seeds: `reset` seeds the generators of NumPy and Python that the env, or its task (dm_control), keeps
    as attributes.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.metadata = {**(getattr(env, "metadata", None) or {}), DISCOUNTS: True}
        self.observation_space = space_of(env.observation_spec(), "observation")
        self.action_space = space_of(env.action_spec(), "action")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            seed_generators(self.env, seed)
        return self.env.reset().observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        timestep = self.env.step(action)
        last, discount = timestep.last(), timestep.discount
        # Reward and discount are None where the env leaves them out.
        reward = 0.0 if timestep.reward is None else timestep.reward
        terminated = bool(last and discount == 0.0)
        is_expected = terminated or discount is None or discount == 1.0
        info = {} if is_expected else {"discount": float(np.asarray(discount).item())}
        return timestep.observation, reward, terminated, last and not terminated, info

    def render(self) -> Any:
        """The image that ``physics.render`` draws, in envs that have it. Raises AttributeError."""
        return get_through(None, self.env, "physics").render()


def seed_generators(env: Any, seed: int) -> None:
    """Seeds the random generators that the env and its task keep."""
    for one in chain(env):
        for holder in (one, getattr(one, "task", None)):
            for value in list(vars(holder).values()) if hasattr(holder, "__dict__") else ():
                if isinstance(value, np.random.RandomState):
                    value.seed(seed % 2**32)
                elif isinstance(value, np.random.Generator):
                    value.bit_generator.state = type(value.bit_generator)(seed).state
                elif isinstance(value, random.Random):
                    value.seed(seed)


def space_of(spec: Any, path: str) -> Space:
    """The space of a spec, or of a nested structure of specs; keys of dicts are sorted.

    DiscreteArray -> Discrete; BoundedArray and Array -> Box of the spec's shape, dtype and bounds; a spec without
    bounds has those of its dtype. Raises SpecMismatch for strings and for objects that are no specs.
    """
    if isinstance(spec, Mapping):
        return spaces.Dict([(key, space_of(spec[key], f"{path}[{key!r}]")) for key in sorted(spec, key=str)])
    if isinstance(spec, (list, tuple)):
        return spaces.Tuple(tuple(space_of(one, f"{path}[{i}]") for i, one in enumerate(spec)))
    shape, dtype = getattr(spec, "shape", None), getattr(spec, "dtype", None)
    if shape is None or dtype is None or np.dtype(dtype).kind not in "biuf":
        raise SpecMismatch(
            f"{path} has the spec {spec!r}; expected a dm_env spec of numbers, or a dict or list of these"
        )
    dtype, shape = np.dtype(dtype), tuple(shape)
    if hasattr(spec, "num_values") and shape == () and dtype.kind in "iu":
        return _discrete(int(spec.num_values), dtype)
    low, high = _limits(dtype)
    minimum, maximum = getattr(spec, "minimum", low), getattr(spec, "maximum", high)
    bounds = [np.broadcast_to(np.asarray(bound, dtype), shape) for bound in (minimum, maximum)]
    return spaces.Box(bounds[0], bounds[1], shape, dtype=dtype.type)


def _discrete(n: int, dtype: np.dtype[Any]) -> spaces.Discrete:
    if _DISCRETE_TAKES_DTYPE:
        return spaces.Discrete(n, dtype=dtype.type)
    space = spaces.Discrete(n)
    space.dtype = dtype  # what batches of it, and Muster's rows, go by
    return space


def _limits(dtype: np.dtype[Any]) -> tuple[float | int | bool, float | int | bool]:
    if dtype.kind == "f":
        return -np.inf, np.inf
    if dtype.kind == "b":
        return False, True
    return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
