"""Results that contradict an env's specs, behind the exceptions that TorchRL's code around the env raises for them."""

from __future__ import annotations

import itertools
import traceback
from typing import Any

from tensordict import TensorDictBase  # type: ignore[import-untyped]  # it ships no py.typed
from torch import Tensor
from torchrl.envs import EnvBase, TransformedEnv

from muster.errors import MusterError, SpecMismatch
from muster.interop.torchrl.writer import laid_out_otherwise, missing_in, path_of

# Where TorchRL's steps and resets, and ours, keep what the env has returned until it is complete.
_STEPS = {"next_tensordict": "step", "arrived": "step", "tensordict_reset": "reset"}


def lie_behind(error: BaseException) -> SpecMismatch | None:
    """The error about what an env has returned, where that is why `error` was raised; else None."""
    if isinstance(error, MusterError):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame, inner in reversed(list(itertools.pairwise([*frames, None]))):
        assert frame is not None
        env = _env_of(frame)
        step = next((name for name in _STEPS if name in frame.f_locals), None)
        if env is None or step is None:
            continue
        if inner is not None and _env_of(inner) is not None and inner.f_code.co_name in ("_step", "_reset"):
            return None  # the env itself has raised
        if isinstance(env, TransformedEnv) and frame.f_code.co_name in ("_step", "_reset"):
            env = env.base_env
        return _difference(env, frame.f_locals[step], _STEPS[step])
    return None


def _env_of(frame: Any) -> Any:
    """The env in whose method, or in whose bare steps, a frame is."""
    owner = frame.f_locals.get("self")
    return owner if isinstance(owner, EnvBase) else getattr(owner, "stepped", None)


def _difference(env: Any, got: Any, step: str) -> SpecMismatch | None:
    if not isinstance(got, TensorDictBase):
        return SpecMismatch(f"the {step} returned a {type(got).__name__}, expected a TensorDict")
    observations = list(env.full_observation_spec.items(True, True))
    others = [
        *(env.full_reward_spec.items(True, True) if step == "step" else ()),
        *env.full_done_spec.items(True, True),
    ]
    flags = {path_of(key) for key in env.done_keys}
    for key, spec in (*observations, *others):
        path, value = path_of(key), got.get(key, None)
        expected = f"{list(spec.shape)} {spec.dtype}"
        if value is None and path not in flags:  # of flags, TorchRL makes those that are missing
            return missing_in(got, f"the {step}'s", path, expected)
        if not isinstance(value, Tensor) or -1 in spec.shape:
            continue
        exact = key in dict(observations)  # TorchRL reshapes others
        reshaped = not exact and value.numel() == spec.shape.numel()
        if (value.shape != spec.shape and not reshaped) or value.dtype != spec.dtype:
            return laid_out_otherwise(f"the {step}'s", path, value, expected)
    return None
