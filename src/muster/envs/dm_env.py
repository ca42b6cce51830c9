"""dm_env's single-agent API behind Gymnasium's."""

from __future__ import annotations

import random
from typing import Any

import gymnasium
import numpy as np

from muster.envs.attributes import chain, get_through, set_through
from muster.envs.dm_env_spaces import space_of

# The metadata key that says that the envs may report discounts in their infos.
DISCOUNTS = "reports_discounts"


def is_dm_env(env: Any) -> bool:
    """Whether `env` speaks dm_env's API, for one agent or several."""
    return all(callable(getattr(env, name, None)) for name in ("reset", "step", "observation_spec", "action_spec"))


class DmEnv(gymnasium.Env[Any, Any]):
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

    def close(self) -> None:
        self.env.close()

    def get_wrapper_attr(self, name: str) -> Any:
        """The env's attribute, looked up through its wrappers."""
        return get_through(self, self.env, name)

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Sets the attribute where it is found, or on the innermost env."""
        set_through(self.env, name, value)
        return True


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
