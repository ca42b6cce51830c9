"""What the pools of `ParallelEnv` and of the collectors share: the start of their processes, and pickled messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gymnasium.vector import AutoresetMode

from muster.backends.process import ProcessBackend
from muster.interop.starting import processes
from muster.pickling import dumps as dumps_carefully
from muster.pool.closing import CloseLimits
from muster.pool.environment import WorkerEnv
from muster.pool.set_up import WorkerInit
from muster.recipes.recipe import Recipe
from muster.transport.mail import dumps
from muster.vector.assemble import LENIENT, drop_in_options, vector_env_of
from muster.vector.packing import Asked
from muster.vector.raisers import originals_raised
from muster.vector.vector_env import VectorEnv


@dataclass(frozen=True)
class PoolOptions:
    """The options of Muster's own that a `ParallelEnv` takes. name: of `num_processes`, for messages."""

    num_processes: Asked = None
    worker_env: WorkerEnv | None = None
    worker_init: WorkerInit = None
    memory_check: str = "error"
    name: str = "num_processes"


def started(
    recipes: Sequence[Recipe], options: PoolOptions, *, context: str | None, num_threads: int
) -> tuple[ProcessBackend, VectorEnv]:
    """The processes that have built what the recipes say, and the vector env that speaks to them."""
    with originals_raised():
        backend = processes(
            recipes,
            context=context,
            num_workers=options.num_processes,
            name=options.name,
            worker_env=options.worker_env,
            worker_init=options.worker_init,
            close_limits=CloseLimits(),
            num_threads=num_threads,
            memory_check=options.memory_check,
        )
        envs = vector_env_of(backend, LENIENT, drop_in_options(backend, AutoresetMode.DISABLED))
    assert isinstance(envs, VectorEnv)
    return backend, envs


def pickled(message: Any, what: str, content: Any, *, context: str | None) -> bytes:
    """A message for one worker. what, content: the part that errors name where it cannot travel."""
    try:
        return dumps(message, shares_main=context == "fork")
    except Exception:
        return dumps_carefully(message, {what: content}, start_method=context or "forkserver")
