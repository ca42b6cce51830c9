"""Recommendations of the doctor: the lines that could run many of an env."""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from muster.doctor.diagnosis import Measurements, Recommendation
from muster.doctor.fixes import NO_FIX, Fix
from muster.doctor.measure import code_of_options
from muster.envs.adapt import is_torchrl
from muster.pickling import is_plain
from muster.pool.resources import memory_left, usable_cores
from muster.recipes import sources
from muster.recipes.existing_env import find_existing_env, is_env

_LONGEST_REPR = 200
_IMPORT = "from muster.interop.torchrl import ParallelEnv\n"
_SHARE_OF_MEMORY = 0.5
# The caller wakes its workers and they wake it: a round of both takes 0.06 ms. This much work should lie between two.
_ROUND_WORK_S = 500e-6
_MOST_ENVS_PER_WORKER = 32
# An env that waits so much of a step that is so long shares a worker with many, at most so many for each core.
_WAITS, _LONG_STEP_S, _MOST_WAITING = 0.7, 1e-3, 64


# A backend, its number of workers, and the options of `make_vec`.
_Way = tuple[str, int, dict[str, Any]]


@dataclass
class Verdict:
    """The facts that a recommendation depends on. source: the env's id or factory, as a line of code names it;
    wrappers: likewise.

    alone: only one env may live in a process.  packs: several may, as a trial has shown.  travels: the recipe can be
    sent.  tried: by start method the problem that ended its worker, or None.  fragile: the env ended its trial early
    while it was reset or stepped.  of_torchrl: its factory returns an `EnvBase`.
    collides: two do not run in two processes.  fix: of that, and of what they share.
    """

    source: str
    env_kwargs: Mapping[str, Any]
    num_envs: int | None
    travels: bool
    tried: Mapping[str, str | None]
    alone: bool = False
    packs: bool = False
    fragile: bool = False
    of_torchrl: bool = False
    collides: bool = False
    fix: Fix = NO_FIX
    wrappers: Sequence[str] = ()


@dataclass(frozen=True)
class Candidate:
    """A line that could be recommended. options: those of its `make_vec` call, without num_envs and env_kwargs."""

    advice: Recommendation
    options: Mapping[str, Any]


def candidates(verdict: Verdict, measured: Measurements) -> list[Candidate]:
    """The ways to run many of the env, the safest first; empty where nothing works."""
    cores = usable_cores()
    context = next((name for name, problem in verdict.tried.items() if problem is None), None)
    if context is None and verdict.travels:
        return []
    per_worker = _envs_per_worker(measured.step_mean_s) if verdict.packs else 1
    count = verdict.num_envs or min(cores * per_worker, _most_envs(cores, measured))
    workers = min(cores, count) if verdict.packs else count
    ways: list[_Way] = []
    if context is not None and not (verdict.collides and count > 1):
        options: dict[str, Any] = {"num_workers": workers} if verdict.packs else {}
        options |= {"one_env_per_process": True} if verdict.alone else {}
        if verdict.fragile and not verdict.of_torchrl:
            options |= {"on_failure": "restart", "step_timeout": 60}
        ways.append(("process", workers, options))
    if not (verdict.alone or verdict.fragile or verdict.of_torchrl):  # envs that share a process are lost together
        if verdict.travels and workers > 1 and not verdict.collides:
            packed = {"num_workers": min(cores, count) - 1} if verdict.packs else {}
            ways.append(("process", workers - 1, {**packed, "caller_steps": True}))
        if verdict.packs or not verdict.travels:
            ways.append(("serial", 0, {"backend": "serial"}))
        if not verdict.travels:
            ways.append(("thread", min(cores, count), {"backend": "thread", "num_workers": min(cores, count)}))
    found = [_candidate(verdict, measured, count, context, way) for way in ways]
    waiting, shares = measured.waiting or 0.0, not (verdict.alone or verdict.of_torchrl or verdict.collides)
    if context is not None and shares and waiting > _WAITS and (measured.step_mean_s or 0.0) > _LONG_STEP_S:
        most = min(_MOST_WAITING, 1 << int(1 / max(1e-3, 1 - waiting)).bit_length() - 1)
        many = verdict.num_envs or min(cores * most, _most_envs(cores, measured))
        way = "process", min(cores, many), {"concurrent": True}
        found.append(_candidate(verdict, measured, many, context, way))
    return found


def _envs_per_worker(step_s: float | None) -> int:
    """A power of two that makes the work between two rounds outweigh what a round costs."""
    count = 1
    while step_s is not None and count * step_s < _ROUND_WORK_S and count < _MOST_ENVS_PER_WORKER:
        count *= 2
    return count


