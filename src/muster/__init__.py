"""Muster: many reinforcement-learning environments in parallel, also those that cannot be pickled, copied or forked.

Names are imported when they are first used, so that a worker loads only what its envs need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muster.doctor.diagnose import diagnose
    from muster.errors import MusterError
    from muster.make import make_vec
    from muster.multi_agent import MultiAgentVectorEnv
    from muster.recipe import get_worker_info, lazy
    from muster.rollout.collector import Collector
    from muster.rollout.multi_collector import MultiCollector
    from muster.rollout.travel import rebuild_with
    from muster.vector import VectorEnv

_HOMES = {
    "Collector": "rollout.collector",
    "MultiCollector": "rollout.multi_collector",
    "MultiAgentVectorEnv": "multi_agent",
    "MusterError": "errors",
    "VectorEnv": "vector",
    "diagnose": "doctor.diagnose",
    "get_worker_info": "recipe",
    "lazy": "recipe",
    "make_vec": "make",
    "rebuild_with": "rollout.travel",
}

__all__ = [
    "Collector",
    "MultiAgentVectorEnv",
    "MultiCollector",
    "MusterError",
    "VectorEnv",
    "diagnose",
    "get_worker_info",
    "lazy",
    "make_vec",
    "rebuild_with",
]


_SUBMODULES = ("algorithms", "errors", "interop", "nn")


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"muster.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'muster' has no attribute {name!r}")
    return getattr(importlib.import_module(f"muster.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, *_SUBMODULES])
