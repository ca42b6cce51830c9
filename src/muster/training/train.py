"""`muster.train`: what ``muster train`` does, from values. How words become values is in values.py."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import gymnasium as gym

from muster.arguments import fields_of, option
from muster.errors import ConfigError, UsageError
from muster.extras import imports_for, require
from muster.introspection import type_name
from muster.pool.output import INHERIT, QUIET
from muster.recipes.named import absolute_name, leads_nowhere, name_of, refuse_while_importing
from muster.training.values import NamedEnv, read_run_file, values_in
from muster.vector.make import make_vec
from muster.vector.replaying import replay_problem

with imports_for(
    "muster.train needs", "muster-rl[train]", "torch", "tensordict", "safetensors", "rich", "tensorboard", "matplotlib"
):
    from torch import nn

    from muster.algorithms import MAPPOConfig, PPOConfig
    from muster.algorithms.ppo_config import AgentsOptions
    from muster.training import runs
    from muster.training.console import run_console
    from muster.training.loggers import require_login
    from muster.training.picture import learning_curve
    from muster.training.plan import PARTS, RunOptions, TrainingPlan, makers_of, options_of, plan_of
    from muster.training.presets import preset_of
    from muster.training.run_envs import FOR_SEVERAL, RunEnvs
    from muster.training.run_folder import read_columns, require_local
    from muster.training.run_policy import RunPolicy
    from muster.training.runs import film_run


@dataclass(frozen=True)
class TrainOptions(NamedEnv):
    """Train a policy with PPO, or the agents of an env with MAPPO, and plot the learning curve.

    Options override the file of --config, and the file overrides the preset for the env's kind. Ctrl-C ends the
    training early and keeps what was reached; --resume continues it.

    Example: muster train CartPole-v1 --seed 1
    """

    run_dir: Path | None = option(None, "folder of the run, or with --seeds of the runs; a new one in runs/")
    seeds: int | None = option(None, "train so many runs, one after the other, from --seed on; compare them", least=1)
    resume: Path | None = option(None, "resume the run in this folder, up to its --total-steps")
    resume_or_begin: bool = option(False, "resume the run in --run-dir, or begin it there: a line for queues of jobs")
    config: Path | None = option(None, "TOML or YAML file with the env, and with options by the names below")
    trust: bool = option(False, "with --resume: use the code, paths, cluster and loggers that the run's folder names")


class Run:
    """A training run, as `muster.train` returns it.

    path: its folder, which `muster.load_policy`, ``muster eval`` and ``resume=`` take, too.
    objects: the env, the wrappers and the network that were handed over.
    """

    def __init__(self, path: str | os.PathLike[str], objects: Mapping[str, Any] | None = None) -> None:
        self.path = Path(path)
        self._objects = objects or {}

    @property
    def metrics(self) -> dict[str, Any]:
        """The columns of metrics.csv, float64 [R] each, a row for each iteration; nan where there was no value."""
        return read_columns(self.path)

    @cached_property
    def policy(self) -> RunPolicy:
        """The policy that was learnt, as `muster.load_policy` gives it."""
        return RunPolicy(self.path, trust=True, objects=self._objects)

    def plot(self) -> Any:
        """The learning curve, as a matplotlib Figure, which notebooks show."""
        plan = plan_of(self.path)
        spec = gym.registry.get(plan.env.rpartition(":")[2])
        goal = None if spec is None else spec.reward_threshold
        return learning_curve(self.path, title=plan.title, goal=goal).finished()

    def film(self, path: str | os.PathLike[str] | None = None, *, seed: int = 0, max_steps: int | None = None) -> Path:
        """Films an episode by the likeliest actions, and returns where the film lies.

        path: ends in .mp4; None for film.mp4 in the run's folder.  seed: of the env.
        max_steps: after which the film ends; None for those of `muster eval`.
        Raises UsageError where the env renders no frames, and ImportError without PyAV.
        """
        to = self.path / "film.mp4" if path is None else Path(path)
        film_run(self.policy, run_console(), to, seed=seed, max_steps=max_steps)
        return to

    def __repr__(self) -> str:
        return f"<run in {str(self.path)!r}>"


KINDS = (TrainOptions, *PARTS.values(), PPOConfig, AgentsOptions)
OPTIONS = {name: kind for kind in KINDS for name in fields_of(kind)}
OF_FILES = {name: kind for name, kind in OPTIONS.items() if kind is not TrainOptions or name in fields_of(NamedEnv)}
OF_CALLS = {name: kind for name, kind in OPTIONS.items() if name not in ("config", "resume_or_begin")}
CHANGES = ("total_steps", "learning_rate", "episode_info")  # what PPO may do otherwise in a run that goes on


def train(
    env: str | Callable[..., Any] | None = None,
    config: Mapping[str, Any] | PPOConfig | str | os.PathLike[str] | None = None,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    seed: int | None = None,
    policy: Any = None,
    callback: runs.Callback | None = None,
    **options: Any,
) -> Any:
    """Trains PPO, or MAPPO where an env has agents, as ``muster train`` does, and returns the `Run`.

    With the same values both leave the same weights and the same metrics. Options override ``config``, and ``config``
    overrides the preset for the env's kind. ``run.path`` is the folder, ``run.metrics`` has its columns,
    ``run.policy`` acts, ``run.plot()`` is a figure, and ``run.film()`` a film.

    env: an env id, ``module:factory``, ``file.py:factory``, or a function or class that makes one env. None with
        ``resume``, where a name leads to the run's env.
    config: options by their names; a `PPOConfig` or `MAPPOConfig`, which counts as a whole; or the path of a TOML
        or YAML file.
    run_dir: the run's folder; None for a new one in ``runs/``.
    seed: the same seed gives the same run; None for that of ``config``, or 0.
    policy: "feedforward", "gru", the name of a function as ``--policy`` has it, a network, which is trained itself,
        or a function that makes one of the observation and the action space: see `PolicyNetwork`.
    callback: is called with the metrics of each iteration once they are saved, a dict by the columns of metrics.csv.
        Where it returns False, or raises, the run ends, and is saved.
    options: the other options of the command by their names, such as ``total_steps``, ``num_envs``, ``env_kwargs``,
        ``wrappers``, ``eval_every`` and ``num_workers``. ``resume=run.path`` resumes a run; pass the objects
        that it was given again. ``init_from=run.path`` begins with the weights of another run. With ``seeds=3`` there
        are three runs, and a list of them is returned.

    Raises ConfigError for bad values, UsageError where the run cannot begin there or the network cannot be trained,
    what envs and the callback raise, and KeyboardInterrupt after Ctrl-C. What was reached is saved in any case.

    >>> import muster, tempfile
    >>> options = {"total_steps": 256, "num_envs": 4, "num_steps": 32}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = muster.train("CartPole-v1", run_dir=f"{folder}/run", **options)
    ...     run.metrics["steps"]
    CartPole-v1  PPO, 256 steps, seed 0, 4 envs...
    array([128., 256.])
    """
    refuse_while_importing("muster.train")
    if config is None or isinstance(config, Mapping):
        table = dict(config or {})
    elif isinstance(config, (str, os.PathLike)):
        table = read_run_file(Path(config), OF_FILES)
    elif isinstance(config, PPOConfig):
        table = asdict(config)
    else:
        raise ConfigError("config", "a dict of options, a PPOConfig, or the path of a TOML file", config)
    named = {"env": env, "run_dir": run_dir, "seed": seed, "policy": policy}
    table |= {**options, **{name: one for name, one in named.items() if one is not None}}
    values, objects = _with_names(table)
    try:
        is_json = json.loads(json.dumps(kwargs := dict(values.get("env_kwargs", {})))) == kwargs
    except (TypeError, ValueError):
        is_json = False
    if not is_json:
        expected = (
            "values that JSON has, for runs that go on; a function of a module that builds the others, as env=, leads "
            "there again; functools.partial(make_env, ...) has to be handed over again"
        )
        raise ConfigError("env_kwargs", expected, kwargs)
    if "seeds" in values and isinstance(own := objects.get("policy"), nn.Module):
        raise ConfigError("policy", "with seeds a function, which makes a network for each run", type_name(own))
    ended = order_of(values, objects).carry_out(callback)
    if ended.stopped is not None:
        signal.raise_signal(ended.stopped)
    found = [Run(path, objects) for path in ended.paths]
    return found if "seeds" in values else found[0]


def _with_names(table: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The checked values, with names in the place of objects; and these, by the fields of `TrainingPlan`."""
    run = table.get("resume")
    settled = plan_of(Path(run)).names if isinstance(run, (str, os.PathLike)) else {}

    def name(place: str, one: Any) -> str:
        if isinstance(one, str):
            return one
        if not callable(one):
            raise ConfigError(place, "a name, or something that can be called", one)
        before = settled.get(place, "")
        return before if "<" in before else name_of(one)  # what no name leads to is what is handed over for it

    around = _several(table.pop("wrappers", table.pop("wrapper", None)) or ())
    given = {name: table[name] for name in ("env", "policy") if name in table}
    objects: dict[str, Any] = {place: one for place, one in given.items() if not isinstance(one, str)}
    if not all(isinstance(one, str) for one in around):
        objects["wrappers"] = tuple(absolute_name(one) if isinstance(one, str) else one for one in around)
    table |= {place: name(place, one) for place, one in given.items()}
    if around:
        table["wrapper"] = tuple(name(f"wrappers[{i}]", one) for i, one in enumerate(around))
    if "log" in table:
        log = table["log"] = _several(table["log"])
        if any(map(callable, log)):
            raise ConfigError("log", "names, such as csv and module:function; a function itself is callback=", log)
    return values_in(table, OF_CALLS), objects


