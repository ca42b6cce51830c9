"""`muster.diagnose`: tries an env out, and returns how to run many of it, or what is in the way."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gymnasium.envs.registration import EnvSpec

from muster.arguments import explains_keywords, whole
from muster.arguments import seconds as number_of_seconds
from muster.doctor import trials
from muster.doctor.advice import Verdict, candidates, name_in_code, name_of_spec, spec_of, unbuildable
from muster.doctor.diagnosis import Diagnosis, Finding, Measurements, Soak
from muster.doctor.findings import (
    FATAL,
    SHARING,
    about_behaviour,
    about_early_end,
    about_pair,
    about_replay,
    about_sharing,
    about_start_methods,
    about_untried,
)
from muster.doctor.lines import is_fatal, pick, try_lines
from muster.doctor.soak import run_soak
from muster.doctor.trials import make_envs
from muster.envs import resolve_foreign_id
from muster.envs.adapt import from_torchrl, with_torchrl
from muster.errors import CannotTravel, RecipeError, WrongType
from muster.extras import require
from muster.hosts.trial import PackedRecipes, Problem, TrialOutcome, run_guarded
from muster.introspection import callable_name, type_name
from muster.pickling import find_culprits, fork_hazards
from muster.recipes.existing_env import is_env
from muster.recipes.recipe import Recipe, make_recipes, shared_by
from muster.vector.side_by_side import try_side_by_side

CONTEXTS = ("forkserver", "spawn", "fork")
# The stages of every worker and every trial, in order; first those before an env's first step.
_BEFORE_STEPS = ("unpacking the recipe", "building it", "resetting it")
_ON_THE_WAY = (*_BEFORE_STEPS, "stepping it", "closing it")
_SHOWN_CULPRITS = 3


@explains_keywords()
def diagnose(
    env: Any,
    *,
    policy: Any = None,
    policy_factory: Any = None,
    num_envs: int | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[Callable[[Any], Any]] = (),
    timeout: float = 60.0,
    seconds: float = 1.0,
    soak_s: float | None = None,
    name: str | None = None,
) -> Diagnosis:
    """The obstacles to running an env in parallel, and the fastest of the `make_vec` lines that suit it.

    env, env_kwargs, wrappers: as for `make_vec`, and factories of TorchRL's `EnvBase`s, whose line is one of
    `muster.interop.torchrl.ParallelEnv`; an env that exists already is a finding, not an error. Every trial
    runs in a process of its own: a crash, a hang or an exit in the env is a finding, too. With what the env shares with
    this process (queues, locks, pipes, memory) only one worker is tried, for one step, and a finding says so.
    num_envs: how many the recommendation is for, None for as many as suit the machine.  timeout: seconds for each stage
    of a trial, and for each step.  seconds: how long each line that could be recommended is run, after its start.
    soak_s: for so many seconds the env is also stepped and reset by random allowed actions, in one process. Findings
    then say whether memory, file handles, threads, child processes, or the time of a step or a reset grow, and how
    fast; `Diagnosis.soak` has the figures. What grows in the first third alone is no leak: soak for three times as long
    as the env takes to fill its caches.
    name: the env's name in messages.
    policy: examined as well: could `MultiCollector` copy it to its processes? It is not called. Needs PyTorch.
    policy_factory: as for `MultiCollector`. Builds a policy twice in another process: are their weights alike in names,
        shapes and dtypes, and do they give the same for the env's observations with the same weights? With `policy`,
        they are compared with it and get its weights, and it is called once, here. Needs PyTorch.

    Raises what `make_vec` raises for an id that does not exist, and for arguments that make no sense. Raises
    ImportError where a policy is to be examined without PyTorch, WrongType for a factory that cannot be called.
    """
    examined = [name for name, given in (("policy", policy), ("policy_factory", policy_factory)) if given is not None]
    if examined:
        require(f"diagnose({examined[0]}=...) needs", "muster-rl[torch]", "torch", "tensordict")
    if policy_factory is not None and not callable(policy_factory):
        got = type_name(policy_factory)
        raise WrongType(f"policy_factory must be a function that builds the policy, got an object of type {got}")
    if num_envs is not None:
        num_envs = whole("num_envs", num_envs, 1)
    if soak_s is not None:
        soak_s = number_of_seconds("soak_s", soak_s)
    if callable(env) and not isinstance(env, EnvSpec) and not is_env(env):
        wrappers = with_torchrl(wrappers)
    diagnosis = _diagnose_env(env, num_envs, env_kwargs or {}, wrappers, timeout, seconds, name or _name(env))
    if soak_s is not None:
        soak, verdicts = _soak(diagnosis, env, env_kwargs or {}, wrappers, soak_s, timeout)
        diagnosis = replace(diagnosis, findings=(*diagnosis.findings, *verdicts), soak=soak)
    if policy is not None:
        from muster.doctor.policy import judge_policy

        finding, verdict = judge_policy(policy)
        diagnosis = replace(diagnosis, findings=(*diagnosis.findings, finding), policy=verdict)
    if policy_factory is not None:
        from muster.doctor.policy_factory import judge_factory, packed_recipe

        # An env that could not be stepped would end another trial in the same way, or hang in it.
        can_step = diagnosis.measured.step_median_s is not None
        recipe = packed_recipe(env, env_kwargs or {}, wrappers) if can_step else None
        findings = judge_factory(policy_factory, policy, recipe, timeout)
        diagnosis = replace(diagnosis, findings=(*diagnosis.findings, *findings))
    return diagnosis


def _diagnose_env(
    env: Any,
    num_envs: int | None,
    env_kwargs: Mapping[str, Any],
    wrappers: Sequence[Callable[[Any], Any]],
    timeout: float,
    seconds: float,
    target: str,
) -> Diagnosis:
    findings: list[Finding] = []
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        try:
            pair = make_recipes(env, 2, env_kwargs, wrappers, resolve_foreign_id=resolve_foreign_id)
        except RecipeError as error:
            advice = unbuildable(env, _source(env, target), env_kwargs)
            return Diagnosis(target, (Finding("blocks", "recipe", str(error)),), Measurements(), advice)
    recipe = pair[0]
    if is_env(env):
        findings.append(_about_instance(env))
    packed = _pack(recipe, findings)
    # What must not be inherited is not tried at all.
    shared = "" if packed is None and fork_hazards(recipe.parts()) else shared_by([recipe], by_fork=packed is None)

    def run(trial: Callable[..., None], hash_seed: int, **options: Any) -> TrialOutcome:
        return run_guarded(trial, packed, stage_timeout_s=timeout, options=options, hash_seed=hash_seed)

    behaviour = run(trials.behaviour, hash_seed=1) if packed is not None and not shared else TrialOutcome()
    tried = try_contexts(recipe, timeout, packed is not None, behaviour, once=bool(shared))
    if shared:
        findings.append(about_sharing(shared))
    findings += about_behaviour(behaviour)
    findings += about_start_methods(tried, known=behaviour.stage in FATAL)
    around = [name_in_code(one) for one in wrappers if one is not from_torchrl]
    verdict = Verdict(_source(env, target), env_kwargs, num_envs, packed is not None, tried, wrappers=around)
    if packed is None or shared:
        return _run_lines(target, findings, verdict, Measurements(), recipe, timeout, seconds, shared)
    verdict.fragile = behaviour.stage in ("resetting it", "stepping it")
    verdict.alone = bool(behaviour.results.get("one_per_process"))
    verdict.of_torchrl = behaviour.results.get("api") == "TorchRL"
    if behaviour.hung and behaviour.stage in _ON_THE_WAY:
        findings.append(about_untried(behaviour))
    elif "rows" in behaviour.results:
        rows = behaviour.results["rows"]
        replayed = run(trials.replay, hash_seed=2, rows=rows)
        side_by_side = try_side_by_side(PackedRecipes.of(pair, "spawn"), timeout, rows)
        findings += [
            *about_replay(behaviour, replayed),
            about_pair(side_by_side, behaviour.results.get("step_median_s")),
        ]
        verdict.alone = verdict.alone or side_by_side.disturbed is not None
        verdict.packs = not verdict.alone and side_by_side.unknown is None
        measured = _measured(behaviour, side_by_side.together)
        return _run_lines(target, findings, verdict, measured, packed, timeout, seconds)
    measured = _measured(behaviour, TrialOutcome())
    return Diagnosis(target, tuple(findings), measured, pick(candidates(verdict, measured), ()))


def _run_lines(
    target: str,
    findings: list[Finding],
    verdict: Verdict,
    measured: Measurements,
    recipe: PackedRecipes | Recipe,
    timeout_s: float,
    run_s: float,
    shared: str = "",
) -> Diagnosis:
    """Runs the lines that could be recommended, and returns the diagnosis. recipe, shared: as for `try_lines`."""
    lines = candidates(verdict, measured)
    tried, outcomes = try_lines(lines, recipe, measured.build_s, timeout_s, run_s, shared)
    if outcomes and outcomes[0].results.get("episodes"):
        results = outcomes[0].results
        measured = replace(measured, episode_rows=results["env_steps"] / results["episodes"])
    if isinstance(recipe, PackedRecipes) and outcomes and is_fatal(outcomes[-1]):
        ended = outcomes[-1]
        if ended.hung:
            ended.detail = ""  # this stack is the doctor's own, not the env's
        findings += about_early_end(ended, "blocks")
        verdict.fragile = True
        return Diagnosis(target, tuple(findings), measured, pick(candidates(verdict, measured), ()), tried=tuple(tried))
    return Diagnosis(target, tuple(findings), measured, pick(lines, tried), tried=tuple(tried))


def _soak(
    diagnosis: Diagnosis,
    env: Any,
    env_kwargs: Mapping[str, Any],
    wrappers: Sequence[Callable[[Any], Any]],
    soak_s: float,
    timeout_s: float,
) -> tuple[Soak | None, list[Finding]]:
    """Soaks an env that the `diagnosis` has found to work; returns the soak and its verdicts."""
    if any(one.topic == SHARING for one in diagnosis.findings):
        return None, [Finding("note", "soak", "not soaked: that would use what it shares with this process, see above")]
    if diagnosis.measured.step_median_s is None and not any(one.steps_per_s for one in diagnosis.tried):
        return None, [Finding("note", "soak", "not soaked: it cannot be stepped, see above")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recipe = make_recipes(env, 1, env_kwargs, wrappers, resolve_foreign_id=resolve_foreign_id)[0]
    packed = _pack(recipe, [])
    if packed is None and (hazards := fork_hazards(recipe.parts())):
        text = f"not soaked: its process would inherit {hazards[0].path}, see above"
        return None, [Finding("note", "soak", text)]
    return run_soak([recipe] if packed is None else packed, soak_s, timeout_s)


def _name(env: Any) -> str:
    if isinstance(env, str):
        return env
    if is_env(env):
        return type_name(env)
    return getattr(env, "id", None) or (callable_name(env) if callable(env) else type_name(env))


def _source(env: Any, target: str) -> str:
    """The name of `env` in a line of code; "make_env" where it has none of its own."""
    if isinstance(env, str):
        return json.dumps(env)
    spec = env if isinstance(env, EnvSpec) else spec_of(env)
    if spec is not None:
        return name_of_spec(spec) or ("spec" if spec is env else "env.spec")
    module, _, name = target.rpartition(":")  # the command line writes module:name
    if not module:
        name = callable_name(env).rpartition(".")[2] if inspect.isfunction(env) or inspect.isclass(env) else ""
    return name if name.isidentifier() else "make_env"


def _about_instance(env: Any) -> Finding:
    culprits = [culprit for culprit in find_culprits(env, "env") if culprit.severity == "blocks"]
    text = f"this is an env that exists already; new ones are made from its spec {env.spec.id!r}."
    if culprits:
        listed = "; ".join(f"{c.path} ({c.type}): {c.reason}" for c in culprits[:_SHOWN_CULPRITS])
        text += f" It could not have been sent to a worker itself: {listed}"
    return Finding("note", "recipe", text)


def _pack(recipe: Recipe, findings: list[Finding]) -> PackedRecipes | None:
    """The recipe for another process, None if it cannot travel."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            packed = PackedRecipes.of([recipe], "spawn")
        except CannotTravel as error:
            findings.append(Finding("blocks", "travel", str(error)))
            return None
    findings += [Finding("warns", "travel", str(one.message)) for one in said if one.category is UserWarning]
    if not said:
        findings.append(Finding("good", "travel", "the recipe and its arguments can be sent to workers"))
    return packed


