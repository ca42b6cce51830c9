"""Whether an `EnvBase` is stepped by TorchRL's own verbs, so that its ``_step`` can be called in their place."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import getattr_static
from typing import Any

from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.transforms import Compose, Transform

# What `EnvBase.step_and_maybe_reset` is made of.
_VERBS = (
    *("any_done", "maybe_reset", "step", "step_and_maybe_reset"),
    *("_complete_done", "_step_and_maybe_reset", "_step_mdp", "_step_proc_data"),
)


def has_own_verbs(env: EnvBase) -> bool:
    """Whether TorchRL's own `step_and_maybe_reset` steps the env, neither compiled nor with hooks after the step."""
    kind, own = type(env), vars(env)
    if not all(_is_original(kind, name) and name not in own for name in _VERBS) or any(
        own.get(name) for name in ("_compiled_step_and_maybe_reset", "_torchrl_native_autoreset")
    ):
        return False
    transforms, base = parts_of(env)
    return base._post_step_mdp_hooks is None and all(
        type(one)._post_step_mdp_hooks is Transform._post_step_mdp_hooks for one in transforms
    )


def is_plainly_wrapped(env: EnvBase) -> bool:
    """Whether nothing but TorchRL's own `TransformedEnv` is around the innermost env."""
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