def _several(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


@dataclass(frozen=True)
class TrainingOrder:
    """A plan, and what to do by it."""

    plan: TrainingPlan
    options: TrainOptions

    def carry_out(self, callback: runs.Callback | None = None) -> runs.Ended:
        """Trains, and says on stdout how it goes. Raises what envs and the callback raise, and as `runs.train`."""
        plan, options, console = self.plan, self.options, run_console()
        if options.seeds is not None:
            return runs.train_seeds(plan, options.seeds, console, run_dir=options.run_dir, callback=callback)
        with plan.trusting(options.resume, options.trust, unused=()):
            if options.resume:  # only now, as the folder has named loggers; a new run is refused before its first env
                require_login(plan.run.log)
            how = {"resume": options.resume is not None, "may_be_done": options.resume_or_begin}
            return runs.train(plan, console, run_dir=options.resume or options.run_dir, callback=callback, **how)


def order_of(values: Mapping[str, Any], objects: Mapping[str, Any]) -> TrainingOrder:
    """The order that values of the options give, by their names. objects: fields of the plan, for names in the values.

    Raises ConfigError, and what envs raise.
    """
    options = options_of(TrainOptions, values)
    if options.run_dir is not None:
        require_local(options.run_dir)
    named = {name: absolute_name(values[name]) for name in ("env", "policy") if name in values}
    listed = {name: tuple(map(absolute_name, values[name])) for name in ("wrapper", "log") if name in values}
    values = {**values, **named, **listed}
    if options.resume is not None:
        return _to_go_on(options, values, objects)
    if options.env is None:
        raise ConfigError("env", "named, such as CartPole-v1, unless resume names a run to go on with", None)
    run, (made, collectors) = options_of(RunOptions, values), makers_of(values)
    require_login(run.log)
    of_env = (options.env_kwargs, values.get("wrapper", ()))
    plan = replace(TrainingPlan(values["env"], PPOConfig(), "", *of_env, made, run, collectors), **objects)
    alone = {name: value for name, value in made.items() if name not in FOR_SEVERAL}
    alone |= {"env_kwargs": dict(options.env_kwargs), "wrappers": plan.around, "autoreset_mode": "same_step"}
    if run.worker_output != INHERIT:  # the run has no folder yet
        alone["worker_output"] = QUIET
    with _probe(plan, alone) as probe:
        preset = preset_of(probe, values["env"])  # its spaces decide, too
        if run.replayable is None:
            problem = (
                replay_problem(probe) if probe.replayable else "they have no states, see make_vec(replayable=True)"
            )
            plan = replace(plan, run=replace(run, replayable=not problem), not_replayed=problem)
    if not preset.agents and (of_agents := [name for name in fields_of(AgentsOptions) if name in values]):
        expected = f"left out, as it is for envs with agents, and {options.env} has one agent alone"
        raise ConfigError(of_agents[0], expected, values[of_agents[0]])
    kind = MAPPOConfig if preset.agents else PPOConfig
    plan = replace(plan, config=options_of(kind, {**preset.config, **values}), preset=preset.name)
    return TrainingOrder(plan, options)


def _probe(plan: TrainingPlan, options: Mapping[str, Any]) -> RunEnvs:
    """One of the plan's envs, with states where it can have them."""
    if plan.run.replayable is None:
        with suppress(ConfigError, UsageError):
            return make_vec(plan.made_from, 1, replayable=True, **options)
    return make_vec(plan.made_from, 1, **options)


def _to_go_on(options: TrainOptions, values: Mapping[str, Any], objects: Mapping[str, Any]) -> TrainingOrder:
    """The plan that the run was started with, changed by what a run may change; the rest may be said again."""
    run = options.resume
    assert run is not None
    plan = plan_of(run)
    config = asdict(plan.config)
    before = {"env": plan.env, "env_kwargs": plan.env_kwargs, "wrapper": plan.wrappers, **config}
    before |= {"num_collectors": plan.collectors.get("num_collectors"), "init_from": plan.run.init_from}
    # What a name led to may lie elsewhere by now.
    moved = [name for name in ("env", "policy") if leads_nowhere(before[name])]
    for name in before:
        if name not in (*CHANGES, *moved) and values.get(name, before[name]) != before[name]:
            raise ConfigError(name, f"{before[name]!r}, which the run in {run} has settled", values[name])
    if options.seeds is not None:
        raise ConfigError("seeds", "left out with resume, which goes on with a single run", options.seeds)
    if options.run_dir is not None and options.run_dir.resolve() != run.resolve():
        raise ConfigError("run_dir", f"left out with resume: {run} goes on in its own folder", str(options.run_dir))
    before = {**plan.options, **plan.collectors}
    if "cluster" in values and values["cluster"] is None:  # what is of the cluster goes with it
        before = {name: value for name, value in before.items() if name not in ("nodes", "working_dir")}
    made, collectors = makers_of({**before, **values})
    if "cluster" in collectors:
        needing = "The run's collectors are on a Ray cluster; --cluster none goes on here, and there this machine needs"
        require(needing, "muster-rl[ray]", "ray")
    changed: dict[str, Any] = {"config": options_of(type(plan.config), {**config, **values})}
    changed |= {"options": made, "collectors": collectors, "given": set(values)}
    changed |= {"run": options_of(RunOptions, {**asdict(plan.run), **values}), "env": values.get("env", plan.env)}
    return TrainingOrder(replace(plan, **{**changed, **objects}), options)
