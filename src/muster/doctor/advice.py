"""What the doctor recommends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from muster.backends.resources import usable_cores
from muster.doctor.diagnosis import Measurements, Recommendation
from muster.doctor.forecast import Trace, envs_per_worker, predict_serial, predict_steps_per_s, workers_pay
from muster.existing_env import find_existing_env, is_env

_LONGEST_REPR = 200


@dataclass
class Verdict:
    """What the recommendation depends on. source: how a line of code names the env, its id or its factory.

    alone: only one env may live in a process.  travels: the recipe can be sent.  tried: for each start method what it
    died of, or None.  fragile: it ended early while it was stepped.
    """

    source: str
    env_kwargs: Mapping[str, Any]
    num_envs: int | None
    travels: bool
    tried: Mapping[str, str | None]
    alone: bool = False
    fragile: bool = False


def recommend(verdict: Verdict, measured: Measurements, trace: Trace | None) -> Recommendation | None:
    """The way to run many of the env; None where nothing works."""
    cores = usable_cores()
    context = next((name for name, error in verdict.tried.items() if error is None), None)
    if context is None:
        if verdict.travels:
            return None
        count = verdict.num_envs or 1
        return _recommendation(verdict, "serial", None, count, 0, None, measured)
    if verdict.alone:
        count = verdict.num_envs or cores
        workers = count
    else:
        per_worker = 1 if trace is None else envs_per_worker(trace.row_s)
        count = verdict.num_envs or cores * per_worker
        workers = min(cores, count)
    if trace is None:
        return _recommendation(verdict, "process", context, count, workers, None, measured)
    obs_bytes = measured.obs_bytes or 0
    if not verdict.alone and not workers_pay(trace.row_s, count, workers):
        return _recommendation(verdict, "serial", None, count, 0, predict_serial(trace, obs_bytes), measured)
    steps_per_s = predict_steps_per_s(trace, count, workers, obs_bytes)
    return _recommendation(verdict, "process", context, count, workers, steps_per_s, measured)


def unbuildable(env: Any) -> Recommendation:
    """For an env, or a factory of one, that exists already: the factory to write, and the line that uses it."""
    existing = env if is_env(env) else None
    if existing is None and callable(env):
        found = find_existing_env(env)
        existing = found[1] if found is not None else None
    inner = getattr(existing, "unwrapped", existing)
    kind = type(inner)
    call = f"{kind.__qualname__}(...)" if existing is not None else "MyEnv(...)"
    cores = usable_cores()
    return Recommendation(
        line=f"envs = muster.make_vec(make_env, num_envs={cores})",
        factory=f"def make_env():\n    return {call}\n",
        backend="process",
        context="forkserver",
        num_envs=cores,
        num_workers=cores,
        steps_per_s=None,
        memory_bytes=None,
    )


def _recommendation(
    verdict: Verdict,
    backend: str,
    context: str | None,
    num_envs: int,
    num_workers: int,
    steps_per_s: float | None,
    measured: Measurements,
) -> Recommendation:
    options = [verdict.source, f"num_envs={num_envs}"]
    if backend != "process":
        options.append(f'backend="{backend}"')
    elif verdict.alone:
        options.append("one_env_per_process=True")
    else:
        options.append(f"num_workers={num_workers}")
    if verdict.fragile:
        options += ['on_failure="restart"', "step_timeout=60"]
    if context not in (None, "forkserver"):
        options.append(f'context="{context}"')
    if verdict.env_kwargs:
        options.append(f"env_kwargs={_kwargs(verdict.env_kwargs)}")
    memory = None
    if measured.env_bytes is not None and measured.worker_bytes is not None:
        memory = num_workers * measured.worker_bytes + num_envs * measured.env_bytes
    return Recommendation(
        line=f"envs = muster.make_vec({', '.join(options)})",
        factory=None,
        backend=backend,
        context=context,
        num_envs=num_envs,
        num_workers=num_workers,
        steps_per_s=steps_per_s,
        memory_bytes=memory,
    )


def _kwargs(env_kwargs: Mapping[str, Any]) -> str:
    text = repr(dict(env_kwargs))
    return text if len(text) <= _LONGEST_REPR and "<" not in text else "env_kwargs"
