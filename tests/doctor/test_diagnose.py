"""What the doctor finds, on envs that have it."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import psutil
import pytest
from patients import Patient, Sharing, Shelling, Starting, make_existing, make_patient

import muster
from muster.doctor import Diagnosis, Finding, Measurements, trials
from muster.doctor.advice import Candidate, Verdict, candidates, name_of_spec, spec_of, unbuildable
from muster.doctor.diagnosing import Subject, pick, try_contexts, try_lines
from muster.doctor.diagnosing import _source as source_of
from muster.doctor.findings import about_behaviour, about_pair, about_replay, about_start_methods, about_states
from muster.doctor.fixes import NO_FIX
from muster.envs import resolve_foreign_id
from muster.hosts.trial import STARTING, TrialOutcome, Trials, pack_for_trials
from muster.pool.resources import memory_left, usable_cores
from muster.recipes.recipe import make_recipes
from muster.vector.side_by_side import SideBySide, play_together, try_side_by_side
from processes import is_alive, is_exiting, left_of, wait_for, wait_for_end

pytestmark = pytest.mark.usefixtures("kept_launchers")


def diagnose(env, **kwargs) -> Diagnosis:
    return muster.diagnose(env, seconds=0.2, timeout=20.0, **kwargs)


def found(diagnosis: Diagnosis, topic: str, severity: str) -> list[Finding]:
    return [one for one in diagnosis.findings if (one.topic, one.severity) == (topic, severity)]


def text_of(diagnosis: Diagnosis, topic: str, severity: str) -> str:
    texts = [one.text for one in found(diagnosis, topic, severity)]
    assert texts, f"nothing about {topic} that {severity}: {diagnosis}"
    return "\n".join(texts)


def living() -> set[int]:
    children = psutil.Process().children(recursive=True)
    return {child.pid for child in children if is_alive(child.pid) and child.name() != "muster-launcher"}


@pytest.fixture(autouse=True)
def _no_process_left():
    before = living()
    yield
    for pid in filter(is_exiting, living() - before):
        wait_for_end(pid)
    assert living() <= before


@pytest.fixture(scope="module")
def healthy() -> Diagnosis:
    return diagnose(make_patient)


def test_a_healthy_env_gets_a_line_that_runs(healthy):
    assert not healthy.blocks
    topics = ("travel", "start methods", "API", "seeds", "states", "isolation")
    assert all(found(healthy, topic, "good") for topic in topics), str(healthy)
    advice = healthy.recommendation
    names = {"muster": muster, "make_patient": make_patient}
    exec(advice.line, names)
    with names["envs"] as envs:
        assert envs.num_envs == advice.num_envs
        envs.reset(seed=0)
        envs.step(envs.action_space.sample())


def test_what_is_measured_makes_sense(healthy):
    measured = healthy.measured
    assert 0 < measured.step_median_s <= measured.step_p99_s
    assert 0 < measured.reset_median_s <= measured.reset_p99_s
    assert measured.episode_rows == pytest.approx(10, abs=1)
    assert measured.obs_bytes == 24
    assert measured.worker_bytes > 1e6
    assert healthy.recommendation.memory_bytes >= measured.worker_bytes or healthy.recommendation.backend == "serial"


def test_the_lines_that_suit_are_run_and_the_fastest_is_recommended(healthy):
    lines = [one.line.replace(f"num_envs={healthy.recommendation.num_envs}", "num_envs=N") for one in healthy.tried]
    expected = ["num_workers=", f"num_workers={usable_cores() - 1}, caller_steps=True", 'backend="serial"']
    if usable_cores() == 1:
        del expected[1]
    assert len(lines) == len(expected)
    for line, option in zip(lines, expected, strict=True):
        assert line.startswith(f"envs = muster.make_vec(make_patient, num_envs=N, {option}")
    assert all(one.steps_per_s > 0 and one.problem is None for one in healthy.tried)
    fastest = max(healthy.tried, key=lambda one: one.steps_per_s)
    assert (healthy.recommendation.line, healthy.recommendation.steps_per_s) == (fastest.line, fastest.steps_per_s)
    assert all(f"{one.steps_per_s:,.0f}  {one.line.removeprefix('envs = ')}" in str(healthy) for one in healthy.tried)


def subject_of(trait: str, timeout_s: float = 20.0) -> Subject:
    findings: list[Finding] = []
    return Subject.of(make_recipes(make_patient, 1, {"trait": trait})[0], timeout_s, findings)


def lines_for(num_envs: int) -> list[Candidate]:
    verdict = Verdict("make_patient", {}, num_envs, travels=True, tried={"forkserver": None}, packs=True)
    return candidates(verdict, Measurements())


def test_a_line_that_fails_is_told_in_one_line_and_the_others_are_run():
    in_processes, *_, in_one = lines_for(4)
    (failed, run), _ = try_lines([in_one, in_processes], subject_of("three in a process"), None, 0.1)
    assert failed.line.startswith('envs = muster.make_vec(make_patient, num_envs=4, backend="serial"')
    assert failed.steps_per_s is None
    assert "building many of it, it raised EnvError" in failed.problem
    assert "licence in use" in failed.problem
    assert "\n" not in failed.problem
    assert run.steps_per_s > 0


def test_a_line_that_hangs_is_cut_off_and_the_others_are_not_run():
    diagnosis = muster.diagnose(make_patient, env_kwargs={"trait": "hangs in the end"}, seconds=0.2, timeout=3.0)
    (tried,) = diagnosis.tried
    assert (tried.steps_per_s, tried.problem) == (None, "stepping many of it, it hung for 3 s")
    assert "stepping many of it, the env hung" in text_of(diagnosis, "life", "blocks")
    assert "step_timeout=60" in diagnosis.recommendation.line
    assert diagnosis.recommendation.steps_per_s is None


def test_what_takes_long_to_build_is_run_on_the_first_line_alone():
    others, first = (lines := lines_for(2))[:-1], lines[-1]
    (run, *left), _ = try_lines([first, *others], subject_of(""), 6.0, 0.1)
    assert run.steps_per_s > 0
    assert [one.problem for one in left] == ["not run: one env takes 6 s to build"] * len(others)
    assert pick([first, *others], [run, *left]).line == run.line


def test_envs_that_share_an_object_are_run_on_threads_too():
    diagnosis = diagnose(lambda lock: Sharing(lock), env_kwargs={"lock": threading.Lock()}, num_envs=2)
    assert all(one.steps_per_s > 0 for one in diagnosis.tried), str(diagnosis)
    options = [one.line.partition("num_envs=2, ")[2] for one in diagnosis.tried]
    assert ['context="fork"' in one for one in options] == [True, False, False]
    assert [one.partition(",")[0] for one in options[1:]] == ['backend="serial"', 'backend="thread"']


def test_an_env_that_dies_is_a_finding_and_the_line_restarts_it():
    diagnosis = diagnose(make_patient, env_kwargs={"trait": "segfault"})
    assert "stepping it, the env was killed by SIGSEGV" in text_of(diagnosis, "life", "blocks")
    assert "_suffer" in found(diagnosis, "life", "blocks")[0].remedy
    assert diagnosis.blocks
    assert 'on_failure="restart"' in diagnosis.recommendation.line


def trials_of(env, num_envs: int = 1, timeout_s: float = 20.0, **kwargs) -> Trials:
    recipes = make_recipes(env, num_envs, kwargs, resolve_foreign_id=resolve_foreign_id)
    return Trials(pack_for_trials(recipes, "spawn"), timeout_s)


def try_out(trial, trait: str, timeout_s: float = 20.0, **options) -> TrialOutcome:
    return trials_of(make_patient, timeout_s=timeout_s, trait=trait).run(trial, **options)


def side_by_side(trait: str) -> SideBySide:
    return try_side_by_side(trials_of(make_patient, 2, trait=trait))


def behave(trait: str, timeout_s: float = 20.0) -> list[Finding]:
    """What the trials of a single env find."""
    first = try_out(trials.behaviour, trait, timeout_s)
    if "rows" not in first.results:
        return about_behaviour(first)
    again = try_out(trials.replay, trait, timeout_s, hash_seed=2, rows=first.results["rows"])
    played = try_out(trials.playing_again, trait, timeout_s, counts=(1, 2))
    return about_behaviour(first) + about_replay(first, again) + about_states(played)


@pytest.mark.parametrize(
    ("trait", "words"),
    [
        ("exit", "stepping it, the env ended the process (exit code 3)"),
        ("raise", "stepping it, the env raised KeyError: 'no such level'"),
        ("hang", "stepping it, the env hung for 3 s"),
    ],
)
def test_every_early_end_is_told(trait, words):
    (finding,) = [one for one in behave(trait, 3.0 if trait == "hang" else 30.0) if one.topic == "life"]
    assert finding.text == words
    assert finding.severity == "blocks"
    assert trait == "exit" or "_suffer" in finding.remedy
    if trait == "hang":
        assert "most recent call first" in finding.remedy
        assert "/muster/" not in finding.remedy
    if trait == "raise":  # the traceback begins in the env's own code
        lines = finding.remedy.splitlines()
        assert "patients.py" in lines[1]
        assert lines[-1] == "KeyError: 'no such level'"
        assert "trials.py" not in finding.remedy


@pytest.mark.parametrize(
    ("trait", "words", "states"),
    [("unseeded", "when the same env is reset to it again", "note"), ("hash order", "in another process", "good")],
)
def test_what_does_not_repeat_itself_is_found(trait, words, states):
    found = behave(trait)
    assert [one.severity for one in found if one.topic == "states"] == [states]
    assert [one for one in found if (one.topic, one.severity) == ("seeds", "warns") and words in one.text]


def test_steps_that_take_long_now_and_then_are_found():
    outcome = try_out(trials.behaviour, "slow now and then")
    assert [one.severity for one in about_behaviour(outcome) if one.topic == "steps"] == ["warns"]
    assert outcome.results["step_median_s"] < outcome.results["step_mean_s"] < 0.1 < outcome.results["step_longest_s"]
    rows = dict(Measurements(step_median_s=5e-4, step_mean_s=2e-3, step_p99_s=6e-4, step_longest_s=0.3).rows())
    assert rows["step"] == "500 us, mean 2 ms, p99 600 us, longest 300 ms"


def test_an_env_that_changes_its_action_is_found():
    findings = about_behaviour(try_out(trials.behaviour, "changes its action"))
    assert [one.severity for one in findings if one.topic == "actions"] == ["warns"]


def test_envs_that_must_be_alone_in_a_process_are_found_by_trial():
    diagnosis = diagnose(make_patient, env_kwargs={"trait": "alone"}, num_envs=3)
    assert "licence in use" in text_of(diagnosis, "isolation", "warns")
    assert not diagnosis.blocks
    assert "one_env_per_process=True" in diagnosis.recommendation.line
    assert diagnosis.recommendation.num_workers == 3
    assert text_of(diagnosis, "states", "good").endswith("a used one, alone")


def test_envs_that_disturb_each_other_are_found_by_trial():
    finding = about_pair(side_by_side("disturbs"))
    assert finding.severity == "warns"
    assert "disturb each other" in finding.text


@pytest.mark.parametrize(
    ("alone", "pair_stage", "severity"),
    [
        ({"digest": "a"}, "building a second one in the same process", "warns"),
        ({"digest": "a"}, "stepping two of it in one process", "warns"),
        ({"digest": "a"}, "building the first of two in one process", "note"),
        ({"digest": "a"}, STARTING, "note"),
        ({}, "stepping two of it in one process", "note"),
    ],
)
def test_isolation_is_claimed_only_for_what_a_second_one_broke(alone, pair_stage, severity):
    one, together = TrialOutcome(results=alone), TrialOutcome(stage=pair_stage, how="was killed by SIGKILL")
    pair = SimpleNamespace(run=lambda trial, **options: together if trial is play_together else one)
    finding = about_pair(try_side_by_side(pair))
    assert finding.severity == severity
    assert ("not known" in finding.text) is (severity == "note")


def test_what_hangs_at_once_is_not_tried_with_every_start_method():
    hung = TrialOutcome(stage="building it", how="hung for 3 s", hung=True)
    assert try_contexts(subject_of("hangs at once"), hung) == {}
    assert about_start_methods({}, known=True) == []
    assert "building it, the env hung" in about_behaviour(hung)[0].text


def test_a_shared_object_that_hangs_in_a_fork_is_cut_off():
    def hanging(lock: threading.Lock) -> Patient:
        time.sleep(600)
        return Patient()

    recipe = make_recipes(hanging, 1, {"lock": threading.Lock()})[0]
    verdict = Verdict("make_env", {}, 2, travels=False, tried={"fork": None})
    subject = Subject(recipe, Trials([recipe], 1.0), "")
    tried, _ = try_lines(candidates(verdict, Measurements()), subject, None, 0.1)
    assert [one.problem for one in tried] == ["building many of it, it hung for 1 s"] * 3


def test_envs_of_one_action_space_do_not_disturb_each_other():
    assert about_pair(side_by_side("rewards its action")).severity == "good"


def test_an_instance_is_no_recipe_but_gets_a_factory():
    diagnosis = diagnose(Patient())
    assert "an env that exists already" in text_of(diagnosis, "recipe", "blocks")
    assert diagnosis.recommendation.factory == "def make_env():\n    return Patient(...)\n"
    assert diagnosis.recommendation.line.startswith("envs = muster.make_vec(make_env,")


def test_a_factory_of_an_existing_env_is_refused_and_its_part_that_cannot_travel_is_named():
    patient = Patient()
    patient.lock = threading.Lock()
    diagnosis = diagnose(lambda: patient)
    assert "_thread.lock" in text_of(diagnosis, "recipe", "blocks")
    assert diagnosis.recommendation.factory == "def make_env():\n    return Patient(...)\n"
    assert found(diagnose(make_existing), "recipe", "blocks")


@pytest.mark.parametrize(
    ("options", "code"),
    [({}, '"CartPole-v1"'), ({"max_episode_steps": 50}, "env.spec"), ({"sutton_barto_reward": True}, "env.spec")],
)
def test_an_instance_is_named_by_what_makes_its_like(options, code):
    env = gym.make("CartPole-v1", **options)
    assert name_of_spec(spec_of(env)) == (code if code != "env.spec" else None)
    assert source_of(env, "x") == code
    advice = unbuildable(lambda: env, "make_env", {})
    assert (f"make_vec({code}, " in advice.line) is (code != "env.spec")


def test_an_argument_that_cannot_travel_blocks_and_is_named():
    diagnosis = diagnose(lambda lock: Patient(), env_kwargs={"lock": threading.Lock()})
    assert diagnosis.blocks
    assert 'env_kwargs["lock"] = muster.lazy(threading.Lock)' in text_of(diagnosis, "travel", "blocks")
    assert "fork tried, and work" in text_of(diagnosis, "start methods", "good")
    assert 'context="fork"' in diagnosis.tried[0].line


def test_an_open_file_is_shared_by_a_fork_and_no_line_is_run(tmp_path):
    with (tmp_path / "log").open("w") as log:
        diagnosis = diagnose(functools.partial(lambda log: Patient(), log), name="my_game:logging_env")
    assert all("not run: its envs would use what they share" in one.problem for one in diagnosis.tried)
    assert 'context="fork"' in diagnosis.recommendation.line


def test_multi_agent_envs_are_played_and_run():
    pytest.importorskip("mpe2")
    team = trials_of("pettingzoo/mpe2/simple_v3")
    played = team.run(trials.behaviour)
    assert (played.stage, played.results["api"]) == (None, "PettingZoo parallel")
    assert played.results["digest"] == played.results["digest_again"] != played.results["digest_other"]
    run = team.run(trials.stepping_many, num_envs=2, options={"backend": "serial"}, seconds=0.05, fix=NO_FIX)
    assert run.stage is None
    assert run.results["steps_per_s"] > 0


def test_start_methods_that_fail_alike_are_told_once():
    tried = {"forkserver": "died after 0.2 s\nin env.py", "spawn": "died after 0.31 s\nin env.py", "fork": "odd"}
    texts = [one.text for one in about_start_methods(tried, known=False)]
    assert texts == ["forkserver, spawn do not work: died after 0.2 s\nin env.py", "fork does not work: odd"]
    assert about_start_methods(tried, known=True)[0].text == "forkserver, spawn do not work: died after 0.2 s"


def test_what_is_no_env_is_told_by_what_it_lacks():
    diagnosis = diagnose(dict)
    assert "no reset and no step and no observation_space" in text_of(diagnosis, "life", "blocks")
    assert diagnosis.recommendation is None


def test_arguments_that_a_factory_lacks_are_in_the_line():
    def make_level(level, *, size=3):
        return Patient()

    diagnosis = diagnose(make_level)
    assert diagnosis.recommendation.line.endswith('env_kwargs={"level": ...})')
    assert diagnosis.recommendation.factory is None


def test_no_more_envs_are_recommended_than_memory_has_room_for():
    verdict = Verdict("make_env", {}, None, travels=True, tried={"forkserver": None}, packs=True)
    left_bytes, _ = memory_left()
    measured = Measurements(obs_bytes=8, env_bytes=left_bytes // 9, worker_bytes=1000)
    assert all(3 <= one.advice.num_envs <= 4 for one in candidates(verdict, replace(measured, step_mean_s=1e-6)))


@pytest.mark.parametrize(
    ("env_kwargs", "code"),
    [
        ({"level": 3, "sizes": [1.5, (2, "a")]}, "env_kwargs={'level': 3, 'sizes': [1.5, (2, 'a')]}"),
        ({"board": np.zeros((3, 3))}, "env_kwargs=env_kwargs"),
        ({"map": np.zeros(100_000)}, "env_kwargs=env_kwargs"),
        ({"far": float("inf")}, "env_kwargs=env_kwargs"),
        ({"lock": threading.Lock()}, "env_kwargs=env_kwargs"),
    ],
)
def test_arguments_are_in_the_line_where_code_can_say_them(env_kwargs, code):
    verdict = Verdict("make_env", env_kwargs, 2, travels=True, tried={"forkserver": None})
    assert all(code in one.advice.line for one in candidates(verdict, Measurements()))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "followed"
    path.touch()
    return str(path)


def test_nothing_that_an_env_has_started_is_left(file):
    diagnose(functools.partial(Starting, file))
    assert not left_of(file)


def test_what_an_env_has_started_does_not_keep_the_doctor_waiting(file):
    outcome = trials_of(functools.partial(Shelling, file)).run(trials.behaviour)
    assert (outcome.stage, outcome.how) == (None, "")
    assert not left_of(file)


def test_a_doctor_that_is_killed_leaves_nothing(file):
    code = """
        import functools, sys
        import muster
        from patients import Holding
        muster.diagnose(functools.partial(Holding, sys.argv[1]))
    """
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    before = living()
    doctor = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), file], env=environ)
    wait_for(f"-f\0{file}")  # the doctor's own command line has it, too
    doctor.kill()
    doctor.wait()
    assert not left_of(file)
    deadline = time.monotonic() + 10  # the trial, which is ours now, ends by itself
    while living() - before and time.monotonic() < deadline:
        time.sleep(0.02)
