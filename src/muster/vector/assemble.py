"""The only place where a backend and parts become a vector env."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from gymnasium.vector import AutoresetMode

from muster._core import Autoreset
from muster.backends.base import Backend, CallerOptions
from muster.backends.recovery import Recovery
from muster.backends.serial import SerialBackend
from muster.errors import RecipeError
from muster.hosts.env_facts import EnvFacts
from muster.hosts.questions import Kept
from muster.hosts.requests import HostOptions, WaitBudget
from muster.pool.deaths import NOUNS, Nouns
from muster.pool.limits import AT_ONCE
from muster.pool.resources import usable_cores
from muster.pool.watch import Activity
from muster.recipes.recipe import Recipe
from muster.spaces.tree import Casting, SpaceNode, tree
from muster.transport.infos import InfoColumns, InfoReader
from muster.transport.slab import SlabPlan
from muster.vector.action_writers import ActionWriter, AgentsWriter, LenientWriter
from muster.vector.multi_agent import MultiAgentVectorEnv
from muster.vector.parts import Assembled, BatchedSpaces, Parts, SteppingOptions, agents_spaces, equal_spaces
from muster.vector.raisers import raise_env_error, raise_original
from muster.vector.replaying import Replaying, require_replayable
from muster.vector.vector_env import VectorEnv
from muster.worker_info import WorkerInfo

# The most processes on a core that all wait awake for long; measured in docs/adr/0003-doorbell.md.
_AWAKE_PER_CORE = 20


def trees_of_spaces(
    facts: EnvFacts, spaces: BatchedSpaces, casting: Casting | None = None
) -> tuple[SpaceNode, SpaceNode]:
    """Trees that cast only where the kind of number is kept: bool to int to float to complex.

    casting: they cast observations by this rule of NumPy's, as other libraries' vector envs do.
    """
    obs = tree(spaces.single_observation, "observation", casting=casting)
    return obs, tree(spaces.single_action, "action", casting=casting)


def agents_trees(facts: EnvFacts, spaces: BatchedSpaces) -> tuple[SpaceNode, SpaceNode]:
    """The trees of a multi-agent env's rows and of its agents' actions."""
    assert facts.agents is not None
    return facts.agents.row_tree(), facts.agents.action_tree()


STRICT = Parts(equal_spaces, trees_of_spaces, ActionWriter, raise_env_error, lenient=False)
LENIENT = Parts(equal_spaces, partial(trees_of_spaces, casting="unsafe"), LenientWriter, raise_original, lenient=True)


def assemble(
    backend: Backend, parts: Parts, options: SteppingOptions, facts: Sequence[EnvFacts] | None = None
) -> Assembled:
    """Starts `backend`, unless its `facts` are passed, and combines it with `parts`.

    After an error the backend is closed, so that nothing of it is left behind.
    """
    facts = backend.start() if facts is None else facts
    try:
        if parts.lenient and any(one.is_awaited for one in facts):
            raise RecipeError(
                f"{backend.user_call.name} steps envs of ordinary methods, as its original does, and this env's are "
                "coroutine functions: muster.make_vec(env, num_envs) awaits them, many at a time"
            )
        spaces = parts.spaces(facts)
        obs, actions = parts.trees(facts[0], spaces)
        writer = parts.writer(actions, spaces.action, backend)
        if options.replayable:
            require_replayable(facts, actions)
        autoreset = getattr(Autoreset, options.autoreset_mode.name)
        must_reset = options.autoreset_mode is AutoresetMode.DISABLED
        processes = backend.num_workers + 1
        caller_budget, worker_budget = wait_budgets(usable_cores(), processes, caller_steps=options.caller_steps)
        backend.attach(
            SlabPlan(obs, actions, backend.first_envs),
            HostOptions(
                autoreset, options.check_finite, parts.lenient, parts.reward_key, worker_budget, options.replayable
            ),
            CallerOptions(must_reset, parts.lenient, writer.in_core, caller_budget),
        )
        columns = InfoColumns(backend.slab, backend.caller, backend.fetch_schemas)
        recovery: Recovery | None = None
        if options.max_restarts is not None:
            recovery = Recovery(backend, options.autoreset_mode, options.max_restarts, columns)
            if options.limits is not None and options.limits.recycle_after:
                recovery.recycles(options.limits.recycle_after, options.limits.max_concurrent_starts or 1)
        backend.replaces_lost(None if recovery is None else recovery.worker_died)
        replaying: Replaying | None = None
        if options.replayable:
            kept = Kept(backend.numbers, backend.pack) if recovery is None else recovery.kept
            replaying = Replaying(backend, options.autoreset_mode, kept)
            if recovery is not None:
                recovery.replays(replaying.resets_again, replaying.state_of if options.replays else None)
        return Assembled(backend, parts, options, facts[0], spaces, writer, InfoReader(columns), recovery, replaying)
    except BaseException:
        backend.close(AT_ONCE)
        raise


def vector_env_of(
    backend: Backend, parts: Parts, options: SteppingOptions, facts: Sequence[EnvFacts] | None = None
) -> VectorEnv | MultiAgentVectorEnv:
    """The vector env for the envs that `backend` builds, of one agent or several. facts: theirs, if it has started."""
    try:
        facts = backend.start() if facts is None else facts
        if facts[0].agents is None:
            return VectorEnv(assemble(backend, parts, options, facts))
        parts = replace(parts, spaces=partial(agents_spaces, parts.spaces), trees=agents_trees, writer=AgentsWriter)
        return MultiAgentVectorEnv(assemble(backend, parts, options, facts))
    except BaseException:  # also a Ctrl-C before the vector env has a finalizer
        backend.close(AT_ONCE)
        raise


def serial_vec(
    recipes: Sequence[Recipe],
    info: WorkerInfo,
    *,
    max_restarts: int | None = None,
    replayable: bool = False,
    nouns: Nouns = NOUNS,
    activity: Activity | None = None,
) -> VectorEnv | MultiAgentVectorEnv:
    """A vector env that steps the envs of `recipes` in this thread and returns views.

    info: the WorkerInfo that the envs see, apart from their index.
    max_restarts: with a number, envs that raise are replaced, as with ``on_failure="restart"``. An env that must be
        alone in its process is not replaced: only another process can do that.
    replayable: as for `make_vec`.  nouns: the names that errors use for its parts.
    activity: where this worker says what it is in.
    """
    backend = SerialBackend(recipes, info, nouns, activity=activity)
    facts = backend.start()
    max_restarts = None if facts[0].metadata.get("one_per_process") else max_restarts
    options = SteppingOptions(AutoresetMode.SAME_STEP, copy=False, max_restarts=max_restarts, replayable=replayable)
    return vector_env_of(backend, STRICT, options, facts)


def wait_budgets(cores: int, processes: int, *, caller_steps: bool = False) -> tuple[WaitBudget, WaitBudget]:
    """The wait budgets of the caller and of the workers; measured in docs/adr/0003-doorbell.md.

    Processes that share cores yield to each other. That costs half as much as a sleep and a wake-up, and a caller that
    shares its core with a busy worker takes no time from it. With a cgroup's quota below the number of cores they
    hardly stay awake: the kernel would throttle them for it. Where very many processes share a core the caller sleeps
    at once, and workers soon: a yield lets all others run that are awake.
    """
    if processes > _AWAKE_PER_CORE * cores:
        return WaitBudget(0, 0, False), WaitBudget(0, 20, False)
    if cores < len(os.sched_getaffinity(0)):
        return WaitBudget(0, 0, False), WaitBudget(0, 100, False)
    if processes > cores:
        pauses, yields = 0, 2000  # about 1 ms: most policies take less between two steps
    else:  # 3 ms, with pauses in between; 10 ms where processes with envs to step wait for a reset in another
        pauses, yields = 1000, 6000 if caller_steps else 2000
    return WaitBudget(pauses, yields, False), WaitBudget(pauses, yields, processes <= cores + 1)
