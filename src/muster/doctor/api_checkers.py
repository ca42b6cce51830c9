"""The complaints of Gymnasium's, PettingZoo's and TorchRL's own checkers about an env."""

from __future__ import annotations

import io
import re
import warnings
from contextlib import redirect_stdout
from typing import Any

import gymnasium
from gymnasium.utils.env_checker import check_env

from muster.envs.dm_env import is_dm_env
from muster.envs.pettingzoo import is_pettingzoo, is_turn_based

_CYCLES = 50


def name_api(env: Any) -> str:
    """The API that `env` speaks, by name."""
    if (name := getattr(type(env), "api_name", None)) is not None:
        return str(name)
    if isinstance(env, gymnasium.Env):
        return "Gymnasium"
    if is_pettingzoo(env):
        return "PettingZoo AEC" if is_turn_based(env) else "PettingZoo parallel"
    return "dm_env" if is_dm_env(env) else "unknown"


def check_api(env: Any) -> tuple[list[str], list[str]]:
    """The complaints and the warnings of the API's own checker, one line each. The checker resets and steps the env."""
    api = name_api(env)
    refused: list[str] = []
    with warnings.catch_warnings(record=True) as caught, redirect_stdout(io.StringIO()):
        warnings.simplefilter("always")
        try:
            if api == "Gymnasium":
                check_env(env.unwrapped, skip_render_check=True)
            elif api.startswith("PettingZoo"):
                _check_pettingzoo(env, api)
            elif api == "TorchRL":
                from torchrl.envs.utils import check_env_specs

                check_env_specs(env.env)  # as `from_torchrl` has made it
        except Exception as error:
            refused.append(_first_line(f"{type(error).__name__}: {error}"))
    said = [str(one.message) for one in caught if not issubclass(one.category, (DeprecationWarning, ImportWarning))]
    return refused, list(dict.fromkeys(_first_line(one) for one in said))


def _check_pettingzoo(env: Any, api: str) -> None:
    try:
        from pettingzoo.test import api_test, parallel_api_test
    except ImportError:
        return  # an env that speaks its API need not come with its package
    (api_test if api == "PettingZoo AEC" else parallel_api_test)(env, num_cycles=_CYCLES)


def _first_line(text: str) -> str:
    plain = re.sub(r"\x1b\[\d+m", "", text).removeprefix("WARN: ").strip()
    return plain.splitlines()[0] if plain else "(no message)"
