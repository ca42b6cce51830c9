"""The facts that the caller needs about an env that another process builds: its spaces, metadata and agents."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gymnasium import ActionWrapper, Wrapper, spaces
from gymnasium.envs.registration import EnvSpec, WrapperSpec
from gymnasium.utils import RecordConstructorArgs
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from muster.envs.agents import AgentsEnv
from muster.envs.layout import AgentLayout, RowNode, layout_difference
from muster.errors import OneEnvPerProcess, RecipeError, SpecMismatch
from muster.hosts.failures import about_gym
from muster.introspection import type_name
from muster.pickling import MAKE_VEC, UserCall, is_plain
from muster.pickling.walk import is_importable
from muster.spaces.compare import first_difference
from muster.spaces.tree import Space
from muster.transport.mail import dumps
from muster.transport.slab import SlabPlan

_SMALL_BYTES = 1 << 16
# The steps of wrappers that return what the env's step does, as it is.
_PASSES_ON = (Wrapper.step, OrderEnforcing.step, ActionWrapper.step)
# The packages of all others.
_UNPACKING = ("gymnasium.", "stable_baselines3.", "torchrl.")


@dataclass(frozen=True)
class EnvFacts:
    """The facts about one env that the caller needs, since it may never build one itself."""

    observation_space: Space
    action_space: Space
    metadata: dict[str, Any]
    render_mode: str | None
    spec: EnvSpec | None
    agents: AgentLayout | None = None
    is_awaited: bool = False


def facts_of(env: Any) -> EnvFacts:
    """The facts of `env`. Raises AttributeError where it is no env, SpecMismatch for other spaces than Gymnasium's."""
    for name in ("observation_space", "action_space"):
        space = getattr(env, name)
        if not isinstance(space, spaces.Space):
            hint = about_gym(env) or "It comes from the package gym: use gymnasium.spaces"
            hint = f" {hint}" if type_name(space).startswith("gym.") else ""
            raise SpecMismatch(f"{type_name(env)}.{name} is {space!r:.200}, expected a gymnasium.spaces.Space.{hint}")
    metadata = getattr(env, "metadata", None) or {}
    return EnvFacts(
        env.observation_space,
        env.action_space,
        dict(metadata),
        getattr(env, "render_mode", None),
        _spec_of(env),
        env.layout if isinstance(env, AgentsEnv) else None,
        is_awaited(env),
    )


def is_awaited(env: Any) -> bool:
    """True if the env has coroutine functions. Raises RecipeError where that is one of two."""
    while isinstance(env, Wrapper) and type(env).step in _PASSES_ON:
        env = env.env
    outer = env
    while (inner := _inner(outer)) is not None:
        coroutines = inspect.iscoroutinefunction(getattr(inner, "step", None))
        passes_on = type(outer).step in _PASSES_ON
        if coroutines and not passes_on and type(outer).step.__module__.startswith(_UNPACKING):
            is_checker = isinstance(outer, PassiveEnvChecker)
            hint = "gymnasium.make takes disable_env_checker=True" if is_checker else "Leave it out"
            raise RecipeError(
                f"the wrapper {type(outer).__name__} does not await the coroutine that its env's step returns. {hint}: "
                "limit episodes in the env itself, by an argument of it, or in a wrapper with `async def step`"
            )
        outer = inner
    step, reset = getattr(env, "step", None), getattr(env, "reset", None)
    steps, resets = map(inspect.iscoroutinefunction, (step, reset))
    for name, method in (("step", step), ("reset", reset)):
        if inspect.isasyncgenfunction(method):
            raise RecipeError(
                f"{type(env).__qualname__}.{name} is an async generator. Make it a coroutine function: return the "
                "result, and yield nothing"
            )
    if steps != resets:
        awaited, plain = ("step", "reset") if steps else ("reset", "step")
        raise RecipeError(
            f"{type(env).__qualname__}.{awaited} is a coroutine function, and {plain} is none. Write "
            f"`async def {plain}`, too"
        )
    return steps


def is_awaited_class(factory: Any) -> bool:
    """True for a class of envs with coroutine functions: its envs may share a process, since they wait."""
    factory = factory.func if isinstance(factory, partial) else factory
    return isinstance(factory, type) and inspect.iscoroutinefunction(getattr(factory, "step", None))


