"""Training runs in their folders: started, continued, evaluated. The command line calls nothing else to train."""

from __future__ import annotations

import math
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from muster.algorithms import MAPPO, PPO, MAPPOMetrics, PPOMetrics
from muster.algorithms.actor_critic import threads_for
from muster.algorithms.on_policy import OnPolicy
from muster.algorithms.ppo_config import MAPPOConfig
from muster.envs.groups import slots_of
from muster.errors import ConfigError, UsageError
from muster.pool.output import INHERIT
from muster.rollout.cluster.nodes import RayCluster
from muster.rollout.evaluation import STEPS_PER_EPISODE, evaluate
from muster.training.checkpoints import Checkpoints, Evaluation, read_checkpoint, states_after
from muster.training.comparison import compare_runs, interquartile_mean, interval
from muster.training.console import TrainingDisplay, format_return, format_seconds, restarts_unwarned, say_restarts
from muster.training.evaluations import Evaluations, evaluations_of
from muster.training.events import charts
from muster.training.film import film_episode
from muster.training.loggers import Loggers, lagging, log_film
from muster.training.phases import Phases, own_runs
from muster.training.picture import drawn, learning_curve, read_curve
from muster.training.plan import TrainingPlan
from muster.training.run_envs import RunEnvs, open_run_envs, recipe_of
from muster.training.run_folder import (
    BEST,
    CHECKPOINT,
    RunFolder,
    as_word,
    new_folder,
    read_config,
    reading,
    require_none,
    states_in,
)
from muster.training.run_networks import adopt, facts_in, plain_of
from muster.training.run_policy import RunPolicy
from muster.training.stopping import STOPS, StopSignals

Callback = Callable[[dict[str, float]], Any]
"""Gets the metrics of each iteration, by the columns of metrics.csv; what returns False ends the run."""

SOLVED_OVER = 100  # episodes, as Gymnasium's thresholds are meant


class Ended(NamedTuple):
    """How a training has ended. stopped: the signal that ended it, None without."""

    paths: list[Path]  # of its runs
    stopped: signal.Signals | None


@contextmanager
def start_algorithm(plan: TrainingPlan) -> Iterator[OnPolicy[Any]]:
    """The plan's PPO or MAPPO. Its envs, in workers or in collectors, are closed at the end."""
    kind: Any = MAPPO if isinstance(plan.config, MAPPOConfig) else PPO
    besides: dict[str, Any] = {"config": plan.config, "policy": plan.network, "device": plan.run.device}
    if not plan.collectors:
        with open_run_envs(plan) as envs:
            yield kind(envs, **besides)
        return
    of_envs = {**recipe_of(plan, {}), "replayable": bool(plan.run.replayable)}
    collectors = {**plan.options, **plan.collectors, "make_vec_options": of_envs}
    nodes, folder = collectors.pop("nodes", None), collectors.pop("working_dir", None)
    if "cluster" in collectors:
        collectors["cluster"] = RayCluster(nodes=nodes, runtime_env={"working_dir": folder} if folder else None)
    with kind(plan.made_from, **besides, collectors=collectors) as algorithm:
        yield algorithm


def train(
    plan: TrainingPlan, console: Console, *,
    run_dir: Path | None, resume: bool = False, may_be_done: bool = False, callback: Callback | None = None,
) -> Ended:  # fmt: skip
    """Trains to the end, until a signal of `StopSignals`, or until the callback ends it.

    The last complete iteration is saved in any case, also where the callback raises. While files cannot be written, the
    training goes on; where they still cannot be at the end, this raises the error that says so.

    run_dir: the run's folder, None for a new one in ``runs/``.  resume: goes on with the run that is there.
    may_be_done: with ``resume``, a run that has nothing left to do is said, and no UsageError.
    """
    if resume and run_dir is not None:
        if done := _is_done(run_dir, plan, console):
            if not may_be_done:
                raise UsageError(done)
            console.print(escape(done))
            return Ended([run_dir], None)
        facts_in(run_dir, plan.config)  # there is memory for its networks
    if plan.collectors and plan.run.worker_output != INHERIT:
        raise ConfigError("worker_output", "left out with collectors", plan.run.worker_output)
    origin, others = None if resume else plan.run.init_from, own_runs()
    begin = partial(new_folder, Path("runs"), f"{plan.name}-seed{plan.config.seed}")
    if run_dir is None and plan.run.logs_in_run:
        run_dir = begin()
    with start_algorithm(plan.printing_to(run_dir)) as ppo:
        anew = None if origin is None else adopt(ppo, Path(origin))
        path = run_dir or begin()
        phases = Phases(path, others)  # before there are those of evaluations
        with (
            phases,
            evaluations_of(ppo, plan.printing_to(path), console) as evaluations,
            RunFolder(path, resume=resume) as folder,
        ):
            # A rate that the user has given anew; without, the rate that the run had reached.
            rate = plan.config.learning_rate if "learning_rate" in plan.given else None
            before_s = _load(ppo, plan, folder, console, rate) if resume else 0.0
            if anew is not None:  # before the config: who resumes does not read the other run
                Checkpoints(folder, steps=0).save(ppo, now=True)
            config = {**plan.to_dict(), "spaces": plain_of(ppo.facts)}  # so that `load_policy` needs no env
            folder.write_config(config)
            _print_header(ppo, plan, console, resume=resume)
            if anew is not None:
                named = f"; these begin anew: {', '.join(anew)}" if anew else ""
                console.print(escape(f"It begins with the weights and statistics of {origin}{named}"))
            with Loggers(path, plan.run.log, console, config=config) as loggers:
                besides = evaluations, before_s, loggers, callback, phases
                return Ended([path], _train(ppo, plan, folder, console, *besides))


