"""What the doctor says of a policy: the decision that `MultiCollector` will take."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from patients import make_existing
from torch import nn

import muster
import programs
from command import muster as run_muster
from muster.doctor.findings import judge_policy
from muster.doctor.targets import judge_target

pytestmark = pytest.mark.usefixtures("kept_launchers")

MODULE = """
import ctypes, os, time
import gymnasium as gym

def broken():
    raise ValueError("no weights found")

def crashes():
    ctypes.string_at(0)

def exits():
    os._exit(0)

def hangs():
    time.sleep(600)

kept = gym.make("CartPole-v1")

def gives_what_exists():
    return kept.unwrapped
"""


def holding(what: object) -> nn.Module:
    policy = nn.Linear(4, 2)
    policy.deep = {"what": [what]}  # type: ignore[assignment]  # as users do it
    return policy


def test_a_policy_that_can_be_copied_is_good_news_with_its_size():
    finding, verdict = judge_policy(nn.Linear(4, 2))
    assert finding.severity == "good"
    assert "2 weights (40 bytes)" in finding.text
    assert verdict.copyable
    assert verdict.weight_bytes == 40


def test_what_is_in_the_way_is_told_with_path_type_reason_and_ways_out():
    finding, verdict = judge_policy(holding(threading.Lock()))
    assert finding.severity == "warns"
    assert not verdict.copyable
    assert (verdict.path, verdict.type) == ('policy.deep["what"][0]', "_thread.lock")
    assert verdict.path in finding.text
    assert verdict.reason in finding.text
    assert any("policy_factory=" in way for way in verdict.ways_out)
    assert any("muster.rebuild_with(a_class_or_submodule, a_factory)" in way for way in verdict.ways_out)
    assert all(way in (finding.remedy or "") for way in verdict.ways_out)


def test_a_policy_that_asks_to_stay_is_only_noted():
    finding, verdict = judge_policy(muster.nn.uncopyable(holding(None)))
    assert finding.severity == "note"
    assert not verdict.copyable


def test_placeholders_on_the_meta_device_are_no_obstacle():
    assert judge_policy(holding(torch.empty(3, device="meta")))[1].copyable


def test_diagnose_reports_it_beside_the_env_and_does_not_call_the_policy():
    class Untouchable(nn.Module):
        def forward(self, obs: torch.Tensor) -> torch.Tensor:
            raise AssertionError("the doctor called the policy")

    diagnosis = muster.diagnose(make_existing, policy=Untouchable())
    assert diagnosis.policy is not None
    assert diagnosis.policy.copyable
    assert diagnosis.blocks  # the env does
    assert "policy: it can be copied" in str(diagnosis)
    assert muster.diagnose(make_existing).policy is None


@pytest.fixture
def doctor(tmp_path: Path):
    (tmp_path / "my_game.py").write_text(MODULE)  # without torch, which takes seconds to import
    command = ["-c", "import muster.cli; muster.cli.main()", "doctor"]
    return lambda *arguments: programs.run(*command, *arguments, cwd=tmp_path, imports=programs.TORCH)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("my_game.py:broken", "building it, it raised ValueError: no weights found"),
        ("my_game.py:crashes", "building it, it was killed by SIGSEGV"),
        ("my_game.py:hangs", "building it, it hung for 3 s"),
        ("odd_game.py:make_policy", "importing the module odd_game, it ended the process (exit code 7)"),
    ],
)
def test_a_policy_that_cannot_be_built_is_a_finding(tmp_path, policy, words):
    (tmp_path / "my_game.py").write_text(MODULE)
    (tmp_path / "odd_game.py").write_text("import os; os._exit(7)")
    finding, verdict = judge_target(f"{tmp_path}/{policy}", 3.0 if "hung" in words else 30.0)
    assert verdict is None
    assert (finding.severity, finding.topic, finding.text) == ("blocks", "policy", words)


def test_a_policy_that_ends_its_process_does_not_end_the_doctor(doctor):
    done = doctor("my_game:gives_what_exists", "--policy", "my_game:exits", "--json")
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert told["policy"] is None
    assert {one["topic"]: one["severity"] for one in told["findings"]} == {"recipe": "blocks", "policy": "blocks"}
    assert told["findings"][-1]["text"] == "building it, it ended the process (exit code 0)"


@pytest.mark.parametrize(
    ("policy", "words"),
    [("/my_game.py:absent", "It has: broken, crashes"), ("absent", "--policy must be module:make_policy")],
)
def test_mistakes_in_a_policy_s_name_are_told_without_a_traceback(tmp_path, policy, words):
    (tmp_path / "my_game.py").write_text(MODULE)
    done = run_muster("doctor", "CartPole-v1", "--policy", policy.replace("/", f"{tmp_path}/"))
    assert done.exit_code == 2
    assert words in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr
