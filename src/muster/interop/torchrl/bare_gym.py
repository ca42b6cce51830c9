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
from torchrl.envs import EnvBase
from torchrl.envs.libs.gym import GymEnv, GymWrapper

from muster.errors import SpecMismatch

_FLAGS = ("terminated", "truncated", "done")


class BareGym:
    """A plain `GymEnv`, stepped from the columns `root` and `arrived` into them; made by `bare_gym`."""

    def __init__(self, env: Any, name: str, root: TensorDictBase, arrived: TensorDictBase) -> None:
        self._wrapper, self._env, self._name = env, env._env, name
        self._action = root.get("action")
        self._obs, self._root_obs = arrived.get(name).numpy(), root.get(name).numpy()
        self._reward = arrived.get("reward").numpy()
        self._flags = [arrived.get(flag).numpy() for flag in _FLAGS]
        self._root_flags = [root.get(flag).numpy() for flag in _FLAGS]

    @property
    def applies(self) -> bool:
        """Whether the env is still plain: its users may have given it readers of infos."""
        return not self._wrapper.info_dict_reader

    def step(self) -> bool:
        """Steps the env; returns whether the episode has ended. Raises SpecMismatch."""
        obs, reward, terminated, truncated, _ = self._env.step(self._wrapper.read_action(self._action))
        obs = np.asarray(obs)
        if obs.shape != self._obs.shape:
            expected = f"expected {list(self._obs.shape)}, as its spec says"
            raise SpecMismatch(f"the step's {self._name!r} has shape {list(obs.shape)}, {expected}")
        self._obs[...] = self._root_obs[...] = obs
        self._reward[0] = reward
        ended = bool(terminated or truncated)
        for flags in (self._flags, self._root_flags):
            flags[0][0], flags[1][0], flags[2][0] = terminated, truncated, ended
        return ended


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
        and len(names) == 1
        and isinstance(names[0], str)
        and type(space) is spaces.Box
        and {*names, "action", *_FLAGS} <= columns
        and tuple(arrived.get(names[0]).shape) == space.shape
        and all(tuple(arrived.get(key, np.zeros(0)).shape) == (1,) for key in others)
    )
    return BareGym(env, names[0], root, arrived) if plain else None
