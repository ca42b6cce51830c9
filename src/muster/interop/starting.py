"""The parts that drop-ins share: recipes from ``env_fns``, and how many envs share a worker process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from multiprocessing import get_context
from typing import Any, TypeVar

from muster.arguments import at_least
from muster.backends.process import ProcessBackend, ProcessOptions
from muster.errors import ConfigError, EnvError, OneEnvPerProcess, RecipeError, SpecMismatch, WorkerError, WrongType
from muster.introspection import callable_name, caller_stacklevel
from muster.recipes.recipe import Recipe
from muster.vector.multi_agent import MultiAgentVectorEnv
from muster.vector.vector_env import VectorEnv
from muster.workers.resources import usable_cores

Made = TypeVar("Made")

_START_TIMEOUT_S = 300.0


class PackingWarning(RuntimeWarning):
    """Several envs could not be built in one process, so each got a process of its own."""


def recipes_of(
    env_fns: Iterable[Callable[[], Any]], wrappers: Sequence[Callable[[Any], Any]] = (), *, may_reuse: bool = False
) -> list[Recipe]:
    """Recipes, one for each factory. may_reuse: see Recipe. Raises ConfigError for an empty list, WrongType."""
    recipes = []
    for i, env_fn in enumerate(env_fns):
        if not callable(env_fn):
            raise WrongType(f"env_fns[{i}] must be a callable that returns an env, got {type(env_fn).__name__}")
        labels = (f"env_fns[{i}]", f"env_fns[{i}]")
        recipes.append(Recipe(i, callable_name(env_fn), env_fn, {}, tuple(wrappers), labels, may_reuse))
    if not recipes:
        raise ConfigError("env_fns is empty; give at least one callable that returns an env")
    return recipes


def with_processes(
    make: Callable[..., Made], recipes: Sequence[Recipe], *, context: str | None, num_workers: int | None
) -> Made:
    """Returns ``make(backend)``, with worker processes that step several envs each where the envs allow that.

    Other workers start only after the first has built a second env. If that raises, or the worker dies, all envs are
    built again, each in a process of its own. context: as for `multiprocessing`; None never forks the caller.
    num_workers: None for one per usable core. Raises what `make` and building the envs raise, ValueError.
    """
    if context is not None:
        get_context(context)  # raises ValueError for an unknown name
    most = len(recipes)
    if num_workers is not None:
        at_least("num_workers", num_workers, 1)
    options = ProcessOptions(
        context=context or "forkserver",
        num_workers=min(num_workers or usable_cores(), most),
        start_timeout_s=_START_TIMEOUT_S,
        packs_carefully=True,
        memory_check="warn",
    )
    backend = ProcessBackend(recipes, options)
    try:
        return make(backend)
    except OneEnvPerProcess:
        pass  # the env itself asks for a process of its own: no reason to warn
    except (EnvError, RecipeError, WorkerError) as error:
        # The env that failed was the first in its process: other envs in the process are not the cause.
        alone = isinstance(error, EnvError) and error.env_index in backend.first_envs
        if options.num_workers == most or isinstance(error, SpecMismatch) or alone:
            raise
        warnings.warn(
            f"Several envs could not be built in one process ({error.headline}), so each gets a process of its "
            f"own. To be rid of this warning pass num_workers={most}.",
            PackingWarning,
            stacklevel=caller_stacklevel(),
        )
    return make(ProcessBackend(recipes, replace(options, num_workers=most)))


def require_copies(envs: VectorEnv | MultiAgentVectorEnv) -> None:
    """Raises ConfigError for views: other libraries keep observations over the next step."""
    if not envs.copy:
        raise ConfigError("observations are views of memory that the next step overwrites; make_vec(..., copy=True)")
