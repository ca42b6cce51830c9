"""The verbs that `MultiCollector` asks of its collectors, wherever they run, and what they hand over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from muster.backends import process
from muster.rollout.fields import Array
from muster.rollout.storage import Storage
from muster.workers.deaths import Nouns


class Filled(NamedTuple):
    """A complete storage. first_env: of its envs, among all.  versions: int64 ``[n]``, of the weights, by env."""

    storage: Storage
    first_env: int
    versions: Array


@dataclass(frozen=True)
class ProcessOptions:
    """How the processes of collectors, or of envs, are started and watched: options of `make_vec` by their names."""

    num_workers: int
    context: str
    start_timeout: float
    step_timeout: float | None
    on_failure: str
    max_restarts: int
    threads_per_worker: int

    @property
    def restarts(self) -> int | None:
        """How many a collector may need, None where none are wanted."""
        return self.max_restarts if self.on_failure == "restart" else None

    def for_backend(self, nouns: Nouns) -> process.ProcessOptions:
        """The same for the backend of collectors."""
        return process.ProcessOptions(
            context="forkserver" if self.context == "auto" else self.context,
            num_workers=self.num_workers,
            start_timeout_s=self.start_timeout,
            step_timeout_s=self.step_timeout,
            threads_per_worker=self.threads_per_worker,
            nouns=nouns,
        )


def collector_nouns(envs: Sequence[range], **others: Any) -> Nouns:
    """What errors call the parts of a `MultiCollector`. envs: of each collector that is told of."""
    return Nouns("collector", "collect", "collecting", "collect_timeout", "the collectors are", tuple(envs), **others)


class CollectorSet(Protocol):
    """Collectors that share all envs, with a policy that each of them has, or that acts for all.

    Whether batches are of all envs, or of one collector's that come first, is settled when the set is made. Where
    `policy` is a module, the caller has it too: updates go into it, and states hold its weights.
    """

    @property
    def version(self) -> int:
        """Version of the weights that collectors take for their next batch; 1 for those they started with."""

    def update_weights(self, weights: Any) -> None:
        """See `MultiCollector.update_policy_weights_`. Another thread may be collecting."""

    def collect(self) -> Filled:
        """Waits for the next batch. After an error `give_up` comes first."""

    def give_up(self) -> None:
        """Drops what is under way: next batches begin new episodes in all envs."""

    def reset(self, round_number: int, frames: int) -> None:
        """Begins new episodes in all envs, and drops what is under way.

        round_number: another one for each reset, so that seeds may differ.  frames: collected before, by all.
        """

    def stats(self) -> dict[str, Any]:
        """See `MultiCollector.stats`."""

    def state_dict(self) -> dict[str, Any]:
        """The policy's weights, and what else collectors go on from."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what `state_dict` returned; `reset` comes next."""

    def close(self) -> None:
        """Ends processes and closes envs."""
