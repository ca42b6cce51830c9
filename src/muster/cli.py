"""The ``muster`` command. It needs the extra ``doctor``, and the commands that train the extra ``train``."""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import muster
from muster.command_line.streams import prepare_streams, say_error
from muster.errors import UsageError
from muster.extras import imports_for, require
from muster.training.stopping import StopSignals

EXTRAS = {"doctor": "doctor", "bench": "doctor", "train": "train", "eval": "train", "plot": "train"}  # by command
ABOUT = """Run many reinforcement-learning envs in parallel, and train on them.

See `muster COMMAND --help` for the options of a command, and `muster --version` for the version.

Exit status: 0; 1 after an error, or where the doctor finds what blocks; 2 where the command line makes no sense; 130
after Ctrl-C; 143 after SIGTERM; and an env that ends the command's own process has its own."""


def main() -> None:
    """Entry point of the installed ``muster`` script."""
    raise SystemExit(run(sys.argv[1:]))


def run(words: Sequence[str]) -> int:
    """Runs the command that `words` are, and returns its exit status."""
    prepare_streams()
    name = words[0] if words and words[0] in COMMANDS else ""
    command = f"muster {name}".rstrip()
    with StopSignals() as stop:
        try:
            return stop.call(lambda: _run(words, name, command))
        except KeyboardInterrupt as error:
            stop.caused(error)
            say_error(f"{command}: stopped by {stop.name}")
            return 128 + int(stop.number or signal.SIGINT)


def _run(words: Sequence[str], name: str, command: str) -> int:
    from muster.command_line.mistakes import Ended, reported

    try:
        with reported(command), warnings.catch_warnings():
            # Gymnasium's, two lines for an older id than its newest; where it has gone, the error says so.
            warnings.filterwarnings("ignore", ".*is out of date", DeprecationWarning)
            if words and words[0] == "--version":
                print(muster.__version__, flush=True)
                return 0
            with imports_for("this command needs", f"muster-rl[{EXTRAS.get(name, 'doctor')}]", "tyro", "rich"):
                import rich  # noqa: F401  # every command prints by it
                import tyro  # noqa: F401  # and reads its options by this
            # Every command can name modules of the folder that it is called in, as with ``python -m``.
            if os.getcwd() not in sys.path:
                sys.path.insert(0, os.getcwd())
            status = COMMANDS[name](words[1:]) if name else overview(words)
            sys.stdout.flush()  # what cannot be printed is an error, too
            return status
    except Ended as ended:
        return ended.status


def overview(words: Sequence[str]) -> int:
    """Shows the commands. Raises Mistake for words that are none of them."""
    import tyro

    from muster.command_line.mistakes import Mistake
    from muster.command_line.parser import HELP, HelpPage, near

    if words and words[0] not in HELP:
        raise Mistake(f"there is no command {words[0]!r}{near(words[0], COMMANDS)}; muster --help lists them")
    with HelpPage():
        tyro.extras.subcommand_cli_from_dict(dict(COMMANDS), prog="muster", args=["--help"], description=ABOUT)
    return 0


def train(words: Sequence[str]) -> int:
    """train a policy with PPO, and plot its learning curve"""
    from rich.console import Console

    needed = ("torch", "tensordict", "tensorboard", "matplotlib")  # the last two not until a rollout has been made
    with imports_for("this command needs", "muster-rl[train]", *needed):
        from muster.training import runs
        from muster.training.seeds import train_seeds
    from muster.command_line.mistakes import SIGNALLED, reported
    from muster.command_line.parser import names_of
    from muster.command_line.sudden_end import sudden_end_said
    from muster.command_line.train_options import TrainOptions
    from muster.command_line.train_plan import training_order
    from muster.training.opening import start_run_envs

    with reported("muster train", names_of(TrainOptions())):
        order, console = training_order(words), Console(highlight=False)
        plan, where = order.plan, order.run
        with sudden_end_said("muster train", plan.env, plan.options):
            if order.seeds is not None:
                stopped = train_seeds(plan, order.seeds, console, run_dir=where)
            else:
                with start_run_envs(plan, console) as envs:
                    resume, rate = order.resume, order.learning_rate
                    stopped = runs.train(plan, envs, console, run_dir=where, resume=resume, learning_rate=rate)
    return 0 if stopped is None else SIGNALLED + stopped


