"""Short ways to step an `EnvBase`, without the tensordicts that TorchRL makes around what the env's own class does.

Only for what gives the same rows bit for bit. `BareGym` is for a plain `GymEnv`: TorchRL's own wrapper and nothing
around it, one Box observed, no readers of infos, no frames skipped; TorchRL's own step takes twenty times as long as
that of a CartPole. `BareEnv` is for any class that leaves `EnvBase`'s verbs as they are, transforms inside included:
around a `_step` of 10 us, TorchRL's takes 50.
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import getattr_static
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from tensordict import TensorDictBase  # type: ignore[import-untyped]  # it ships no py.typed
from torch import Tensor
from torchrl.data import Categorical, OneHot
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.libs.gym import GymEnv, GymWrapper
from torchrl.envs.transforms import Compose, Transform

from muster.errors import SpecMismatch
from muster.interop.torchrl.leaves import Writer
from muster.rollout.plain_modules import as_key, leaves_of

_FLAGS = ("terminated", "truncated", "done")
# What `EnvBase.step_and_maybe_reset` is made of.
_VERBS = (
    *("any_done", "maybe_reset", "step", "step_and_maybe_reset"),
    *("_complete_done", "_step_and_maybe_reset", "_step_mdp", "_step_proc_data"),
)


def has_own_verbs(env: EnvBase) -> bool:
    """True if TorchRL's own `step_and_maybe_reset` steps the env, neither compiled nor with hooks after the step."""
    kind, own = type(env), vars(env)
    is_changed = any(own.get(name) for name in ("_compiled_step_and_maybe_reset", "_torchrl_native_autoreset"))
    if is_changed or not all(_is_original(kind, name) and name not in own for name in _VERBS):
        return False
    transforms, base = parts_of(env)
    hooks = Transform._post_step_mdp_hooks
    return base._post_step_mdp_hooks is None and all(type(one)._post_step_mdp_hooks is hooks for one in transforms)


def is_plainly_wrapped(env: EnvBase) -> bool:
    """True if nothing but TorchRL's own `TransformedEnv` is around the innermost env."""
    while isinstance(env, TransformedEnv):
        if type(env) is not TransformedEnv:
            return False
        env = env.base_env
    return True


def parts_of(env: EnvBase) -> tuple[list[Transform], EnvBase]:
    """The transforms around an env, in the order of a step, and the env."""
    transforms: list[Transform] = []
    while isinstance(env, TransformedEnv):
        transforms = [*_flat(env.transform), *transforms]
        env = env.base_env
    return transforms, env


def _flat(transform: Any) -> Iterator[Transform]:
    if type(transform) is Compose:
        for one in transform.transforms:
            yield from _flat(one)
    elif transform is not None:
        yield transform


def _is_original(kind: type[EnvBase], name: str) -> bool:
    # TransformedEnv completes nothing: its transforms have.
    return getattr_static(kind, name) in (getattr_static(EnvBase, name), getattr_static(TransformedEnv, name))


class BareEnv:
    """An env with `has_own_verbs`, stepped from the columns `root` into those of ``next``, and on to `root`.

    write: into `arrived`, which like `root` holds no stacks.
    """

    def __init__(self, env: Any, root: TensorDictBase, arrived: TensorDictBase, write: Writer) -> None:
        self._env, self._root, self._write = env, root, write
        self._flags = [arrived.get(key).numpy() for key in env.done_keys]
        moved = env._step_mdp(root.copy().set("next", arrived))
        places = {leaf.data_ptr(): leaf for leaf in arrived.values(True, True) if leaf.numel()}
        self._moves: list[tuple[Tensor, Tensor]] = []
        self._columns = leaves_of(root)
        for key, column in root.items(True, True):
            leaf = moved.get(key, None)
            if leaf is not None and leaf.numel() and (source := places.get(leaf.data_ptr())) is not None:
                self._moves.append((column, source))

    @property
    def applies(self) -> bool:
        """True if TorchRL's steps are still the env's: its users may have compiled them."""
        return self._env.__dict__.get("_compiled_step_and_maybe_reset") is None and not self._env.run_type_checks

    def step(self) -> bool:
        """Steps the env; returns whether a done flag is set. Raises SpecMismatch."""
        given = self._root.copy()
        arrived = self._env._step(given)
        if not isinstance(arrived, TensorDictBase):
            raise SpecMismatch(f"the step returned a {type(arrived).__name__}, expected a TensorDict")
        if not self._write.write_if_whole(arrived):
            self._write(self._completed(arrived))
        for path, value in leaves_of(given).items():
            column = self._columns.get(path)
            if column is not None and column is not value:  # the env has written into its input
                column.copy_(value)
        for column, source in self._moves:
            column.copy_(source)
        return any(flag.any() for flag in self._flags)

    def _completed(self, arrived: TensorDictBase) -> TensorDictBase:
        """A step's result as TorchRL makes it: rewards and flags of the right shape, and flags that are missing."""
        try:
            completed: TensorDictBase = self._env._step_proc_data(arrived)
        except Exception as error:
            if (misfit := self._write.misfit(arrived, [as_key(key) for key in self._env.done_keys])) is not None:
                raise misfit from error
            raise
        return completed


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
        """True if the env is still plain: its users may have given it readers of infos."""
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
