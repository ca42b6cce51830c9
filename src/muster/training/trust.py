"""Code that only a run folder names is imported on the word of whoever runs the program, never on the folder's."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from muster.errors import UsageError
from muster.recipes.known_envs import is_of_known_library
from muster.training.own_runs import is_own
from muster.training.plan import TrainingPlan, plan_of
from muster.training.run_folder import read_config


def read_plan(path: Path, *, trust: bool = False) -> TrainingPlan:
    """The plan of the run in the folder ``path``, whose envs are to be made.

    trust: lets the folder name code to import. Without it a person at a terminal is asked, and anybody else is refused.
    Raises UsageError where it is refused, and where this version of Muster cannot use the plan.
    """
    plan = plan_of(path)
    if not trust and (code := named_code(path)) and not _agrees(path, code):
        raise UsageError(f"{_warning(path, code)} Pass --trust if you trust whoever made the folder.")
    return plan


def require_trust(path: Path) -> None:
    """Raises UsageError where the run in the folder ``path`` names code to import for its envs."""
    if code := named_code(path):
        raise UsageError(
            f"{_warning(path, code)} Pass trust=True to load_policy if you trust whoever made the folder, or make the "
            "envs yourself: muster.make_vec(...)."
        )


def named_code(path: Path) -> list[str]:
    """What the run in the folder ``path`` would have imported, as it is named there.

    These are files, functions and wrappers, and ids of modules that neither this program has imported nor Muster knows,
    nor this user has named in making the run.
    """
    config: Mapping[str, Any] = read_config(path)
    env, wrappers = str(config.get("env", "")), config.get("wrappers") or ()
    return [env] * _is_code(env, config) + [str(wrapper) for wrapper in wrappers]


def _is_code(env: str, config: Mapping[str, Any]) -> bool:
    module, _, name = env.rpartition(":")
    if env.endswith(".py") or module.endswith(".py"):
        return True
    # A function is called, with arguments from the folder: one of a module that is imported already may do anything.
    is_id = bool(name) and not name.isidentifier()
    known = is_id and (module in sys.modules or is_of_known_library(module) or is_own(config))
    return bool(module) and not known


def _warning(path: Path, code: list[str]) -> str:
    return f"{path} names code of its own: {', '.join(code)}. To make its envs is to run that code."


def _agrees(path: Path, code: list[str]) -> bool:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    sys.stderr.write(f"{_warning(path, code)} Do you trust it? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
