"""Steps of a plain `GymEnv` without the tensordicts between its Gymnasium env and the columns.

Only for what gives the same rows bit for bit: TorchRL's own wrapper and nothing around it, one Box observed, no readers
of infos, no frames skipped. TorchRL's own step takes twenty times as long as that of a CartPole.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from tensordict import TensorDictBase  # type: ignore[import-untyped]  # it ships no py.typed
from torch import Tensor
from torchrl.data import Categorical, OneHot
from torchrl.envs import EnvBase
from torchrl.envs.libs.gym import GymEnv, GymWrapper

from muster.errors import SpecMismatch

_FLAGS = ("terminated", "truncated", "done")


class BareGym:
    """A plain `GymEnv`, stepped from the columns `root` and `arrived` into them; made by `bare_gym`."""

    def __init__(self, env: Any, name: str, root: TensorDictBase, arrived: TensorDictBase) -> None:
        self._wrapper, self._env, self.name = env, env._env, name
        self._action = root.get("action")
        self._spec = env.full_action_spec["action"]
        self._is_choice = isinstance(self._spec, (OneHot, Categorical))
        self._obs, self._root_obs = arrived.get(name).numpy(), root.get(name).numpy()
        self.dtype = self._obs.dtype
        self._reward = arrived.get("reward").numpy()
        self._flags = [arrived.get(flag).numpy() for flag in _FLAGS]
        self._root_flags = [root.get(flag).numpy() for flag in _FLAGS]

    @property
    def applies(self) -> bool:
        """Whether the env is still plain: its users may have given it readers of infos."""
        return not self._wrapper.info_dict_reader

    def step(self) -> bool:
        """Steps the env; returns whether the episode has ended. Raises SpecMismatch."""
        obs, reward, terminated, truncated = self.take(self._action)
        self._obs[...] = self._root_obs[...] = obs
        self._reward[0] = reward
        ended = bool(terminated or truncated)
        for flags in (self._flags, self._root_flags):
            flags[0][0], flags[1][0], flags[2][0] = terminated, truncated, ended
        return ended

    def take(self, action: Tensor) -> tuple[Any, Any, Any, Any]:
        """Steps the env by `action`: observation, reward, terminated, truncated. Raises SpecMismatch."""
        given = self._spec.to_numpy(action, safe=False)  # as TorchRL's read_action, which takes four times as long
        if self._is_choice and given.size == 1:
            given = int(given)
        obs, reward, terminated, truncated, _ = self._env.step(given)
        if type(reward) is not float:
            reward = _number(reward)
        return self._checked(obs, "step"), reward, terminated, truncated

    def reset(self) -> Any:
        """Resets the env; returns the observation. Raises SpecMismatch."""
        return self._checked(self._env.reset()[0], "reset")

    def _checked(self, obs: Any, verb: str) -> Any:
        obs = np.asarray(obs)
        if obs.shape != self._obs.shape:
            expected = f"expected {list(self._obs.shape)}, as its spec says"
            raise SpecMismatch(f"the {verb}'s {self.name!r} has shape {list(obs.shape)}, {expected}")
        return obs


def _number(reward: Any) -> float:
    """A reward as TorchRL reads it: none is 0, and arrays of one number are that."""
    if reward is None:
        return 0.0
    if np.size(reward) != 1:
        raise SpecMismatch(f"the step's 'reward' has shape {list(np.shape(reward))}, expected [1], as its spec says")
    return float(np.asarray(reward).reshape(()))


def bare_gym(env: EnvBase, root: TensorDictBase, arrived: TensorDictBase) -> BareGym | None:
    """The short way for `env`, if it is plain. root, arrived: its columns, those of the input and those of ``next``."""
    if type(env) not in (GymEnv, GymWrapper) or not isinstance(env._env, gymnasium.Env):
        return None
    others = {"reward", *_FLAGS}
    names = [key for key in arrived.keys(True, True) if key not in others]
    space, columns = env._env.observation_space, set(root.keys(True, True))
    plain = (
        not env.batch_size
        and env.wrapper_frame_skip == 1
        and (env.device is None or env.device.type == "cpu")
        and list(env.action_keys) == ["action"]
        and len(names) == 1
        and isinstance(names[0], str)
        and type(space) is spaces.Box
        and {*names, "action", *_FLAGS} <= columns
        and tuple(arrived.get(names[0]).shape) == space.shape
        and all(tuple(arrived.get(key, np.zeros(0)).shape) == (1,) for key in others)
    )
    return BareGym(env, names[0], root, arrived) if plain else None
