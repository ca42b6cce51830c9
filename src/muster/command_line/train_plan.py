"""The order of `muster train`, from its words: the preset first, then ``--config``, then the options."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from muster.command_line.parser import HELP, Parser
from muster.errors import ConfigError
from muster.recipes.named import find_here
from muster.training.plan import RunOptions, options_of, plan_of
from muster.training.presets import preset_named
from muster.training.run_folder import holds_run
from muster.training.train import CHANGES, KINDS, OF_FILES, TrainingOrder, TrainOptions, order_of
from muster.training.values import read_run_file

PARSER = Parser("muster train", KINDS)
OWN_VALUES = "The values below are the algorithms' own; `muster train ENV --help` shows those of that env's preset."


def training_order(words: Sequence[str]) -> TrainingOrder:
    """The order that the words give. Raises HelpShown, ConfigError, and what envs raise."""
    wants_help = any(word in HELP for word in words)
    by_words = PARSER.read([word for word in words if word not in HELP])
    file = by_words.get("config")
    values = {**({} if file is None else read_run_file(file, OF_FILES)), **by_words}
    if values.get("resume_or_begin") and not wants_help:
        values = _resume_or_begin(values)
    run = values.get("resume")
    if run is None or values.get("trust"):
        find_here()  # and else only where the line names code, below
    if wants_help and run is None and "env" not in values:
        PARSER.show_help(values, OWN_VALUES)
    order = order_of({name: one for name, one in values.items() if name != "log" or not wants_help}, {})
    if order.plan.names_code:
        find_here()
    if wants_help:
        plan = order.plan
        of_plan = {**dataclasses.asdict(plan.config), **plan.options, **plan.collectors, **dataclasses.asdict(plan.run)}
        by_preset = f"those for {values.get('env')}, by the preset '{plan.preset}'"
        said = by_preset if run is None else f"those that {run} has now"
        PARSER.show_help({**of_plan, **values}, f"The values below are {said}.")
    return order


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
