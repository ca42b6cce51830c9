"""One `EnvBase` in its worker: an env to the engine; a step carries out one command of TorchRL's verbs.

What goes in and out are the columns; the engine's own action is the command's number, and its observation nothing. So
whatever the engine does for envs holds here, too: start methods, deaths that are noticed and explained, no orphans.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase  # type: ignore[import-untyped]  # it ships no py.typed
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.batched_envs import BatchedEnvBase
from torchrl.envs.common import EnvMetaData
from torchrl.envs.libs.gym import GymWrapper
from torchrl.envs.libs.pettingzoo import PettingZooWrapper

from muster.arguments import with_ints
from muster.envs.pettingzoo import is_pettingzoo
from muster.errors import MusterError, RecipeError
from muster.interop.torchrl.columns import EnvRows, has_stacks
from muster.interop.torchrl.leaves import Keys, Writer
from muster.interop.torchrl.short_steps import BareEnv, BareGym, bare_gym, has_own_verbs
from muster.introspection import type_name
from muster.rollout.fields import describe
from muster.rollout.plain_modules import as_key
from muster.worker_info import get_worker_info

# Shape and dtype of leaves by their paths; None for objects.
Schema = dict[tuple[str, ...], Any]


class Command(IntEnum):
    """The commands that need no objects."""

    STEP = 0
    STEP_AND_RESET = 1
    RESET = 2


NO_KEYS = 0
"""The number of the key set None: no ``next`` in the input of a step, and no tensordict for a reset."""

_FLAG = "_reset"
_NOTHING = np.zeros(1, np.uint8)
_NO_INFO: dict[str, Any] = {}


class HostedEnv(gymnasium.Env[Any, Any]):
    """An `EnvBase` as the engine steps it. The action is ``[command, number of a key set]``.

    Calls that are no step, or that carry objects, are `perform`, by the names of TorchRL's own messages.
    """

    observation_space = spaces.Box(0, 1, (1,), np.uint8)
    action_space = spaces.Box(0, 2**31, (2,), np.int64)

    def __init__(self, env: EnvBase) -> None:
        self.env = env
        info = get_worker_info()
        self._index, self._worker = (0, 0) if info is None else (info.env_index or 0, info.worker_index)
        self._key_sets: list[Keys | None] = [None]
        self._bare: BareGym | BareEnv | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "env":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.env, name)

    # ---- before the first step

    def env_metadata(self, wanted: Sequence[int]) -> EnvMetaData | None:
        """TorchRL's description of the env, if its index is among those `wanted`. Raises for unsuited transforms."""
        if self._index not in wanted:
            return None
        BatchedEnvBase._validate_worker_env(self.env)
        return EnvMetaData.metadata_from_env(self.env)

    def differs_from(self, schema: Schema) -> str:
        """The first difference of the env's leaves from `schema`, see `schema_of`; "" for none."""
        return difference(schema, schema_of(EnvMetaData.metadata_from_env(self.env)))

    def attach(self, rows: Mapping[int, EnvRows], reset_keys: Keys, step_keys: Keys, object_keys: Keys) -> None:
        """Maps the columns. reset_keys, step_keys: the leaves that a reset writes at the root, and a step in next."""
        self.env.set_spec_lock_()
        whole = rows[self._index].mapped()
        self._next = whole.get("next")
        self._root = whole.exclude("next")
        self._object_keys = object_keys
        self._write_next = Writer(self._next, "the step's", required=step_keys)
        self._write_root = Writer(self._root, "the root's")
        self._bare = bare_gym(self.env, self._root, self._next)
        if self._bare is None and not object_keys and has_own_verbs(self.env) and not has_stacks(whole):
            self._bare = BareEnv(self.env, self._root, self._next, self._write_next)
        of_reset, required = self._root.select(*reset_keys, strict=False), [as_key(key) for key in reset_keys]
        required = [path for path in required if path[-1] != _FLAG]
        self._write_reset = Writer(of_reset, "the reset's", required)
        # A reset with flags changes what lies at their places and below. Of the rest TorchRL returns the input.
        places = [as_key(key)[:-1] for key in self.env.reset_keys]
        required = [path for path in required if any(path[: len(place)] == place for place in places)]
        self._write_given_reset = Writer(of_reset, "the reset's", required)

    def learn_keys(self, number: int, keys: Keys) -> None:
        """Gives a set of keys a number; commands name it so from now on."""
        self._key_sets[number:] = [keys]

    # ---- commands

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        command, number = action.tolist()
        keys = self._key_sets[number]
        bare = self._bare if command != Command.RESET and keys is None else None
        if bare is not None and not bare.applies:
            bare = None
        try:
            if bare is not None:
                if bare.step() and command == Command.STEP_AND_RESET:
                    self._write_root(self.env.maybe_reset(self._root.exclude(*self.env.reset_keys).clone()))
            elif command == Command.RESET:
                self._reset(keys, {})
            else:
                self._step(keys, resets=command == Command.STEP_AND_RESET)
        except Exception as error:
            if bare is None or isinstance(self.env, TransformedEnv):  # else TorchRL's code has no part in it
                self._advise(error, "reset" if command == Command.RESET else "step")
            raise
        return _NOTHING, 0.0, False, False, _NO_INFO

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Nothing: the envs are reset by command."""
        return _NOTHING, {}

    def perform(self, pickled: Mapping[int, bytes]) -> Any:
        """Carries out the message for this env, if there is one: a name and its data. Returns the answer, or None."""
        if self._index not in pickled:
            return None
        name, data = pickle.loads(pickled[self._index])
        handler = _HANDLERS.get(name) if isinstance(name, str) else None
        try:
            return self._ask(name, *data) if handler is None else handler(self, data)
        except Exception as error:
            if name in _STEPS:
                self._advise(error, _STEPS[name])
            raise

    def close(self) -> None:
        self.env.close(raise_if_closed=False)

    def _advise(self, error: Exception, verb: str) -> None:
        """Adds to an exception where it was raised, and how to find out whether the env keeps to its specs."""
        if not isinstance(error, MusterError):
            error.add_note(
                f"Raised in {verb} of env {self._index} (worker {self._worker}). If the env may return what its specs "
                "do not promise: check_env_specs(env) of torchrl.envs.utils shows all that differs"
            )

    def _step(
        self, keys: Keys | None, objects: TensorDictBase | None = None, *, resets: bool
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """Steps the env, and by `resets` resets it where it is done; returns what has arrived, and the next root."""
        given = self._root.clone()  # what the env hands on of it is written after its column was
        if keys is not None:
            given.set("next", self._next.select(*keys))
        if objects is not None:
            given.update(objects)
        data, root = self.env.step_and_maybe_reset(given) if resets else (self.env.step(given), None)
        arrived = data.get("next")
        self._write_next(arrived)
        root = self.env._step_mdp(data) if root is None else root
        self._write_root(root)
        return arrived, root

    def _reset(self, keys: Keys | None, kwargs: Mapping[str, Any]) -> TensorDictBase:
        given = None if keys is None else self._root.select(*keys, strict=False)
        current = self.env.reset(tensordict=given, **kwargs)
        (self._write_reset if given is None else self._write_given_reset)(current)
        return current

    # ---- messages that carry objects

    def _handle_step(self, data: Any, *, resets: bool = False) -> Any:
        if not isinstance(data, dict):  # shapes are dynamic: there are no columns
            return self.env._step(data)
        keys = _tuple_of(data.get("next_td_passthrough_keys"))
        arrived, root = self._step(keys, data.get("non_tensor_data"), resets=resets)
        if not resets:
            return "objects", arrived.select(*self._object_keys, strict=False)
        return "objects", root.select(*self._object_keys).set("next", arrived.select(*self._object_keys))

    def _handle_reset(self, data: Any) -> Any:
        given, kwargs = data
        if given is None or isinstance(given, TensorDictBase):  # shapes are dynamic: there are no columns
            return self.env.reset(tensordict=None if given is None else given.unlock_(), **kwargs)
        current = self._reset(_tuple_of(given), kwargs)
        return ("objects", current.select(*self._object_keys, strict=False)) if self._object_keys else None

    def _handle_seed(self, data: Any) -> Any:
        seed, static_seed = data
        if seed is not None:
            torch.manual_seed(seed)
        return "seeded", self.env.set_seed(with_ints(seed), static_seed=static_seed)

    def _handle_snapshot(self, data: Any) -> Any:
        try:
            self.env[slice(None)] = data
        except (TypeError, NotImplementedError, AttributeError) as error:
            kind = type(self.env).__name__
            return "set_env_snapshot_error", f"{kind} in a worker does not support snapshot writeback: {error}"
        return "set_env_snapshot_done", None

    def _ask(self, name: str | tuple[str, ...], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The value of an attribute, which a tuple of names leads to, or what it returns where it is a method."""
        names = (name,) if isinstance(name, str) else tuple(name)
        value: Any = self.env
        for one in names:
            value = getattr(value, one)
        if callable(value):
            value = value(*[arg for arg in args if not (isinstance(arg, str) and arg == "_self")], **kwargs)
        return "_".join(names) + "_done", None if names == ("to",) else value


