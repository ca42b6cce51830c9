"""Tells a leak from a warm-up in the samples of a soak."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from muster.doctor.diagnosis import Trend

_BLOCKS = 12
_FEWEST_BLOCKS = 4
_FEWEST_FOR_QUARTILE = 3
# The first part of a soak is for caches, lazy imports and pools; only what grows after it can be a leak.
WARM_UP = 1 / 3
# A leak goes on: in each half it grows at this part of its mean rate, at least, ...
_EARLIER_HALF, _LATER_HALF = 0.25, 0.5
# ... it never gives back more than this part of what it has taken, and it stands out from the noise.
_GIVEN_BACK = 0.3
_ABOVE_NOISE = 3.5
# At less than this part of the mean rate in the later half, growth has come to its end.
_ENDED = 0.1
# A warm-up is worth a word from this many times the tolerance.
_NOTABLE = 20

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Tolerance:
    """Growth that is none, in the later part of a soak: an amount, or a part of what there was."""

    amount: float
    part: float = 0.0
    # Whether the least samples of a quantity are its true values, since garbage that waits for its collection and other
    # things that come and go add to it; not so for durations.
    has_floor: bool = True


@dataclass(frozen=True)
class Growth:
    """The course of one quantity. marks: its value at the start, after a third, after two thirds and at the end.

    a_step, an_episode: growth after the warm-up; 0 where `trend` is not that it grows.
    added: what there is more at the end than at the start.
    """

    trend: Trend
    marks: tuple[float, float, float, float]
    added: float
    a_step: float
    an_episode: float


def judge(at_s: Floats, steps: Floats, episodes: Floats, values: Floats, tolerance: Tolerance) -> Growth | None:
    """The growth of `values`, one a sample; None where the samples are too few to tell.

    The samples after the warm-up are divided into blocks. Each block counts by its least value, or by its lower
    quartile. The slope is the median of the slopes between all pairs of blocks (Theil 1950, Sen 1968,
    doi:10.1080/01621459.1968.10480934), which stays right where a fourth of the blocks are not.
    """
    later = at_s >= at_s[-1] * WARM_UP if len(at_s) else np.zeros(0, np.bool_)
    blocks = [part for part in np.array_split(np.flatnonzero(later), _BLOCKS) if len(part)]
    if len(blocks) < _FEWEST_BLOCKS or (not tolerance.has_floor and len(blocks[-1]) < _FEWEST_FOR_QUARTILE):
        return None
    rows = np.array([_typical(values, block, tolerance.has_floor) for block in blocks])
    x, y = steps[rows], values[rows]
    slope = _slope(x, y)
    grown = slope * (x[-1] - x[0])
    half = len(x) // 2
    halves = _slope(x[:half], y[:half]), _slope(x[-half:], y[-half:])
    rest = y - slope * x
    noise = 1.48 * float(np.median(np.abs(rest - np.median(rest))))
    given_back = float(np.max(np.maximum.accumulate(y) - y))
    allowed = max(tolerance.amount, tolerance.part * abs(float(y[0])))
    trend: Trend = "steady"
    if grown > max(allowed, _ABOVE_NOISE * noise) and given_back < _GIVEN_BACK * grown:
        if halves[0] > _EARLIER_HALF * slope and halves[1] > _LATER_HALF * slope:
            trend = "grows"
        elif halves[1] > _ENDED * slope and tolerance.has_floor:
            trend = "grows unevenly"
    if trend == "steady" and tolerance.has_floor and y.min() - values[0] > _NOTABLE * allowed:
        trend = "grew at first"
    grows = trend in ("grows", "grows unevenly")
    first = values[0] if tolerance.has_floor else np.median(values[~later] if not later.all() else y[:1])
    return Growth(
        trend,
        (float(first), float(y[0]), float(y[half]), float(y[-1])),
        added=float(values[-1] - values[0]),
        a_step=slope if grows else 0.0,
        an_episode=_slope(episodes[rows], y) if grows else 0.0,
    )


def samples_needed(tolerance: Tolerance) -> float:
    """The number of samples, the warm-up's among them, from which on `judge` can tell."""
    later = _FEWEST_BLOCKS if tolerance.has_floor else _BLOCKS * _FEWEST_FOR_QUARTILE
    return later / (1 - WARM_UP)


def overall(steps: Floats, episodes: Floats, values: Floats) -> Growth:
    """The growth of `values` from the first sample to the last, of a soak that was too short to tell its course."""
    added = float(values[-1] - values[0])
    marks = [float(values[(len(values) - 1) * third // 3]) for third in range(4)]
    played = max(1.0, float(steps[-1] - steps[0])), max(1.0, float(episodes[-1] - episodes[0]))
    return Growth("grows", (marks[0], marks[1], marks[2], marks[3]), added, added / played[0], added / played[1])


def _typical(values: Floats, block: npt.NDArray[np.intp], has_floor: bool) -> int:
    """The row of the sample that stands for its block: the least, or the lower quartile."""
    order = np.argsort(values[block], kind="stable")
    return int(block[order[0 if has_floor else len(order) // 4]])


def _slope(x: Floats, y: Floats) -> float:
    """The median of the slopes between all pairs of points; 0 where no two have another x."""
    i, j = np.triu_indices(len(x), 1)
    apart = x[j] != x[i]
    return float(np.median((y[j] - y[i])[apart] / (x[j] - x[i])[apart])) if apart.any() else 0.0