def evaluate(words: Sequence[str]) -> int:
    """play episodes with what a run has trained"""
    from rich.console import Console

    with imports_for("this command needs", "muster-rl[train]", "torch", "tensordict"):
        from muster.training import runs
    from muster.command_line.command_options import EvalOptions
    from muster.command_line.mistakes import SIGNALLED, Mistake, reported
    from muster.command_line.parser import check_least, names_of, read_options
    from muster.command_line.sudden_end import sudden_end_said
    from muster.training.film import require_filmable
    from muster.training.opening import start_run_envs
    from muster.training.trust import read_plan

    with reported("muster eval", names_of(EvalOptions())):
        options = read_options(EvalOptions(), words, "muster eval")
        if options.run is None:
            raise Mistake("name the folder of a RUN, as muster train has made it")
        check_least(options, episodes=1, seed=0, max_steps=1)
        plan, console = read_plan(options.run, trust=options.trust), Console(highlight=False)
        if options.video is not None:
            require("--video needs", "muster-rl[train]", "av")
            require_filmable(options.video)
        played: dict[str, Any] = {
            name: getattr(options, name) for name in ("checkpoint", "seed", "sample", "max_steps")
        }
        with sudden_end_said("muster eval", plan.env, plan.options):
            with start_run_envs(plan, console, min(plan.config.num_envs, options.episodes)) as envs:
                stopped = runs.evaluate_run(options.run, plan, envs, console, episodes=options.episodes, **played)
            if options.video is not None and stopped is None:
                rendering = {"render_mode": "rgb_array"}
                with start_run_envs(plan, console, 1, env_kwargs=rendering, autoreset_mode="disabled") as envs:
                    stopped = runs.film_run(options.run, envs, console, options.video, **played)
    return 0 if stopped is None else SIGNALLED + stopped


def plot(words: Sequence[str]) -> int:
    """draw the learning curves of several runs"""
    with imports_for("this command needs", "muster-rl[train]", "torch", "tensordict", "matplotlib"):
        from muster.training.comparison import compare_runs
    from muster.command_line.command_options import PlotOptions
    from muster.command_line.mistakes import Mistake
    from muster.command_line.parser import read_options

    options = read_options(PlotOptions(), words, "muster plot")
    if not options.runs:
        raise Mistake("name the folder of a RUN, or several, as muster train has made them")
    for label, count in compare_runs(options.runs, options.output).items():
        print(f"{count} run{'s' * (count > 1)}  {label}")
    print(f"picture: {options.output}")
    return 0


def doctor(words: Sequence[str]) -> int:
    """try an env out, or this machine, and say what to write"""
    from rich.console import Console

    from muster.command_line.command_options import DoctorOptions
    from muster.command_line.doctoring import diagnose_for, refuse_without_env
    from muster.command_line.mistakes import reported
    from muster.command_line.parser import check_least, names_of, read_options
    from muster.doctor.diagnosis import Diagnosis
    from muster.doctor.machine import MachineReport, examine
    from muster.doctor.show import show, show_machine
    from muster.doctor.targets import prints_to_stderr

    console = Console(highlight=False)
    report: MachineReport | Diagnosis
    with reported("muster doctor", names_of(DoctorOptions())), prints_to_stderr():
        options = read_options(DoctorOptions(), words, "muster doctor")
        check_least(options, num_envs=1, timeout=0.1, seconds=0.01, soak=1)
        if options.env is None:
            refuse_without_env(options)
            require("this command needs", "muster-rl[doctor]", "psutil")
            report = examine()
        else:
            report = diagnose_for(options)
    if options.json:
        print(json.dumps(report.to_dict(), indent=2))
    elif isinstance(report, MachineReport):
        show_machine(report, console)
    else:
        show(report, console)
    return int(report.blocks)


def bench(words: Sequence[str]) -> int:
    """measure the ways to run an env"""
    from rich.console import Console

    from muster.command_line.command_options import BenchOptions
    from muster.command_line.mistakes import Mistake, reported
    from muster.command_line.parser import check_least, names_of, read_options
    from muster.command_line.sudden_end import sudden_end_said
    from muster.doctor.measure import measure
    from muster.doctor.speeds import show_speeds
    from muster.doctor.targets import prints_to_stderr
    from muster.recipes.named import callable_named, env_named

    console = Console(highlight=False)
    with reported("muster bench", names_of(BenchOptions())):
        options = read_options(BenchOptions(), words, "muster bench")
        if options.env is None:
            raise Mistake("name an ENV to measure, such as CartPole-v1")
        check_least(options, num_envs=1, num_workers=1, rounds=1, seconds=0.01)
        if options.num_workers is not None and options.num_workers > options.num_envs:
            raise Mistake(f"--num-workers {options.num_workers} is too many for --num-envs {options.num_envs}")
        in_this_process = {"backend": "serial"}  # as one of the ways has them
        with sudden_end_said("muster bench", options.env, in_this_process), prints_to_stderr():
            env, around = env_named(options.env), list(map(callable_named, options.wrapper))
            with console.status("measuring"):
                measured = measure(
                    env,
                    options.num_envs,
                    num_workers=options.num_workers,
                    env_kwargs=options.env_kwargs,
                    wrappers=around,
                    rounds=options.rounds,
                    seconds=options.seconds,
                )
            if all(one.problem for one in measured):
                raise UsageError(f"{options.env} cannot be stepped: {measured[1].problem}")  # by workers
    if options.json:
        print(json.dumps({one.way: one.problem or one.steps_per_s for one in measured}, indent=2))
    else:
        show_speeds(options.env, options.wrapper, options.num_envs, measured, console)
    return 0


COMMANDS = {"train": train, "eval": evaluate, "plot": plot, "doctor": doctor, "bench": bench}
