"""The ``muster`` command. It needs the extra ``doctor``, and the commands that train the extra ``train``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import gymnasium as gym

import muster
from muster.errors import EnvError, MusterError, UsageError
from muster.extras import imports_for, require

# A missing package is reported by ``main``, without a traceback; a program that only imports this module goes on.
try:
    import typer
    from rich.console import Console
    from rich.markup import escape
except ImportError as error:
    _failed_import: ImportError | None = error
else:
    _failed_import = None
    Target = Annotated[
        str, typer.Argument(metavar="TARGET", help="An env id, or module:factory for a function that builds an env.")
    ]
    Kwargs = Annotated[
        str | None, typer.Option(metavar="JSON", help="Keyword arguments for the env, such as '{\"size\": 5}'.")
    ]

if TYPE_CHECKING:
    from muster.doctor import Diagnosis
    from muster.training.plan import TrainingPlan

SIGNALLED = 128  # the shell's exit status for a signal, less its number: 130 for Ctrl-C, 143 for SIGTERM
PRESETS = "the preset's"
PPO_OPTIONS = ("seed", "num_envs", "total_steps", "learning_rate", "normalize_observations", "normalize_rewards")
EXTRAS = {"doctor": "doctor", "bench": "doctor", "train": "train", "eval": "train"}  # by command


def main() -> None:
    """Entry point of the installed ``muster`` script."""
    command = next((word for word in sys.argv[1:] if word in EXTRAS), None)
    needing = "The muster command needs" if command is None else f"muster {command} needs"
    try:
        with imports_for(needing, f"muster-rl[{EXTRAS.get(command or '', 'doctor')}]", "typer", "rich"):
            if _failed_import is not None:
                raise _failed_import
    except ImportError as error:
        raise SystemExit(str(error)) from None
    make_app()()


def make_app() -> typer.Typer:
    """The command line, for ``main`` and for tests."""
    app = typer.Typer(name="muster", no_args_is_help=True, add_completion=False, rich_markup_mode="rich")
    app.callback()(describe)
    app.command("train", no_args_is_help=True)(train)
    app.command("eval", no_args_is_help=True)(evaluate)
    app.command("doctor")(doctor)
    app.command("bench", no_args_is_help=True)(bench)
    return app


def show_version(asked: bool) -> None:
    """Prints the version if ``--version`` was passed, and exits before any command is looked up."""
    if asked:
        typer.echo(muster.__version__)
        raise typer.Exit


def describe(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=show_version)
    ] = False,
) -> None:
    """Run many reinforcement-learning environments in parallel, and train on them."""
    # Every command can name modules of the folder that it is called in, as with ``python -m``.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def doctor(
    context: typer.Context,
    target: Annotated[
        str | None, typer.Argument(metavar="TARGET", help="An env id or module:factory. Left out: this machine.")
    ] = None,
    kwargs: Kwargs = None,
    num_envs: Annotated[
        int | None, typer.Option(min=1, show_default="what suits the machine", help="Envs to recommend a line for.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds after which a trial is taken to hang.")] = 60.0,
    seconds: Annotated[
        float, typer.Option(min=0.01, help="How long each line that could be recommended is run.")
    ] = 1.0,
    policy: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FACTORY", help="Also say whether this policy can go to collector processes."),
    ] = None,
    policy_factory: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FACTORY", help="Also say whether this function builds the same policy everywhere."
        ),
    ] = None,
    soak: Annotated[float | None, typer.Option(min=1, metavar="SECONDS", help="Also look for leaks so long.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Try an env out, and say how to run many of it, or what is in the way; without a TARGET examine the machine.

    Every trial runs in a process of its own. The exit status is 1 when something blocks parallel use.

    [dim]Example:[/] [bold]muster doctor my_game:make_env --kwargs '{"level": 3}'[/]
    """
    if target is None:
        _report_machine(context, as_json)
    from muster.doctor.show import show

    options: dict[str, Any] = {"num_envs": num_envs, "timeout": timeout, "seconds": seconds, "soak_s": soak}
    diagnosis = _diagnose(target, kwargs, policy, policy_factory, options)
    if as_json:
        typer.echo(json.dumps(diagnosis.to_dict(), indent=2))
    else:
        show(diagnosis, Console(highlight=False))
    raise typer.Exit(int(diagnosis.blocks))


