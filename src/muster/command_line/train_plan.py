"""What `muster train` is to do, from its words: the preset first, then ``--config``, then the options."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from muster.algorithms import PPOConfig
from muster.command_line.mistakes import Mistake, option_of
from muster.command_line.parser import HELP, asks_for_help, check_least, read_options, show_help
from muster.command_line.run_toml import read_run_toml
from muster.command_line.sudden_end import sudden_end_said
from muster.command_line.train_options import EnvOptions, TrainOptions, UncheckedPPO
from muster.recipes.named import absolute_name, callable_named
from muster.training.plan import RunOptions, TrainingPlan, plan_of
from muster.training.presets import preset_for
from muster.training.run_envs import open_envs
from muster.training.trust import named_code, read_plan

COMMAND = "muster train"
CHANGES = ("total_steps", "learning_rate")  # what PPO may do otherwise in a run that goes on
FOR_SEVERAL = ("num_workers", "caller_steps")  # options that one env alone cannot have
NOT_OF_MAKE_VEC = ("env_kwargs", "wrapper")
OWN_VALUES = "PPO's values below are its own; `muster train ENV --help` shows those of that env's preset."


@dataclass(frozen=True)
class TrainingOrder:
    """A plan, and where to train by it. learning_rate: as for `runs.train`.  seeds: as many runs, None for this one."""

    plan: TrainingPlan
    run: Path | None
    resume: bool
    learning_rate: float | None = None
    seeds: int | None = None


def training_order(words: Sequence[str]) -> TrainingOrder:
    """What the words order. Prints the help where they ask for it, and exits. Raises Mistake, and what envs raise."""
    without_help = [word for word in words if word not in HELP]
    first = read_options(TrainOptions(), without_help, COMMAND)  # not lenient: what it does not know, nobody does
    file = {} if first.config is None else read_run_toml(first.config)
    if first.resume is not None:
        return _to_go_on(first.resume, file, words)
    options = _layered(TrainOptions(), file, without_help)
    if options.env is None:
        if asks_for_help(words):
            show_help(options, COMMAND, OWN_VALUES)
        raise Mistake("name an ENV to train on, such as CartPole-v1, or a run to go on with: --resume RUN")
    if not asks_for_help(words):
        _check_alone(options)
    env, wrappers = absolute_name(options.env), tuple(map(absolute_name, options.make.wrapper))
    kwargs = dict(options.make.env_kwargs)
    around = list(map(callable_named, wrappers))
    alone = {name: value for name, value in _for_make_vec(options.make).items() if name not in FOR_SEVERAL}
    # Its spaces are part of what decides.
    ending = sudden_end_said(COMMAND, env, alone)
    with ending, open_envs(env, 1, env_kwargs=kwargs, wrappers=around, **alone) as probe:
        preset = preset_for(probe.spec, probe.single_observation_space, probe.single_action_space)
    options = _layered(TrainOptions().changed(preset.config), file, without_help)
    if asks_for_help(words):
        show_help(options, COMMAND, f"PPO's values below are those for {options.env}, by the preset {preset.name}.")
    made = _for_make_vec(options.make)
    plan = TrainingPlan(env, _checked(options.ppo), preset.name, kwargs, wrappers, made, options.run)
    return TrainingOrder(plan, options.run_dir, resume=False, seeds=options.seeds)


def _to_go_on(run: Path, file: Mapping[str, Any], words: Sequence[str]) -> TrainingOrder:
    """The plan that the run was started with, changed by what a run may change; the rest may be said again."""
    plan = plan_of(run)
    around = {"env": plan.env, "env_kwargs": plan.env_kwargs, "wrapper": plan.wrappers, **plan.options}
    before = TrainOptions().changed({**around, **dataclasses.asdict(plan.config), **dataclasses.asdict(plan.run)})
    if asks_for_help(words):
        show_help(before, COMMAND, f"The values below are those that {run} has now.")
    # The rate that it had reached, unless one is asked for: nan stands for that.
    options = _layered(before.changed({"learning_rate": math.nan}), file, words)
    rate = options.ppo.learning_rate
    ppo = options.ppo if not math.isnan(rate) else replace(options.ppo, learning_rate=plan.config.learning_rate)
    asked = {
        "env": absolute_name(options.env or plan.env) == plan.env,
        "env_kwargs": options.make.env_kwargs == plan.env_kwargs,
        "wrapper": tuple(map(absolute_name, options.make.wrapper)) == plan.wrappers,
        **{
            field.name: getattr(ppo, field.name) == getattr(plan.config, field.name)
            for field in dataclasses.fields(PPOConfig)
            if field.name not in CHANGES
        },
    }
    if settled := [option_of(name) for name, same in asked.items() if not same]:
        raise Mistake(f"the run has settled {', '.join(settled)}; --resume goes on with what it has")
    if options.seeds is not None:
        raise Mistake("--seeds is for new runs; --resume goes on with a single one")
    if options.run_dir is not None and options.run_dir.resolve() != run.resolve():
        raise Mistake("--run-dir is for new runs; --resume goes on in the folder of its own")
    said = _layered(TrainOptions(), file, words)
    named = {absolute_name(name) for name in (said.env, *said.make.wrapper) if name is not None}
    read_plan(run, trust=options.trust or named.issuperset(named_code(run)))  # not the folder alone names it then
    made, besides = _for_make_vec(options.make), _checked_run(options.run)
    plan = replace(plan, config=_checked(ppo), options=made, run=besides)
    return TrainingOrder(plan, run, resume=True, learning_rate=None if math.isnan(rate) else rate)


def _layered(base: TrainOptions, file: Mapping[str, Any], words: Sequence[str]) -> TrainOptions:
    """`base`, changed by the file's values, and then by the words."""
    below = base.changed(file)
    options = read_options(below.changed({"wrapper": ()}), words, COMMAND)  # tyro would add to those below
    return options if options.make.wrapper else options.changed({"wrapper": below.make.wrapper})


def _checked(ppo: UncheckedPPO) -> PPOConfig:
    return PPOConfig(**dataclasses.asdict(ppo))


def _check_alone(options: TrainOptions) -> None:
    """Raises Mistake, or ConfigError, for what is wrong whatever the env and its preset are."""
    check_least(options, seeds=1)
    if options.make.num_workers != "auto":
        check_least(options.make, num_workers=1)
    _checked_run(options.run)
    options.ppo.check_each()


def _checked_run(run: RunOptions) -> RunOptions:
    """The options, if they make sense. Raises Mistake."""
    check_least(run, eval_every=1, eval_episodes=1, checkpoint_every=1, keep=1)
    if run.keep is not None and run.checkpoint_every is None:
        raise Mistake("--keep says how many of the copies stay that --checkpoint-every STEPS makes; say that, too")
    return run


def _for_make_vec(make: EnvOptions) -> dict[str, Any]:
    """The options of `make_vec` that have not its own values."""
    return {
        field.name: getattr(make, field.name)
        for field in dataclasses.fields(EnvOptions)
        if field.name not in NOT_OF_MAKE_VEC and getattr(make, field.name) != field.default
    }
