"""The envs of a run, the same whenever they are made; where that takes long, it is said."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from muster.algorithms.ppo_config import MAPPOConfig
from muster.errors import UsageError
from muster.extras import require
from muster.pool.notices import starts_unsaid
from muster.training.plan import TrainingPlan
from muster.training.preset_wrappers import flat
from muster.training.presets import preset_named
from muster.vector.make import make_vec
from muster.vector.multi_agent import MultiAgentVectorEnv
from muster.vector.vector_env import VectorEnv

if TYPE_CHECKING:
    from rich.console import Console

SAID_AFTER_S = 1.0
RunEnvs = VectorEnv | MultiAgentVectorEnv


def start_run_envs(plan: TrainingPlan, console: Console, num_envs: int | None = None, **options: Any) -> RunEnvs:
    """The envs of `open_run_envs`. What takes longer than a second is said meanwhile."""
    count = plan.config.num_envs if num_envs is None else num_envs
    with start_said(console, count, {**plan.options, **options}):
        return open_run_envs(plan, num_envs, **options)


@contextmanager
def start_said(console: Console, num_envs: int, options: Mapping[str, Any]) -> Iterator[None]:
    """Says that envs start if the ``with`` block takes longer than a second. options: of `make_vec`."""
    # A worker that is forked from this process must not inherit the locks of a thread that prints.
    if options.get("context") == "fork":
        yield
        return
    with starts_unsaid(), _said_later(console, f"starting {num_envs} env{'s' * (num_envs > 1)}"):
        yield


def open_run_envs(
    plan: TrainingPlan,
    num_envs: int | None = None,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[Callable[[Any], Any]] = (),
    **options: Any,
) -> RunEnvs:
    """The plan's envs, in the plan's own wrappers, and around these the preset's; modules that they need are imported.

    num_envs: None for the plan's; of another number the workers are as many as suit it.
    env_kwargs, wrappers: in addition to the plan's, and around them.  options: further ones of `make_vec`, in place of
    the plan's.
    Raises what `make_vec` raises, UsageError for envs with agents where the plan is PPO's, or the other way round, and
    ImportError where the preset needs a package.
    """
    recipe = recipe_of(plan, env_kwargs or {}, wrappers)
    count = plan.config.num_envs if num_envs is None else num_envs
    left_out = () if count == plan.config.num_envs else ("num_workers", "caller_steps")
    made = {name: value for name, value in plan.options.items() if name not in left_out}
    envs = open_envs(plan.made_from, count, **recipe, **{**made, **state_of(plan), **options})
    has_agents = isinstance(envs, MultiAgentVectorEnv)
    if has_agents != isinstance(plan.config, MAPPOConfig):
        envs.close()
        count_now = "several agents" if has_agents else "one agent"
        raise UsageError(f"{plan.name} has {count_now}, and its run is of {plan.algorithm}: it was another env then")
    return envs


def recipe_of(
    plan: TrainingPlan, env_kwargs: Mapping[str, Any], wrappers: Sequence[Callable[[Any], Any]] = ()
) -> dict[str, Any]:
    """``env_kwargs`` and ``wrappers`` of the plan's envs for `make_vec`. Raises ImportError as `open_run_envs`.

    env_kwargs, wrappers: as for `open_run_envs`.
    """
    preset = preset_named(plan.preset)
    require(f"Training {plan.name} needs", "muster-rl[train]", *preset.modules)
    by_preset = preset.env_kwargs if isinstance(plan.made_from, str) else {}  # a factory has arguments of its own
    # A network of the user's own reads the parts of an observation itself.
    by_family = [one for one in preset.wrappers if one is not flat or "policy" not in plan.names]
    around = (*plan.around, *by_family, *wrappers)
    return {"env_kwargs": {**by_preset, **plan.env_kwargs, **env_kwargs}, "wrappers": around}


def state_of(plan: TrainingPlan) -> dict[str, bool]:
    """The option of `make_vec` that has envs with agents tell their state, where a critic sees it."""
    return {"state": plan.config.critic == "centralised"} if isinstance(plan.config, MAPPOConfig) else {}


def open_envs(env: Any, num_envs: int, **options: Any) -> RunEnvs:
    """Envs, of an id or a factory, as training needs them. Options are those of `make_vec`, whose errors it raises."""
    return make_vec(env, num_envs, **{"autoreset_mode": "same_step", **options})


@contextmanager
def _said_later(console: Console, text: str) -> Iterator[None]:
    """Says the text if the ``with`` block takes long: until its end in a terminal, as a line anywhere else."""
    status = console.status(text)
    say = threading.Timer(SAID_AFTER_S, status.start if console.is_terminal else lambda: console.print(text))
    say.start()
    try:
        yield
    finally:
        say.cancel()
        say.join()
        status.stop()
