"""What the command line calls an env: an id, or ``module:factory``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from muster.doctor.diagnosis import Finding
from muster.doctor.guarded import STARTING, run_guarded
from muster.errors import RecipeError, UsageError


def about_import(target: str, timeout_s: float) -> Finding | None:
    """What kept the module of ``module:factory`` from being imported in a process of its own; None if nothing did.

    To be asked before `resolve_target`, whose caller an ``os._exit``, a crash or a hang of the module would end.
    """
    module_name = _module_of(target)
    if module_name is None:
        return None
    outcome = run_guarded("importing", b"", stage_timeout_s=timeout_s, options={"module": module_name})
    if outcome.stage is None:
        return None
    if outcome.stage == STARTING:
        return Finding("blocks", "import", f"{outcome.stage}, the trial {outcome.how}", outcome.detail or None)
    text = f"{outcome.stage} {module_name}, it {outcome.how}"
    return Finding("blocks", "import", text, outcome.detail or None)


@contextmanager
def prints_to_stderr() -> Iterator[None]:
    """What this process and those that it starts print goes to stderr meanwhile: stdout is for the report."""
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
    """What `make_vec` takes for `target`, and the import that names it in code; None for an id.

    ``module:name`` is a factory where the module has a callable of that name, else an id of an env that the module
    registers. Raises ModuleNotFoundError, and RecipeError where it is neither.
    """
    module_name, name = _module_of(target), target.rpartition(":")[2]
    if module_name is None:
        return target, None
    module = importlib.import_module(module_name)
    found = getattr(module, name, None)
    if found is None:
        callables = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise RecipeError(f"module {module_name} has no {name!r}. It has: {', '.join(callables) or 'no callable'}")
    return found, f"from {module_name} import {name}"


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


def resolve_policy(target: str | None) -> Any:
    """The policy that ``--policy module:make_policy`` names, built; None for None.

    A name of something that is no function or class is taken for the policy itself. Raises RecipeError, and UsageError
    where building it fails.
    """
    if target is None:
        return None
    found, how_to_import = resolve_target(target)
    if how_to_import is None:
        raise RecipeError(f"--policy must be module:make_policy, a function that builds the policy, got {target!r}")
    if not (inspect.isroutine(found) or inspect.isclass(found)):
        return found
    try:
        return found()
    except Exception as error:
        raise UsageError(f"{target} does not build a policy: it raised {type(error).__name__}: {error}") from error


def parse_kwargs(text: str | None) -> dict[str, Any]:
    """The keyword arguments that ``--kwargs`` gives as JSON. Raises ValueError."""
    if text is None:
        return {}
    try:
        kwargs = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--kwargs must be a JSON object such as '{{\"size\": 5}}', got {text!r}: {error}") from None
    if not isinstance(kwargs, dict):
        raise ValueError(f"--kwargs must be a JSON object such as '{{\"size\": 5}}', got {text!r}")
    return kwargs
