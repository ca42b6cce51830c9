"""Adapters that turn envs of other APIs, in the worker, into envs of the API that the stepping loop knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def resolve_foreign_id(env_id: str) -> Callable[..., Any]:
    """The factory of an id ``pettingzoo/<family>/<name>`` or ``meltingpot/<substrate>``.

    No env is built and no env's module is imported. Raises RecipeError, ModuleNotFoundError.
    """
    from muster.envs.melting_pot import check_substrate
    from muster.envs.pettingzoo import check_env

    kind, _, name = env_id.partition("/")
    return check_substrate(name) if kind == "meltingpot" else check_env(name)
