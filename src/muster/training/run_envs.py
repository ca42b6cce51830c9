"""The envs of a run, the same whenever they are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from muster.errors import UsageError
from muster.extras import require
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
    """The plan's envs in its preset's wrappers; modules that they need are imported.

    num_envs: None for the plan's; of another number the workers are as many as suit it.
    env_kwargs, wrappers: in addition to the plan's, and around them.  options: further ones of `make_vec`, in place of
    the plan's.
    Raises what `make_vec` raises, UsageError for envs with agents, ImportError where the preset needs a package.
    """
    preset = preset_named(plan.preset)
    require(f"Training {plan.env} needs", "muster-rl[train]", *preset.modules)
    count = plan.config.num_envs if num_envs is None else num_envs
    made = {"num_workers": plan.num_workers if count == plan.config.num_envs else None, "autoreset_mode": "same_step"}
    envs = make_vec(
        plan.env,
        count,
        env_kwargs={**preset.env_kwargs, **(env_kwargs or {})},
        wrappers=(*preset.wrappers, *wrappers),
        **{**made, **options},
    )
    if not isinstance(envs, VectorEnv):
        envs.close()
        raise UsageError(f"{plan.env} has several agents; muster train takes envs with one.")
    return envs
