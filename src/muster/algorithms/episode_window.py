"""The figures of the episodes that ended last."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from muster.rollout.episodes import Episodes

EPISODE_WINDOW = 100


class EpisodeSummary(NamedTuple):
    """Figures of the last 100 episodes; nan until the first one ends."""

    episodes: int  # ended so far
    mean_return: float
    low_return: float  # 10th percentile
    high_return: float  # 90th percentile
    mean_length: float  # in env steps


class EpisodeWindow:
    """The returns and lengths of the last 100 episodes that ended."""

    def __init__(self) -> None:
        self.ended = 0
        self.returns: deque[float] = deque(maxlen=EPISODE_WINDOW)
        self.lengths: deque[int] = deque(maxlen=EPISODE_WINDOW)

    def add(self, episodes: Episodes) -> None:
        """Adds the episodes that ended in a rollout."""
        self.ended += len(episodes.returns)
        self.returns.extend(episodes.returns.tolist())
        self.lengths.extend(episodes.lengths.tolist())

    def summary(self) -> EpisodeSummary:
        if not self.returns:
            return EpisodeSummary(0, math.nan, math.nan, math.nan, math.nan)
        low, high = np.percentile(self.returns, (10, 90))
        mean_return, mean_length = np.mean(self.returns), np.mean(self.lengths)
        return EpisodeSummary(self.ended, float(mean_return), float(low), float(high), float(mean_length))

    def state_dict(self) -> dict[str, Any]:
        return {"ended": self.ended, "returns": list(self.returns), "lengths": list(self.lengths)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.ended = int(state["ended"])
        self.returns = deque(state["returns"], EPISODE_WINDOW)
        self.lengths = deque(state["lengths"], EPISODE_WINDOW)
