"""Soaks of envs that leak, of envs that do not, and of series of samples that are made up."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from leaky import Leaky, LeakyTeam
from patients import make_patient

import muster
import programs
from muster.doctor import Diagnosis, Finding, Measurements, Soak, SoakedQuantity
from muster.doctor.diagnosing import Subject
from muster.doctor.diagnosing import _soak as soak_if_it_works
from muster.doctor.soak import judge_soak, run_soak
from muster.envs import resolve_foreign_id
from muster.errors import ConfigError
from muster.hosts.trial import TrialOutcome, Trials, pack_for_trials
from muster.recipes.recipe import make_recipes
from slow import slow

pytestmark = pytest.mark.usefixtures("kept_launchers")

HERE = Path(__file__).parent


def soaked(env: Any, soak_s: float, **kwargs: Any) -> tuple[Soak, list[Finding]]:
    recipes = make_recipes(env, 1, kwargs, (), resolve_foreign_id=resolve_foreign_id)
    soak, findings = run_soak(Trials(pack_for_trials(recipes, "spawn"), 60.0), soak_s)
    assert soak is not None, findings
    return soak, findings


def quantity(soak: Soak, name: str) -> SoakedQuantity:
    (found,) = [one for one in soak.quantities if one.name == name]
    return found


def warnings_of(findings: list[Finding]) -> list[str]:
    return [one.text for one in findings if one.severity == "warns"]


def is_clean(soak: Soak, findings: list[Finding]) -> bool:
    assert [one.severity for one in findings] == ["good"], findings
    assert "no leak in" in findings[-1].text
    return all(one.trend == "steady" for one in soak.quantities)


# ---- made up: 60 s of an env that makes 5000 steps a second, 20 an episode

MB, KB = 1e6, 1e3
AT_S = np.linspace(0.0, 60.0, 200)
STEPS = np.floor(AT_S * 5000)
EPISODES = np.floor(STEPS / 20) + 1
DRAW = np.random.default_rng(0)
STEADY = {"memory": 30 * MB, "file handles": 10, "child processes": 0}


def judged(name: str, values: Any, steps: Any = STEPS) -> SoakedQuantity:
    """The judgement of one quantity, all others being steady."""
    columns = [np.broadcast_to(one, AT_S.shape) for one in {**STEADY, name: values}.values()]
    rows = np.stack([AT_S, steps, EPISODES, *columns], 1).tolist()
    soak, findings = judge_soak(TrialOutcome({"samples": rows}), 60)
    assert soak is not None
    assert [one.name for one in soak.quantities if one.trend == "grows"] == [name] * (findings[0].severity != "good")
    return quantity(soak, name)


def filled(seconds: float) -> Any:
    return 30 * MB + 40 * MB * np.minimum(AT_S / seconds, 1)


def saw(period_s: float) -> Any:
    return 30 * MB + 50 * MB * (AT_S % period_s) / period_s


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("memory", 30 * MB + STEPS * 20 * KB),
        ("memory", 30 * MB + EPISODES * 100),
        ("memory", filled(20) + STEPS * 20),  # after a cache
        ("memory", saw(3) + STEPS * 200),  # of buffers that come and go
        ("file handles", 10 + EPISODES),
        ("child processes", 10 + np.floor(EPISODES / 2000)),  # 7 in all
    ],
)
def test_what_goes_on_growing_is_a_leak(name: str, values: Any) -> None:
    growth = judged(name, values)
    assert growth.trend == "grows"
    assert growth.an_episode == pytest.approx(20 * growth.a_step, rel=0.01)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("memory", 30 * MB + DRAW.exponential(2 * MB, 200)),
        ("memory", 30 * MB + STEPS * 0.5),  # 150 KB in all
        ("memory", filled(20)),
        ("memory", 30 * MB + 40 * MB * (1 - np.exp(-AT_S / 10))),  # a cache that fills more and more slowly
        ("memory", saw(9)),
        ("memory", saw(25)),
        ("memory", 30 * MB + 50 * MB * (AT_S > 45)),  # one big allocation
        ("memory", 50 * MB - STEPS * 10),
        ("file handles", 10 + DRAW.integers(0, 6, 200)),
        ("child processes", 10 + (AT_S > 30) * 2),
    ],
)
def test_what_comes_and_goes_or_fills_is_none(name: str, values: Any) -> None:
    growth = judged(name, values)
    assert growth.trend == "steady"
    assert growth.a_step == growth.an_episode == 0


def test_a_soak_that_is_too_short_says_so() -> None:
    soak, (found,) = judge_soak(TrialOutcome({"samples": [[one, 100, 5, 1, 6, 0] for one in (0, 1)]}), 1)
    assert found.severity == "note"
    assert "too few to show that anything grows" in found.text
    assert soak is not None
    assert soak.quantities == ()


# ---- real


def test_whatever_is_left_behind_in_each_episode_is_counted() -> None:
    soak, findings = soaked(Leaky, 4.0, traits="handle and process", length=150)
    warned = warnings_of(findings)
    for kind, example in (("file handles", "/dev/null"), ("child processes", "sleep")):
        (text,) = [text for text in warned if re.match(rf"leaks {kind}, 0\.00\d* a step, 1 an episode: from ", text)]
        assert f" after {soak.episodes:,} episodes and {soak.steps:,} steps" in text
        assert example in text
    handles = quantity(soak, "file handles")
    assert handles.an_episode == pytest.approx(1, abs=0.05)
    assert handles.marks == tuple(sorted(handles.marks))


def test_what_is_kept_of_each_step_is_counted() -> None:
    soak, findings = soaked(Leaky, 4.0, traits="20 KB")
    (text,) = warnings_of(findings)
    assert re.match(r"leaks memory, [12]\d(\.\d)? KB a step, [34]\d\d KB an episode: from ", text)
    assert "A million steps would take 2" in text
    assert quantity(soak, "memory").a_step == pytest.approx(20_000, rel=0.1)


@pytest.mark.parametrize("traits", ["cache", *slow("cycle and trajectory")])
def test_a_cache_that_fills_and_what_comes_and_goes_are_no_leak(traits: str) -> None:
    assert is_clean(*soaked(Leaky, 4.0, traits=traits, fill_s=0.4))


@pytest.mark.slow
def test_episodes_of_several_agents_without_an_end_are_cut_short() -> None:
    soak, findings = soaked(LeakyTeam, 4.0, length=0)
    assert soak.episodes >= 20
    assert any(text.startswith("leaks file handles, ") for text in warnings_of(findings)), findings


@pytest.mark.slow
def test_a_soak_ends_before_the_handles_run_out() -> None:
    soak, findings = soaked(Leaky, 30.0, traits="handle and few handles", step_s=1e-3)
    assert soak.seconds < 25
    (text,) = warnings_of(findings)
    assert re.match(r"leaks file handles, 0\.05\d* a step, 1 an episode: ", text)
    assert "The soak was ended there" in text


def test_an_env_that_ends_early_is_a_finding() -> None:
    _, (found,) = soaked(Leaky, 30.0, traits="raise", step_s=0.0)
    assert found.topic == "life"
    assert "soaking it, the env raised RuntimeError: the simulator has" in found.text


def test_what_cannot_be_sent_is_soaked_in_a_fork() -> None:
    lock = threading.Lock()

    def locked() -> Leaky:
        with lock:
            return Leaky("handle")

    _, findings = run_soak(Trials(make_recipes(locked, 1, {}, ()), 60.0), 4.0)
    assert [text.partition(",")[0] for text in warnings_of(findings)] == ["leaks file handles"]


@pytest.mark.parametrize("soak_s", [0, -1.0, "60", True])
def test_a_time_that_is_none_is_refused(soak_s: Any) -> None:
    with pytest.raises(ConfigError, match="soak_s must be a number of seconds greater than 0"):
        muster.diagnose(make_patient, soak_s=soak_s)


def test_an_env_that_cannot_be_stepped_is_not_soaked() -> None:
    subject = Subject.of(make_recipes(make_patient, 1)[0], 60.0, [])
    soak, (finding,) = soak_if_it_works(Diagnosis("x", (), Measurements(), None), subject, 60.0)
    assert soak is None
    assert finding.text == "not soaked: it cannot be stepped, see above"


@pytest.mark.slow
def test_the_command_prints_the_table_and_the_verdict() -> None:
    command = ["-c", "import muster.cli; muster.cli.main()", "doctor", "leaky:LeakyTeam"]
    done = programs.run(*command, "--soak", "3", "--seconds", "0.1", "--num-envs", "1", cwd=HERE)
    assert done.returncode == 0, done.stderr
    assert "muster: soaking it for 3 s" in done.stderr
    said = " ".join(done.stdout.split())
    assert "! soak leaks file handles, 0.05" in said
    assert " a step, 1 an episode: from " in said
    assert "Soaked for 3" in said
    assert "+1 grows child processes" in said
