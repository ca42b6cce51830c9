"""The words for a `MultiCollector`'s processes, and the storages that collectors return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from muster.pool.deaths import Nouns
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


def collector_nouns(envs: Sequence[range], **others: Any) -> Nouns:
    """The nouns that errors use for parts of a `MultiCollector`. envs: of each collector that errors may name."""
    return Nouns("collector", "collect_timeout", "the collectors are", tuple(envs), **others)