# The messages that step or reset.
_STEPS = {"step": "step", "step_and_maybe_reset": "step", "reset": "reset"}
_HANDLERS: dict[str, Callable[[HostedEnv, Any], Any]] = {
    "step": HostedEnv._handle_step,
    "step_and_maybe_reset": partial(HostedEnv._handle_step, resets=True),
    "reset": HostedEnv._handle_reset,
    "seed": HostedEnv._handle_seed,
    "state_dict": lambda hosted, _: ("state_dict", without_locks(hosted.env.state_dict())),
    "load_state_dict": lambda hosted, data: hosted.env.load_state_dict(data),
    "set_env_snapshot": HostedEnv._handle_snapshot,
}


def hosted(env: Any) -> HostedEnv:
    """The env that a factory has returned, for the engine. Raises RecipeError."""
    if isinstance(env, EnvBase):
        return HostedEnv(env)
    problem: TypeError | None = None
    try:
        if is_pettingzoo(env):
            return HostedEnv(PettingZooWrapper(env))
        if isinstance(env, gymnasium.Env):
            return HostedEnv(GymWrapper(env))
    except TypeError as error:  # an env with PettingZoo's methods, but of another class
        problem = error
    raise RecipeError(
        f"create_env_fn returned a {type_name(env)}, expected an EnvBase of TorchRL's, or an env of Gymnasium's or "
        "PettingZoo's classes; others become one by as_torchrl(muster.make_vec(...))"
    ) from problem