def _diagnose(
    target: str, kwargs: str | None, policy: str | None, policy_factory: str | None, options: dict[str, Any]
) -> Diagnosis:
    """The diagnosis of the env that ``target`` names, and of the policy. options: further ones of `diagnose`."""
    from muster.doctor import Diagnosis, Measurements, diagnose
    from muster.doctor.targets import (
        about_import,
        judge_target,
        parse_kwargs,
        policy_factory_of,
        prints_to_stderr,
        resolve_target,
    )

    timeout = options["timeout"]
    with _reported_plainly(), prints_to_stderr():
        for option, provided in (("--policy", policy), ("--policy-factory", policy_factory)):
            if provided is not None:
                require(f"muster doctor {option} needs", "muster-rl[torch]", "torch", "tensordict")
        if (unusable := about_import(target, timeout)) is not None:
            return Diagnosis(target, (unusable,), Measurements(), None)
        try:
            env, how_to_import = resolve_target(target)
            arguments = parse_kwargs(kwargs)
            judged = None if policy is None else judge_target(policy, timeout)
            factory = None if policy_factory is None else policy_factory_of(policy_factory)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        if (soak_s := options["soak_s"]) is not None:
            typer.echo(f"Trying {target} out, then soaking it for {soak_s:g} s", err=True)
        diagnosis = diagnose(env, policy_factory=factory, env_kwargs=arguments, name=target, **options)
    if judged is not None:
        diagnosis = replace(diagnosis, findings=(*diagnosis.findings, judged[0]), policy=judged[1])
    advice = diagnosis.recommendation
    # The line may name something else than the target: the id of the env, where a factory returns the same env twice.
    if how_to_import is not None and advice is not None and f"({target.rpartition(':')[2]}," in advice.line:
        diagnosis = replace(diagnosis, recommendation=replace(advice, factory=f"import muster\n{how_to_import}\n"))
    return diagnosis


def _report_machine(context: typer.Context, as_json: bool) -> NoReturn:
    """Runs ``muster doctor`` without a target."""
    from muster.doctor.machine import examine
    from muster.doctor.show import show_machine
    from muster.doctor.targets import prints_to_stderr

    if options := [f"--{name.replace('_', '-')}" for name in _provided(context) if name != "as_json"]:
        needs = "needs" if len(options) == 1 else "need"
        raise typer.BadParameter(f"{', '.join(options)} {needs} a TARGET, the env to try out")
    with _reported_plainly(), prints_to_stderr():
        require("muster doctor needs", "muster-rl[doctor]", "psutil")
        report = examine()
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        show_machine(report, Console(highlight=False))
    raise typer.Exit(int(report.blocks))


