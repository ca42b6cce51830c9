"""`muster.diagnose`: tries an env out, and returns how to run many of it, or what is in the way."""

from __future__ import annotations

import inspect
import json
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from gymnasium.envs.registration import EnvSpec

from muster.arguments import explains_keywords, whole
from muster.arguments import seconds as number_of_seconds
from muster.doctor import findings, trials
from muster.doctor.advice import Candidate, Verdict, candidates, name_in_code, name_of_spec, spec_of, unbuildable
from muster.doctor.conflicts import find_conflicts, leftovers, watched
from muster.doctor.diagnosis import Diagnosis, Finding, Measurements, Recommendation, Soak, TriedLine
from muster.doctor.diagnosis import seconds as in_words
from muster.doctor.fixes import NO_FIX, Fix
from muster.doctor.measure import make_envs
from muster.doctor.soak import run_soak
from muster.doctor.trials import STEPPING_MANY, stepping_many
from muster.envs import resolve_foreign_id
from muster.envs.adapt import from_torchrl, with_torchrl
from muster.errors import CannotTravel, RecipeError
from muster.extras import require
from muster.hosts.trial import TrialOutcome, Trials, pack_for_trials
from muster.introspection import callable_name, type_name
from muster.pool.launcher_client import LauncherClient
from muster.pool.resources import usable_cores
from muster.recipes.existing_env import is_env
from muster.recipes.recipe import Recipe, make_recipes, shared_by
from muster.vector.side_by_side import LEAST_S, TIMES_ALONE, try_side_by_side

CONTEXTS = ("forkserver", "spawn", "fork")
# The stages of every worker and every trial, in order; first those before an env's first step.
_BEFORE_STEPS = ("unpacking the recipe", "building it", "resetting it")
_ON_THE_WAY = (*_BEFORE_STEPS, "stepping it", "closing it")
_LONG_BUILD_S = 5.0
_REPLAY_HASH_SEED = 2


