"""Leaks and what only looks like one, in series of samples that are made up."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from muster.doctor.growth import Growth, Tolerance, judge

MB, KB = 1e6, 1e3
MEMORY, COUNT, TIME = Tolerance(256 * KB, 0.005), Tolerance(2.5), Tolerance(5e-6, 0.5, has_floor=False)
AT_S = np.linspace(0.0, 60.0, 400)
STEPS = np.floor(AT_S * 5000)
EPISODES = np.floor(STEPS / 20) + 1
DRAW = np.random.default_rng(0)


def judged(values: Callable[[np.ndarray], np.ndarray] | np.ndarray, tolerance: Tolerance, **others) -> Growth:
    """The growth of values by time, of an env that makes 5000 steps a second, 20 an episode."""
    series = values(AT_S) if callable(values) else values
    growth = judge(AT_S, others.get("steps", STEPS), EPISODES, series, tolerance)
    assert growth is not None
    return growth


def filled(at_s: np.ndarray, seconds: float, size: float) -> np.ndarray:
    return 30 * MB + size * np.minimum(at_s / seconds, 1)


def saw(at_s: np.ndarray, period_s: float, height: float) -> np.ndarray:
    return 30 * MB + height * (at_s % period_s) / period_s


@pytest.mark.parametrize(
    ("values", "tolerance"),
    [
        (30 * MB + STEPS * 20 * KB, MEMORY),
        (30 * MB + EPISODES * 100, MEMORY),
        (30 * MB + STEPS * 20 + DRAW.exponential(2 * MB, 400), MEMORY),  # on top of garbage
        (filled(AT_S, 20, 40 * MB) + STEPS * 20, MEMORY),  # after a cache
        (saw(AT_S, 3, 50 * MB) + STEPS * 100, MEMORY),  # between garbage collections
        (10 + EPISODES, COUNT),
        (10 + np.floor(EPISODES / 2000), COUNT),  # 7 in all
        (2e-5 + EPISODES * 4e-9, TIME),
        ((2e-5 + EPISODES * 4e-9) * DRAW.lognormal(0, 0.15, 400), TIME),  # on a noisy machine
        (2e-5 + np.sqrt(EPISODES) * 1e-6, TIME),  # the slower, the fewer episodes
    ],
)
def test_what_goes_on_growing_is_a_leak(values, tolerance):
    growth = judged(values, tolerance)
    assert growth.trend == "grows"
    assert growth.an_episode == pytest.approx(20 * growth.a_step, rel=0.01)


@pytest.mark.parametrize(
    ("values", "tolerance"),
    [
        (np.full(400, 30 * MB), MEMORY),
        (30 * MB + DRAW.exponential(2 * MB, 400), MEMORY),
        (30 * MB + DRAW.normal(0, 100 * KB, 400), MEMORY),
        (30 * MB + STEPS * 0.5, MEMORY),  # 150 KB in all
        (saw(AT_S, 3, 50 * MB), MEMORY),
        (saw(AT_S, 9, 50 * MB), MEMORY),
        (saw(AT_S, 20, 50 * MB), MEMORY),
        (saw(AT_S, 25, 50 * MB), MEMORY),
        (30 * MB + 50 * MB * (AT_S > 45), MEMORY),  # one big allocation
        (50 * MB - STEPS * 10, MEMORY),
        (10 + DRAW.integers(0, 6, 400), COUNT),
        (10 + (AT_S > 30) * 2, COUNT),
        (2e-5 * DRAW.lognormal(0, 0.3, 400), TIME),
        (2e-5 * np.where(AT_S > 30, 2.0, 1.0), TIME),  # from then on the machine has more to do
        (2e-5 * np.where(AT_S > 50, 3.0, 1.0) * DRAW.lognormal(0, 0.1, 400), TIME),
        (2e-6 + EPISODES * 2e-10, TIME),  # doubled, but by nobody to be noticed
    ],
)
def test_what_comes_and_goes_is_none(values, tolerance):
    growth = judged(values, tolerance)
    assert growth.trend == "steady"
    assert growth.a_step == growth.an_episode == 0


@pytest.mark.parametrize("seconds", [1.0, 10.0, 20.0, 21.5])
def test_a_cache_that_has_filled_is_a_warm_up(seconds):
    growth = judged(filled(AT_S, seconds, 40 * MB), MEMORY)
    assert growth.trend == "grew at first"
    assert growth.marks[0] == 30 * MB
    assert growth.marks[3] == 70 * MB
    assert judged(10 + 60 * np.minimum(AT_S, 1), COUNT).trend == "grew at first"


def test_a_cache_that_fills_more_and_more_slowly_is_left_open():
    growth = judged(30 * MB + 40 * MB * (1 - np.exp(-AT_S / 15)), MEMORY)
    assert growth.trend == "grows unevenly"


def test_growth_that_begins_late_is_left_open():
    assert judged(30 * MB + 1 * MB * np.maximum(AT_S - 38, 0), MEMORY).trend == "grows unevenly"


def test_rates_are_by_step_and_by_episode_whatever_the_machine_does_besides():
    # Half of the steps in the first third, and then more and more slowly.
    steps = np.floor(300_000 * np.sqrt(AT_S / 60))
    growth = judged(30 * MB + 2000 * steps, MEMORY, steps=steps)
    assert growth.trend == "grows"
    assert growth.a_step == pytest.approx(2000)


def test_too_few_samples_tell_nothing():
    few = slice(0, 5)
    assert judge(AT_S[few], STEPS[few], EPISODES[few], EPISODES[few], COUNT) is None
    none = np.zeros(0)
    assert judge(none, none, none, none, COUNT) is None
    some = slice(0, 40)  # two in each block: enough for a count, not for a quartile
    assert judge(AT_S[some], STEPS[some], EPISODES[some], EPISODES[some], COUNT) is not None
    assert judge(AT_S[some], STEPS[some], EPISODES[some], EPISODES[some], TIME) is None
