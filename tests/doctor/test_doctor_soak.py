"""Soaks of envs that leak, and of envs that do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from leaky import CACHE, Leaky, LeakyTeam
from patients import make_patient

import muster
from muster.doctor import Finding, Soak, SoakedQuantity
from muster.doctor.diagnosis import seconds
from muster.doctor.soak import judge_soak, run_soak
from muster.envs import resolve_foreign_id
from muster.errors import ConfigError
from muster.recipes.recipe import make_recipes
from muster.workers.guarded import PackedRecipes, TrialOutcome

HERE = Path(__file__).parent


def soaked(env: Any, soak_s: float, **kwargs: Any) -> tuple[Soak, list[Finding]]:
    recipes = make_recipes(env, 1, kwargs, (), resolve_foreign_id=resolve_foreign_id)
    soak, findings = run_soak(PackedRecipes.of(recipes, "spawn"), soak_s, timeout_s=60.0)
    assert soak is not None, findings
    return soak, findings


def quantity(soak: Soak, name: str) -> SoakedQuantity:
    (found,) = [one for one in soak.quantities if one.name == name]
    return found


def warnings_of(findings: list[Finding]) -> list[str]:
    return [one.text for one in findings if one.severity == "warns"]


def is_clean(soak: Soak, findings: list[Finding]) -> bool:
    findings = [one for one in findings if "was not judged" not in one.text]  # on a machine that has much else to do
    assert [one.severity for one in findings] == ["good"] * len(findings), findings
    assert "no leak in" in findings[-1].text
    return all(one.trend in ("steady", "grew at first") for one in soak.quantities)


@pytest.fixture
def _removes_shared_files() -> Iterator[None]:
    yield
    for file in (*Path("/dev/shm").glob("muster-leaky-*"), *Path(tempfile.gettempdir()).glob("muster-leaky-*")):
        file.unlink()


@pytest.mark.usefixtures("_removes_shared_files")
def test_whatever_is_left_behind_in_each_episode_is_counted() -> None:
    traits = "handle and thread and process and file and shared file"
    for soak_s in (2.5, 10.0):  # a machine that has much else to do plays too few episodes in less
        soak, findings = soaked(Leaky, soak_s, traits=traits, length=50)
        warned = warnings_of(findings)
        if len(warned) == len(traits.split(" and ")):
            break
    for kind in ("file handle", "thread", "child process", "temporary file"):
        (text,) = [text for text in warned if text.startswith(f"leaks one {kind} an episode: ")]
        assert f" after {soak.episodes:,} episodes and {soak.steps:,} steps" in text
        named = {"file handle": "/dev/null", "child process": "sleep", "temporary file": ".log"}.get(kind, "")
        assert named in text
    assert any(text.startswith("leaks one file in /tmp or /dev/shm an episode: ") for text in warned)
    handles = quantity(soak, "file handles")
    assert handles.trend == "grows"
    assert handles.an_episode == pytest.approx(1, abs=0.05)
    assert handles.marks == tuple(sorted(handles.marks))


@pytest.mark.usefixtures("_removes_shared_files")
@pytest.mark.parametrize("trait", ["file of Python's", "shared memory", "file of C code's", "file of a child's"])
def test_files_in_folders_for_all_programs_are_known_by_who_makes_them(trait: str) -> None:
    _, findings = soaked(Leaky, 3.0, traits=trait, length=100, step_s=1e-3)
    (text,) = [text for text in warnings_of(findings) if "file in /tmp or /dev/shm" in text]
    assert text.startswith("leaks one file in /tmp or /dev/shm an episode: ")
    assert "muster-leaky-" in text


NOISE = """
import sys, time
from pathlib import Path
for i in range(100_000):
    for place in sys.argv[1:]:
        Path(place, f"muster-leaky-by-another-{i}").touch()
    print(i, flush=True)
    time.sleep(0.01)
