"""The command line's names of envs: an id, or ``module:factory``."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from muster.doctor.diagnosis import Finding, PolicyVerdict
from muster.doctor.trials import importing, judging
from muster.errors import ConfigError, RecipeError
from muster.introspection import find_in
from muster.workers.guarded import STARTING, TrialOutcome, run_guarded


def about_import(target: str, timeout_s: float) -> Finding | None:
    """The finding that the module of ``module:factory`` cannot be imported; None where it can, and for an id.

    The import is tried in a process of its own: the module may crash, hang or call ``os._exit``. Call this before
    `resolve_target`, which imports the module into the command line's own process.
    """
    module_name = _module_of(target)
    if module_name is None:
        return None
    outcome = run_guarded(importing, None, stage_timeout_s=timeout_s, options={"module_name": module_name})
    return None if outcome.stage is None else _about_early_end("import", outcome)


def judge_target(target: str, timeout_s: float) -> tuple[Finding, PolicyVerdict | None]:
    """The finding and verdict of `judge_policy` on the policy that ``--policy module:make_policy`` names.

    The policy is built in a process of its own. Where it cannot be built, the finding says so and there is no verdict.
    Raises RecipeError where the module has nothing of that name, ModuleNotFoundError.
    """
    module_name, name = _module_of(target), target.rpartition(":")[2]
    if module_name is None:
        raise RecipeError(f"--policy must be module:make_policy, a function that builds the policy, got {target!r}")
    names = {"module_name": module_name, "name": name}
    outcome = run_guarded(judging, None, stage_timeout_s=timeout_s, options=names)
    if mistake := outcome.results.get("mistake"):
        raise RecipeError(mistake)
    if outcome.stage is not None:
        return _about_early_end("policy", outcome), None
    verdict = outcome.results["verdict"]
    ways_out = tuple(verdict.pop("ways_out"))
    return Finding(**outcome.results["finding"]), PolicyVerdict(**verdict, ways_out=ways_out)


def policy_factory_of(target: str) -> Callable[[], Any]:
    """The factory that ``--policy-factory module:make_policy`` names; it imports the module where it is called.

    Raises RecipeError where the target names no function, ModuleNotFoundError.
    """
    module_name = _module_of(target)
    if module_name is None:
        raise RecipeError(f"--policy-factory must be module:make_policy, a function without arguments, got {target!r}")
    return functools.partial(_call_named, module_name, target.rpartition(":")[2])


def _call_named(module_name: str, name: str) -> Any:
    return find_in(importlib.import_module(module_name), name)()


def _about_early_end(topic: str, outcome: TrialOutcome) -> Finding:
    what = "the trial" if outcome.stage == STARTING else "it"
    return Finding("blocks", topic, f"{outcome.stage}, {what} {outcome.how}", outcome.detail or None)


@contextmanager
def prints_to_stderr() -> Iterator[None]:
    """Sends to stderr what this process and its children print in the meantime: stdout is for the report."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def resolve_target(target: str) -> tuple[Any, str | None]:
    """The argument of `make_vec` for `target`, and the import that names it in code; None for an id.

    In ``module:name`` the name is that of a callable in the module, else the id of an env that the module registers.
    Raises ModuleNotFoundError, and RecipeError where it is neither.
    """
    module_name, name = _module_of(target), target.rpartition(":")[2]
    if module_name is None:
        return target, None
    return find_in(importlib.import_module(module_name), name), f"from {module_name} import {name}"


def _module_of(target: str) -> str | None:
    """The module in ``module:factory``, None for an id. Raises ModuleNotFoundError."""
    module_name, colon, name = target.partition(":")
    if not colon or not name.isidentifier():
        return None
    if importlib.util.find_spec(module_name.partition(".")[0]) is None:
        raise ModuleNotFoundError(
            f"No module named {module_name!r} for {target!r}: it must be in this folder, or installed.",
            name=module_name,
        )
    return module_name


def parse_kwargs(text: str | None) -> dict[str, Any]:
    """The keyword arguments that ``--kwargs`` holds as JSON. Raises ConfigError."""
    if text is None:
        return {}
    try:
        kwargs = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--kwargs must be a JSON object such as '{{\"size\": 5}}', got {text!r}: {error}") from None
    if not isinstance(kwargs, dict):
        raise ConfigError(f"--kwargs must be a JSON object such as '{{\"size\": 5}}', got {text!r}")
    return kwargs
