"""The one collector of a `MultiCollector` whose policy stays in this process and acts for all envs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space

from muster.rollout.collector import Collector
from muster.rollout.collector_set import Filled


class StayingCollector:
    """A `Collector` with the verbs of a `CollectorSet`. Its own seeds go on from reset to reset."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    @property
    def version(self) -> int:
        return self._collector.policy_version

    def update_weights(self, weights: Any) -> None:
        self._collector.update_policy_weights_(weights)

    def collect(self) -> Filled:
        storage = self._collector.collect_storage()
        return Filled(storage, 0, np.full(storage.N, self._collector.acting_version))

    def call(self, name: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(self._collector.envs.call(name, *args, **kwargs))

    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        self._collector.envs.set_attr(name, values)

    def spaces(self) -> tuple[Space[Any], Space[Any]]:
        return self._collector.envs.single_observation_space, self._collector.envs.single_action_space

    def give_up(self) -> None:
        self._collector.reset()

    def reset(self, round_number: int, frames: int) -> None:
        self._collector.reset()

    def stats(self) -> dict[str, Any]:
        return dict(self._collector.stats()["envs"])

    def state_dict(self) -> dict[str, Any]:
        return {"staying": self._collector.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._collector.load_state_dict(state["staying"])

    def close(self) -> None:
        self._collector.shutdown()
