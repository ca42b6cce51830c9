"""The ``muster`` command. It needs the extra ``doctor``, and the commands that train the extra ``train``."""

from __future__ import annotations

import faulthandler
import json
import logging
import signal
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import muster
from muster.arguments import option, option_of
from muster.command_line.mistakes import REPORTED, SIGNALLED, prepare_streams, report, say_error
from muster.command_line.parser import HELP, HelpShown, Parser, paragraphs
from muster.errors import ConfigError, UsageError, printable_lines
from muster.extras import bound_spinning, imports_for, require
from muster.pool.worker_process import ignore_user_signals
from muster.recipes.named import find_here
from muster.training.stopping import STOPS, StopSignals
from muster.training.values import NamedEnv, near

EXTRAS = {"doctor": "doctor", "bench": "doctor", "top": "doctor", "train": "train", "eval": "train", "plot": "train"}
ABOUT = """Run many reinforcement-learning envs in parallel, and train on them.

See `muster COMMAND --help` for the options of a command, and `muster --version` for the version.

Exit status: 0; 1 after an error, or where the doctor finds what blocks; 2 where the command line makes no sense; 130
after Ctrl-C; 129, 131 and 143 after SIGHUP, SIGQUIT and SIGTERM; and an env that ends the command's own process has its
own."""


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


@dataclass(frozen=True)
class TopOptions:
    """Look at the runs of this user while they run, or at that of process PID: all envs and collectors in workers.

    For each worker its env steps a second, the shares of the time in which it steps, waits, copies, and is ready but
    has no core; and for each run what keeps it. Runs do nothing for it, and may have begun before or begin later.
    Press q to end.

    Example: muster top --once
    """

    pid: int | None = option(None, "look at this process alone, or at the run that it is a worker of", positional=True)
    every: float = option(1.0, "seconds between two looks", least=0.1, most=86400, alias="-n")
    once: bool = option(False, "print one table, and end")
    json: bool = option(False, "print JSON, for programs: an object for each look")
    trace: Path | None = option(None, "write a timeline that ui.perfetto.dev and chrome://tracing show, and end")
    seconds: float = option(5.0, "how long the timeline is", least=0.1, most=86400)


def main() -> None:
    """Entry point of the installed ``muster`` script."""
    prepare_streams()
    bound_spinning()
    ignore_user_signals()  # also in processes that it starts; a run then notes them
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    faulthandler.enable()  # shows the line in which an env, or a library, has crashed
    raise SystemExit(run(sys.argv[1:]))


def run(words: Sequence[str]) -> int:
    """Runs the command that `words` are, and returns its exit status."""
    name = words[0] if words and words[0] in COMMANDS else ""
    command = f"muster {name}".rstrip()
    with StopSignals() as stop:
        try:
            return stop.call(lambda: _run(words, name))
        except HelpShown:
            return 0
        except (*REPORTED, KeyboardInterrupt) as error:
            if isinstance(error, STOPS) and stop.caused(error):
                say_error(f"{command}: stopped by {stop.name}")
                return SIGNALLED + int(stop.number or signal.SIGINT)
            return report(command, error)


def _run(words: Sequence[str], name: str) -> int:
    with warnings.catch_warnings():
        # Gymnasium's, two lines for an older id than its newest; where it has gone, the error says so.
        warnings.filterwarnings("ignore", ".*is out of date", DeprecationWarning)
        if words and words[0] == "--version":
            print(muster.__version__, flush=True)
            return 0
        if not name:
            return overview(words)
        require("this command needs", f"muster-rl[{EXTRAS[name]}]", "rich")  # every command prints by it
        status = COMMANDS[name](words[1:])
        try:
            sys.stdout.flush()  # what cannot be printed is an error, too
        except OSError as error:
            failed = report(f"muster {name}", error)
            return status or failed
        return status


def overview(words: Sequence[str]) -> int:
    """Shows the commands. Raises ConfigError for words that are none of them."""
    if words and words[0] not in HELP:
        raise ConfigError(f"there is no command {words[0]!r}{near(words[0], COMMANDS)}; muster --help lists them")
    print(f"usage: muster COMMAND [OPTIONS]\n\n{paragraphs(ABOUT)}\n\ncommands:")
    for name, command in COMMANDS.items():
        print(f"  {name:8}{command.__doc__}")
    sys.stdout.flush()
    return 0


def train(words: Sequence[str]) -> int:
    """train a policy, or those of agents, and plot the learning curve"""
    needed = ("torch", "tensordict", "safetensors", "tensorboard", "matplotlib")
    with imports_for("this command needs", "muster-rl[train]", *needed):
        from muster.command_line.train_plan import training_order

    stopped = training_order(words).carry_out().stopped
    return 0 if stopped is None else SIGNALLED + stopped


