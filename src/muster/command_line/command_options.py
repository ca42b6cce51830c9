"""The options of `muster eval`, `muster doctor` and `muster bench`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import arg

Flag = Annotated[tyro.conf.FlagCreatePairsOff[bool], arg(help_behavior_hint="")]
Env = Annotated[tyro.conf.Positional[str | None], arg(metavar="ENV", help_behavior_hint="")]
EnvKwargs = Annotated[Mapping[str, Any], arg(aliases=("--kwargs",), help_behavior_hint="")]
Wrappers = tyro.conf.UseAppendAction[tuple[str, ...]]


@dataclass(frozen=True)
class EvalOptions:
    """Play whole episodes with the policy that a run has trained, and tell how good it is.

    Statistics of observations stay as they are in the checkpoint.

    Example: muster eval runs/CartPole-v1-seed0-20260101-120000
    """

    # The folder of a run.
    run: Annotated[tyro.conf.Positional[Path | None], arg(metavar="RUN", help_behavior_hint="")] = None
    episodes: int = 20  # whole episodes to play
    # another one than the newest: the steps of a copy, best, or a path
    checkpoint: Annotated[str | None, arg(metavar="NAME|PATH", help_behavior_hint="")] = None
    seed: int = 0  # of the envs; same seed, same episodes
    sample: Flag = False  # draw actions as in training, instead of the likeliest
    # stop after so many steps of all envs: some episodes never end
    max_steps: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: 50_000 per episode)")] = None
    # also film one more episode, the first of that seed: a path that ends in .mp4
    video: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    trust: Flag = False  # import the code that the run's folder names for its envs


@dataclass(frozen=True)
class PlotOptions:
    """Draw the learning curves of several runs into one picture.

    Runs that differ in nothing but their seed are one curve: the interquartile mean over the seeds, and its 95 %
    bootstrap interval, for each number of steps that all of them have made.

    Example: muster plot runs/CartPole-v1-seed*
    """

    # Folders of runs, or of folders of runs.
    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], arg(metavar="RUN ...", help_behavior_hint="")] = ()
    output: Path = Path("comparison.png")  # the picture


@dataclass(frozen=True)
class DoctorOptions:
    """Try an env out, and say how to run many of it, or what is in the way; without ENV examine the machine.

    Every trial runs in a process of its own. The exit status is 1 when something blocks parallel use.

    Example: muster doctor my_game:make_env --env-kwargs '{"level": 3}'
    """

    # An env id (CartPole-v1, module:Id-v0), module:factory, or file.py:factory. Left out: this machine.
    env: Env = None
    env_kwargs: EnvKwargs = field(default_factory=dict)  # keyword arguments of the env, such as '{"size": 5}'
    wrapper: Wrappers = ()  # module:callable or file.py:callable, env -> env; the first one innermost
    # envs to recommend a line for
    num_envs: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: what suits the machine)")] = None
    timeout: float = 60.0  # seconds after which a trial is taken to hang
    seconds: float = 1.0  # how long each line that could be recommended is run
    # module:factory of a policy: can it go to collector processes?
    policy: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None
    # module:factory of a policy: does it build the same one everywhere?
    policy_factory: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None
    soak: Annotated[float | None, arg(metavar="SECONDS", help_behavior_hint="")] = None  # also look for leaks so long
    json: Flag = False  # print JSON, for programs


@dataclass(frozen=True)
class BenchOptions:
    """Measure how many steps a second each way to run an env makes on this machine.

    Actions are random. `muster doctor` says whether an env can be run in parallel at all.

    Example: muster bench CartPole-v1 --num-envs 32
    """

    # An env id (CartPole-v1, module:Id-v0), module:factory, or file.py:factory.
    env: Env = None
    env_kwargs: EnvKwargs = field(default_factory=dict)  # keyword arguments of the env, such as '{"size": 5}'
    wrapper: Wrappers = ()  # module:callable or file.py:callable, env -> env; the first one innermost
    num_envs: int = 8  # envs stepped at once
    # processes that share the envs
    num_workers: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: as in make_vec)")] = None
    rounds: int = 5  # rounds, in each of which every way has its turn
    seconds: float = 1.0  # how long a way is measured in a round
    json: Flag = False  # print JSON, for programs
