"""The shares of a training's clock are those of its own envs, whatever else its process has."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

import muster
from muster.training.phases import Phases, own_runs
from muster.transport.big_arrays import memfd
from spinning import Spinning


def test_shares_are_those_of_the_envs_that_the_training_has_made(tmp_path: Path) -> None:
    strange = memfd("about")
    with muster.make_vec(Spinning, 2) as other:
        other.reset(seed=0)
        others = own_runs()
        with muster.make_vec(Spinning, 2) as envs, Phases(tmp_path, others) as phases:
            envs.reset(seed=0)
            phases.shares()
            phases.enter("rollout")
            for _ in range(30):
                other.step(np.zeros(2, np.int64))
            phases.enter("update")
            first = phases.shares()
            phases.enter("rollout")
            for _ in range(30):
                envs.step(np.zeros(2, np.int64))
            phases.enter("update")
            second = phases.shares()
    os.close(strange)
    assert first["share_envs"] == 0.0
    assert first["share_acting"] > 0.5
    assert second["share_envs"] > 0.2
    assert sum(second.values()) <= 1.01
