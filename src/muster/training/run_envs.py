"""The envs of a run, the same whenever they are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from muster.errors import UsageError
from muster.extras import require
from muster.recipes.named import callable_named, env_named
from muster.training.plan import TrainingPlan
from muster.training.presets import preset_named
from muster.vector.make import make_vec
from muster.vector.vector_env import VectorEnv


def open_run_envs(
    plan: TrainingPlan,
    num_envs: int | None = None,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[Callable[[Any], Any]] = (),
    **options: Any,
) -> VectorEnv:
    """The plan's envs, in the plan's own wrappers, and around these the preset's; modules that they need are imported.

    num_envs: None for the plan's; of another number the workers are as many as suit it.
    env_kwargs, wrappers: in addition to the plan's, and around them.  options: further ones of `make_vec`, in place of
    the plan's.
    Raises what `make_vec` raises, UsageError for envs with agents, ImportError where the preset needs a package.
    """
    preset = preset_named(plan.preset)
    require(f"Training {plan.env} needs", "muster-rl[train]", *preset.modules)
    count = plan.config.num_envs if num_envs is None else num_envs
    made = dict(plan.options)
    if count != plan.config.num_envs:
        made = {name: value for name, value in made.items() if name not in ("num_workers", "caller_steps")}
    env = env_named(plan.env)
    kwargs = preset.env_kwargs if isinstance(env, str) else {}  # a factory has arguments of its own
    kwargs = {**kwargs, **plan.env_kwargs, **(env_kwargs or {})}
    around = (*map(callable_named, plan.wrappers), *preset.wrappers, *wrappers)
    return open_envs(plan.env, count, env_kwargs=kwargs, wrappers=around, **{**made, **options})


def open_envs(
    name: str, num_envs: int, *, env_kwargs: Mapping[str, Any], wrappers: Sequence[Callable[[Any], Any]], **options: Any
) -> VectorEnv:
    """The envs of a name, as `env_named` reads it, as training needs them. Raises as `open_run_envs`."""
    made = {"autoreset_mode": "same_step", **options}
    envs = make_vec(env_named(name), num_envs, env_kwargs=env_kwargs, wrappers=wrappers, **made)
    if not isinstance(envs, VectorEnv):
        envs.close()
        raise UsageError(f"{name} has several agents; muster train takes envs with one.")
    return envs
