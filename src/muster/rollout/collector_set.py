"""The verbs that `MultiCollector` calls on its collectors, wherever they run, and the storages that they return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from gymnasium import Space

from muster.pool.closing import CloseLimits, limits_of
from muster.pool.deaths import Nouns
from muster.pool.environment import Changes
from muster.pool.set_up import Processes, WorkerInit, choose_init
from muster.rollout.fields import Array
from muster.rollout.storage import Storage


class Filled(NamedTuple):
    """A complete storage.  first_env: its first env's index among all.  versions: int64 ``[n]``, of weights, by env."""

    storage: Storage
    first_env: int
    versions: Array


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

    def processes(self, preloads: tuple[str, ...]) -> Processes:
        """How the collectors' processes start. preloads: of the launcher, whose imports `worker_env` cannot reach."""
        return Processes(
            "forkserver" if self.context == "auto" else self.context,
            self.start_timeout,
            self.threads_per_worker,
            self.worker_env,
            choose_init(self.worker_init, starts_fresh=self.context != "fork"),
            () if any(self.worker_env) else preloads,
        )

    def close_limits(self, nouns: Nouns) -> CloseLimits:
        """How long each collector has to close its envs."""
        return limits_of(self.close_timeout, max(map(len, nouns.envs)))


def collector_nouns(envs: Sequence[range], **others: Any) -> Nouns:
    """The nouns that errors use for parts of a `MultiCollector`. envs: of each collector that errors may name."""
    return Nouns("collector", "collect_timeout", "the collectors are", tuple(envs), **others)


class CollectorSet(Protocol):
    """Collectors that share all envs, with a policy that each of them has, or that acts for all.

    A set is made for batches of all envs, or for batches of the one collector that is ready first. Where the policy is
    a module, the caller has it too: updates go into that module, and states hold its weights.
    """

    @property
    def version(self) -> int:
        """Version of the weights that collectors take for their next batch; 1 for those they started with."""

    def update_weights(self, weights: Any) -> None:
        """Updates weights, see `MultiCollector.update_policy_weights_`. Another thread may be collecting."""

    def collect(self) -> Filled:
        """Waits for the next batch. After an error the caller calls `give_up` first."""

    def give_up(self) -> None:
        """Drops what is under way: the next batches begin new episodes in all envs."""

    def call(self, name: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Between batches `VectorEnv.call` on all envs, in the order of their indices among all."""

    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        """Between batches `VectorEnv.set_attr` with a value for each env."""

    def spaces(self) -> tuple[Space[Any], Space[Any]]:
        """One env's observation and action spaces."""

    def reset(self, round_number: int, frames: int) -> None:
        """Begins new episodes in all envs, and drops what is under way.

        round_number: a new one for each reset, so that seeds may differ.
        frames: number that all collectors together have collected before.
        """

    def stats(self) -> dict[str, Any]:
        """Counts and shares of time, see `MultiCollector.stats`."""

    def state_dict(self) -> dict[str, Any]:
        """The policy's weights, and all else that collectors need to go on."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what `state_dict` returned; the caller calls `reset` next."""

    def close(self) -> None:
        """Ends processes and closes envs."""
