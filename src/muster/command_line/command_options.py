"""The options of the commands, but for `muster train`: those are in training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from muster.arguments import option
from muster.training.values import NamedEnv


@dataclass(frozen=True)
class EvalOptions:
    """Play whole episodes with the policy that a run has trained, and show how good it is.

    Statistics of observations stay as they are in the checkpoint.

    Example: muster eval runs/CartPole-v1-seed0-20260101-120000
    """

    run: Path | None = option(None, "the folder of a run", positional=True)
    episodes: int = option(20, "whole episodes to play", least=1)
    checkpoint: str | None = option(None, "another one than the newest: the steps of a copy, best, or a path")
    seed: int = option(0, "of the envs; same seed, same episodes", least=0)
    sample: bool = option(False, "draw actions as in training, instead of the likeliest")
    max_steps: int | None = option(
        None, "stop after so many steps of all envs: some episodes never end; without it 50_000 per episode", least=1
    )
    video: Path | None = option(None, "also film one more episode, the first of that seed: a path that ends in .mp4")
    trust: bool = option(False, "use the code and the paths that the run's folder names for its envs, and its wandb")


@dataclass(frozen=True)
class PlotOptions:
    """Draw the learning curves of several runs into one picture.

    Runs that differ in nothing but their seed are one curve: the interquartile mean over the seeds, and its 95 %
    bootstrap interval, for each number of steps that all of them have made.

    Example: muster plot runs/CartPole-v1-seed*
    """

    runs: tuple[Path, ...] = option((), "folders of runs, or of folders of runs", positional=True)
    output: Path = option(Path("comparison.png"), "the picture")


@dataclass(frozen=True)
class DoctorOptions(NamedEnv):
    """Try an env out, and say how to run many of it, or what is in the way; without ENV examine the machine.

    Every trial runs in a process of its own. The exit status is 1 when something blocks parallel use.

    Example: muster doctor my_game:make_env --env-kwargs '{"level": 3}'
    """

    num_envs: int | None = option(None, "envs to recommend a line for; without it what suits the machine", least=1)
    timeout: float = option(60.0, "seconds after which a trial is taken to hang", least=0.1)
    seconds: float = option(1.0, "how long each line that could be recommended is run", least=0.01)
    policy: str | None = option(None, "module:factory of a policy: can it go to collector processes?")
    soak: float | None = option(None, "also look for leaks, for so many seconds", least=1)
    json: bool = option(False, "print JSON, for programs")


@dataclass(frozen=True)
class BenchOptions(NamedEnv):
    """Measure how many steps a second each way to run an env makes on this machine.

    Actions are random. `muster doctor` says whether an env can be run in parallel at all.

    Example: muster bench CartPole-v1 --num-envs 32
    """

    num_envs: int = option(8, "envs stepped at once", least=1)
    num_workers: int | None = option(None, "processes that share the envs; without it as in make_vec", least=1)
    rounds: int = option(5, "rounds; in each one every way has its turn", least=1)
    seconds: float = option(1.0, "how long a way is measured in a round", least=0.01)
    json: bool = option(False, "print JSON, for programs")
