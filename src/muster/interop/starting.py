"""The parts that drop-ins share: recipes from lists of functions, and the worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

from muster.backends.process import ProcessBackend, ProcessOptions
from muster.backends.serial import SerialBackend
from muster.errors import ConfigError, WrongType
from muster.interop.env_functions import FromArguments
from muster.introspection import callable_name
from muster.lazy_values import Lazy
from muster.pickling import UserCall
from muster.recipes.recipe import Recipe
from muster.vector.multi_agent import MultiAgentVectorEnv
from muster.vector.packing import Asked, check_workers, count_processes
from muster.vector.vector_env import VectorEnv
from muster.workers.close_limits import CloseLimits
from muster.workers.deaths import Nouns
from muster.workers.resources import usable_cores
from muster.workers.worker_env import WorkerEnv
from muster.workers.worker_init import WorkerInit, choose_init, choose_init_of_drop_in

_START_TIMEOUT_S = 300.0


def recipes_of(
    fns: Iterable[Callable[..., Any]],
    call: UserCall,
    wrappers: Sequence[Callable[[Any], Any]] = (),
    *,
    may_reuse: bool = False,
    label: str = "",
) -> list[Recipe]:
    """Recipes, one for each factory.

    may_reuse: see Recipe.  label: the name of factory `{}` in messages; empty for that of an element of a list.
    Raises ConfigError for an empty list, WrongType.
    """
    recipes = []
    for i, fn in enumerate(fns):
        name = (label or f"{call.factory}[{{}}]").format(i)
        if isinstance(fn, FromArguments):
            recipe = replace(fn.recipe(tuple(wrappers), may_reuse=may_reuse), env_index=i)
        elif callable(fn) and type(fn) is not Lazy:
            recipe = Recipe(i, callable_name(fn), fn, {}, tuple(wrappers), (name, name), may_reuse, call)
        else:
            raise WrongType(f"{name} must be a callable that returns an env, got {type(fn).__name__}")
        recipes.append(recipe)
    if not recipes:
        raise ConfigError(f"{call.factory} is empty; give at least one callable that returns an env")
    return recipes


def processes(
    recipes: Sequence[Recipe],
    *,
    context: str | None,
    num_workers: Asked,
    name: str,
    worker_env: WorkerEnv | None,
    worker_init: WorkerInit,
    close_limits: Callable[[int], CloseLimits],
    num_threads: int = 1,
    memory_check: str = "warn",
) -> ProcessBackend:
    """The backend that steps each env in a process of its own, as the originals do; fewer processes only on request.

    context: as for `multiprocessing`; None never forks the caller.
    num_workers: None for one process per env; a number packs the envs, "auto" where a trial shows that it may.
    name: the argument's name.  worker_env, worker_init: as for `muster.make_vec`; without `worker_init` workers run the
    script's top level where that sets up other modules, since the originals' workers have that.
    close_limits: how long the original waits for envs that close, by the number of processes.
    num_threads: threads of each process's numeric libraries.
    memory_check: as for `muster.make_vec`; the originals start whatever is asked for.
    Raises ValueError for an unknown context, ConfigError.
    """
    if context is not None:
        get_context(context)  # raises ValueError for an unknown name
    method = context or "forkserver"
    asked = check_workers(name, num_workers)
    init = choose_init_of_drop_in(worker_init, starts_fresh=method != "fork")
    if isinstance(asked, int):
        workers = min(asked, len(recipes))
    else:
        cores = usable_cores()
        workers = count_processes(
            recipes, asked, cores, method, _START_TIMEOUT_S, packs=False, worker_env=worker_env, init=init
        )
    options = ProcessOptions(
        context=method,
        num_workers=workers,
        start_timeout_s=_START_TIMEOUT_S,
        threads_per_worker=num_threads,
        memory_check=memory_check,
        worker_env=worker_env,
        init=init,
        nouns=Nouns(step_timeout=""),
    )
    backend = ProcessBackend(recipes, options)
    backend.close_limits = close_limits(workers)
    return backend


def in_this_process(recipes: Sequence[Recipe], worker_init: WorkerInit) -> SerialBackend:
    """The backend that steps all envs in the calling thread. worker_init: as for `muster.make_vec`."""
    return SerialBackend(recipes, init=choose_init(worker_init, starts_fresh=False).function)


def require_copies(envs: VectorEnv | MultiAgentVectorEnv) -> None:
    """Raises ConfigError for views: other libraries keep observations over the next step."""
    if not envs.copy:
        raise ConfigError("observations are views of memory that the next step overwrites; make_vec(..., copy=True)")
