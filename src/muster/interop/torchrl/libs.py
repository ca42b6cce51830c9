"""TorchRL's envs of other libraries, where these have changed since, or are installed in part."""

from __future__ import annotations

import importlib.util
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchrl.envs.libs.meltingpot import MeltingpotEnv, MeltingpotWrapper
from torchrl.envs.libs.pettingzoo import PettingZooEnv as TorchRLsEnv
from torchrl.envs.libs.pettingzoo import PettingZooWrapper

from muster.envs.light_melting_pot import import_without_bots
from muster.envs.pettingzoo import import_env

__all__ = ["MeltingpotEnv", "MeltingpotWrapper", "PettingZooEnv"]

# TorchRL imports Melting Pot when an env is built: from now on without the bots, where TensorFlow is not installed.
import_without_bots()

# Where tasks are looked for, in this order. The MPE of PettingZoo 1.26 and newer is a package of its own.
_FAMILIES = {
    **{f"pettingzoo.{family}": family for family in ("sisl", "butterfly", "classic", "atari", "mpe")},
    "mpe2": "mpe",
}


class _Tasks:
    """``PettingZooEnv.available_envs``, of the class and of its envs."""

    def __get__(self, env: Any, cls: Any) -> list[str]:
        return _tasks()


class PettingZooEnv(TorchRLsEnv):  # type: ignore[misc]  # it has no types
    """TorchRL's `PettingZooEnv`, which finds the tasks of PettingZoo 1.26 and newer, too.

    Arguments are those of TorchRL's class. A task is "multiwalker_v9", or with its family "sisl/multiwalker_v9"; those
    of MPE come from the package mpe2 where that is installed. Raises RuntimeError for a task that is not there.

    >>> from muster.interop.torchrl import PettingZooEnv
    >>> env = PettingZooEnv("simple_spread_v3", parallel=True)
    >>> env.rollout(5)["agent", "observation"].shape
    torch.Size([5, 3, 18])
    >>> env.close()
    """

    available_envs = _Tasks()

    def _build_env(self, task: str, parallel: bool, **kwargs: Any) -> Any:
        self.task_name = task
        module = import_env(_module_of(task))
        made = module.parallel_env(**kwargs) if parallel else module.env(**kwargs)
        return PettingZooWrapper._build_env(self, env=made)


def _module_of(task: str) -> str:
    """The module of a task, ``"multiwalker_v9"`` or ``"sisl/multiwalker_v9"``. Raises RuntimeError, as TorchRL does."""
    wanted, _, name = task.rpartition("/")
    for package, family in _FAMILIES.items():
        if wanted in ("", family, package):
            with suppress(ImportError):  # of packages that are not there, and of pettingzoo.mpe since it has moved
                if importlib.util.find_spec(f"{package}.{name}") is not None:
                    return f"{package}.{name}"
    raise RuntimeError(f"Specified task not in available environments {_tasks()}: got {task!r}")


def _tasks() -> list[str]:
    found = []
    for package, family in _FAMILIES.items():
        with suppress(ImportError):
            spec = importlib.util.find_spec(package)
            folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
            found += [f"{family}/{path.stem}" for folder in folders for path in sorted(folder.glob("*_v*.py"))]
    return list(dict.fromkeys(found))
