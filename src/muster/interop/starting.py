"""The parts that drop-ins share: functions that build an env anywhere, recipes of functions, and the processes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import gymnasium

from muster.backends.process import ProcessBackend, ProcessOptions
from muster.backends.serial import SerialBackend
from muster.errors import ConfigError, WrongType
from muster.introspection import callable_name
from muster.lazy_values import Lazy
from muster.pickling import UserCall
from muster.pickling import dumps as dumps_carefully
from muster.pool.deaths import Nouns
from muster.pool.environment import WorkerEnv
from muster.pool.limits import FOR_EVER, Limits
from muster.pool.messages import Sealed
from muster.pool.resources import usable_cores
from muster.pool.set_up import Processes, WorkerInit, choose_init, choose_init_of_drop_in
from muster.pool.unique_indices import UniqueIndices
from muster.recipes.recipe import BuiltEnv, Recipe
from muster.recipes.sources import EnvFunction
from muster.transport.mail import dumps
from muster.vector.multi_agent import MultiAgentVectorEnv
from muster.vector.packing import Asked, check_workers, count_processes
from muster.vector.vector_env import VectorEnv
from muster.worker_info import WorkerInfo, get_worker_info, worker_info_context

_RELEASE_TIMEOUT_S = 2.0
# Of drop-ins: none has a limit for a start, and one for a step only those that have restarts.
RESTARTING = Nouns(start_timeout="")
NOUNS = replace(RESTARTING, step_timeout="")


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


def limits_of(
    on_failure: str, max_restarts: int, step_timeout: float | None, max_concurrent_starts: int | None
) -> Limits:
    """The limits of drop-ins that have these keywords; as the originals', their ``close`` waits for everything."""
    return Limits(
        step_timeout=step_timeout,
        on_failure=on_failure,
        max_restarts=max_restarts,
        max_concurrent_starts=max_concurrent_starts,
        nouns=RESTARTING,
        closing=FOR_EVER,
    )


def processes(
    recipes: Sequence[Recipe],
    ways: Processes,
    limits: Limits,
    num_workers: Asked,
    *,
    name: str = "num_workers",
    memory_check: str = "warn",
) -> ProcessBackend:
    """The backend that steps each env in a process of its own, as the originals do; fewer processes only on request.

    num_workers: None for one process per env; a number packs the envs, "auto" where a trial shows that it may.
    name: that argument's name in the drop-in.
    memory_check: as for `muster.make_vec`; the originals start whatever is asked for.
    Raises ConfigError.
    """
    asked = check_workers(name, num_workers)
    if isinstance(asked, int):
        workers = min(asked, len(recipes))
    else:
        workers = count_processes(recipes, asked, usable_cores(), ways, limits.start_timeout, packs=False)
    return ProcessBackend(recipes, ProcessOptions(ways, limits, workers, memory_check=memory_check))


def ways_of(
    context: str | None,
    num_threads: int = 1,
    worker_env: WorkerEnv | None = None,
    worker_init: WorkerInit = None,
    *,
    original_forks: bool = False,
    preloads: tuple[str, ...] = (),
) -> Processes:
    """How the processes of a drop-in start.

    context: as for `multiprocessing`; None never forks the caller.  num_threads: of each process's numeric libraries.
    worker_env, worker_init: as for `muster.make_vec`; without `worker_init` workers run the script's top level where
    that may set up something, since the originals' workers have it: by running the script, unless original_forks.
    preloads: modules that all workers need, imported once where `worker_env` changes nothing for them.
    Raises ValueError for an unknown context, ConfigError.
    """
    if context is not None:
        get_context(context)  # raises ValueError for an unknown name
    method = context or "forkserver"
    init = choose_init_of_drop_in(worker_init, starts_fresh=method != "fork", original_forks=original_forks)
    # What is imported early has read the launcher's variables, not those that workers are given.
    preloads = preloads if worker_env is None else ()
    return Processes(method, num_threads, worker_env, init, preloads)


def sealed(message: Any, what: str, content: Any, *, context: str | None) -> Sealed:
    """A message for one worker, pickled. what, content: the part that errors name where it cannot travel."""
    try:
        return Sealed(dumps(message, shares_main=context == "fork"))
    except Exception:
        return Sealed(dumps_carefully(message, {what: content}, start_method=context or "forkserver"))


def in_this_process(recipes: Sequence[Recipe], worker_init: WorkerInit) -> SerialBackend:
    """The backend that steps all envs in the calling thread. worker_init: as for `muster.make_vec`."""
    return SerialBackend(recipes, init=choose_init(worker_init, starts_fresh=False).function)


def require_copies(envs: VectorEnv | MultiAgentVectorEnv) -> None:
    """Raises ConfigError for views: other libraries keep observations over the next step."""
    if not envs.copy:
        raise ConfigError("observations are views of memory that the next step overwrites; make_vec(..., copy=True)")


class FromArguments(EnvFunction):
    """A function that builds an env wherever it is called, by arguments in which values may be lazy."""

    def recipe(self, wrappers: tuple[Callable[[Any], Any], ...] = (), *, may_reuse: bool = False) -> Recipe:
        """The recipe of the env, for Muster's own vector envs."""
        parts = (self.name, self.build, self.arguments, wrappers, self.labels)
        return Recipe(self.env_index, *parts, may_reuse, self.call)

    def __call__(self) -> Any:
        """The env, for a vector env that is not Muster's. Lazy values in the arguments are released with it."""
        index, count, indices = self.env_index, self.num_envs, UniqueIndices()
        info = get_worker_info() or WorkerInfo(index, index, count, count, None, unique_indices=indices.take(1))
        with worker_info_context(info):
            built = self.recipe(may_reuse=True).build()
        weakref.finalize(built.env, indices.release)
        return _Releasing(built) if built.values.has_releases else built.env


class _Releasing(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Releases an env's lazy values once the env is closed. Attributes that others set go to the env."""

    def __init__(self, built: BuiltEnv) -> None:
        super().__init__(built.env)
        self._built = built

    def __setattr__(self, name: str, value: Any) -> None:
        if "_built" in self.__dict__:
            setattr(self.env, name, value)
        else:
            super().__setattr__(name, value)

    def close(self) -> None:
        """Closes the env, then releases its values."""
        try:
            super().close()
        finally:
            self._built.release(_RELEASE_TIMEOUT_S)
