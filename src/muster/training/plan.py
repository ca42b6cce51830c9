"""The plan of a run: what it trains on, and with which options; as the run folder's config.json holds it."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from muster.algorithms.ppo_config import PPOConfig
from muster.errors import ConfigError, UsageError
from muster.training.own_runs import seal_of
from muster.training.presets import preset_named
from muster.training.run_folder import read_config

MAKE_VEC_OPTIONS = (  # those that make sense for a run
    *("num_workers", "backend", "context", "caller_steps", "one_env_per_process", "threads_per_worker"),
    *("start_timeout", "step_timeout", "close_timeout", "on_failure", "max_restarts", "memory_check"),
)


@dataclass(frozen=True)
class RunOptions:
    """What a run does besides training. A run that goes on does so, too."""

    # env steps between two evaluations, in envs of their own; the best state is kept; None: no evaluations
    eval_every: int | None = None
    eval_episodes: int = 10  # whole episodes of an evaluation, the same each time, played by the likeliest actions
    checkpoint_every: int | None = None  # env steps between two copies of the checkpoint; None: no copies
    keep: int | None = None  # how many of these copies stay, the newest; None: all


@dataclass(frozen=True)
class TrainingPlan:
    """The env and the options of a run.

    env: as `env_named` takes it.  preset: the name of the row that the options started from, and whose wrappers are
    around the env.  env_kwargs, wrappers: the user's own, the latter as `callable_named` takes them.
    options: further ones of `make_vec`, as far as they have not its own values.  run: what the run does besides.
    """

    env: str
    config: PPOConfig
    preset: str
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    wrappers: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    run: RunOptions = RunOptions()

    @property
    def name(self) -> str:
        """The env's name without a file's folders."""
        return os.path.basename(self.env) if ".py:" in self.env else self.env

    @property
    def title(self) -> str:
        return f"{self.name}, PPO, seed {self.config.seed}"

    def differences(self) -> dict[str, Any]:
        """What is not as the preset has it, by name; seed and total_steps are each run's own."""
        preset = PPOConfig(**preset_named(self.preset).config)
        names = [one.name for one in dataclasses.fields(PPOConfig) if one.name not in ("seed", "total_steps")]
        values = {name: getattr(self.config, name) for name in names}
        changed = {name: value for name, value in values.items() if value != getattr(preset, name)}
        around = {"env_kwargs": dict(self.env_kwargs), "wrapper": ",".join(self.wrappers)}
        return {**{name: value for name, value in around.items() if value}, **changed}

    def to_dict(self) -> dict[str, Any]:
        """The plan as config.json holds it."""
        run = {"env": self.env, "algorithm": "PPO", "preset": self.preset, **dataclasses.asdict(self.config)}
        made = {"env_kwargs": dict(self.env_kwargs), "wrappers": list(self.wrappers), "make_vec": dict(self.options)}
        about = {**_versions(), "seal": seal_of({**run, **made})}
        return {**run, **made, "run": dataclasses.asdict(self.run), "with": about}


def plan_of(path: Path) -> TrainingPlan:
    """The plan of the run in the folder ``path``; what it names is not imported.

    Raises UsageError where this version of Muster cannot use it.
    """
    config = read_config(path)
    names = [field.name for field in dataclasses.fields(PPOConfig)]
    missing = [name for name in ("env", "preset", "env_kwargs", "wrappers", "make_vec", *names) if name not in config]
    if config.get("algorithm") != "PPO" or missing:
        raise UsageError(
            f"{path / 'config.json'} is not that of a PPO run of this version of Muster"
            + (f": it lacks {', '.join(missing)}." if missing else ".")
        )
    kinds = {"env": str, "preset": str, "env_kwargs": dict, "wrappers": list, "make_vec": dict}
    unfit = [name for name, kind in kinds.items() if not isinstance(config[name], kind)]
    if not unfit and not all(isinstance(wrapper, str) for wrapper in config["wrappers"]):
        unfit = ["wrappers"]
    if not unfit:
        unfit = [f"make_vec.{name}" for name in config["make_vec"] if name not in MAKE_VEC_OPTIONS]
    kept = config.get("run", {})  # not there in older runs
    if not unfit:
        unfit = ["run"] if not isinstance(kept, dict) else [f"run.{name}" for name in _unfit_for_run(kept)]
    if unfit:
        raise UsageError(
            f"{path / 'config.json'} is not as muster train writes it: look at {', '.join(map(repr, unfit))}."
        )
    try:
        options = PPOConfig(**{name: config[name] for name in names})
    except ConfigError as error:
        raise UsageError(f"{path / 'config.json'}: {error}") from None
    made = (config["env_kwargs"], tuple(config["wrappers"]), config["make_vec"])
    run = RunOptions(**{one.name: kept[one.name] for one in dataclasses.fields(RunOptions) if one.name in kept})
    return TrainingPlan(config["env"], options, config["preset"], *made, run)


def _unfit_for_run(kept: Mapping[str, Any]) -> list[str]:
    """The names of values that no field of `RunOptions` can have."""
    fields = {one.name: one for one in dataclasses.fields(RunOptions)}
    return [
        name
        for name, value in kept.items()
        if name in fields and type(value) is not int and (value is not None or fields[name].default is not None)
    ]


def _versions() -> dict[str, Any]:
    versions: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("muster-rl", "torch", "numpy", "gymnasium"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return {**versions, "cores": os.cpu_count()}
