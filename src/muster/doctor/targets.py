"""What the command line calls an env: an id, or ``module:factory``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
from typing import Any

from muster.errors import RecipeError, UsageError


def resolve_target(target: str) -> tuple[Any, str | None]:
    """What `make_vec` takes for `target`, and the import that names it in code; None for an id.

    ``module:name`` is a factory where the module has a callable of that name, else an id of an env that the module
    registers. Raises ModuleNotFoundError, and RecipeError where it is neither.
    """
    module_name, colon, name = target.partition(":")
    if not colon or not name.isidentifier():
        return target, None
    if importlib.util.find_spec(module_name.partition(".")[0]) is None:
        raise ModuleNotFoundError(
            f"No module named {module_name!r} for {target!r}: it must be in this folder, or installed.",
            name=module_name,
        )
    module = importlib.import_module(module_name)
    found = getattr(module, name, None)
    if found is None:
        callables = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise RecipeError(f"module {module_name} has no {name!r}. It has: {', '.join(callables) or 'no callable'}")
    return found, f"from {module_name} import {name}"


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
