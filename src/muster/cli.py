"""The ``muster`` command. It needs the extra ``doctor``, and the commands that train the extra ``train``."""

from __future__ import annotations

import faulthandler
import json
import logging
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import muster
from muster.arguments import option_of
from muster.command_line.command_options import BenchOptions, DoctorOptions, EvalOptions, PlotOptions
from muster.command_line.mistakes import REPORTED, SIGNALLED, prepare_streams, report, say_error
from muster.command_line.parser import HELP, HelpShown, Parser, paragraphs
from muster.errors import ConfigError, UsageError, printable_lines
from muster.extras import bound_spinning, imports_for, require
from muster.pool.worker_process import ignore_user_signals
from muster.recipes.named import find_here
from muster.training.stopping import STOPS, StopSignals
from muster.training.values import near

EXTRAS = {"doctor": "doctor", "bench": "doctor", "train": "train", "eval": "train", "plot": "train"}  # by command
ABOUT = """Run many reinforcement-learning envs in parallel, and train on them.

See `muster COMMAND --help` for the options of a command, and `muster --version` for the version.

Exit status: 0; 1 after an error, or where the doctor finds what blocks; 2 where the command line makes no sense; 130
after Ctrl-C; 129, 131 and 143 after SIGHUP, SIGQUIT and SIGTERM; and an env that ends the command's own process has its
own."""


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


COMMANDS = {"train": train, "eval": evaluate, "plot": plot, "doctor": doctor, "bench": bench}
