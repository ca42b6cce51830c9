"""The only place where a backend and parts become a vector env."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from gymnasium.vector import AutoresetMode

from muster.backends.base import Backend
from muster.backends.serial import SerialBackend
from muster.recipes.recipe import Recipe, WorkerInfo
from muster.vector.agent_rows import RowVectorEnv
from muster.vector.multi_agent import MultiAgentVectorEnv
from muster.vector.vector_env import VectorEnv
from muster.workers.env_facts import EnvFacts
from muster.workers.options import Patience
from muster.workers.resources import usable_cores


def vector_env_of(
    backend: Backend, facts: Sequence[EnvFacts] | None = None, **options: Any
) -> VectorEnv | MultiAgentVectorEnv:
    """The vector env for what kind of envs `backend` turns out to build. facts: of them, if it has started."""
    facts = backend.start() if facts is None else facts
    if facts[0].agents is None:
        return VectorEnv(backend, facts=facts, **options)
    return MultiAgentVectorEnv(RowVectorEnv(backend, facts=facts, **options))


def serial_vec(
    recipes: Sequence[Recipe],
    info: WorkerInfo,
    *,
    autoreset_mode: AutoresetMode = AutoresetMode.SAME_STEP,
    max_restarts: int | None = None,
) -> VectorEnv | MultiAgentVectorEnv:
    """A vector env of views over recipes that were understood elsewhere, stepped in this thread.

    info: what the envs are told of where they are built, but for their index.
    max_restarts: with a number, envs that raise are replaced, as by ``on_failure="restart"``; but not one that must be
        alone in its process, which only another process can replace.
    """
    backend = SerialBackend(recipes, info)
    facts = backend.start()
    return vector_env_of(
        backend,
        facts,
        autoreset_mode=autoreset_mode,
        observation_mode="same",
        copy=False,
        check_finite=False,
        caller_patience=Patience(0, 0, False),
        worker_patience=Patience(0, 0, False),
        max_restarts=None if facts[0].metadata.get("one_per_process") else max_restarts,
    )


def patience(cores: int, processes: int, *, caller_steps: bool = False) -> tuple[Patience, Patience]:
    """How long the caller and the workers wait awake; measured in docs/adr/0003-doorbell.md.

    Processes that share cores yield to each other, which costs half of a sleep and a wake-up; a caller that shares its
    core with a busy worker takes nothing from it by that. Out of a cgroup's quota they hardly stay awake: it would end
    in being throttled.
    """
    if cores < len(os.sched_getaffinity(0)):
        return Patience(0, 0, False), Patience(0, 100, False)
    if processes > cores:
        pauses, yields = 0, 2000  # about 1 ms: most policies take less between two steps
    else:  # with pauses between them 3 ms; 10 where it is another's reset that a process with envs to step waits for
        pauses, yields = 1000, 6000 if caller_steps else 2000
    return Patience(pauses, yields, False), Patience(pauses, yields, processes <= cores + 1)


def serial_backend(recipes: Sequence[Recipe]) -> tuple[SerialBackend, dict[str, Any]]:
    """The backend that steps in the calling thread, and the waiting times to hand to VectorEnv with it."""
    return SerialBackend(recipes), patience_options(0)


def patience_options(num_workers: int) -> dict[str, Any]:
    caller, worker = patience(usable_cores(), num_workers + 1)
    return {"caller_patience": caller, "worker_patience": worker, "check_finite": False, "max_restarts": None}