"""


@pytest.mark.usefixtures("_removes_shared_files")
def test_files_of_other_programs_are_not_blamed_on_the_env() -> None:
    places = [tempfile.gettempdir(), "/dev/shm"]
    with subprocess.Popen([sys.executable, "-c", NOISE, *places], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        _, findings = soaked(Leaky, 2.5, step_s=5e-3, length=100)
        other.kill()
    assert [one.text for one in findings if "/tmp" in one.text] == []
    assert warnings_of(findings) == []


def outcome_of(soak_s: float, between_s: float, resets: bool) -> TrialOutcome:
    """What a soak reports that takes a sample every so often."""
    count = int(soak_s / between_s)
    rows = [(i * between_s, 100 * i, 5 * i, 10**8, 6, 1, 0, 0, 0, 1e-4, 1e-3 if resets else None) for i in range(count)]
    return TrialOutcome({"samples": rows, "stopped_by": None, "cut_short": 0 if resets else 5 * (count - 1)})


@pytest.mark.parametrize("resets", [True, False])
def test_durations_that_could_not_be_judged_are_told_with_a_soak_that_is_long_enough(resets: bool) -> None:
    soak, findings = judge_soak(outcome_of(9, 0.5, resets), 9)
    assert soak is not None
    assert "time of a step" not in [one.name for one in soak.quantities]
    (found,) = [one for one in findings if "was not judged" in one.text]
    assert found.text.startswith("whether steps and resets take longer and longer was not judged: ")
    assert found.severity == "note"
    assert found.remedy is not None
    enough_s = float(found.remedy.removeprefix("--soak "))
    assert 30 < enough_s < 60
    soak, findings = judge_soak(outcome_of(enough_s, 0.5, resets), enough_s)
    assert soak is not None
    assert quantity(soak, "time of a step").trend == "steady"
    assert [one.text.partition(":")[2] for one in findings if "was not judged" in one.text] == [
        f" {seconds(soak.seconds)} had no episode that came to its end"
    ] * (not resets)


def test_a_soak_that_is_too_short_for_everything_says_how_long_is_enough() -> None:
    _, findings = judge_soak(outcome_of(2, 0.5, True), 2)
    (found,) = findings
    assert "too few to tell whether anything grows" in found.text
    assert found.remedy is not None
    soak, _ = judge_soak(outcome_of(float(found.remedy.removeprefix("--soak ")), 0.5, True), 9)
    assert soak is not None
    assert quantity(soak, "memory").trend == "steady"


def test_what_is_kept_of_each_step_is_counted() -> None:
    soak, findings = soaked(Leaky, 3.0, traits="20 KB")
    text = warnings_of(findings)[-1]
    assert text.startswith("leaks memory, 2")
    assert " KB a step, 4" in text
    assert "A million steps would take 2" in text
    assert quantity(soak, "memory").a_step == pytest.approx(20_000, rel=0.1)


def test_a_cache_that_fills_is_no_leak() -> None:
    soak, findings = soaked(Leaky, 2.0, traits="cache", fill_s=0.4)
    assert is_clean(soak, findings)
    memory = quantity(soak, "memory")
    assert memory.trend == "grew at first"
    assert memory.marks[3] - memory.marks[0] == pytest.approx(CACHE * 100_000, rel=0.1)
    assert "a warm-up, no leak" in findings[0].text


def test_buffers_in_garbage_are_no_leak() -> None:
    assert is_clean(*soaked(Leaky, 2.0, traits="cycle and trajectory and thread that ends"))


def test_cartpole_leaks_nothing() -> None:
    soak, findings = soaked("CartPole-v1", 2.0)
    assert is_clean(soak, findings)
    assert soak.seconds == pytest.approx(2.0, abs=1.0)
    assert soak.steps > soak.episodes > 100
    assert {"memory", "file handles", "temporary files"} <= {one.name for one in soak.quantities}


def test_episodes_of_several_agents_without_an_end_are_cut_short() -> None:
    soak, findings = soaked(LeakyTeam, 3.0, length=0)
    assert soak.episodes >= 10
    assert any(text.startswith("leaks one file handle an episode: ") for text in warnings_of(findings)), findings


def test_handles_that_run_out_are_a_leak() -> None:
    soak, findings = soaked(Leaky, 30.0, traits="handle and few handles", step_s=0.0)
    assert soak.seconds < 15
    text = warnings_of(findings)[-1]
    assert text.startswith("leaks one file handle an episode: ")
    assert "A process may open 200: enough for about 190 episodes" in text
    assert "The soak was ended there" in text


@pytest.mark.parametrize(
    ("trait", "how"),
    [("raise", "the env raised RuntimeError: the simulator has"), ("segfault", "the env was killed by SIGSEGV")],
)
def test_an_env_that_ends_early_is_a_finding(trait: str, how: str) -> None:
    soak, findings = soaked(Leaky, 30.0, traits=trait, step_s=0.0)
    assert [one.topic for one in findings] == ["life"]
    assert f"soaking it, {how}" in findings[0].text
    assert soak.episodes <= 50


def test_what_cannot_be_sent_is_soaked_in_a_fork() -> None:
    lock = threading.Lock()

    def locked() -> Leaky:
        with lock:
            return Leaky("handle")

    place, variable = tempfile.gettempdir(), os.environ.get("TMPDIR")
    _, findings = run_soak(make_recipes(locked, 1, {}, ()), 3.0, timeout_s=60.0)
    assert any(text.startswith("leaks one file handle an episode: ") for text in warnings_of(findings))
    assert (tempfile.gettempdir(), os.environ.get("TMPDIR")) == (place, variable)


@pytest.mark.parametrize("soak_s", [0, -1.0, "60", True])
def test_a_time_that_is_none_is_refused(soak_s: Any) -> None:
    with pytest.raises(ConfigError, match="soak_s must be a number of seconds greater than 0"):
        muster.diagnose(make_patient, soak_s=soak_s)


def test_an_env_that_cannot_be_stepped_is_not_soaked() -> None:
    diagnosis = muster.diagnose(make_patient, env_kwargs={"trait": "raise"}, soak_s=60.0, seconds=0.1)
    assert diagnosis.soak is None
    assert [one.text for one in diagnosis.findings if one.topic == "soak"] == [
        "not soaked: it cannot be stepped, see above"
    ]


def test_the_command_prints_the_table_and_the_verdict() -> None:
    command = [sys.executable, "-c", "import muster.cli; muster.cli.main()", "doctor", "leaky:LeakyTeam"]
    options = ["--soak", "1.5", "--seconds", "0.1", "--num-envs", "1"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=110, cwd=HERE)
    assert done.returncode == 0, done.stderr
    assert "then soaking it for 1.5 s" in done.stderr
    said = " ".join(done.stdout.split())
    assert "! soak leaks one file handle an episode: " in said
    assert "Soaked for 1.5" in said
    assert "+1 grows threads 2 2 2 2 steady child processes" in said


@pytest.mark.slow
def test_the_soak_is_part_of_the_json() -> None:
    command = [sys.executable, "-c", "import muster.cli; muster.cli.main()", "doctor", "leaky:LeakyTeam"]
    options = ["--soak", "1.5", "--seconds", "0.1", "--num-envs", "1", "--json"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=110, cwd=HERE)
    soak = json.loads(done.stdout)["soak"]
    handles = next(one for one in soak["quantities"] if one["name"] == "file handles")
    assert handles["trend"] == "grows"
    assert handles["an_episode"] == pytest.approx(1, abs=0.05)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("kwargs", "verdict"),
    [
        ({"traits": "handle"}, "leaks one file handle an episode: "),
        ({"traits": "20 KB"}, "leaks memory, 20"),
        ({"traits": "300 bytes"}, "leaks memory, 3"),
        ({"traits": "slower", "step_s": 0.0}, "a step takes longer and longer: "),
    ],
)
def test_a_minute_finds_the_leak(kwargs: dict[str, Any], verdict: str) -> None:
    _, findings = soaked(Leaky, 60.0, **kwargs)
    assert any(text.startswith(verdict) for text in warnings_of(findings)), findings


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("traits", ["cache", "cycle", "trajectory"])
def test_a_minute_raises_no_false_alarm(traits: str) -> None:
    assert is_clean(*soaked(Leaky, 60.0, traits=traits, fill_s=20.0))


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("env_id", ["CartPole-v1", "HalfCheetah-v5", "ALE/Pong-v5"])
def test_a_minute_finds_nothing_in_known_envs(env_id: str) -> None:
    assert is_clean(*soaked(env_id, 60.0))