def schema_of(metadata: EnvMetaData) -> Schema:
    """Shape and dtype of each leaf of an env's specs; of objects only that they are there."""
    schema: Schema = {}
    for key, spec in metadata.specs.items(True, True):
        dtype = getattr(spec, "dtype", None)
        schema[key[2:]] = (tuple(spec.shape), dtype) if isinstance(dtype, torch.dtype) else None
    return schema


def difference(expected: Schema, got: Schema) -> str:
    """The first difference of one schema from another, in words; "" for none."""
    for key in {**expected, **got}:
        if key not in got:
            return f"{describe(key)} is missing"
        if key not in expected:
            return f"{describe(key)} is one more"
        if expected[key] != got[key]:
            return f"{describe(key)} has shape and dtype {_words(got[key])}, expected {_words(expected[key])}"
    return ""


def _words(entry: Any) -> str:
    return "an object" if entry is None else f"{list(entry[0])} {entry[1]}"


def _tuple_of(keys: Any) -> Keys | None:
    return None if keys is None or keys is False else tuple(keys)


def without_locks(state: Any) -> Any:
    """A state dict without the locks that a shared ``VecNorm`` has in its own."""
    from multiprocessing.synchronize import Lock

    entries = ((key, without_locks(value) if isinstance(value, OrderedDict) else value) for key, value in state.items())
    return OrderedDict((key, None if isinstance(value, Lock) else value) for key, value in entries)
