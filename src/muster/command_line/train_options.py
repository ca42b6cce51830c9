"""The options of `muster train`: those of the env are written here, the algorithm's are the fields of `PPOConfig`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from tyro.conf import arg

from muster.algorithms import PPOConfig
from muster.command_line.command_options import Env, EnvKwargs, Flag, Wrappers
from muster.training.plan import RunOptions

Timeout = Annotated[float | None, arg(metavar="NUMBER|None")]


class UncheckedPPO(PPOConfig):
    """`PPOConfig` while its values are read one by one: whether they go together is seen once all are known."""

    def __post_init__(self) -> None:
        """Checks nothing."""

    def check_each(self) -> None:
        """Raises ConfigError for a value that is wrong whatever the others are."""
        self._check_each()


@dataclass(frozen=True)
class EnvOptions:
    """The arguments of `make_vec` that make sense for a training run."""

    env_kwargs: EnvKwargs = field(default_factory=dict)  # keyword arguments of the env, such as '{"size": 5}'
    # module:callable or file.py:callable, env -> env; the first one innermost, and the preset's own outermost
    wrapper: Wrappers = ()
    # processes that share the envs; auto: as many as a trial finds safe
    num_workers: Annotated[
        int | Literal["auto"] | None, arg(metavar="INT|auto", help_behavior_hint="(default: as in make_vec)")
    ] = None
    backend: Literal["process", "thread", "serial"] = "process"  # what steps the envs
    context: Literal["auto", "forkserver", "spawn", "fork"] = "auto"  # how workers start
    caller_steps: bool = False  # the training process steps some of the envs itself
    one_env_per_process: bool = False  # for libraries that can be loaded only once per process
    threads_per_worker: int = 1  # threads of OpenMP, BLAS and torch in each worker
    start_timeout: float = 300.0  # seconds for a worker to build its envs
    step_timeout: Timeout = None  # seconds for one step of an env
    close_timeout: Timeout = 60.0  # seconds for an env to close
    on_failure: Literal["raise", "restart"] = "raise"  # of an env or a worker; restart: its episode ends truncated
    max_restarts: int = 10  # how often one worker may fail within a minute
    memory_check: Literal["error", "warn", "off"] = "error"  # where the envs will not fit into memory


@dataclass(frozen=True)
class TrainOptions:
    """Train a policy with PPO and plot its learning curve.

    What is left out has the value of a preset, which is chosen by the env's kind; then those of --config count, then
    the options. Ctrl-C ends the training early and keeps what was reached; --resume goes on from there.

    Example: muster train CartPole-v1 --seed 1
    """

    # An env id (CartPole-v1, module:Id-v0), module:factory, or file.py:factory.
    env: Env = None
    # folder for config, metrics, checkpoint and plot; with --seeds for a folder of each run
    run_dir: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="(default: a new one in runs/)")] = None
    # train so many runs, one after the other, from --seed on, and compare them
    seeds: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: one run)")] = None
    # go on with the run in this folder, up to its --total-steps
    resume: Annotated[Path | None, arg(metavar="RUN", help_behavior_hint="")] = None
    # TOML with options of the run, the env and PPO, by the names below
    config: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    trust: Flag = False  # with --resume: import the code that the run's folder names for its envs
    # What the run does besides training. A run that goes on does so, too.
    run: RunOptions = field(default_factory=RunOptions)
    # What is around the env, and what steps it. In Python these are arguments of muster.make_vec.
    make: Annotated[EnvOptions, arg(name="env")] = EnvOptions()
    # Names as in CleanRL. In Python these are fields of muster.algorithms.PPOConfig.
    ppo: Annotated[UncheckedPPO, arg(name="PPO")] = field(default_factory=UncheckedPPO)

    def changed(self, values: Mapping[str, Any]) -> Self:
        """These options, with some values by the names of their fields."""
        left, parts = dict(values), {}
        for part in ("run", "make", "ppo"):
            names = {one.name for one in dataclasses.fields(getattr(self, part))}
            parts[part] = replace(getattr(self, part), **{name: left.pop(name) for name in names & left.keys()})
        return replace(self, **left, **parts)
