"""An env that ends the process of a command is said to have done so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from muster.command_line.sudden_end import sudden_end_said

ENV = """
import os
from gymnasium.envs.classic_control import CartPoleEnv

class Exits(CartPoleEnv):
    def reset(self, **arguments):
        os._exit(5)
"""


@pytest.mark.parametrize(
    "words", ["bench own_env.py:Exits --num-envs 2", "train own_env.py:Exits --num-envs 2 --backend serial"]
)
def test_an_env_that_exits_within_the_command_is_one_line(tmp_path: Path, words: str) -> None:
    (tmp_path / "own_env.py").write_text(ENV)
    command = [sys.executable, "-P", "-m", "muster", *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 5
    begin, *_ = words.split()
    assert done.stderr.startswith(
        f"muster {begin}: error: an env in this process, or a library that it uses, has ended"
    )
    assert done.stderr.count("\n") == 1
    assert "own_env.py:Exits" in done.stderr


@pytest.mark.parametrize("options", [{}, {"backend": "serial"}, {"caller_steps": True}])
def test_nothing_is_said_of_work_that_ends(options: dict[str, object], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="its own"), sudden_end_said("muster train", "CartPole-v1", options):
        raise ValueError("its own")
    assert capfd.readouterr().err == ""
