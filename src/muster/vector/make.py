"""`make_vec`: the one call that builds a vector env."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gymnasium.vector import AutoresetMode

from muster.arguments import flags, one_of, whole
from muster.backends.base import Backend
from muster.backends.process import ProcessBackend, ProcessOptions, check_pool
from muster.backends.serial import SerialBackend
from muster.backends.thread import ThreadBackend
from muster.envs.adapt import adapted_recipes
from muster.errors import ConfigError, OneEnvPerProcess
from muster.vector.assemble import STRICT, AssemblyOptions, vector_env_of, wait_budgets
from muster.vector.batched_spaces import alike_spaces
from muster.vector.multi_agent import MultiAgentVectorEnv
from muster.vector.vector_env import VectorEnv
from muster.workers.deaths import NOUNS
from muster.workers.memory_plan import MEMORY_CHECKS
from muster.workers.resources import usable_cores

BACKENDS = ("serial", "thread", "process")


def make_vec(
    env: Any,
    num_envs: int | None = None,
    *,
    backend: str = "process",
    num_workers: int | None = None,
    env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    wrappers: Sequence[Callable[[Any], Any]] = (),
    context: str = "auto",
    autoreset_mode: str | AutoresetMode = "next_step",
    observation_mode: str = "same",
    copy: bool = True,
    one_env_per_process: bool = False,
    caller_steps: bool = False,
    start_timeout: float = 300.0,
    step_timeout: float | None = None,
    on_failure: str = "raise",
    max_restarts: int = 10,
    check_finite: bool = False,
    threads_per_worker: int = 1,
    groups: Mapping[Any, str] | None = None,
    state: bool = False,
    memory_check: str = "error",
) -> VectorEnv | MultiAgentVectorEnv:
    """A vector env: N envs, stepped in parallel by worker processes, behind Gymnasium's `VectorEnv` API.

    For envs with several agents it is a `MultiAgentVectorEnv`, which has the same methods.

    env: a Gymnasium id, an `EnvSpec`, a factory, or a list of factories; never an env that exists already.
    num_envs: None for 1, or for the list's length.
    backend: "process"; or "thread", for envs that release the GIL or must share one object; or "serial", to step all
        envs in the calling thread.
    num_workers: worker processes or threads; None for one per usable core, at most one per env.
    env_kwargs: keyword arguments for each env, one dict or a list of dicts; values may be `muster.lazy`.
    wrappers: callables ``env -> env``, applied in the worker, the first innermost.
    context: how workers start. "auto" starts fresh processes and never forks the caller.
    autoreset_mode: "next_step", "same_step" or "disabled", as Gymnasium defines them.
    observation_mode: "different" lets the envs' bounds differ; shapes, dtypes and keys must be equal.
    copy: False returns observations as views, valid until that env's next send.
    one_env_per_process: for libraries that can be loaded only once per process; num_workers is then num_envs. An env
        class can request it with ``metadata["one_per_process"] = True``.
    caller_steps: the calling process steps some of the envs instead of sleeping; if one of these crashes, so does it.
    start_timeout, step_timeout: seconds for a worker to build its envs, and for one ``env.step``.
    on_failure: "restart" replaces an env that raised, and a worker that died or timed out; their episodes end
        truncated, with the reason in ``infos["restarted"]``.
    max_restarts: how often one worker may fail within a minute before its failure is an error after all.
    check_finite: raise on NaN or infinity in observations and rewards.
    threads_per_worker: threads that OpenMP, BLAS and torch may start in each worker.
    groups: for multi-agent envs the group of every agent; None groups agents by name and spaces.
    state: True reads the state of multi-agent envs that have one after every step, into ``infos["state"]``; this may
        take a fifth of the step's time. Exceptions of ``state()`` are raised, except after the last agent has gone:
        then the episode's last state is kept.
    memory_check: what to do if the envs in worker processes will not fit into the memory that the cgroup or the
        machine has left, estimated from the first ones that were built: "error", "warn" or "off".

    Raises RecipeError, CannotTravel, EnvError (an env could not be built), SpecMismatch (the envs differ), WorkerDied,
    WorkerTimeout, NotEnoughMemory, OneEnvPerProcess, ConfigError.
    """
    one_of("backend", backend, BACKENDS)
    mode = _autoreset_mode(autoreset_mode)
    one_of("observation_mode", observation_mode, ("same", "different"))
    one_of("memory_check", memory_check, MEMORY_CHECKS)
    check_pool(NOUNS, context, start_timeout, step_timeout, on_failure, max_restarts, threads_per_worker)
    copy, check_finite = flags(copy=copy, check_finite=check_finite)
    caller_steps, one_env_per_process = flags(caller_steps=caller_steps, one_env_per_process=one_env_per_process)
    recipes = adapted_recipes(env, num_envs, env_kwargs, wrappers, groups, state)
    cores = usable_cores()
    if backend != "process":
        _refuse_without_processes(one_env_per_process, caller_steps, step_timeout)
    if backend == "serial":
        if num_workers is not None:
            raise ConfigError('num_workers needs workers; leave it out, or use backend="process" or "thread"')
        chosen: Backend = SerialBackend(recipes)
    elif backend == "thread":
        chosen = ThreadBackend(recipes, _count_workers(len(recipes), num_workers, cores, False, False), start_timeout)
    else:
        workers = _count_workers(len(recipes), num_workers, cores, one_env_per_process, caller_steps)
        if caller_steps:
            _refuse_caller_steps(one_env_per_process, step_timeout, on_failure)
        options = ProcessOptions(
            context="forkserver" if context == "auto" else context,
            num_workers=workers,
            caller_steps=caller_steps,
            start_timeout_s=start_timeout,
            step_timeout_s=step_timeout,
            threads_per_worker=threads_per_worker,
            one_env_per_process=one_env_per_process,
            memory_check=memory_check,
        )
        chosen = ProcessBackend(recipes, options)
    caller_wait_budget, worker_wait_budget = wait_budgets(cores, chosen.num_workers + 1, caller_steps=caller_steps)
    assembly = AssemblyOptions(
        autoreset_mode=mode,
        caller_wait_budget=caller_wait_budget,
        worker_wait_budget=worker_wait_budget,
        copy=copy,
        check_finite=check_finite,
        max_restarts=max_restarts if on_failure == "restart" else None,
    )
    parts = STRICT if observation_mode == "same" else replace(STRICT, spaces=alike_spaces)
    try:
        return vector_env_of(chosen, parts, assembly)
    except OneEnvPerProcess:
        if backend != "process" or num_workers is not None or caller_steps:
            raise
    return vector_env_of(ProcessBackend(recipes, replace(options, num_workers=len(recipes))), parts, assembly)


def _autoreset_mode(mode: str | AutoresetMode) -> AutoresetMode:
    names = {word.lower(): one for one in AutoresetMode for word in (one.name, one.value)}
    if isinstance(mode, AutoresetMode):
        return mode
    if not isinstance(mode, str) or mode.lower() not in names:
        raise ConfigError(f'autoreset_mode must be "next_step", "same_step" or "disabled", got {mode!r}')
    return names[mode.lower()]


def _count_workers(num_envs: int, num_workers: int | None, cores: int, one_each: bool, caller_steps: bool) -> int:
    if one_each:
        if num_workers not in (None, num_envs):
            needed = f"num_workers={num_envs} (num_envs)"
            raise ConfigError(f"one_env_per_process=True needs {needed}, got num_workers={num_workers}")
        return num_envs
    most = num_envs - 1 if caller_steps else num_envs
    if num_workers is None:
        return max(min(cores - 1 if caller_steps else cores, most), 0 if caller_steps else 1)
    count = whole("num_workers", num_workers, 1)
    if count > most:
        reason = "the calling process steps one env itself" if caller_steps else "a worker needs an env"
        raise ConfigError(f"num_workers={count} is too many for num_envs={num_envs}: {reason}; use at most {most}")
    return count


def _refuse_without_processes(one_env_per_process: bool, caller_steps: bool, step_timeout: float | None) -> None:
    provided = {"one_env_per_process": one_env_per_process, "caller_steps": caller_steps, "step_timeout": step_timeout}
    if name := next((name for name, value in provided.items() if value), None):
        raise ConfigError(f'{name} needs worker processes; leave it out, or use backend="process"')


def _refuse_caller_steps(one_env_per_process: bool, step_timeout: float | None, on_failure: str) -> None:
    if one_env_per_process:
        raise ConfigError("caller_steps=True would build an env in the calling process: not with one_env_per_process")
    if step_timeout is not None:
        raise ConfigError("caller_steps=True: the calling process cannot kill itself, so step_timeout is not possible")
    if on_failure == "restart":
        raise ConfigError('caller_steps=True: the calling process cannot restart itself; not with on_failure="restart"')
