"""The ``muster`` command. It needs the extra ``cli``; PyTorch is imported only by the commands that train."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import gymnasium as gym

import muster
from muster.errors import EnvError, MusterError, UsageError
from muster.report.learning_curve import plot_learning_curve
from muster.report.run_folder import RunFolder

# Told by ``main``, without a traceback; a program that only imports this module is not stopped.
try:
    import typer
    from rich.console import Console
    from rich.markup import escape

    from muster.report.console import TrainingDisplay, format_return, format_seconds
except ImportError as error:
    _missing: str | None = str(error.name).partition(".")[0]
else:
    _missing = None

if TYPE_CHECKING:
    from muster.algorithms import PPO

CHECKPOINT_EVERY_S = 60.0
INTERRUPTED = 130  # the shell's exit status for Ctrl-C


def main() -> None:
    """What the installed ``muster`` script calls."""
    if _missing is not None:
        raise SystemExit(f"The muster command needs {_missing}. Install it with: pip install 'muster-rl[cli]'")
    make_app()()


def make_app() -> typer.Typer:
    """The command line, for ``main`` and for tests."""
    app = typer.Typer(name="muster", no_args_is_help=True, add_completion=False, rich_markup_mode="rich")
    app.callback()(describe)
    app.command("train", no_args_is_help=True)(train)
    app.command("doctor", no_args_is_help=True)(doctor)
    return app


def describe() -> None:
    """Run many reinforcement-learning environments in parallel, and train on them."""


def doctor(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="An env id, or module:factory for a function that builds an env.")
    ],
    kwargs: Annotated[
        str | None, typer.Option(metavar="JSON", help="Keyword arguments for the env, such as '{\"size\": 5}'.")
    ] = None,
    num_envs: Annotated[
        int | None, typer.Option(min=1, show_default="what suits the machine", help="Envs to recommend a line for.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds after which a trial is taken to hang.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Try an env out, and say how to run many of it, or what is in the way.

    Every trial runs in a process of its own. The exit status is 1 when something blocks parallel use.

    [dim]Example:[/] [bold]muster doctor my_game:make_env --kwargs '{"level": 3}'[/]
    """
    from muster.doctor import diagnose
    from muster.doctor.show import show
    from muster.doctor.targets import parse_kwargs, resolve_target

    _find_modules_here()
    with _told_plainly():
        try:
            env, how_to_import = resolve_target(target)
            arguments = parse_kwargs(kwargs)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        diagnosis = diagnose(env, num_envs=num_envs, env_kwargs=arguments, timeout=timeout, name=target)
    if diagnosis.recommendation is not None and how_to_import is not None and diagnosis.recommendation.factory is None:
        diagnosis = replace(
            diagnosis, recommendation=replace(diagnosis.recommendation, factory=f"import muster\n{how_to_import}\n")
        )
    if as_json:
        typer.echo(json.dumps(diagnosis.to_dict(), indent=2))
    else:
        show(diagnosis, Console(highlight=False))
    raise typer.Exit(int(diagnosis.blocks))


def train(
    env: Annotated[str, typer.Argument(metavar="ENV", help="A Gymnasium id: CartPole-v1, or module:Id-v0.")],
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same policy, with any number of workers.")] = 0,
    num_envs: Annotated[int, typer.Option(min=1, help="Envs stepped in parallel.")] = 8,
    num_workers: Annotated[
        int | None, typer.Option(min=1, show_default="one per core", help="Processes that share the envs.")
    ] = None,
    total_steps: Annotated[int, typer.Option(min=1, help="Env steps, rounded up to whole rollouts.")] = 200_000,
    run_dir: Annotated[
        Path | None,
        typer.Option(show_default="a new one in runs/", help="Folder for config, metrics, checkpoint and plot."),
    ] = None,
) -> None:
    """Train a policy with PPO and plot its learning curve.

    Observations and actions may be Box, Discrete, MultiDiscrete or MultiBinary.
    Ctrl-C ends the training early and keeps what was reached.

    [dim]Example:[/] [bold]muster train CartPole-v1 --seed 1[/]
    """
    console = Console(highlight=False)
    _find_modules_here()
    with _told_plainly():
        from muster.algorithms import PPO, PPOConfig

        config = PPOConfig(total_steps=total_steps, seed=seed, num_envs=num_envs)
        try:
            envs = muster.make_vec(env, num_envs, num_workers=num_workers, autoreset_mode="same_step")
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        with envs:
            if not isinstance(envs, muster.VectorEnv):
                raise UsageError(f"{env} has several agents; muster train takes envs with one.")
            ppo = PPO(envs, config)
            with RunFolder(run_dir) if run_dir else RunFolder.create(Path("runs"), f"{env}-seed{seed}") as folder:
                folder.write_config(
                    {"env": env, "algorithm": "PPO", **asdict(config), "num_workers": num_workers, "with": _versions()}
                )
                workers = len(envs.stats()["workers"])
                console.print(
                    f"[bold]{escape(env)}[/]  [dim]PPO, {total_steps:,} steps, seed {seed}, "
                    f"{num_envs} envs on {workers} worker{'s' * (workers > 1)}[/]"
                )
                goal = envs.spec.reward_threshold if envs.spec else None
                finished = _train(ppo, folder, console, title=f"{env}, PPO, seed {seed}", goal=goal)
    if not finished:
        raise typer.Exit(INTERRUPTED)


