"""What `muster train` is to do, from its words: the preset first, then ``--config``, then the options."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from muster.algorithms import MAPPOConfig, PPOConfig
from muster.algorithms.ppo_config import AgentsOptions
from muster.arguments import fields_of
from muster.command_line.command_options import TrainOptions
from muster.command_line.parser import HELP, Parser, near
from muster.errors import ConfigError
from muster.extras import imports_for, require
from muster.recipes.named import absolute_name, find_here, leads_nowhere
from muster.training import runs
from muster.training.console import run_console
from muster.training.loggers import require_login
from muster.training.plan import (
    CollectorsOptions,
    MakeVecOptions,
    RunOptions,
    TrainingPlan,
    makers_of,
    options_of,
    plan_of,
)
from muster.training.presets import Preset, preset_for, preset_for_agents, preset_named
from muster.training.run_envs import RunEnvs, open_envs
from muster.training.run_folder import holds_run, require_local
from muster.training.seeds import train_seeds
from muster.vector.multi_agent import MultiAgentVectorEnv

PARSER = Parser("muster train", (TrainOptions, RunOptions, MakeVecOptions, CollectorsOptions, PPOConfig, AgentsOptions))
OPTIONS = [name for kind in PARSER.kinds for name in fields_of(kind)]
OF_COMMAND = ("run_dir", "seeds", "resume", "resume_or_begin", "config", "trust")  # options that a file has not
CHANGES = ("total_steps", "learning_rate", "episode_info")  # what PPO may do otherwise in a run that goes on
FOR_SEVERAL = ("num_workers", "caller_steps")  # options that one env alone cannot have
OWN_VALUES = "The values below are the algorithms' own; `muster train ENV --help` shows those of that env's preset."


@dataclass(frozen=True)
class TrainingOrder:
    """A plan, and where to train by it. resume, may_be_done, learning_rate: as for `runs.train`.

    trust: whether the user agrees to all that the plan has: who starts a run has said it.
    seeds: as many runs, None for this one.
    """

    plan: TrainingPlan
    run: Path | None
    resume: bool = False
    may_be_done: bool = False
    learning_rate: float | None = None
    trust: bool = True
    seeds: int | None = None

    def carry_out(self, callback: runs.Callback | None = None) -> runs.Ended:
        """Trains, and says on stdout how it goes. Raises what envs and the callback raise, and as `runs.train`."""
        plan, console = self.plan, run_console()
        if self.seeds is not None:
            return train_seeds(plan, self.seeds, console, run_dir=self.run, callback=callback)
        going_on: dict[str, Any] = {name: getattr(self, name) for name in ("resume", "may_be_done", "learning_rate")}
        with plan.trusting(self.run, self.trust, unused=()):
            if self.resume:  # only now, as the folder has named loggers; a new run is refused before its first env
                require_login(plan.run.log)
            return runs.train(plan, console, run_dir=self.run, callback=callback, **going_on)


def training_order(words: Sequence[str]) -> TrainingOrder:
    """What the words order. Raises HelpShown, ConfigError, and what envs raise."""
    wants_help = any(word in HELP for word in words)
    by_words = PARSER.read([word for word in words if word not in HELP])
    file = by_words.get("config")
    values = {**({} if file is None else read_run_file(file)), **by_words}
    if values.get("resume_or_begin") and not wants_help:
        values = _resume_or_begin(values)
    run = values.get("resume")
    if run is None or values.get("trust"):
        find_here()  # and else only where the line names code, below
    if wants_help and run is None and "env" not in values:
        PARSER.show_help(values, OWN_VALUES)
    order = order_of({name: one for name, one in values.items() if name != "log" or not wants_help})
    if order.plan.names_code:
        find_here()
    if wants_help:
        plan = order.plan
        of_plan = {**dataclasses.asdict(plan.config), **plan.options, **plan.collectors, **dataclasses.asdict(plan.run)}
        by_preset = f"those for {values.get('env')}, by the preset '{plan.preset}'"
        said = by_preset if run is None else f"those that {run} has now"
        PARSER.show_help({**of_plan, **values}, f"The values below are {said}.")
    return order


def order_of(values: Mapping[str, Any], objects: Mapping[str, Any] | None = None) -> TrainingOrder:
    """What values of the options order, by their names. objects: as for `TrainingPlan`.

    Raises ConfigError, and what envs raise.
    """
    options = options_of(TrainOptions, values)
    if options.run_dir is not None:
        require_local(options.run_dir)
    named = {name: absolute_name(values[name]) for name in ("env", "policy") if name in values}
    listed = {name: tuple(map(absolute_name, values[name])) for name in ("wrapper", "log") if name in values}
    values = {**values, **named, **listed}
    if options.resume is not None:
        return _to_go_on(options, values, objects or {})
    if options.env is None:
        raise ConfigError("env", "named, such as CartPole-v1, unless resume names a run to go on with", None)
    run, (made, collectors) = options_of(RunOptions, values), makers_of(values)
    require_login(run.log)
    of_env = (options.env_kwargs, values.get("wrapper", ()))
    plan = TrainingPlan(values["env"], PPOConfig(), "", *of_env, made, run, collectors, objects or {})
    alone = {name: value for name, value in made.items() if name not in FOR_SEVERAL}
    alone |= {"env_kwargs": dict(options.env_kwargs), "wrappers": plan.around}
    with open_envs(plan.made_from, 1, **alone) as probe:  # its spaces decide, too
        preset = _preset_of(probe, plan.env)
    if not preset.agents and (of_agents := [name for name in fields_of(AgentsOptions) if name in values]):
        expected = f"left out, as it is for envs with agents, and {options.env} has one agent alone"
        raise ConfigError(of_agents[0], expected, values[of_agents[0]])
    kind = MAPPOConfig if preset.agents else PPOConfig
    plan = replace(plan, config=options_of(kind, {**preset.config, **values}), preset=preset.name)
    return TrainingOrder(plan, options.run_dir, seeds=options.seeds)


def _preset_of(envs: RunEnvs, name: str) -> Preset:
    """The preset for envs of that name."""
    if not isinstance(envs, MultiAgentVectorEnv):
        return preset_for(envs.spec, envs.single_observation_space, envs.single_action_space)
    seen, acts = envs.single_observation_space, envs.single_action_space
    return preset_for_agents(name, [seen[group] for group in envs.groups], [acts[group] for group in envs.groups])


def _resume_or_begin(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, with --resume where --run-dir holds a run. Raises ConfigError where they do not go together.

    The line has to name all that the run has settled: what is left out is not as the run has it.
    """
    options = options_of(TrainOptions, values)
    run = options.run_dir
    if run is None or options.env is None or options.resume is not None or options.seeds is not None:
        raise ConfigError("--resume-or-begin takes an ENV and --run-dir, and neither --resume nor --seeds")
    if not holds_run(run):
        return dict(values)
    plan = plan_of(run)
    config = dataclasses.asdict(options_of(type(plan.config), preset_named(plan.preset).config))
    left_out = {name: value for name, value in config.items() if name not in CHANGES}
    left_out |= {"env_kwargs": {}, "wrapper": (), **dataclasses.asdict(RunOptions())}
    values = {**left_out, **values, "resume": run}
    if values.get("learning_rate") == plan.config.learning_rate:
        del values["learning_rate"]  # said again, it would start at this rate again
    return values


