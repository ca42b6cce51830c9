"""CleanRL's ppo.py with only the vector env changed.

Needs a checkout of CleanRL, named by MUSTER_CLEANRL_CHECKOUT, and tyro:
    MUSTER_CLEANRL_CHECKOUT=~/cleanrl python -m pytest -m slow tests/interop/test_cleanrl.py
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_THEIRS = "gym.vector.SyncVectorEnv("
_PLAY = """
import runpy, sys
import gymnasium, torch

agent = runpy.run_path(sys.argv[0], run_name="__main__")["agent"]
env = gymnasium.make("CartPole-v1")
total = 0.0
for seed in range(10):
    obs, _ = env.reset(seed=seed)
    over = False
    while not over:
        obs, reward, terminated, truncated, _ = env.step(agent.actor(torch.tensor(obs)).argmax().item())
        total += reward
        over = terminated or truncated
print("mean return", total / 10)
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ppo_learns_cartpole(tmp_path):
    pytest.importorskip("tyro")
    checkout = os.environ.get("MUSTER_CLEANRL_CHECKOUT")
    if not checkout:
        pytest.skip("MUSTER_CLEANRL_CHECKOUT names no checkout")
    program = (Path(checkout) / "cleanrl" / "ppo.py").read_text()
    assert program.count(_THEIRS) == 1
    ours = "from muster.interop.gymnasium import AsyncVectorEnv\n" + program.replace(_THEIRS, "AsyncVectorEnv(")
    (tmp_path / "ppo.py").write_text(ours)
    play = f"import sys; sys.argv = {['ppo.py', '--total-timesteps', '100000', '--no-cuda']!r}{_PLAY}"
    done = subprocess.run([sys.executable, "-c", play], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout[-200:])
    assert float(done.stdout.split()[-1]) > 150