def train_seeds(
    plan: TrainingPlan, count: int, console: Console, *, run_dir: Path | None, callback: Callback | None = None
) -> Ended:
    """Trains ``count`` runs, from the plan's seed on, each in envs and in a folder ``seed<k>`` of its own.

    At the end, also where an error or a signal is the end of all, comparison.png has what there is.
    run_dir: the folder of these folders, None for a new one in ``runs/``.
    callback: of each run.
    Returns as `train`. Raises as that, and UsageError before anything where one of the folders holds a run.
    """
    seeds = range(plan.config.seed, plan.config.seed + count)
    parent = run_dir or new_folder(Path("runs"), f"{plan.name}-seeds")
    for seed in seeds:
        require_none(parent / f"seed{seed}")
    begun: list[Path] = []
    try:
        for seed in seeds:
            begun.append(parent / f"seed{seed}")
            one = replace(plan, config=replace(plan.config, seed=seed))
            stopped = train(one, console, run_dir=begun[-1], callback=callback).stopped
            if stopped is not None:
                return Ended(begun, stopped)
    finally:
        _print_seeds([run for run in begun if (run / CHECKPOINT).exists()], parent, console)
    return Ended(begun, None)


def _print_seeds(found: Sequence[Path], parent: Path, console: Console) -> None:
    picture = parent / "comparison.png"
    comparison = drawn(picture, partial(compare_runs, found, picture)) if found else ""
    curves = [curve for run in found if len(curve := read_curve(run))]
    if not curves:
        return
    last = np.array([curve[-1, 1] for curve in curves])
    low, high = interval(last)
    console.print(
        f"[dim]{'seeds':>15}[/]  [bold]{interquartile_mean(last):,.1f}[/] is the interquartile mean of the last mean "
        f"returns of {len(last)}, {low:,.1f} to {high:,.1f} its 95 % interval"
    )
    console.print(f"[dim]{'comparison':>15}[/]  {escape(comparison)}")


def _is_done(run: Path, plan: TrainingPlan, console: Console) -> str:
    """A sentence where the run has made all of its steps; then its loggers have what they lacked. Else empty."""
    with reading(run / CHECKPOINT):
        steps, total = int(read_checkpoint(run)["steps"]) if states_in(run) else 0, plan.config.total_steps
    if steps < total:
        return ""
    if names := lagging(run, plan.run.log, steps):
        with RunFolder(run, resume=True), Loggers(run, names, console, config=read_config(run)) as loggers:
            loggers.send(steps)
    return (
        f"{run} has made {steps:,} of {total:,} steps: there is nothing left to do. To train it longer, say how many "
        f"there are to be: --total-steps {2 * steps}"
    )