def bench(
    target: Target,
    kwargs: Kwargs = None,
    num_envs: Annotated[int, typer.Option(min=1, help="Envs stepped at once.")] = 8,
    num_workers: Annotated[
        int | None, typer.Option(min=1, show_default="one per core", help="Processes that share the envs.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in each of which every way has its turn.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.01, help="How long a way is measured in a round.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Measure how many steps a second each way to run an env makes on this machine.

    Actions are random. `muster doctor` says whether an env can be run in parallel at all.

    [dim]Example:[/] [bold]muster bench CartPole-v1 --num-envs 32[/]
    """
    from muster.doctor.measure import measure
    from muster.doctor.targets import parse_kwargs, prints_to_stderr, resolve_target

    console = Console(highlight=False)
    with _reported_plainly(), prints_to_stderr():
        try:
            env, how_to_import = resolve_target(target)
            arguments = parse_kwargs(kwargs)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        with console.status("measuring"):
            measured = measure(
                env, num_envs, num_workers=num_workers, env_kwargs=arguments, rounds=rounds, seconds=seconds
            )
        if all(one.problem for one in measured):
            raise UsageError(f"{target} cannot be stepped: {measured[0].problem}")
    if as_json:
        typer.echo(json.dumps({one.way: one.problem or one.steps_per_s for one in measured}, indent=2))
    else:
        from muster.doctor.speeds import show_speeds

        show_speeds(target, how_to_import, num_envs, measured, console)


def train(
    context: typer.Context,
    env: Annotated[
        str | None, typer.Argument(metavar="ENV", help="A Gymnasium id: CartPole-v1, or module:Id-v0.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same policy, with any number of workers.")] = 0,
    num_envs: Annotated[int | None, typer.Option(min=1, show_default=PRESETS, help="Envs stepped in parallel.")] = None,
    num_workers: Annotated[
        int | None, typer.Option(min=1, show_default="one per core", help="Processes that share the envs.")
    ] = None,
    total_steps: Annotated[
        int | None, typer.Option(min=1, show_default=PRESETS, help="Env steps, rounded up to whole rollouts.")
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(show_default=PRESETS, help="Of Adam. With --resume: what to go on from."),
    ] = None,
    normalize_observations: Annotated[
        bool | None,
        typer.Option(
            "--normalize-observations/--no-normalize-observations",
            show_default=PRESETS,
            help="Bring observations to mean 0 and deviation 1.",
        ),
    ] = None,
    normalize_rewards: Annotated[
        bool | None,
        typer.Option(
            "--normalize-rewards/--no-normalize-rewards",
            show_default=PRESETS,
            help="Bring returns to deviation 1, for learning only.",
        ),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(show_default="a new one in runs/", help="Folder for config, metrics, checkpoint and plot."),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Go on with the run in this folder, up to its --total-steps.")
    ] = None,
) -> None:
    """Train a policy with PPO and plot its learning curve.

    Options that are left out have the values of a preset, which is chosen by the env's kind: the first line names it.
    Observations and actions may be Box, Discrete, MultiDiscrete or MultiBinary.
    Ctrl-C ends the training early and keeps what was reached; --resume goes on from there.

    [dim]Example:[/] [bold]muster train CartPole-v1 --seed 1[/]
    """
    console = Console(highlight=False)
    with _reported_plainly():
        needed = ("torch", "tensordict", "tensorboard", "matplotlib")  # the last two not until a rollout has been made
        with imports_for("muster train needs", "muster-rl[train]", *needed):
            from muster.training import runs

        if resume is not None:
            plan = _resumed_plan(context, resume)
        elif env is not None:
            provided = _provided(context)
            plan = _new_plan(env, {name: provided[name] for name in PPO_OPTIONS if name in provided}, num_workers)
        else:
            raise typer.BadParameter("name an ENV to train on, or a run to go on with: --resume RUN")
        with _opened_for(plan, plan.config.num_envs) as envs:
            run = resume or run_dir
            stopped = runs.train(
                plan, envs, console, run_dir=run, resume=resume is not None, learning_rate=learning_rate
            )
    if stopped is not None:
        raise typer.Exit(SIGNALLED + stopped)


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    episodes: Annotated[int, typer.Option(min=1, help="Whole episodes to play.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Of the envs; same seed, same episodes.")] = 0,
    sample: Annotated[bool, typer.Option("--sample", help="Draw actions as in training, not the likeliest.")] = False,
    max_steps: Annotated[
        int, typer.Option(min=1, help="Give up after so many steps of all envs: some episodes never end.")
    ] = 1_000_000,
) -> None:
    """Play whole episodes with the policy that a run has trained, and tell how good it is.

    Statistics of observations stay as they are in the checkpoint.

    [dim]Example:[/] [bold]muster eval runs/CartPole-v1-seed0-20260101-120000[/]
    """
    console = Console(highlight=False)
    with _reported_plainly():
        with imports_for("muster eval needs", "muster-rl[train]", "torch", "tensordict"):
            from muster.training import runs
            from muster.training.plan import plan_of

        plan = plan_of(run)
        with _opened_for(plan, min(plan.config.num_envs, episodes)) as envs:
            stopped = runs.evaluate_run(
                run, plan, envs, console, episodes=episodes, seed=seed, sample=sample, max_steps=max_steps
            )
    if stopped is not None:
        raise typer.Exit(SIGNALLED + stopped)


def _new_plan(env: str, options: Mapping[str, Any], num_workers: int | None) -> TrainingPlan:
    """The plan for an env: its family's preset, changed by ``options`` of PPO."""
    from muster.algorithms import PPOConfig
    from muster.training.plan import TrainingPlan
    from muster.training.presets import preset_for

    with _opened(env, 1, None) as probe:  # its spaces are part of what decides
        preset = preset_for(probe.spec, probe.single_observation_space, probe.single_action_space)
    return TrainingPlan(env, PPOConfig(**{**preset.config, **options}), preset.name, num_workers)


def _resumed_plan(context: typer.Context, run: Path) -> TrainingPlan:
    """The plan that the run was started with, changed by the options on the command line."""
    from muster.training.plan import plan_of

    provided = _provided(context)
    if fixed := sorted(provided.keys() - {"resume", "total_steps", "learning_rate", "num_workers"}):
        raise typer.BadParameter(f"the run has settled {', '.join(fixed)}; --resume goes on with what it has")
    plan = plan_of(run)
    changed = {name: provided[name] for name in ("total_steps", "learning_rate") if name in provided}
    config = replace(plan.config, **changed)
    return replace(plan, config=config, num_workers=provided.get("num_workers", plan.num_workers))


def _provided(context: typer.Context) -> dict[str, Any]:
    """The options that were passed on the command line."""
    return {
        name: value
        for name, value in context.params.items()
        if getattr(context.get_parameter_source(name), "name", None) == "COMMANDLINE"
    }


@contextmanager
def _opened_for(plan: TrainingPlan, num_envs: int) -> Iterator[muster.VectorEnv]:
    """The plan's envs, as its preset makes them, closed at the end."""
    from muster.training.presets import preset_named

    preset = preset_named(plan.preset)
    require(f"Training {plan.env} needs", "muster-rl[train]", *preset.modules)
    workers = plan.num_workers if num_envs == plan.config.num_envs else None
    with _opened(plan.env, num_envs, workers, env_kwargs=preset.env_kwargs, wrappers=preset.wrappers) as envs:
        yield envs


@contextmanager
def _opened(env: str, num_envs: int, num_workers: int | None, **options: Any) -> Iterator[muster.VectorEnv]:
    """The envs, closed at the end. A ValueError is reported with the usage: an option may be its cause."""
    try:
        envs = muster.make_vec(env, num_envs, num_workers=num_workers, autoreset_mode="same_step", **options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with envs:
        if not isinstance(envs, muster.VectorEnv):
            raise UsageError(f"{env} has several agents; muster train takes envs with one.")
        yield envs


@contextmanager
def _reported_plainly() -> Iterator[None]:
    """Ends the command with the error's message alone where the message is enough, without our code's traceback."""
    try:
        yield
    except (MusterError, gym.error.Error, ImportError, OSError) as error:
        console = Console(stderr=True, highlight=False)
        console.print(f"[bold red]{type(error).__name__}[/]  {escape(str(error))}", soft_wrap=True)
        known = isinstance(error.__cause__, gym.error.Error)  # such as an id that the worker did not find
        if isinstance(error, EnvError) and error.worker_traceback and not known:
            console.print(f"[dim]{escape(error.worker_traceback.rstrip())}[/]", soft_wrap=True)
        raise typer.Exit(1) from error
