"""The envs of a run, the same whenever they are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from muster.algorithms.ppo_config import MAPPOConfig
from muster.errors import UsageError
from muster.extras import require
from muster.pool.output import INHERIT
from muster.training.plan import TrainingPlan
from muster.training.preset_wrappers import flat
from muster.training.presets import preset_named
from muster.vector.make import make_vec
from muster.vector.multi_agent import MultiAgentVectorEnv
from muster.vector.vector_env import VectorEnv

RunEnvs = VectorEnv | MultiAgentVectorEnv
FOR_SEVERAL = ("num_workers", "caller_steps")  # options that suit a number of envs


def open_run_envs(
    plan: TrainingPlan, num_envs: int | None = None, *, env_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[Callable[[Any], Any]] = (), **options: Any,
) -> RunEnvs:  # fmt: skip
    """The plan's envs, in the plan's own wrappers, and around these the preset's; modules that they need are imported.

    num_envs: None for the plan's; of another number the workers are as many as suit it.
    env_kwargs, wrappers: in addition to the plan's, and around them.  options: further ones of `make_vec`, in place of
    the plan's.
    Raises what `make_vec` raises, UsageError for envs with agents where the plan is PPO's, or the other way round, and
    ImportError where the preset needs a package.
    """
    count = plan.config.num_envs if num_envs is None else num_envs
    left_out = () if count == plan.config.num_envs else FOR_SEVERAL
    made = {name: value for name, value in plan.options.items() if name not in left_out}
    if plan.run.worker_output != INHERIT:
        made["worker_output"] = plan.run.worker_output
    recipe = {"autoreset_mode": "same_step", **recipe_of(plan, env_kwargs or {}, wrappers)}
    if num_envs is None:  # else these are no envs that go on
        recipe["replayable"] = bool(plan.run.replayable)
    envs: RunEnvs = make_vec(plan.made_from, count, **{**made, **recipe, **options})
    has_agents = isinstance(envs, MultiAgentVectorEnv)
    if has_agents != isinstance(plan.config, MAPPOConfig):
        envs.close()
        count_now = "several agents" if has_agents else "one agent"
        raise UsageError(f"{plan.name} has {count_now}, and its run is of {plan.algorithm}: it was another env then")
    return envs


def recipe_of(
    plan: TrainingPlan, env_kwargs: Mapping[str, Any], wrappers: Sequence[Callable[[Any], Any]] = ()
) -> dict[str, Any]:
    """Arguments of `make_vec` for the plan's envs, with their state where a critic sees it. Raises as `open_run_envs`.

    env_kwargs, wrappers: as for `open_run_envs`.
    """
    preset = preset_named(plan.preset)
    require(f"Training {plan.name} needs", "muster-rl[train]", *preset.modules)
    by_preset = preset.env_kwargs if isinstance(plan.made_from, str) else {}  # a factory has arguments of its own
    # A network of the user's own reads the parts of an observation itself.
    by_family = [one for one in preset.wrappers if one is not flat or "policy" not in plan.names]
    recipe = {"env_kwargs": {**by_preset, **plan.env_kwargs, **env_kwargs}}
    sees_state = isinstance(plan.config, MAPPOConfig) and plan.config.critic == "centralised"
    return {**recipe, "wrappers": (*plan.around, *by_family, *wrappers), "state": sees_state}