def _print_header(ppo: OnPolicy[Any], plan: TrainingPlan, console: Console, *, resume: bool) -> None:
    noun = "collector" if plan.collectors else "worker"
    count = plan.collectors["num_collectors"] if plan.collectors else len(ppo.envs.stats()["workers"])
    begun = f", from step {ppo.steps:,}" if resume else ""
    where = f" on {ppo.device}" if ppo.device.type != "cpu" or torch.cuda.is_available() else ""
    threads = threads_for(plan.config.torch_threads)
    preset = f"preset '{plan.preset}'" + (f", but {plan.differences()}" if plan.differences() else "")
    console.print(
        f"[bold]{escape(plan.name)}[/]  [dim]{plan.algorithm}{where}, {plan.config.total_steps:,} steps{begun}, "
        f"seed {plan.config.seed}, {plan.config.num_envs} envs on {count} {noun}{'s' * (count > 1)}, "
        f"{threads} thread{'s' * (threads > 1)} of torch, "
        f"{escape(preset)}[/]",
    )
    if sees := getattr(ppo, "critic_sees", ""):
        console.print(escape(sees))
    if plan.run.replayable:
        console.print(
            "[dim]Checkpoints hold the states of envs: a resumed run plays their episodes again, and goes on bit for "
            "bit. Where steps have effects outside: --no-replayable[/]"
        )
    elif plan.not_replayed:
        console.print(f"[dim]A resumed run will begin new episodes: {escape(plan.not_replayed)}[/]")
    if ppo.schedule.began_again:
        rate = ppo.schedule.at(ppo.steps).learning_rate
        console.print(
            f"The run had finished, its learning rate at 0: it starts at {rate:g} again, or at --learning-rate."
        )


def evaluate_run(
    policy: RunPolicy, envs: RunEnvs, console: Console, *, episodes: int, seed: int, max_steps: int | None
) -> None:
    """Prints returns and lengths of whole episodes that a run's policy plays; statistics stay as in the checkpoint.

    max_steps: as for `evaluate`; None for `STEPS_PER_EPISODE` for each episode.
    """
    most_steps = episodes * STEPS_PER_EPISODE if max_steps is None else max_steps
    with console.status(f"playing {episodes} episodes") as status:

        def show(ended: int, steps: int) -> None:
            status.update(f"playing {episodes} episodes: {ended} ended, {steps:,} steps taken")

        options: dict[str, Any] = {"episode_info": policy.plan.config.episode_info, "on_progress": show}
        played = evaluate(envs, policy, episodes=episodes, seed=seed, max_steps=most_steps, **options)
    returns, groups = played.means, slots_of(policy.groups) if len(policy.groups) > 1 else {}
    title = f"{escape(policy.plan.name)}, {policy.plan.algorithm} after {policy.steps:,} steps"
    console.print(f"[italic]{title}[/]")  # as its title it would be as narrow as the table
    actions = "drawn from the policy" if policy.sample else "the likeliest"
    left_out = episodes - len(returns)
    ended = f"{len(returns)} of {episodes}" if left_out else f"{episodes}"
    table = Table(show_header=False)
    for name, text in {
        "mean return": f"{returns.mean():,.1f}, deviation {returns.std():,.1f}",
        **{f"that of {escape(group)}": f"{played.returns[:, at].mean():,.1f}" for group, at in groups.items()},
        "lowest, highest": f"{returns.min():,.1f}, {returns.max():,.1f}",
        **{escape(name): f"{mean:,.3g}" for name, mean in played.figures.items()},
        "mean length": f"{played.lengths.mean():,.1f} steps",
        "episodes": f"{ended}, seed {seed}, actions {actions}",
    }.items():
        table.add_row(f"[dim]{name}[/]", text)
    console.print(table, soft_wrap=False)
    if left_out:
        console.print(
            f"[yellow]{left_out} of {episodes} episodes had not ended when --max-steps was reached. They are left out "
            "of these figures, which favours short episodes.[/]",
        )


def film_run(policy: RunPolicy, console: Console, path: Path, *, seed: int, max_steps: int | None) -> None:
    """Films an episode that a run's policy plays in an env of the run, and says where the film lies.

    path, max_steps, and what it raises: as for `film_episode`.
    """
    rendering: dict[str, Any] = {"env_kwargs": {"render_mode": "rgb_array"}, "autoreset_mode": "disabled"}
    with open_run_envs(policy.plan, 1, **rendering) as envs:
        frames = film_episode(envs, policy, path, seed=seed, max_steps=max_steps or STEPS_PER_EPISODE)
    console.print(f"Filmed an episode of {frames - 1:,} steps: {escape(str(path))}")
    if "wandb" in policy.plan.run.log and policy.trust:
        try:
            log_film(policy.run, path)
        except (UsageError, ImportError) as error:  # such as for a run that was logged offline
            console.print(f"The film is not in wandb: {escape(str(error))}")
    elif "wandb" in policy.plan.run.log:
        console.print("It stays here: to send it to wandb, where the folder has the run logged, say --trust.")


