"""Findings of the doctor, made from the outcomes of its trials."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from muster.doctor.diagnosis import Finding, PolicyVerdict, Severity, seconds, size
from muster.hosts.trial import STARTING, TrialOutcome
from muster.vector.side_by_side import SideBySide

# An env that ends its trial early in one of these stages cannot be stepped; one that gets past them can.
FATAL = ("unpacking the recipe", "building it", "resetting it", "stepping it")
_MANY_THREADS = 2
_LONG_STEP_S = _MUCH_LONGER_S = 100e-6
_UNEVEN = 1.5
_SHOWN = 4


def about_early_end(
    outcome: TrialOutcome, severity: Severity, topic: str = "life", subject: str = "the env"
) -> list[Finding]:
    """One finding where the trial ended early; none where it came to its end. subject: what it was the trial of."""
    if outcome.stage is None:
        return []
    if outcome.stage == STARTING:  # no code of the subject has run
        subject = "a trial"
    return [Finding(severity, topic, f"{outcome.stage}, {subject} {outcome.how}", outcome.detail or None)]


def about_behaviour(outcome: TrialOutcome) -> list[Finding]:
    """Findings of the trial `behaviour`."""
    found = about_early_end(outcome, "blocks" if outcome.stage in FATAL else "warns")
    results = outcome.results
    if "api" in results:
        found += _about_api(results["api"], results.get("refused"), results.get("warned", ()))
    if results.get("one_per_process"):
        found.append(Finding("note", "isolation", 'its class declares metadata["one_per_process"] = True'))
    if results.get("changes_action"):
        found.append(Finding("warns", "actions", "its step changes the action array it is given"))
    median_s, mean_s = results.get("step_median_s", 0.0), results.get("step_mean_s", 0.0)
    if mean_s > max(_UNEVEN * median_s, median_s + _MUCH_LONGER_S):
        text = (
            f"some steps take far longer than most: the median is {seconds(median_s)}, the mean {seconds(mean_s)}, the "
            f"longest {seconds(results['step_longest_s'])}. In a vector env all wait for the slowest of a step; look "
            "for what else such a step does, such as a rebuild. envs.send and envs.recv wait for the first that are "
            "done, and muster train --num-collectors waits once a rollout"
        )
        found.append(Finding("warns", "steps", text))
    if results.get("threads_started", 0) >= _MANY_THREADS:
        text = f"it starts {results['threads_started']} threads; with a worker per core they take each other's time"
        found.append(Finding("warns", "threads", text))
    return found


def about_replay(behaviour: TrialOutcome, replay: TrialOutcome) -> list[Finding]:
    """Findings about seeds: whether they reproduce a trajectory, in one process and in two."""
    found = about_early_end(replay, "warns")
    first = behaviour.results
    if "digest" not in replay.results or "digest_other" not in first:
        return found
    if first["digest"] != first["digest_again"]:
        text = "the same seed gives another trajectory when the same env is reset to it again"
        found.append(Finding("warns", "seeds", text))
    elif first["digest"] != replay.results["digest"]:
        text = "the same seed gives another trajectory in another process: it draws from a generator that is not seeded"
        found.append(Finding("warns", "seeds", f"{text}, or depends on the order of a set"))
    elif first["digest"] == first["digest_other"]:
        found.append(Finding("note", "seeds", "another seed gives the same trajectory: the seed has no effect"))
    else:
        text = "the same seed gives the same trajectory, across processes too; another seed another one"
        found.append(Finding("good", "seeds", text))
    return found


def about_states(trial: TrialOutcome) -> list[Finding]:
    """The finding of the trial `playing_again`."""
    if trial.stage is not None:
        return [Finding("note", "states", f"it has no states to go back to: {first_line(trial.problem)}")]
    played: Sequence[tuple[str, str]] = trial.results["played"]
    for where, problem in played:
        if problem:
            return [Finding("note", "states", f"it has no states to go back to, {where}: {problem}")]
    text = "the same seed and actions lead to the same state, in a fresh env and a used one"
    return [
        Finding(
            "good",
            "states",
            f"{text}, {' and '.join(where for where, _ in played)}",
            "muster.make_vec(..., replayable=True)",
        )
    ]


def about_pair(pair: SideBySide, step_s: float | None = None) -> Finding:
    """The finding whether two envs may live in one process, and what that saves. step_s: seconds of a step, if known.

    Each step of an env in a process of its own wakes that process, which takes some microseconds.
    """
    if pair.unknown is not None:
        return Finding("note", "isolation", pair.unknown)
    if pair.disturbed is not None:
        return Finding("warns", "isolation", pair.disturbed, "muster.make_vec(..., one_env_per_process=True)")
    text = "several may live in one process: two side by side are what each is alone"
    if step_s is not None and step_s < _LONG_STEP_S:
        text += f". num_workers= packs them, which saves a wake-up for each step of {seconds(step_s)}"
    elif step_s is not None:
        text += f". Packing them would save little: a wake-up is nothing against a step of {seconds(step_s)}"
    return Finding("good", "isolation", text)


def about_sharing(shared: str) -> Finding:
    """The finding that says how little was tried, since trials would use objects of the calling process."""
    text = (
        f"it shares {shared} with this process, and every trial would use that. So only one worker was tried, for a "
        "reset and a step: what these have put there is there now. To have all tried, diagnose a factory that makes "
        "such objects itself"
    )
    return Finding("warns", "sharing", text)


def judge_policy(policy: Any) -> tuple[Finding, PolicyVerdict]:
    """The decision of `MultiCollector` about `policy`, made before any process starts, as a finding and a verdict.

    Imports PyTorch.
    """
    from muster.rollout.replicas.policy_travel import PolicyFacts

    facts = PolicyFacts.of(policy)
    weights, obstacle = facts.weights(), facts.obstacle
    weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    if obstacle is None:
        text = f"it can be copied to collector processes, once; {len(weights)} weights ({size(weight_bytes)}) follow"
        return Finding("good", "policy", text), PolicyVerdict(True, weight_bytes)
    ways = obstacle.ways_out()
    verdict = PolicyVerdict(False, weight_bytes, obstacle.path, obstacle.type_name, obstacle.reason, ways)
    if obstacle.marked:
        text = f"it stays in the calling process, as it asks: {obstacle}. There it acts for the envs of all workers"
        return Finding("note", "policy", text), verdict
    text = f"it cannot be copied to collector processes, because of {obstacle}. MultiCollector lets it act here for all"
    return Finding("warns", "policy", text, "\n".join(f"# {way}" for way in ways)), verdict


def about_start_methods(tried: Mapping[str, str | None], known: bool) -> list[Finding]:
    """Findings about start methods. tried: each one's problem, or None.  known: another finding explains it."""
    works = [name for name, problem in tried.items() if problem is None]
    found = []
    if works:
        found.append(Finding("good", "start methods", f"{', '.join(works)} tried, and work"))
    # Most often all fail with the same words, and only figures (pids, times) differ.
    alike: dict[str, tuple[str, list[str]]] = {}
    for name, problem in tried.items():
        if problem is not None:
            alike.setdefault(re.sub(r"[\d.]+", "", first_line(problem)), (problem, []))[1].append(name)
    severity: Severity = "note" if works else "blocks"
    for problem, names in alike.values():
        subject = f"{', '.join(names)} {'do' if len(names) > 1 else 'does'} not work"
        found.append(Finding(severity, "start methods", f"{subject}: {first_line(problem) if known else problem}"))
    return found


def first_line(problem: str) -> str:
    """The first line of a problem, where its details are of no use."""
    return problem.split("\n", 1)[0]


def _about_api(api: str, refused: Sequence[str] | None, warned: Sequence[str]) -> list[Finding]:
    if api == "unknown":
        return [Finding("blocks", "API", "it speaks none of the APIs: Gymnasium, PettingZoo, dm_env")]
    if refused is None:
        return []
    if refused:
        return [Finding("warns", "API", f"{api}'s own checker refuses it: {'; '.join(refused[:_SHOWN])}")]
    found = [Finding("good", "API", f"it follows its API ({api})")]
    if warned:
        found.append(Finding("note", "API", f"{api}'s own checker remarks: {'; '.join(warned[:_SHOWN])}"))
    return found