def try_contexts(
    recipe: Recipe, timeout_s: float, travels: bool, behaviour: TrialOutcome, *, once: bool = False
) -> dict[str, Problem | None]:
    """The problem that ended a worker, by start method; None where it stepped. Methods that would hang are left out.

    once: no method is tried after the first one that starts a worker.
    """
    tried: dict[str, Problem | None] = {}
    if behaviour.hung and behaviour.stage in _BEFORE_STEPS:
        return tried
    for context in CONTEXTS:
        tried[context] = _try_context(recipe, context, timeout_s, travels)
        if (behaviour.hung and tried[context] is not None) or (once and (travels or context == "fork")):
            break
    return tried


def _try_context(recipe: Recipe, context: str, timeout_s: float, travels: bool) -> Problem | None:
    """The problem that ended a worker started for real; None if it stepped.

    A recipe that does not travel can still be inherited, though forked workers must not use every object in it.
    """
    if not travels:
        if context != "fork":
            return Problem("the recipe cannot be sent to its workers, see above")
        if hazards := fork_hazards(recipe.parts()):
            found = f"{hazards[0].path}: {hazards[0].reason}"
            return Problem(f"workers would inherit what they must not use: {found}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            limits = dict.fromkeys(("start_timeout", "step_timeout", "close_timeout"), timeout_s)
            with make_envs(recipe, 1, context=context, **limits) as envs:
                envs.reset(seed=0)
                envs.step(envs.action_space.sample())
        except Exception as error:  # a KeyboardInterrupt or SystemExit that the env raises arrives as an EnvError
            return Problem(f"{type(error).__name__}: {error}")
    return None


def _measured(behaviour: TrialOutcome, pair: TrialOutcome) -> Measurements:
    first_bytes = behaviour.results.get("env_bytes")
    env_bytes = pair.results.get("env_bytes", first_bytes)
    base_bytes = behaviour.results.get("worker_bytes")
    libraries = None if first_bytes is None else max(0, first_bytes - env_bytes)
    return Measurements(
        build_s=behaviour.results.get("build_s"),
        step_median_s=behaviour.results.get("step_median_s"),
        step_p99_s=behaviour.results.get("step_p99_s"),
        reset_median_s=behaviour.results.get("reset_median_s"),
        reset_p99_s=behaviour.results.get("reset_p99_s"),
        obs_bytes=behaviour.results.get("obs_bytes"),
        env_bytes=env_bytes,
        worker_bytes=None if base_bytes is None or libraries is None else base_bytes + libraries,
        threads_started=behaviour.results.get("threads"),
    )