def evaluate(words: Sequence[str]) -> int:
    """play episodes with what a run has trained"""
    with imports_for("this command needs", "muster-rl[train]", "torch", "tensordict", "safetensors"):
        from muster.training import runs
    from muster.training.console import run_console
    from muster.training.film import require_filmable
    from muster.training.run_envs import open_run_envs
    from muster.training.run_policy import load_policy

    options = EvalOptions(**Parser("muster eval", (EvalOptions,)).read(words))
    if options.run is None:
        raise ConfigError("name the folder of a RUN, as muster train has made it")
    if options.trust:
        find_here()
    policy = load_policy(options.run, checkpoint=options.checkpoint, sample=options.sample, trust=options.trust)
    plan, console = policy.plan, run_console()
    played: dict[str, Any] = {"seed": options.seed, "max_steps": options.max_steps}
    with plan.trusting(options.run, options.trust):
        if options.video is not None:
            require("--video needs", "muster-rl[train]", "av")
            require_filmable(options.video)
        with open_run_envs(plan, min(plan.config.num_envs, options.episodes)) as envs:
            runs.evaluate_run(policy, envs, console, episodes=options.episodes, **played)
        if options.video is not None:
            runs.film_run(policy, console, options.video, **played)
    return 0


def plot(words: Sequence[str]) -> int:
    """draw the learning curves of several runs"""
    with imports_for("this command needs", "muster-rl[train]", "torch", "tensordict", "matplotlib"):
        from muster.training.comparison import compare_runs

    options = PlotOptions(**Parser("muster plot", (PlotOptions,)).read(words))
    if not options.runs:
        raise ConfigError("name the folder of a RUN, or several, as muster train has made them")
    for label, count in compare_runs(options.runs, options.output).items():
        print(printable_lines(f"{count} run{'s' * (count > 1)}  {label}"))
    print(printable_lines(f"picture: {options.output}"))
    return 0


def doctor(words: Sequence[str]) -> int:
    """try an env out, or this machine, and say what to write"""
    from muster.command_line.doctoring import diagnose_for
    from muster.doctor.diagnosis import Diagnosis
    from muster.doctor.machine import MachineReport, examine
    from muster.doctor.plain_console import PlainConsole
    from muster.doctor.show import show, show_machine
    from muster.doctor.targets import prints_to_stderr

    console = PlainConsole(highlight=False)
    report: MachineReport | Diagnosis
    find_here()
    provided = Parser("muster doctor", (DoctorOptions,)).read(words)
    options = DoctorOptions(**provided)
    with prints_to_stderr():
        if options.env is not None:
            report = diagnose_for(options)
        elif for_env := [option_of(name) for name in provided if name != "json"]:
            raise ConfigError(f"{', '.join(for_env)} {'need' if for_env[1:] else 'needs'} an ENV, the env to try out")
        else:
            require("this command needs", "muster-rl[doctor]", "psutil")
            report = examine()
    if options.json:
        print(json.dumps(report.to_dict(), indent=2))
    elif isinstance(report, MachineReport):
        show_machine(report, console)
    else:
        show(report, console)
    return int(report.blocks)


def bench(words: Sequence[str]) -> int:
    """measure the ways to run an env"""
    from muster.doctor.measure import measure
    from muster.doctor.plain_console import PlainConsole
    from muster.doctor.show import show_speeds
    from muster.doctor.targets import prints_to_stderr
    from muster.recipes.named import callable_named, env_named

    find_here()
    console = PlainConsole(highlight=False)
    options = BenchOptions(**Parser("muster bench", (BenchOptions,)).read(words))
    if options.env is None:
        raise ConfigError("name an ENV to measure, such as CartPole-v1")
    if options.num_workers is not None and options.num_workers > options.num_envs:
        expected = f"at most {options.num_envs} for {options.num_envs} envs, as a worker needs an env"
        raise ConfigError("num_workers", expected, options.num_workers)
    with prints_to_stderr():
        env, around = env_named(options.env), list(map(callable_named, options.wrapper))
        with console.status("measuring"):
            names = ("num_workers", "env_kwargs", "rounds", "seconds")
            how = {name: getattr(options, name) for name in names}
            measured = measure(env, options.num_envs, wrappers=around, **how)
        if all(one.problem for one in measured):
            raise UsageError(f"{options.env} cannot be stepped: {measured[1].problem}")  # by workers
    if options.json:
        print(json.dumps({one.way: one.problem or one.steps_per_s for one in measured}, indent=2))
    else:
        show_speeds(options.env, options.wrapper, options.num_envs, measured, console)
    return 0


def top(words: Sequence[str]) -> int:
    """look at what runs: who steps, who waits, and for what"""
    from muster.doctor.plain_console import PlainConsole
    from muster.view.top import watch
    from muster.view.trace import write_trace

    options = TopOptions(**Parser("muster top", (TopOptions,)).read(words))
    if options.trace is not None:
        print(printable_lines(write_trace(options.pid, options.trace, options.seconds)))
    else:
        watch(PlainConsole(highlight=False), options.pid, options.every, once=options.once, as_json=options.json)
    return 0


COMMANDS = {"train": train, "eval": evaluate, "plot": plot, "doctor": doctor, "bench": bench, "top": top}
