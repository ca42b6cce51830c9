"""Four collectors of multiwalker with one policy for its walkers, as a script of a user's, under every start method."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import programs

pytest.importorskip("pettingzoo.sisl")
SCRIPT = """
import sys

from tensordict.nn import TensorDictModule

import muster

net = muster.nn.MultiAgentMLP(31, 4, 3, centralised=True, share_params=True)
policy = TensorDictModule(net, in_keys=[("walker", "observation")], out_keys=[("walker", "action")])
collector = muster.MultiCollector(
    "pettingzoo/sisl/multiwalker_v9",
    policy,
    num_collectors=4,
    frames_per_batch=100,
    max_frames_per_traj=50,
    total_frames=200,
    device="cpu",
    reset_at_each_iter=False,
    context=sys.argv[1],
    make_vec_options={"env_kwargs": {"n_walkers": 3, "shared_reward": False, "max_cycles": 1000}},
)
with collector:
    for batch in collector:
        print(*batch["next", "walker", "reward"].shape)
print("frames:", collector.frames)
"""


@pytest.mark.parametrize("context", ["fork", *(pytest.param(c, marks=pytest.mark.slow) for c in ("auto", "spawn"))])
def test_it_gives_two_batches(context: str, tmp_path: Path):
    script = tmp_path / "collect.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "SDL_VIDEODRIVER": "dummy"}
    how: Any = {"cwd": tmp_path, "env": environment, "imports": programs.TORCH}
    done = programs.run("-W", "ignore", script, context, check=True, **how)
    # PettingZoo says there, too, which actions of an untrained network it clips.
    assert [line for line in done.stdout.splitlines() if not line.startswith("[WARNING]")] == [
        "4 25 3 1",
        "4 25 3 1",
        "frames: 200",
    ]
