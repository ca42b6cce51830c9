"""The plan of a run: what it trains on, and with which options; as the run folder's config.json holds it."""

from __future__ import annotations

import dataclasses
import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from muster.algorithms.ppo_config import PPOConfig
from muster.errors import UsageError
from muster.training.run_folder import read_config


@dataclass(frozen=True)
class TrainingPlan:
    """The env and the options of a run.

    env: an id.  preset: the name of the row that the options started from, and whose wrappers the env has.
    num_workers: processes for the envs, None for one per core.
    """

    env: str
    config: PPOConfig
    preset: str
    num_workers: int | None = None

    @property
    def title(self) -> str:
        return f"{self.env}, PPO, seed {self.config.seed}"

    def to_dict(self) -> dict[str, Any]:
        """The plan as config.json holds it."""
        config = dataclasses.asdict(self.config)
        run = {"env": self.env, "algorithm": "PPO", "preset": self.preset}
        return {**run, **config, "num_workers": self.num_workers, "with": _versions()}


def plan_of(path: Path) -> TrainingPlan:
    """The plan of the run in the folder ``path``; what it names is not imported.

    Raises UsageError where this version of Muster cannot use it.
    """
    config = read_config(path)
    names = [field.name for field in dataclasses.fields(PPOConfig)]
    missing = [name for name in ("env", "preset", "num_workers", *names) if name not in config]
    if config.get("algorithm") != "PPO" or missing:
        raise UsageError(
            f"{path / 'config.json'} is not that of a PPO run of this version of Muster"
            + (f": it lacks {', '.join(missing)}." if missing else ".")
        )
    options = PPOConfig(**{name: config[name] for name in names})
    return TrainingPlan(config["env"], options, config["preset"], config["num_workers"])


def _versions() -> dict[str, Any]:
    versions: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("muster-rl", "torch", "numpy", "gymnasium"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return {**versions, "cores": os.cpu_count()}