def _load(
    ppo: OnPolicy[Any], plan: TrainingPlan, folder: RunFolder, console: Console, learning_rate: float | None
) -> float:
    """Loads the state that the run in ``folder`` had reached; returns the seconds that the run had taken until then.

    A run that was killed before its first checkpoint had reached nothing.
    """
    if not states_in(folder.path):
        if lost := folder.begin_again():
            console.print(f"It begins again, as there is no state to go on from. Its rows so far are in {lost}")
        return 0.0
    with reading(folder.checkpoint_path), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        state = read_checkpoint(folder.path)
        try:
            ppo.load_state_dict(state, learning_rate=learning_rate)
        except UsageError as error:
            if "envs" not in state["collector"] or not plan.run.replayable:
                raise
            if isinstance(plan.env, str):
                going_on = "To go on in new episodes: --no-replayable, or replayable=False"
                raise UsageError(f"{folder.checkpoint_path}: {error}. {going_on}") from error
            warnings.warn(f"New episodes begin: {error.headline}", stacklevel=1)  # of an env that has no name
            del state["collector"]["envs"]
            ppo.load_state_dict(state, learning_rate=learning_rate)
    if plan.run.replayable and "envs" not in state["collector"]:
        console.print("[yellow]This checkpoint has no states of envs: new episodes begin.[/]")
    for one in said:
        console.print(f"[yellow]{escape(str(one.message))}[/]")
    if ppo.steps < 0:
        raise UsageError(f"{folder.checkpoint_path} is that of no run: its steps are {ppo.steps}")
    if later := states_after(folder.path, ppo.steps):
        raise UsageError(
            f"{folder.path} would go on from step {ppo.steps:,}, and has later states, in places that new ones would "
            f"take: {', '.join(later)}. Move them elsewhere first"
        )
    with reading(folder.metrics_path):
        seconds = float(folder.drop_metrics_after(ppo.steps).get("seconds", 0))
        if not math.isfinite(seconds):
            raise UsageError(f"{folder.metrics_path} is no run's: its last row says that it took {seconds} seconds")
        return seconds


def _train(
    ppo: OnPolicy[Any], plan: TrainingPlan, folder: RunFolder, console: Console,
    evaluations: Evaluations | None, before_s: float, loggers: Loggers, callback: Callback | None, phases: Phases,
) -> signal.Signals | None:  # fmt: skip
    """Trains as `train` does, and returns the signal. before_s: the seconds that the run had taken before."""
    started = time.monotonic() - before_s
    checkpoints = Checkpoints(folder, steps=ppo.steps, every=plan.run.checkpoint_every, keep=plan.run.keep)
    disk, finished, restarts = Disk(console), False, 0

    def row_of(metrics: PPOMetrics | MAPPOMetrics, evaluation: Evaluation | None = None) -> dict[str, float]:
        seconds, again = time.monotonic() - started, len(ppo.collector.last_losses)
        row = {"seconds": seconds, "steps_per_second": metrics.steps / seconds, **metrics.as_row(), **phases.shares()}
        row["restarts"] = again
        if evaluations is not None:
            played = evaluation or Evaluation(0, math.nan, math.nan)
            row |= {f"eval_{name}": value for name, value in played.figures.items()}
            row |= {"eval_return": played.mean_return, "eval_length": played.mean_length}
        return row

    def write(row: dict[str, float]) -> None:
        loggers.add(row)
        folder.append_metrics(row, charts(row) if "tensorboard" in plan.run.log else None)

    def log() -> None:
        loggers.send(checkpoints.saved)

    ppo.tell_phases(phases.enter)
    with StopSignals(saves=True) as stop:
        try:
            with TrainingDisplay(console, ppo.config.total_steps, steps=ppo.steps) as display, restarts_unwarned():
                while ppo.steps < ppo.config.total_steps:
                    before = ppo.steps
                    metrics = stop.call(ppo.iterate)  # signals interrupt nothing else: no file is cut short
                    restarts += len(ppo.collector.last_losses)
                    say_restarts(ppo.collector.last_losses, console, begun_at=before, num_envs=ppo.config.num_envs)
                    judged = stop.call(partial(_judged, evaluations, phases, before))
                    row = row_of(metrics, judged)
                    save = partial(checkpoints.save, ppo, judged, now=stop.save_asked())
                    disk.tries(partial(write, row), save, log)
                    evaluated = None if judged is None else judged.mean_return
                    display.update(metrics.steps, metrics.episodes.mean_return, evaluated=evaluated)
                    if callback is not None and _is_false(stop.call(partial(callback, row))):
                        break
                else:
                    finished = True
        except STOPS as error:
            if not stop.caused(error):
                raise
            console.print(f"[yellow]Stopped by {stop.name}.[/]")
        finally:
            seconds = time.monotonic() - started
            # An iteration may end in the moment of the signal: checkpoint and CSV must agree.
            last = [] if ppo.metrics is None else [partial(write, row_of(ppo.metrics))]
            disk.tries(*last, partial(checkpoints.save, ppo, now=True), log)
            draw = partial(learning_curve, folder.path, title=plan.title, goal=_goal_of(ppo))
            plot = drawn(folder.plot_path, lambda: draw().save(folder.plot_path))
            if not finished and disk.full is None:
                console.print(f"What was reached is saved in {escape(str(folder.path))}")
            if ppo.steps < ppo.config.total_steps:
                console.print(f"To go on: {escape(_command_to_go_on(plan, folder.path))}")
        if disk.full is not None:
            raise disk.full
        figures: dict[str, Any] = {"plot": plot, "best": checkpoints.best, "slowed_by": phases.slowed_by()}
        _print_result(ppo, folder, console, seconds=seconds, restarts=restarts, **figures)
    return None if finished else stop.number