def _to_go_on(options: TrainOptions, values: Mapping[str, Any], objects: Mapping[str, Any]) -> TrainingOrder:
    """The plan that the run was started with, changed by what a run may change; the rest may be said again."""
    run = options.resume
    assert run is not None
    plan = replace(plan_of(run), objects=objects, given=set(values))
    config = dataclasses.asdict(plan.config)
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
    besides = options_of(RunOptions, {**dataclasses.asdict(plan.run), **values})
    changed = options_of(type(plan.config), {**config, **values})
    plan = replace(
        plan, env=values.get("env", plan.env), config=changed, options=made, run=besides, collectors=collectors
    )
    rate = values.get("learning_rate")  # without one that is asked for, the rate that the run had reached
    return TrainingOrder(plan, run, True, options.resume_or_begin, rate, options.trust)


def read_run_file(path: Path) -> dict[str, Any]:
    """The values of a run's file by the names of their fields: YAML by its suffix, else TOML.

    Raises ConfigError, which names file and key, and ImportError without PyYAML.
    """
    try:
        text = path.read_text(encoding="utf-8")
        table = _read_yaml(text) if path.suffix in (".yaml", ".yml") else tomllib.loads(text)
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--config {path} cannot be read: {problem}") from None
    try:
        return values_in(table, [name for name in OPTIONS if name not in OF_COMMAND])
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def values_in(table: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The values of a table by the names of their fields. Raises ConfigError for what is not in ``known``."""
    values = {}
    for key, written in table.items():
        name = {"kwargs": "env_kwargs", "wrappers": "wrapper"}.get(key, key.replace("-", "_"))
        if name not in known:
            own = "; what the env itself takes goes into env_kwargs"
            raise ConfigError(f"{key} is no option of the env or of a run{near(name, known) or own}")
        try:
            values[name] = PARSER.value(name, written)
        except ConfigError as error:
            raise ConfigError(key, error.expected, error.got) from None
    return values


def _read_yaml(text: str) -> dict[str, Any]:
    """The dict that the text holds. Raises ConfigError, and ImportError without PyYAML."""
    with imports_for("--config in YAML needs", "muster-rl[loggers]", "yaml"):
        import yaml
    try:
        table = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark, reason = getattr(error, "problem_mark", None), getattr(error, "reason", type(error).__name__)
        where = f" (line {mark.line + 1})" if mark else ""
        raise ConfigError(f"{getattr(error, 'problem', None) or reason}{where}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"it holds no names with values, as in num_envs: 8, but {type(table).__name__}")
    return {str(key): value for key, value in table.items()}
