"""The options of a `MultiCollector`'s processes, the words for them, and the storages that collectors return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from muster.pool.deaths import Nouns
from muster.pool.environment import Changes
from muster.pool.limits import CloseLimits, limits_of
from muster.pool.set_up import Processes, SetUp, WorkerInit, choose_init
from muster.rollout.fields import Array
from muster.rollout.storage import Storage


class Filled(NamedTuple):
    """A complete storage.  first_env: its first env's index among all.  versions: int64 ``[n]``, of weights, by env.

    notes: what the user is to be warned of, such as a collector that was replaced.
    """

    storage: Storage
    first_env: int
    versions: Array
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class CollectorOptions:
    """Options for starting and watching the processes of collectors, or of envs; named as in `make_vec`.

    worker_env: one for each process.  worker_init: as the user gave it.
    """

    num_workers: int
    context: str
    start_timeout: float
    step_timeout: float | None
    close_timeout: float | None
    on_failure: str
    max_restarts: int
    threads_per_worker: int
    worker_env: Sequence[Changes]
    worker_init: WorkerInit

    @property
    def restarts(self) -> int | None:
        """The number of restarts that a collector may need; None where a failure is raised."""
        return self.max_restarts if self.on_failure == "restart" else None

    def processes(self, preloads: tuple[str, ...], *, far: bool = False) -> Processes:
        """How the collectors' processes start. preloads: of the launcher, whose imports `worker_env` cannot reach.

        far: whether that is on other machines.
        """
        init = choose_init(self.worker_init, starts_fresh=self.context != "fork")
        set_up = SetUp.of_this_process(init)
        return Processes(
            "forkserver" if self.context == "auto" else self.context,
            self.start_timeout,
            self.threads_per_worker,
            self.worker_env,
            init,
            () if any(self.worker_env) else preloads,
            set_up=set_up.elsewhere() if far else set_up,
            max_restarts=self.restarts,
        )

    def close_limits(self, nouns: Nouns) -> CloseLimits:
        """How long each collector has to close its envs."""
        return limits_of(self.close_timeout, max(map(len, nouns.envs)))


def collector_nouns(envs: Sequence[range], **others: Any) -> Nouns:
    """The nouns that errors use for parts of a `MultiCollector`. envs: of each collector that errors may name."""
    return Nouns("collector", "collect_timeout", "the collectors are", tuple(envs), **others)
