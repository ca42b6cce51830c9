"""`muster doctor`, as a person and as a program call it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

import programs
from command import muster
from muster.doctor import Diagnosis, Finding, Measurements
from muster.doctor.show import show
from muster.doctor.targets import about_import

pytestmark = pytest.mark.usefixtures("kept_launchers")

MODULE = """
import os
import gymnasium as gym

def make_env(gravity=9.8):
    env = gym.make("CartPole-v1")
    env.unwrapped.gravity = gravity
    return env

class Interrupts(gym.Env):
    def __init__(self):
        print("built", flush=True)
        os.write(1, b"natively")
        raise KeyboardInterrupt

print("imported")
kept = gym.make("CartPole-v1")

def gives_what_exists():
    return kept.unwrapped
"""


@pytest.fixture
def doctor(tmp_path: Path):
    (tmp_path / "my_game.py").write_text(MODULE)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["-c", "import muster.cli; muster.cli.main()", "doctor", *arguments]
        return programs.run(*command, cwd=tmp_path)  # type: ignore[no-any-return]

    return run


@pytest.mark.slow
def test_a_file_in_wrappers_gets_lines_that_run(doctor, tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "far_game.py").write_text(MODULE)
    (tmp_path / "around.py").write_text(
        "import gymnasium as gym\nclass Half(gym.RewardWrapper):\n    def reward(self, r):\n        return r / 2\n"
        "alias = lambda env: Half(env)\n"
    )
    wrappers = ("--wrapper", "around:Half", "--wrapper", "around.py:alias")
    arguments = (*wrappers, "--env-kwargs", '{"gravity": 5.0}', "--num-envs", "2", "--seconds", "0.2", "--json")
    done = doctor("far/far_game.py:make_env", *arguments)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["blocks"] is False
    assert all(one["steps_per_s"] > 0 for one in told["tried"])
    advice = told["recommendation"]
    assert advice["line"] in [one["line"] for one in told["tried"]]
    assert advice["num_envs"] == 2
    assert "env_kwargs={'gravity': 5.0}, wrappers=[Half, wrapper]" in advice["line"]
    code = f"{advice['factory']}\n{advice['line']}\nenvs.reset()\n"
    code += "assert envs.step(envs.action_space.sample())[1].tolist() == [0.25, 0.25]\nenvs.close()"
    programs.run("-c", code, cwd=tmp_path, check=True)


def test_what_blocks_is_told_first(capsys):
    findings = (Finding("good", "travel", "it can be sent"), Finding("blocks", "life", "it ended the process"))
    show(Diagnosis("my_game:crashes", findings, Measurements(), None), Console(width=80, highlight=False))
    target, listed, last = capsys.readouterr().out.rstrip().split("\n\n")
    assert target == "my_game:crashes"
    assert [line.split()[:2] for line in listed.splitlines()] == [["x", "life"], ["+", "travel"]]
    assert last == "Nothing works yet: see what is in the way, above."


def test_a_factory_of_an_existing_env_blocks(doctor):
    done = doctor("my_game:gives_what_exists")
    assert done.returncode == 1, done.stderr
    assert "holds an env that exists already" in " ".join(done.stdout.split())
    assert 'import muster\n\nenvs = muster.make_vec("CartPole-v1", num_envs=' in done.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["my_game:absent"], 2, "It has: make_env"),
        (["no_such_module:make_env"], 1, "No module named 'no_such_module'"),
    ],
)
def test_mistakes_are_told_without_a_traceback(doctor, arguments, status, words):
    done = doctor(*arguments)
    said = " ".join(done.stderr.replace("│", " ").split())
    assert done.returncode == status, done.stderr
    assert words in said
    assert "Traceback" not in done.stderr


def test_a_mistake_in_what_is_no_module_is_told_at_once():
    done = muster("doctor", "CartPohl-v1")
    assert done.exit_code == 1
    assert "CartPohl" in done.stderr


def test_an_env_that_interrupts_is_a_finding_and_what_it_prints_no_part_of_the_report(doctor):
    done = doctor("my_game:Interrupts", "--json")
    assert done.returncode == 1, done.stderr
    texts = [finding["text"] for finding in json.loads(done.stdout)["findings"]]
    [works] = [text for text in texts if text.startswith("forkserver, spawn, fork do not work: ")]
    assert "KeyboardInterrupt" in works
    assert all(word in done.stderr for word in ("imported", "built", "natively"))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import ctypes; ctypes.string_at(0)", "was killed by SIGSEGV"),
        ("raise KeyboardInterrupt", "raised KeyboardInterrupt"),
        ("import sys; sys.exit(0)", "raised SystemExit: 0"),
        ("import time; time.sleep(600)", "hung for 3 s"),
    ],
)
def test_a_module_that_cannot_be_imported_is_a_finding(tmp_path, code, words):
    (tmp_path / "odd_game.py").write_text(code)
    finding = about_import(f"{tmp_path / 'odd_game.py'}:make_env", 3.0 if "hung" in words else 30.0)
    assert (finding.severity, finding.topic) == ("blocks", "import")
    assert finding.text.startswith("importing the module odd_game, it ")
    assert words in finding.text


def test_a_module_that_ends_its_process_sets_the_exit_status(doctor, tmp_path):
    (tmp_path / "odd_game.py").write_text("import os; os._exit(0)")
    done = doctor("odd_game:make_env", "--json")
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert told["blocks"] is True
    (finding,) = told["findings"]
    assert finding["text"] == "importing the module odd_game, it ended the process (exit code 0)"