@explains_keywords()
def diagnose(
    env: Any,
    *,
    policy: Any = None,
    num_envs: int | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[Callable[[Any], Any]] = (),
    timeout: float = 60.0,
    seconds: float = 1.0,
    soak_s: float | None = None,
    name: str | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> Diagnosis:
    """The obstacles to running an env in parallel, and the fastest of the `make_vec` lines that suit it.

    env, env_kwargs, wrappers: as for `make_vec`, and factories of TorchRL's `EnvBase`, with a line of
        `muster.interop.torchrl.ParallelEnv`; an env that exists already is a finding, not an error. Every trial runs
        in a process of its own: a crash, a hang or an exit in the env is a finding, too. With what the env shares with
        this process (queues, locks, pipes, memory) only one worker is tried, for one step, and a finding says so.
    num_envs: how many the recommendation is for, None for as many as suit the machine.
    timeout: seconds for each stage of a trial, and for each step.
    seconds: how long each line that could be recommended is run, after its start.
    soak_s: for so many seconds the env is also stepped and reset by random allowed actions, in one process. Findings
        then say whether memory, file handles or child processes grow, and how fast; `Diagnosis.soak` has the figures.
        What grows in the first third alone is no leak: soak three times as long as the env takes to fill its caches.
    name: the env's name in messages.
    progress: called with the name of each stage before it begins.
    policy: examined as well: could `MultiCollector` copy it to its processes? It is not called. Needs PyTorch.

    Raises what `make_vec` raises for an id that does not exist, and for arguments that make no sense. Raises
    ImportError where a policy is to be examined without PyTorch. Returns a `Diagnosis`: its ``str`` is a report.

    >>> import muster
    >>> diagnosis = muster.diagnose("CartPole-v1", env_kwargs={"speed": 2})
    >>> diagnosis.blocks, [finding.topic for finding in diagnosis.findings if finding.severity == "blocks"]
    (True, ['life', 'start methods'])
    """
    if policy is not None:
        require("diagnose(policy=...) needs", "muster-rl[torch]", "torch", "tensordict")
    if num_envs is not None:
        num_envs = whole("num_envs", num_envs, 1)
    if soak_s is not None:
        soak_s = number_of_seconds("soak_s", soak_s)
    if callable(env) and not isinstance(env, EnvSpec) and not is_env(env):
        wrappers = with_torchrl(wrappers)
    with LauncherClient.kept():
        diagnosis, subject = _diagnose_env(
            env, num_envs, env_kwargs or {}, wrappers, timeout, seconds, name or _name(env), progress
        )
        found, results = list(diagnosis.findings), dict[str, Any]()
        if soak_s is not None:
            progress(f"soaking it for {soak_s:g} s")
            results["soak"], verdicts = _soak(diagnosis, subject, soak_s)
            found += verdicts
        if policy is not None:
            progress("examining the policy")
            finding, results["policy"] = findings.judge_policy(policy)
            found.append(finding)
    return replace(diagnosis, findings=tuple(found), **results)


@dataclass(frozen=True)
class Subject:
    """The env that is diagnosed.

    trials: of one of it; in forks, where its recipe cannot be sent.  shared: what it shares with this process, in
    words, "" for nothing.  longest_s: the most seconds for a stage.
    fix: what gives each env its own of what two fight over.  say: called with the name of each stage.
    """

    recipe: Recipe
    trials: Trials
    shared: str
    longest_s: float = math.inf
    fix: Fix = NO_FIX
    say: Callable[[str], None] = lambda stage: None

    @property
    def travels(self) -> bool:
        """True where its recipe can be sent."""
        return isinstance(self.trials.recipes, bytes)

    @classmethod
    def of(cls, recipe: Recipe, timeout_s: float, found: list[Finding]) -> Subject:
        """Packs the recipe. found: receives what is found."""
        recipes: bytes | list[Recipe] = [recipe]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                recipes = pack_for_trials([recipe], "spawn")
            except CannotTravel as error:
                found.append(Finding("blocks", "travel", str(error)))
        found += [Finding("warns", "travel", str(one.message)) for one in said if one.category is UserWarning]
        if not said and isinstance(recipes, bytes):
            found.append(Finding("good", "travel", "the recipe and its arguments can be sent to workers"))
        return cls(recipe, Trials(recipes, timeout_s), shared_by([recipe], by_fork=not isinstance(recipes, bytes)))


def _diagnose_env(
    env: Any,
    num_envs: int | None,
    env_kwargs: Mapping[str, Any],
    wrappers: Sequence[Callable[[Any], Any]],
    timeout: float,
    seconds: float,
    target: str,
    progress: Callable[[str], None],
) -> tuple[Diagnosis, Subject | None]:
    found: list[Finding] = []
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        try:
            pair = make_recipes(env, 2, env_kwargs, wrappers, resolve_foreign_id=resolve_foreign_id)
        except RecipeError as error:
            line = unbuildable(env, _source(env, target), env_kwargs)
            return Diagnosis(target, (Finding("blocks", "recipe", str(error)),), Measurements(), line), None
    if is_env(env):
        text = f"this is an env that exists already; new ones are made from its spec {env.spec.id!r}."
        found.append(Finding("note", "recipe", text))
    subject = replace(Subject.of(pair[0], timeout, found), say=progress)
    travels, shared, behaviour = subject.travels, subject.shared, TrialOutcome()
    if travels and not shared:
        progress("trying one env alone")
        started = time.monotonic()
        behaviour = watched(subject.trials, trials.behaviour)
        limit_s = min(timeout, max(LEAST_S, round(TIMES_ALONE * (time.monotonic() - started), 1)))
        subject = replace(subject, trials=replace(subject.trials, stage_timeout_s=limit_s), longest_s=timeout)
    tried = try_contexts(subject, behaviour)
    if shared:
        found.append(findings.about_sharing(shared))
    found += findings.about_behaviour(behaviour)
    found += findings.about_start_methods(tried, known=behaviour.stage in findings.FATAL)
    around = [name_in_code(one) for one in wrappers if one is not from_torchrl]
    verdict = Verdict(_source(env, target), env_kwargs, num_envs, travels, tried, wrappers=around)
    verdict.fragile = behaviour.stage in ("resetting it", "stepping it")
    verdict.alone = bool(behaviour.results.get("one_per_process"))
    verdict.of_torchrl = behaviour.results.get("api") == "TorchRL"
    together, is_run = TrialOutcome(), not travels or bool(shared)
    if behaviour.hung and behaviour.stage in _ON_THE_WAY:
        text = f"{behaviour.stage}, it hung: its speed, its seeds and two of it in one process were not tried"
        found.append(Finding("note", "life", text))
    elif "rows" in behaviour.results:
        rows, is_run = behaviour.results["rows"], True
        progress("trying the same seed in another process")
        again = watched(subject.trials, trials.replay, hash_seed=_REPLAY_HASH_SEED, rows=rows)
        found += findings.about_replay(behaviour, again)
        subject = replace(subject, trials=replace(subject.trials, leftovers=leftovers((behaviour, again))))
        conflicts = find_conflicts(subject.trials, (behaviour, again), progress, verdict.of_torchrl)
        found += conflicts.findings()
        verdict.fix = conflicts.fix or NO_FIX
        subject = replace(subject, fix=verdict.fix)
        verdict.collides = conflicts.fails and conflicts.fix is None
        verdict.alone |= bool(verdict.fix.variables)  # of a worker, and of no env in it
        if not verdict.fix.variables:
            together = _try_in_one_process(pair, subject, behaviour, verdict, found)
        found += _try_to_play_again(subject, verdict)
    begun = Diagnosis(target, tuple(found), _measured(behaviour.results, together.results), None)
    return _advised(begun, verdict, subject, seconds if is_run else None), subject


def _try_in_one_process(
    pair: Sequence[Recipe], subject: Subject, behaviour: TrialOutcome, verdict: Verdict, found: list[Finding]
) -> TrialOutcome:
    subject.say("trying two of it in one process")
    packed = pack_for_trials([verdict.fix.apply(one)[0] for one in pair], "spawn")
    side_by_side = try_side_by_side(replace(subject.trials, recipes=packed), behaviour.results["rows"])
    if not (verdict.collides and side_by_side.disturbed):
        waits = behaviour.results.get("waiting", 0.0) > 0.5
        found.append(findings.about_pair(side_by_side, None if waits else behaviour.results.get("step_median_s")))
    verdict.alone = verdict.alone or side_by_side.disturbed is not None
    verdict.packs = not verdict.alone and side_by_side.unknown is None
    return side_by_side.together


def _try_to_play_again(subject: Subject, verdict: Verdict) -> list[Finding]:
    subject.say("playing it again from its seed and actions")
    counts = (1,) if verdict.alone else (1, 2)
    return findings.about_states(watched(subject.trials, trials.playing_again, counts=counts))


def _advised(begun: Diagnosis, verdict: Verdict, subject: Subject, run_s: float | None) -> Diagnosis:
    """The diagnosis, with the line that is recommended. run_s: how long each is run; None where none is."""
    found, measured = begun.findings, begun.measured
    lines = candidates(verdict, measured)
    ran, outcomes = ([], []) if run_s is None else try_lines(lines, subject, measured.build_s, run_s)
    if outcomes and outcomes[0].results.get("episodes"):
        results = outcomes[0].results
        measured = replace(measured, episode_rows=results["env_steps"] / results["episodes"])
    advice = pick(lines, ran)
    if subject.travels and outcomes and outcomes[-1].stage == STEPPING_MANY:
        ended = outcomes[-1]
        if ended.hung:
            ended.detail = ""  # this stack is the doctor's own, not the env's
        found = (*found, *findings.about_early_end(ended, "blocks"))
        verdict.fragile = True
        advice = pick(candidates(verdict, measured), ())
    return Diagnosis(begun.target, found, measured, advice, tried=tuple(ran))


def try_lines(
    lines: Sequence[Candidate], subject: Subject, build_s: float | None, run_s: float
) -> tuple[list[TriedLine], list[TrialOutcome]]:
    """The lines, each with its env steps a second or its problem, and the outcomes of the trials that were run.

    The first line alone is run where building one env takes long, and where its envs die or hang as they are stepped;
    not so where the trial runs in a fork, which may be the cause.
    build_s: seconds to build one env, if known.  run_s: how long each line is run, after its start.
    """
    if subject.shared:
        why = "not run: its envs would use what they share with this process, see above"
        return [TriedLine(one.advice.line, problem=why) for one in lines], []
    tried: list[TriedLine] = []
    outcomes: list[TrialOutcome] = []
    for one in lines:
        if outcomes and build_s is not None and build_s > _LONG_BUILD_S:
            tried.append(TriedLine(one.advice.line, problem=f"not run: one env takes {in_words(build_s)} to build"))
            continue
        subject.say(f"running {one.advice.line.removeprefix('envs = ')}")
        num_envs = one.advice.num_envs
        # Several start on a core.
        limit_s = min(subject.longest_s, subject.trials.stage_timeout_s * -(-num_envs // usable_cores()))
        many = replace(subject.trials, stage_timeout_s=max(limit_s, 2 * run_s))
        options = dict(one.options)
        outcome = many.run(stepping_many, num_envs=num_envs, options=options, seconds=run_s, fix=subject.fix)
        outcomes.append(outcome)
        steps_per_s = outcome.results.get("steps_per_s")
        problem = None if steps_per_s else findings.first_line(outcome.problem)
        tried.append(TriedLine(one.advice.line, steps_per_s, problem))
        if build_s is None and "start_s" in outcome.results:
            build_s = outcome.results["start_s"] * max(1, one.advice.num_workers) / one.advice.num_envs
        if subject.travels and outcome.stage == STEPPING_MANY:
            break
    return tried, outcomes


def pick(lines: Sequence[Candidate], tried: Sequence[TriedLine]) -> Recommendation | None:
    """The fastest of the lines; the first where none was run to its end, None where there are none."""
    if not lines:
        return None
    speeds = [one.steps_per_s or 0.0 for one in tried] or [0.0]
    best = max(speeds)
    return replace(lines[speeds.index(best)].advice, steps_per_s=best or None)


def _soak(diagnosis: Diagnosis, subject: Subject | None, soak_s: float) -> tuple[Soak | None, list[Finding]]:
    measured, tried = diagnosis.measured, diagnosis.tried
    if subject is not None and subject.shared:
        why = "that would use what it shares with this process"
    elif subject is None or (measured.step_median_s is None and not any(one.steps_per_s for one in tried)):
        why = "it cannot be stepped"
    else:
        return run_soak(subject.trials, soak_s)
    return None, [Finding("note", "soak", f"not soaked: {why}, see above")]


def _name(env: Any) -> str:
    if isinstance(env, str):
        return env
    if is_env(env):
        return type_name(env)
    return getattr(env, "id", None) or (callable_name(env) if callable(env) else type_name(env))


def _source(env: Any, target: str) -> str:
    if isinstance(env, str):
        return json.dumps(env)
    spec = env if isinstance(env, EnvSpec) else spec_of(env)
    if spec is not None:
        return name_of_spec(spec) or ("spec" if spec is env else "env.spec")
    module, _, name = target.rpartition(":")  # the command line writes module:name
    if not module:
        name = callable_name(env).rpartition(".")[2] if inspect.isfunction(env) or inspect.isclass(env) else ""
    return name if name.isidentifier() else "make_env"


def try_contexts(subject: Subject, behaviour: TrialOutcome) -> dict[str, str | None]:
    """The problem that ended a worker, by start method; None where it stepped. Methods that would hang are left out.

    Where the env shares something with this process, no method is tried after the first one that starts a worker.
    """
    tried: dict[str, str | None] = {}
    if behaviour.hung and behaviour.stage in _BEFORE_STEPS:
        return tried
    for context in CONTEXTS:
        subject.say(f"trying a worker by {context}")
        tried[context] = _try_context(subject, context)
        started = subject.travels or context == "fork"
        if (behaviour.hung and tried[context] is not None) or (subject.shared and started):
            break
    return tried


def _try_context(subject: Subject, context: str) -> str | None:
    """The problem that ended a worker started for real; None if it stepped."""
    if not subject.travels and context != "fork":  # a fork inherits it
        return "the recipe cannot be sent to its workers, see above"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            limits = dict.fromkeys(("start_timeout", "step_timeout", "close_timeout"), subject.trials.stage_timeout_s)
            with make_envs(subject.recipe, 1, context=context, **limits) as envs:
                envs.reset(seed=0)
                envs.step(envs.sample_actions())
        except Exception as error:  # a KeyboardInterrupt or SystemExit that the env raises arrives as an EnvError
            return f"{type(error).__name__}: {error}"
    return None


def _measured(alone: Mapping[str, Any], together: Mapping[str, Any]) -> Measurements:
    """The figures among the results of two trials: of one env, and of two in one process."""
    known = {field.name: alone.get(field.name) for field in fields(Measurements)}
    if known["env_bytes"] is not None and (of_second := together.get("env_bytes")) is not None:
        # What the first one took more is of the libraries that each worker loads.
        known["worker_bytes"] += max(0, known["env_bytes"] - of_second)
        known["env_bytes"] = of_second
    return Measurements(**known)
