"""What `muster train` is to do, from its words: the preset first, then ``--config``, then the options."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from muster.algorithms import MAPPOConfig, PPOConfig
from muster.algorithms.ppo_config import AgentsOptions
from muster.arguments import fields_of
from muster.command_line.command_options import TrainOptions
from muster.command_line.parser import HELP, Parser, near, option_of
from muster.errors import ConfigError
from muster.recipes.named import absolute_name, callable_named, find_here
from muster.training.plan import (
    CollectorsOptions,
    MakeVecOptions,
    RunOptions,
    TrainingPlan,
    makers_of,
    options_of,
    plan_of,
)
from muster.training.presets import Preset, preset_for, preset_for_agents
from muster.training.run_envs import RunEnvs, open_envs
from muster.vector.multi_agent import MultiAgentVectorEnv

PARSER = Parser("muster train", (TrainOptions, RunOptions, MakeVecOptions, CollectorsOptions, PPOConfig, AgentsOptions))
OF_COMMAND = ("run_dir", "seeds", "resume", "config", "trust")  # options that a file has not
CHANGES = ("total_steps", "learning_rate")  # what PPO may do otherwise in a run that goes on
FOR_SEVERAL = ("num_workers", "caller_steps")  # options that one env alone cannot have
OWN_VALUES = "The values below are the algorithms' own; `muster train ENV --help` shows those of that env's preset."


@dataclass(frozen=True)
class TrainingOrder:
    """A plan, and where to train by it. learning_rate: as for `runs.train`.  seeds: as many runs, None for this one.

    trust: whether the user agrees to the code that the plan names: who starts a run has named it.
    """

    plan: TrainingPlan
    run: Path | None
    resume: bool
    trust: bool = True
    learning_rate: float | None = None
    seeds: int | None = None


def training_order(words: Sequence[str]) -> TrainingOrder:
    """What the words order. Raises HelpShown, ConfigError, and what envs raise."""
    wants_help = any(word in HELP for word in words)
    by_words = PARSER.read([word for word in words if word not in HELP])
    file = by_words.get("config")
    values = {**({} if file is None else read_run_toml(file)), **by_words}
    options = options_of(TrainOptions, values)
    if options.resume is None or options.trust:
        find_here()
    if options.resume is not None:
        return _to_go_on(options, values, wants_help)
    if options.env is None:
        if wants_help:
            PARSER.show_help(values, OWN_VALUES)
        raise ConfigError("name an ENV to train on, such as CartPole-v1, or a run to go on with: --resume RUN")
    if "policy" in values:
        values["policy"] = absolute_name(values["policy"])
    run, (made, collectors) = options_of(RunOptions, values), makers_of(values)
    env, wrappers = absolute_name(options.env), tuple(map(absolute_name, options.wrapper))
    kwargs, around = dict(options.env_kwargs), list(map(callable_named, wrappers))
    alone = {name: value for name, value in made.items() if name not in FOR_SEVERAL}
    with open_envs(env, 1, env_kwargs=kwargs, wrappers=around, **alone) as probe:  # its spaces decide, too
        preset = _preset_of(probe, env)
    if not preset.agents and (of_agents := [name for name in fields_of(AgentsOptions) if name in values]):
        raise ConfigError(f"{option_of(of_agents[0])} is for envs with agents, and {options.env} has one agent alone")
    kind = MAPPOConfig if preset.agents else PPOConfig
    values = {**preset.config, **values}
    if wants_help:
        PARSER.show_help(values, f"The values below are those for {options.env}, by the preset {preset.name}.")
    plan = TrainingPlan(env, options_of(kind, values), preset.name, kwargs, wrappers, made, run, collectors)
    return TrainingOrder(plan, options.run_dir, resume=False, seeds=options.seeds)


def _preset_of(envs: RunEnvs, name: str) -> Preset:
    """The preset for envs of that name."""
    if not isinstance(envs, MultiAgentVectorEnv):
        return preset_for(envs.spec, envs.single_observation_space, envs.single_action_space)
    seen, acts = envs.single_observation_space, envs.single_action_space
    return preset_for_agents(name, [seen[group] for group in envs.groups], [acts[group] for group in envs.groups])


def _to_go_on(options: TrainOptions, values: Mapping[str, Any], wants_help: bool) -> TrainingOrder:
    """The plan that the run was started with, changed by what a run may change; the rest may be said again."""
    run = options.resume
    assert run is not None
    plan = plan_of(run)
    config = dataclasses.asdict(plan.config)
    before = {"env": plan.env, "env_kwargs": plan.env_kwargs, "wrapper": plan.wrappers, **config}
    before["num_collectors"] = plan.collectors.get("num_collectors")
    if wants_help:
        now = {**before, **plan.options, **plan.collectors, **dataclasses.asdict(plan.run), **values}
        PARSER.show_help(now, f"The values below are those that {run} has now.")
    asked = {**values, "env": plan.env if options.env is None else absolute_name(options.env)}
    asked["wrapper"] = tuple(map(absolute_name, options.wrapper)) or plan.wrappers
    if settled := [name for name in before if name not in CHANGES and asked.get(name, before[name]) != before[name]]:
        raise ConfigError(
            f"the run has settled {', '.join(map(option_of, settled))}; --resume goes on with what it has"
        )
    if options.seeds is not None:
        raise ConfigError("--seeds is for new runs; --resume goes on with a single one")
    if options.run_dir is not None and options.run_dir.resolve() != run.resolve():
        raise ConfigError("--run-dir is for new runs; --resume goes on in the folder of its own")
    if not options.trust:
        plan.require_trust(run)
    made, collectors = makers_of({**plan.options, **plan.collectors, **values})
    besides = options_of(RunOptions, {**dataclasses.asdict(plan.run), **values})
    plan = replace(
        plan,
        config=options_of(type(plan.config), {**config, **values}),
        options=made,
        run=besides,
        collectors=collectors,
    )
    # Without one that is asked for, the rate that the run had reached.
    return TrainingOrder(plan, run, True, options.trust, learning_rate=values.get("learning_rate"))


def read_run_toml(path: Path) -> dict[str, Any]:
    """The values of a run's TOML file by the names of their fields. Raises ConfigError, which names file and key."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--config {path} cannot be read: {problem}") from None
    known = [name for kind in PARSER.kinds for name in fields_of(kind) if name not in OF_COMMAND]
    values = {}
    for key, written in table.items():
        name = "env_kwargs" if key == "kwargs" else key.replace("-", "_")
        if name not in known:
            raise ConfigError(f"{path}: {key} is no option of the env or of a run{near(name, known)}")
        try:
            values[name] = PARSER.value(name, written)
        except ConfigError as error:
            raise ConfigError(error.naming(f"{path}: {key}")) from None
    return values