def _most_envs(num_workers: int, measured: Measurements) -> int:
    """The number of envs that fit into half of the free memory, at least 1; the other half is for the training."""
    room = int(_SHARE_OF_MEMORY * memory_left()[0]) - num_workers * (measured.worker_bytes or 0)
    return max(1, room // max(1, measured.env_bytes or 0))


def unbuildable(env: Any, source: str, env_kwargs: Mapping[str, Any]) -> Recommendation:
    """The line to write for an env that exists already, a factory that returns one, or one that lacks arguments.

    source: the env or factory as a line of code names it.
    """
    cores = usable_cores()
    existing = env if is_env(env) else None
    if existing is None and callable(env):
        found = find_existing_env(env)
        existing = found[1] if found is not None else None
    spec = spec_of(existing)
    if is_torchrl(existing):
        line = f"envs = ParallelEnv({cores}, make_env)"
        factory: str | None = f"{_IMPORT}\n\ndef make_env():\n    return {sources.constructor_of(existing)}\n"
    elif spec is not None and (name := name_of_spec(spec)) is not None:
        line, factory = f"envs = muster.make_vec({name}, num_envs={cores})", None
    elif existing is None and (missing := _missing_arguments(env, env_kwargs)):
        provided = [f"{json.dumps(name)}: {value!r}" for name, value in env_kwargs.items()]
        listed = ", ".join([*provided, *(f"{json.dumps(name)}: ..." for name in missing)])
        line, factory = f"envs = muster.make_vec({source}, num_envs={cores}, env_kwargs={{{listed}}})", None
    else:
        call = sources.constructor_of(existing) if existing is not None else "MyEnv(...)"
        line = f"envs = muster.make_vec(make_env, num_envs={cores})"
        factory = f"def make_env():\n    return {call}\n"
    return Recommendation(line, factory, "process", "forkserver", num_envs=cores, num_workers=cores)


def spec_of(existing: Any) -> EnvSpec | None:
    """The spec that an env could be rebuilt from."""
    spec, lost = sources.spec_of(existing)
    return spec if lost is None else None


def name_in_code(function: Any) -> str:
    """The name of a wrapper in a line of code; "wrapper" where it has none of its own."""
    name = str(getattr(function, "__name__", ""))
    return name if name.isidentifier() else "wrapper"


def name_of_spec(spec: EnvSpec) -> str | None:
    """The spec's id, as code; None where that id is registered with another spec by now."""
    registered = gym.registry.get(spec.id)
    try:
        return json.dumps(spec.id) if registered is not None and _as_made(registered) == _as_made(spec) else None
    except Exception:  # kwargs need not be comparable
        return None


def _as_made(spec: EnvSpec) -> dict[str, Any]:
    """The fields of a spec that decide how envs are made, without those that `gymnasium.make` adds by itself."""
    fields = {key: getattr(spec, key) for key in ("entry_point", "max_episode_steps", "additional_wrappers")}
    return {**fields, "kwargs": {key: value for key, value in spec.kwargs.items() if key != "render_mode" or value}}


def _missing_arguments(factory: Any, env_kwargs: Mapping[str, Any]) -> list[str]:
    try:
        parameters = inspect.signature(factory, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):
        return []
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [one.name for one in parameters if one.kind in by_name and one.default is one.empty]
    return [name for name in needed if name not in env_kwargs]


def _candidate(verdict: Verdict, measured: Measurements, num_envs: int, context: str | None, way: _Way) -> Candidate:
    backend, num_workers, options = way
    if backend != "process":
        context = None
    elif context != "forkserver":
        options = {**options, "context": context}
    code = [verdict.source, f"num_envs={num_envs}", *code_of_options(options)]
    if kwargs := _kwargs(verdict):
        code.append(f"env_kwargs={kwargs}")
    if backend == "process":
        code += verdict.fix.options()
    if verdict.wrappers:
        code.append(f"wrappers=[{', '.join(verdict.wrappers)}]")
    factory, line = None, f"envs = muster.make_vec({', '.join(code)})"
    if verdict.of_torchrl:
        factory, line = _IMPORT, f"envs = {_parallel_env(verdict, num_envs, options)}"
    memory = None
    if measured.env_bytes is not None and measured.worker_bytes is not None:
        processes = num_workers if backend == "process" else 0
        memory = processes * measured.worker_bytes + num_envs * measured.env_bytes
    caller_steps = "caller_steps" in options
    advice = Recommendation(
        line, factory, backend, context, num_envs, num_workers, memory_bytes=memory, caller_steps=caller_steps
    )
    return Candidate(advice, options)


def _parallel_env(verdict: Verdict, num_envs: int, options: Mapping[str, Any]) -> str:
    code = [str(num_envs), verdict.source]
    if kwargs := _kwargs(verdict):
        code.append(f"create_env_kwargs={kwargs}")
    names = {"num_workers": "num_processes", "context": "mp_start_method"}
    code += code_of_options({names[key]: value for key, value in options.items() if key in names})
    return f"ParallelEnv({', '.join(code)})"


def _kwargs(verdict: Verdict) -> str:
    """The arguments as code to paste, those of the fix included; "" where there are none.

    "env_kwargs", their likely name, stands for those that no literal makes again.
    """
    fixed = verdict.fix.arguments
    left = {name: value for name, value in verdict.env_kwargs.items() if name not in fixed}
    items = [f"{name!r}: {value!r}" for name, value in left.items()]
    if not _is_literal(left):
        if not fixed:
            return "env_kwargs"
        items = ["**env_kwargs"]
    items += [f"{name!r}: {code}" for name, code in fixed.items()]
    return f"{{{', '.join(items)}}}" if items else ""


def _is_literal(env_kwargs: Mapping[str, Any]) -> bool:
    if not all(map(is_plain, env_kwargs.values())) or len(text := repr(env_kwargs)) > _LONGEST_REPR:
        return False
    with contextlib.suppress(ValueError, SyntaxError):  # the repr of an array is no literal
        return bool(ast.literal_eval(text) == env_kwargs)
    return False