def _train(ppo: PPO, folder: RunFolder, console: Console, *, title: str, goal: float | None) -> bool:
    """Trains to the end, or until Ctrl-C and then returns False. Whatever happens, what was reached is saved."""
    started = saved = time.monotonic()
    finished = False
    try:
        with TrainingDisplay(console, ppo.config.total_steps) as display:
            for metrics in ppo.train():
                now = time.monotonic()
                seconds = now - started
                folder.append_metrics(
                    {"seconds": seconds, "steps_per_second": metrics.steps / seconds, **metrics.as_row()}
                )
                display.update(metrics.steps, metrics.episodes.mean_return)
                if now - saved > CHECKPOINT_EVERY_S:
                    folder.save_checkpoint(ppo.state_dict())
                    saved = now
        finished = True
    except KeyboardInterrupt:
        console.print("[yellow]Stopped by Ctrl-C.[/]")
    finally:
        seconds = time.monotonic() - started
        folder.save_checkpoint(ppo.state_dict())
        plotted = plot_learning_curve(folder.metrics_path, folder.plot_path, title=title, goal=goal)
        if not finished:
            console.print(f"What was reached is saved in {escape(str(folder.path))}", soft_wrap=True)
    _print_result(ppo, folder, console, seconds=seconds, goal=goal, plotted=plotted)
    return finished


def _print_result(
    ppo: PPO, folder: RunFolder, console: Console, *, seconds: float, goal: float | None, plotted: bool
) -> None:
    mean_return = ppo.episodes.summary().mean_return
    result = f"[bold]{format_return(mean_return)}[/] over the last {min(ppo.episodes.ended, 100)} episodes"
    if goal is not None:
        result += f"  [green]solved (at {goal:,g})[/]" if mean_return >= goal else f"  [dim]solved at {goal:,g}[/]"
    lines = {
        "mean return": result,
        "trained": f"{ppo.steps:,} steps in {format_seconds(seconds)}, {ppo.steps / seconds:,.0f} steps/s",
        "learning curve": escape(str(folder.plot_path)) if plotted else "none: no episode has ended yet",
        "checkpoint": escape(str(folder.checkpoint_path)),
        "metrics": escape(str(folder.metrics_path)),
    }
    for name, text in lines.items():
        console.print(f"[dim]{name:>15}[/]  {text}", soft_wrap=True)


def _find_modules_here() -> None:
    """As for ``python -m``: modules in the folder that the command is called in can be named."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


@contextmanager
def _told_plainly() -> Iterator[None]:
    """Errors that their message explains end the command with it, without a traceback through our own code."""
    try:
        yield
    except (MusterError, gym.error.Error, ImportError, OSError) as error:
        console = Console(stderr=True, highlight=False)
        console.print(f"[bold red]{type(error).__name__}[/]  {escape(str(error))}", soft_wrap=True)
        if isinstance(error, EnvError) and error.worker_traceback:
            console.print(f"[dim]{escape(error.worker_traceback.rstrip())}[/]", soft_wrap=True)
        raise typer.Exit(1) from error


def _versions() -> dict[str, Any]:
    versions: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("muster-rl", "torch", "numpy", "gymnasium"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return {**versions, "cores": os.cpu_count()}