def _judged(evaluations: Evaluations | None, phases: Phases, before: int) -> Evaluation | None:
    """The evaluation that is due after the iteration which began after `before` steps."""
    judged = None
    if evaluations is not None and evaluations.due(before):
        phases.enter("evaluation")
        judged = evaluations.play()
    phases.enter("checkpoint")
    return judged


def _is_false(said: Any) -> bool:
    return isinstance(said, (bool, np.bool_)) and not said


def _command_to_go_on(plan: TrainingPlan, run: Path) -> str:
    if not all(isinstance(one, str) for one in (plan.policy or "", plan.env, *plan.wrappers)):
        # Objects are handed over again.
        return f"muster.train(..., resume={str(run)!r})"
    trust = " --trust" if plan.reaching else ""  # nobody is asked off a terminal
    return f"muster train --resume {as_word(run)}{trust}"


class Disk:
    """The disk of a run. What it has no room for is said once, and tried again whenever something is saved.

    full: the first error of what could not be saved the last time; None where all could.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self.full: OSError | UsageError | None = None

    def tries(self, *saves: Callable[[], object]) -> None:
        """Calls all of the functions; each keeps what cannot be written. Raises their other errors at last."""
        before, self.full, others = self.full, None, list[Exception]()
        for save in saves:
            try:
                save()
            except (OSError, UsageError) as error:  # such as for what is no file in a file's place
                self.full = self.full or error
            except Exception as error:
                others.append(error)
        if before is None and self.full is not None:
            said = f"{str(self.full).rstrip('.')}. The training goes on, and tries again to save."
            self._console.print(f"[yellow]{escape(said)}[/]")
        elif before is not None and self.full is None:
            self._console.print("There is room again: the newest state is saved.")
        if others:
            raise others[0]


def _print_result(
    ppo: OnPolicy[Any], folder: RunFolder, console: Console, *,
    seconds: float, plot: str, best: Evaluation | None, restarts: int, slowed_by: str | None,
) -> None:  # fmt: skip
    goal = _goal_of(ppo)
    mean_return, ended = ppo.episodes.summary().mean_return, ppo.episodes.ended
    result = f"[bold]{format_return(mean_return)}[/] over the last {min(ended, SOLVED_OVER)} episodes"
    if goal is not None:
        solved = mean_return >= goal and ended >= SOLVED_OVER
        over = "" if ended >= SOLVED_OVER else f" over {SOLVED_OVER} episodes"
        result += f"  [green]solved (at {goal:,g})[/]" if solved else f"  [dim]the goal is {goal:,g}{over}[/]"
    best_path = escape(str(folder.path / BEST))
    lines = {
        "mean return": result,
        "trained": f"{ppo.steps:,} steps in {format_seconds(seconds)}, {ppo.steps / seconds:,.0f} steps/s",
        "slowed by": slowed_by and escape(slowed_by),
        "restarts": f"[yellow]{restarts:,}[/]" if restarts else None,
        "learning curve": escape(plot),
        "checkpoint": escape(str(folder.checkpoint_path)),
        "best evaluation": best and f"[bold]{format_return(best.mean_return)}[/] at step {best.steps:,}: {best_path}",
        "metrics": escape(str(folder.metrics_path)),
    }
    for name, text in lines.items():
        if text is not None:
            console.print(f"[dim]{name:>15}[/]  {text}")


def _goal_of(ppo: OnPolicy[Any]) -> float | None:
    """The mean return at which the env counts as solved."""
    return ppo.facts.spec.reward_threshold if ppo.facts.spec else None