def _inner(env: Any) -> Any:
    """The env that a wrapper of Gymnasium's or TorchRL's wraps. Not by their `__dict__`, see `_spec_of`."""
    if isinstance(env, Wrapper):
        return env.env
    if type(env).__module__.startswith("muster.interop.torchrl."):
        return getattr(env, "env", None)
    return getattr(env, "_env", None) if type(env).__module__.startswith("torchrl.") else None


def _spec_of(env: Any) -> EnvSpec | None:
    """The env's spec, with those arguments of it and of its wrappers that are plain and small; None where it has none.

    It can go to another process: what is called is there by its name, or left out, since it may hold anything.
    Wrappers are not asked for it, since each copies all arguments below it; nor for their `__dict__`: CPython looks
    attributes up more slowly from then on, 9 % of a step of CartPole.
    """
    try:
        own, layers = getattr(getattr(env, "unwrapped", env), "spec", None), list[Wrapper[Any, Any, Any, Any]]()
        if not isinstance(own, EnvSpec):
            return None
        callables = {name: _by_name(getattr(own, name)) for name in ("entry_point", "vector_entry_point")}
        spec = replace(own, kwargs=_slim(own.kwargs), **callables)
        while isinstance(env, Wrapper):
            layers.append(env)
            env = env.env
        for layer in reversed(layers):
            if isinstance(layer, TimeLimit):
                spec.max_episode_steps = layer._max_episode_steps
            elif isinstance(layer, OrderEnforcing):
                spec.order_enforce = True
            elif isinstance(layer, PassiveEnvChecker):
                spec.disable_env_checker = False
            elif type(layer).spec is Wrapper.spec:  # another would have to be asked
                kwargs = _slim(layer._saved_kwargs) if isinstance(layer, RecordConstructorArgs) else None
                entry_point = f"{type(layer).__module__}:{type(layer).__name__}"
                spec.additional_wrappers += (WrapperSpec(layer.class_name(), entry_point, kwargs),)
        return spec
    except Exception:  # a property of a user's class may raise anything
        return None


def _by_name(entry_point: Any) -> Any:
    return entry_point if isinstance(entry_point, str) or is_importable(entry_point) else None


def _slim(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in kwargs.items() if _is_small(one)}


def _is_small(value: Any) -> bool:
    # What is big is not pickled to find out.
    size = getattr(value, "nbytes", sys.getsizeof(value))
    return is_plain(value) and size <= _SMALL_BYTES and len(dumps(value)) <= _SMALL_BYTES


def check_one_per_process(env: Any, num_envs: int, call: UserCall = MAKE_VEC) -> None:
    """Raises OneEnvPerProcess if `env` must be alone in its process, but `num_envs` > 1 are to be built there."""
    if num_envs > 1 and (getattr(env, "metadata", None) or {}).get("one_per_process"):
        raise OneEnvPerProcess(
            f'{type(getattr(env, "unwrapped", env)).__qualname__} declares metadata["one_per_process"] = True, but '
            f"{num_envs} envs were to be built in one process. Give each a process of its own: {call.one_each}."
        )


def same_facts(a: EnvFacts, b: EnvFacts) -> bool:
    pairs = ((a.observation_space, b.observation_space), (a.action_space, b.action_space))
    return a.agents == b.agents and not any(first_difference(x, y, "", bounds=True) for x, y in pairs)


def misfit(plan: SlabPlan, env: Any, index: int) -> SpecMismatch | None:
    """The reason why a new env does not fit the rows that were laid out for the first one; None if it does."""
    facts, layout = facts_of(env), plan.obs.layout if isinstance(plan.obs, RowNode) else None
    reason = layout_difference(layout, facts.agents)
    for path, expected, got in (
        ("observation", plan.obs.space if layout is None else layout.observation_space(), facts.observation_space),
        ("action", plan.action.space if layout is None else layout.action_space(), facts.action_space),
    ):
        if reason is None and (found := first_difference(expected, got, path, bounds=False)) is not None:
            reason = f"{found.path}: {found.field} is {found.got}, expected {found.expected}"
    if reason is None:
        return None
    return SpecMismatch(
        f"env {index}, built anew, is laid out otherwise than before: {reason}. Make the factory build the same spaces "
        "and agents every time",
        env_index=index,
    )
