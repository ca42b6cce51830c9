"""Muster: many reinforcement-learning environments in parallel, also those that cannot be pickled, copied or forked.

- `make_vec` makes a vector env: N envs, stepped by worker processes, behind Gymnasium's API. It is a `VectorEnv`, or a
  `MultiAgentVectorEnv`. `lazy` and `get_worker_info` are for what each env has of its own, `EnvState` for going back.
- `diagnose` tries an env out, and says how to run many of it, or what is in the way.
- `Collector` joins a vector env and a policy to an iterator of batches; `MultiCollector` has several processes collect
  them, also those of a `RayCluster` of `Node` hosts. `rebuild_with` is for policies that cannot be copied there.
- `train` trains PPO or MAPPO, and `load_policy` loads what a run has learnt.
- `muster.rollout` has returns and advantages, `muster.algorithms` PPO and MAPPO, `muster.nn` multi-agent networks,
  `muster.interop` vector envs with the constructors of Gymnasium's, Stable-Baselines3's and TorchRL's own.
- Exceptions are in `muster.errors`; each is a `MusterError`.

The vector envs are imported with the package. Parts that need torch, or that few programs use, are imported on first
access.

>>> import muster
>>> with muster.make_vec("CartPole-v1", num_envs=4) as envs:
...     obs, infos = envs.reset(seed=0)
...     obs, rewards, terminated, truncated, infos = envs.step([0, 1, 0, 1])
>>> obs.shape, rewards
((4, 4), array([1., 1., 1., 1.]))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from muster.errors import MusterError
from muster.extras import VERSION
from muster.hosts.env_states import EnvState
from muster.lazy_values import lazy
from muster.vector.make import make_vec
from muster.vector.multi_agent import MultiAgentVectorEnv
from muster.vector.vector_env import VectorEnv
from muster.worker_info import get_worker_info

if TYPE_CHECKING:
    from muster.doctor.diagnosing import diagnose
    from muster.rollout.cluster.nodes import Node, RayCluster
    from muster.rollout.collector import Collector
    from muster.rollout.multi_collector import MultiCollector
    from muster.rollout.replicas.policy_travel import rebuild_with
    from muster.training.run_policy import load_policy
    from muster.training.train import train

__version__ = VERSION

_LATER = {
    "Collector": "rollout.collector",
    "MultiCollector": "rollout.multi_collector",
    "Node": "rollout.cluster.nodes",
    "RayCluster": "rollout.cluster.nodes",
    "diagnose": "doctor.diagnosing",
    "load_policy": "training.run_policy",
    "rebuild_with": "rollout.replicas.policy_travel",
    "train": "training.train",
}
_SUBMODULES = ("algorithms", "interop", "nn", "rollout")
_NEED_TORCH = {*_LATER, "algorithms", "nn", "rollout"} - {"diagnose"}

__all__ = [
    "Collector",
    "EnvState",
    "MultiAgentVectorEnv",
    "MultiCollector",
    "MusterError",
    "Node",
    "RayCluster",
    "VectorEnv",
    "diagnose",
    "get_worker_info",
    "lazy",
    "load_policy",
    "make_vec",
    "rebuild_with",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"muster.{name}")
    if name not in _LATER:
        raise AttributeError(f"module 'muster' has no attribute {name!r}")
    if name == "train":
        importlib.import_module("muster.extras").bound_spinning()
    return getattr(importlib.import_module(f"muster.{_LATER[name]}"), name)


def __dir__() -> list[str]:
    from muster.extras import is_installed

    names = {*globals(), *__all__, *_SUBMODULES}
    # `help(muster)` reads every name in here, and would end with the first that needs a package which is missing.
    return sorted(names if is_installed("torch") and is_installed("tensordict") else names - _NEED_TORCH)
