"""Random programs with fixed seeds; `make fuzz` runs as many others as one likes."""

from __future__ import annotations

from random import Random

import drop_in_programs
import pytest
import vector_programs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vector_programs import Tally

from fuzz import BACKENDS, KINDS

# Hypothesis makes a program that fails smaller, which takes minutes.
pytestmark = pytest.mark.timeout(600)
fixed = settings(
    derandomize=True, deadline=None, database=None, max_examples=20, suppress_health_check=list(HealthCheck)
)
draws = given(draw=st.randoms(use_true_random=False))


@fixed
@draws
def test_rows_are_those_of_envs_stepped_by_hand(draw: Random) -> None:
    vector_programs.run(draw, Tally(), ["serial"], size=6)


@pytest.mark.filterwarnings("ignore:.*left env.agents:RuntimeWarning")  # agents pause
@fixed
@draws
def test_rows_of_agents_are_those_of_envs_stepped_by_hand(draw: Random) -> None:
    vector_programs.run(draw, Tally(), ["serial"], agents=True)


@fixed
@draws
def test_gymnasiums_drop_ins_return_what_gymnasiums_own_do(draw: Random) -> None:
    drop_in_programs.run_gymnasium(draw, Tally(), ["serial"])


@pytest.mark.filterwarnings("ignore")  # those of the originals
@pytest.mark.parametrize(
    ("kind", "package", "programs"),
    [
        ("vector", "numpy", 12),
        ("agents", "numpy", 8),
        ("gymnasium", "numpy", 6),
        ("sb3", "stable_baselines3", 5),
        ("collector", "tensordict", 6),
        ("torchrl", "torchrl", 3),
    ],
)
def test_programs(kind: str, package: str, programs: int) -> None:
    pytest.importorskip(package)
    for seed in range(programs):
        KINDS[kind](Random(seed), Tally(), BACKENDS)
