"""`make_vec`: the one call that builds a vector env."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from gymnasium.vector import AutoresetMode

from muster.arguments import explains_keywords, flags, one_of
from muster.backends.base import Backend
from muster.backends.process import ProcessBackend, ProcessOptions
from muster.backends.serial import SerialBackend
from muster.backends.thread import ThreadBackend
from muster.envs.adapt import adapted_recipes
from muster.errors import ConfigError
from muster.hosts.env_facts import is_awaited_class
from muster.pickling import UserCall
from muster.pool.environment import WorkerEnv
from muster.pool.limits import CLOSE_S, Limits
from muster.pool.output import INHERIT, checked_output
from muster.pool.resources import MEMORY_CHECKS, usable_cores
from muster.pool.set_up import Processes, WorkerInit, choose_init
from muster.recipes.known_envs import is_known
from muster.recipes.named import refuse_while_importing
from muster.recipes.recipe import Recipe
from muster.vector.assemble import STRICT, vector_env_of
from muster.vector.multi_agent import MultiAgentVectorEnv
from muster.vector.packing import AUTO, at_most, check_workers, count_processes, one_each
from muster.vector.parts import SteppingOptions, equal_spaces
from muster.vector.vector_env import VectorEnv

BACKENDS = ("serial", "thread", "process")


@explains_keywords()
def make_vec(
    env: Any,
    num_envs: int | None = None,
    *,
    backend: str = "process",
    num_workers: int | Literal["auto"] | None = None,
    env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    wrappers: Sequence[Callable[[Any], Any]] = (),
    context: str = "auto",
    autoreset_mode: str | AutoresetMode = "next_step",
    observation_mode: str = "same",
    copy: bool = True,
    one_env_per_process: bool = False,
    caller_steps: bool = False,
    concurrent: bool = False,
    start_timeout: float = 300.0,
    step_timeout: float | None = None,
    close_timeout: float | None = CLOSE_S,
    on_failure: str = "raise",
    max_restarts: int = 10,
    max_concurrent_starts: int | None = None,
    recycle_after: Mapping[str, float] | None = None,
    replayable: bool = False,
    check_finite: bool = False,
    threads_per_worker: int = 1,
    groups: Mapping[Any, str] | None = None,
    state: bool = False,
    worker_env: WorkerEnv | None = None,
    worker_init: WorkerInit = None,
    worker_output: str | os.PathLike[str] = INHERIT,
    memory_check: str = "error",
) -> VectorEnv | MultiAgentVectorEnv:
    """A vector env: N envs, stepped in parallel by worker processes, behind Gymnasium's `VectorEnv` API.

    For envs with several agents it is a `MultiAgentVectorEnv`, which has the same methods.

    env: a Gymnasium id, an `EnvSpec`, a factory, or its name as ``module:factory`` or ``file.py:factory``, or a list of
        these; never an env that exists already.
    num_envs: None for 1, or for the list's length.
    backend: "process"; or "thread", for envs that release the GIL or must share one object; or "serial", to step all
        envs in the calling thread.
    num_workers: worker processes. None gives each env a process of its own, since a library may share what it holds
        with all envs in its process; only ids of Gymnasium, ALE, PettingZoo, mpe2, MiniGrid, dm_control and Melting
        Pot, without wrappers of anybody else and without windows (render_mode "human"), share one process per usable
        core. A number is for envs that share nothing: so many workers step several envs each. "auto" tries two envs
        side by side in a process of its own, for 64 steps, and packs them as those ids where each is bit for bit what
        it is alone, infos included; of a list, two of each kind and of any two kinds, up to three. Envs that share
        queues, locks, pipes or memory with this process are not tried, since the trial would use these, and get a
        process each. Threads: None for one per usable core.
    env_kwargs: keyword arguments for each env, one dict or a list of dicts; values may be `muster.lazy`, and what
        multiprocessing shares: queues, locks, pipes, memory (of a spawn or forkserver context, unless workers fork).
    wrappers: callables ``env -> env``, applied in the worker, the first innermost.
    context: how workers start. "auto" starts fresh processes and never forks the caller.
    autoreset_mode: "next_step", "same_step" or "disabled", as Gymnasium defines them.
    observation_mode: "different" lets the envs' bounds differ; shapes, dtypes and keys must be equal.
    copy: False returns observations as views, valid until that env's next send. Else they are the caller's own: each
        fork of the caller copies the big batches that are held, of 0.4 GB in about 0.5 s.
    one_env_per_process: for libraries that can be loaded only once per process: num_workers is num_envs ("auto", too,
        without a trial), and an env that raised is built again in a new process. An env class requests it by
        ``metadata["one_per_process"] = True``.
    caller_steps: the calling process steps some of the envs instead of sleeping, one where each env has a process of
        its own; if one of these crashes, so does it.
    concurrent: for envs that wait, such as browsers, containers and language models: a worker steps all its envs at the
        same time, each in a thread of its own, or in the worker's event loop where its ``reset`` and ``step`` are
        coroutine functions. `num_workers` None then gives one worker per usable core, one in all with threads, and
        `step_timeout` ends one env alone. Envs of coroutine functions are awaited in any case, and a class of such envs
        shares one process per core.
    start_timeout, step_timeout: seconds for a worker to build its envs, and for one ``env.step`` or ``env.reset``.
        A call has the second one, too. What counts is the time for which the caller waits: a step that hangs while
        nobody waits is ended one limit after a wait begins. Limits apart, lines of the logger "muster" say after 10 s,
        1, 10 and 60 minutes which env is waited for, and where it hangs.
    close_timeout: seconds that ``close()`` waits for each env's own ``close()``, which may have a video to finish; None
        waits as long as that takes. After 5 s a line says which envs are still closing; Ctrl-C ends the wait. Workers
        that are too slow are killed, with a RuntimeWarning. Envs that the caller steps itself cannot be cut off.
    on_failure: "restart" replaces an env that raised, and a worker that died or timed out; their episodes end
        truncated, with the reason in ``infos["restarted"]``. A worker that fails while the vector env starts is started
        again, too, up to `max_restarts` times, each with a RuntimeWarning. What `set_attr` set last is set again in the
        new env; where that fails, the reason and a RuntimeWarning say so. Ends of pipes in `env_kwargs` then stay open,
        for replacements, until `close`. "replay" sets the new env to the state before the step that failed, see
        `replayable`, and gives it the action again: the row comes as if nothing had happened, but for
        ``infos["replayed"]``, which counts. A step that fails again, or an env that does not come to that state, is as
        with "restart". Effects outside are repeated.
    max_restarts: how often one worker may fail within a minute before its failure is an error after all.
    max_concurrent_starts: how many workers build their envs at the same time, for simulators whose starts are in each
        other's way: the next one begins once one is ready, in the order of their indices, and `start_timeout` counts
        from its own turn. Workers that replace others take turns, too. None for all at once.
    recycle_after: with ``on_failure="restart"``, for envs that leak: a worker is replaced after so many ``"episodes"``,
        ``"steps"`` or ``"seconds"``, or once it and its children hold so many ``"memory_bytes"`` of their own, as in
        ``{"episodes": 500, "memory_bytes": 2 << 30}``. It is looked at every 0.5 s, and replaced where its env begins
        an episode: the old env is closed first, within `close_timeout`, and the reset that is due is the new one's. No
        row is lost, and ``stats()["recycled"]`` counts it. With ``"same_step"``, and of other envs in the same worker,
        which are in the middle of episodes, the next row ends the episode truncated, with the reason in
        ``infos["restarted"]``; such a worker is replaced once none of its envs owes an answer. One worker at a time, or
        `max_concurrent_starts`.
    replayable: gives each reset a seed of its own, those within steps included, so that ``envs.get_states()`` has the
        states of envs, and ``envs.set_states(states)`` sets any such envs to them: by the same seed and actions. For
        envs that draw from generators that ``reset(seed=...)`` seeds; a worker with one env seeds the global ones, too.
    check_finite: raise on NaN or infinity in observations and rewards.
    threads_per_worker: threads that OpenMP, BLAS and torch may start in each worker, where the environment does not say
        it (``OMP_NUM_THREADS``).
    groups: for multi-agent envs the group of every agent; None groups agents by name and spaces.
    state: True reads the state of multi-agent envs that have one after every step, into ``infos["state"]``; this may
        take a fifth of the step's time. Exceptions of ``state()`` are raised, except after the last agent has gone:
        then the episode's last state is kept.
    worker_env: environment variables of the worker processes, set before a worker imports what its envs need: one dict,
        a list of one dict per worker, or a function of the worker's index, called here:
        ``lambda i: {"CUDA_VISIBLE_DEVICES": i % 4}``. Values are str or int; None unsets. A worker that replaces
        another one has the same. Variables that the dynamic linker, Python or NumPy reads at its start
        (``LD_LIBRARY_PATH``, ``PYTHONHASHSEED``, ``OPENBLAS_NUM_THREADS``) take effect with ``context="spawn"`` alone:
        other workers are forked from a process that has started already; those of "fork" have all that the caller has
        imported, too. Envs that the caller steps itself have the caller's environment.
    worker_init: called once in each worker process before what its envs need is imported: a function without arguments,
        for what a script sets up apart from its own classes, functions and globals, which travel: patched libraries,
        aliases in ``sys.modules``, registries. "script": each worker runs the script's top level instead, as
        multiprocessing does; the script needs a main guard. A worker that replaces another one does the same. NumPy's
        error handling (``np.seterr``), torch's default dtype and the recursion limit are copied anyway; warning filters
        are not. Where this process steps envs (serial, thread, `caller_steps`) it calls the function once, too; the
        script has run here already.
    worker_output: where what workers and their children print goes: "inherit", to where this process prints; "quiet",
        nowhere; or a folder, with a file for each, ``worker-3.log``, to which each start adds a line with the time, the
        pid, the envs and the reason. A file of 16 MB is begun anew, and kept as ``worker-3.log.1``. Errors quote the
        last lines of stderr in any case.
    memory_check: what to do if the envs in worker processes will not fit into the memory that the cgroup or the
        machine has left, estimated from the first ones that were built: "error", "warn" or "off". All are built at the
        same time where that is "off", or where 1 GB is left for each; else those after the first begin once that is
        known to fit, or after 1 s.

    Raises RecipeError, CannotTravel, EnvError (an env could not be built), SpecMismatch (the envs differ), WorkerDied,
    WorkerTimeout, NotEnoughMemory, OneEnvPerProcess, ConfigError.

    >>> import muster
    >>> with muster.make_vec("CartPole-v1", num_envs=4, env_kwargs={"sutton_barto_reward": True}) as envs:
    ...     obs, infos = envs.reset(seed=0)
    ...     obs, rewards, terminated, truncated, infos = envs.step(envs.sample_actions())
    >>> obs.shape, rewards
    ((4, 4), array([0., 0., 0., 0.]))
    """
    refuse_while_importing("muster.make_vec")
    one_of("backend", backend, BACKENDS)
    mode = _autoreset_mode(autoreset_mode)
    one_of("observation_mode", observation_mode, ("same", "different"))
    one_of("memory_check", memory_check, MEMORY_CHECKS)
    one_of("on_failure", on_failure, ("raise", "restart", "replay"))
    replays = on_failure == "replay"
    limits = Limits(
        *(start_timeout, step_timeout, close_timeout, "restart" if replays else on_failure, max_restarts),
        max_concurrent_starts=max_concurrent_starts,
        recycle_after=recycle_after,
    )
    copy, check_finite = flags(copy=copy, check_finite=check_finite)
    concurrent, replayable = flags(concurrent=concurrent, replayable=replayable or replays)
    output = checked_output(worker_output)
    processes = Processes(context, threads_per_worker, worker_env, concurrent=concurrent, output=output)
    caller_steps, one_env_per_process = flags(caller_steps=caller_steps, one_env_per_process=one_env_per_process)
    if concurrent and (caller_steps or one_env_per_process):
        other = "caller_steps" if caller_steps else "one_env_per_process"
        raise ConfigError("concurrent", f"left out with {other}: it is for workers with several envs", True)
    if concurrent and replayable:
        raise ConfigError("replayable", "left out with concurrent, where envs take turns as they happen to", True)
    if concurrent and recycle_after is not None:
        raise ConfigError(
            "recycle_after", "left out with concurrent: its worker's envs end at no time together", recycle_after
        )
    num_workers = check_workers("num_workers", num_workers)
    recipes = adapted_recipes(env, num_envs, env_kwargs, wrappers, groups, state)
    asked = {"num_workers": num_workers is not None, "caller_steps": caller_steps, "concurrent": concurrent}
    recipes = [replace(recipe, call=_words_of(recipe.call, backend, asked)) for recipe in recipes]
    cores = usable_cores()
    if backend != "process":
        unfit: dict[str, Any] = {
            "one_env_per_process": one_env_per_process,
            "caller_steps": caller_steps,
            "step_timeout": None if backend == "thread" and concurrent else step_timeout,
            "num_workers": AUTO if num_workers == AUTO else None,
            "worker_env": worker_env,
            "max_concurrent_starts": max_concurrent_starts,
            "recycle_after": recycle_after,
            "worker_output": None if processes.output == INHERIT else worker_output,
        }
        if name := next((name for name, value in unfit.items() if value not in (None, False)), None):
            expected = f"left out with the {backend} backend, which has no worker processes"
            raise ConfigError(name, expected, unfit[name])
    init = choose_init(worker_init, starts_fresh=backend == "process" and context != "fork")
    processes = replace(processes, init=init)
    if backend == "serial":
        if num_workers is not None:
            raise ConfigError("num_workers", "left out with the serial backend, which has no workers", num_workers)
        chosen: Backend = SerialBackend(recipes, init=init.function, concurrent=concurrent)
    elif backend == "thread":
        usual = 1 if concurrent else min(cores, len(recipes))
        threads = num_workers if isinstance(num_workers, int) else usual
        chosen = ThreadBackend(recipes, at_most(threads, recipes), limits, init.function, concurrent=concurrent)
    else:
        if caller_steps:
            _refuse_caller_steps(one_env_per_process, step_timeout, on_failure)
        if one_env_per_process:
            workers = one_each(num_workers, recipes)
        elif isinstance(num_workers, int):
            workers = at_most(num_workers, recipes, caller_steps)
        else:
            known = concurrent or all(map(_may_share, recipes))
            count = count_processes(recipes, num_workers, cores, processes, start_timeout, packs=known)
            workers = count - caller_steps
        chosen = ProcessBackend(
            recipes, ProcessOptions(processes, limits, workers, caller_steps, one_env_per_process, memory_check)
        )
    stepping = SteppingOptions(mode, copy, check_finite, limits.restarts, caller_steps, limits, replayable, replays)
    parts = STRICT if observation_mode == "same" else replace(STRICT, spaces=partial(equal_spaces, bounds=False))
    return vector_env_of(chosen, parts, stepping)


def _may_share(recipe: Recipe) -> bool:
    return is_known(recipe) or is_awaited_class(recipe.factory)


def _autoreset_mode(mode: str | AutoresetMode) -> AutoresetMode:
    names = {word.lower(): one for one in AutoresetMode for word in (one.name, one.value)}
    if isinstance(mode, AutoresetMode):
        return mode
    if not isinstance(mode, str) or mode.lower() not in names:
        raise ConfigError(f'autoreset_mode must be "next_step", "same_step" or "disabled", got {mode!r}')
    return names[mode.lower()]


def _words_of(call: UserCall, backend: str, asked: Mapping[str, bool]) -> UserCall:
    """`call`, with its words for a process for each env fitted to its other arguments."""
    one_each = call.one_each if backend == "process" else 'backend="process"'
    in_the_way = [name for name, is_asked in asked.items() if is_asked]
    without = f" without {' and '.join(in_the_way)}" if in_the_way else ""
    return replace(call, one_each=one_each + without)


def _refuse_caller_steps(one_env_per_process: bool, step_timeout: float | None, on_failure: str) -> None:
    if one_env_per_process:
        raise ConfigError("caller_steps", "left out where each env is to have its own process", True)
    if step_timeout is not None:
        expected = "left out with caller steps: the calling process cannot kill itself"
        raise ConfigError("step_timeout", expected, step_timeout)
    if on_failure != "raise":
        expected = '"raise" with caller steps: the calling process cannot restart itself'
        raise ConfigError("on_failure", expected, on_failure)
