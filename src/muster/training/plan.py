"""The plan of a run: what it trains on, and with which options; as the run folder's config.json holds it."""

from __future__ import annotations

import dataclasses
import inspect
import operator
import os
import platform
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from muster.algorithms.ppo_config import POLICIES, MAPPOConfig, PPOConfig
from muster.arguments import check_options, fields_of, option, option_of
from muster.errors import ConfigError, RecipeError, RunConfigError, UsageError, printable
from muster.extras import installed_version
from muster.pool.output import INHERIT, QUIET
from muster.recipes.known_envs import installed_alone, is_of_known_library, not_installed
from muster.recipes.named import callable_named, env_named, name_of, split_name
from muster.rollout.episodes import reported
from muster.rollout.multi_collector import MultiCollector
from muster.training.events import CHARTS
from muster.training.presets import preset_named
from muster.training.run_folder import read_config, require_room
from muster.vector.make import make_vec

CONFIGS: Mapping[str, type[PPOConfig]] = {"PPO": PPOConfig, "MAPPO": MAPPOConfig}
"""The options of each algorithm."""
IN_FOLDER = ("csv", "tensorboard")  # the loggers that write into the run's folder alone
KNOWN_LOGGERS = (*IN_FOLDER, "wandb")


_VEC, _SET = (
    SimpleNamespace(**{name: one.default for name, one in inspect.signature(maker).parameters.items()})
    for maker in (make_vec, MultiCollector)
)


@dataclass(frozen=True)
class RunOptions:
    """Options of a run apart from training, also when it is resumed."""

    eval_every: int | None = option(
        None, "env steps between two evaluations, in envs of their own; the best state is kept; None: none", least=1
    )
    eval_episodes: int = option(
        10, "whole episodes of an evaluation, the same each time, by likeliest actions", least=1
    )
    checkpoint_every: int | None = option(None, "env steps between two copies of the checkpoint; None: none", least=1)
    keep: int | None = option(None, "how many of these copies stay, the newest; None: all", least=1)
    init_from: str | None = option(None, "another run's folder: begin with its weights and statistics where they fit")
    worker_output: str = option(
        _VEC.worker_output,
        "what workers print: inherit, quiet, or a folder for logs, in the run's; not kept for a resume",
    )
    replayable: bool | None = option(
        None,
        "checkpoints hold the states of envs, which a resumed run plays again by seed and actions, so that it goes on "
        "bit for bit; None: where a trial shows that the envs can",
    )
    device: str = option("auto", "cpu, cuda, cuda:1 or mps; auto: the GPU for images and large networks, else the CPU")
    log: tuple[str, ...] = option(
        ("csv", "tensorboard"),
        "csv (always), tensorboard, wandb, and module:function or file.py:function, which gets each row as a dict",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.keep is not None and self.checkpoint_every is None:
            raise ConfigError("keep", "left out where no copies of the checkpoint are made", self.keep)
        if len(set(self.log)) < len(self.log):
            raise ConfigError("log", "a list that names each logger once", self.log)
        if unknown := [name for name in self.log if name not in KNOWN_LOGGERS and not all(split_name(name))]:
            raise ConfigError("log", f"{', '.join(KNOWN_LOGGERS)}, module:function or file.py:function", unknown[0])

    @property
    def logs_in_run(self) -> bool:
        """True if what workers print goes into the run's folder."""
        output = self.worker_output  # make_vec refuses a scheme
        return output not in (INHERIT, QUIET) and "://" not in output and not Path(output).is_absolute()


@dataclass(frozen=True)
class MakeVecOptions:
    """The steppers of the envs: arguments of `muster.make_vec` that a run may have."""

    num_workers: int | Literal["auto"] | None = option(
        _VEC.num_workers,
        "processes that share the envs; auto: as many as a trial finds safe; None: by make_vec",
        least=1,
    )
    backend: Literal["process", "thread", "serial"] = option(_VEC.backend, "what steps the envs")
    context: Literal["auto", "forkserver", "spawn", "fork"] = option(_VEC.context, "how workers start")
    caller_steps: bool = option(_VEC.caller_steps, "the training process steps some of the envs itself")
    one_env_per_process: bool = option(_VEC.one_env_per_process, "for libraries that can be loaded once per process")
    threads_per_worker: int = option(_VEC.threads_per_worker, "threads of OpenMP, BLAS and torch in a worker", least=1)
    start_timeout: float = option(_VEC.start_timeout, "seconds for a worker to build its envs", above=0)
    step_timeout: float | None = option(_VEC.step_timeout, "seconds for a step or reset of an env; None: any", above=0)
    close_timeout: float | None = option(_VEC.close_timeout, "seconds for an env to close; None: any", above=0)
    on_failure: Literal["raise", "restart"] = option(
        _VEC.on_failure, "of an env or a worker; restart: its episode ends truncated"
    )
    max_restarts: int = option(_VEC.max_restarts, "how often one worker may fail within a minute", least=0)
    memory_check: Literal["error", "warn", "off"] = option(_VEC.memory_check, "where envs will not fit into memory")

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class CollectorsOptions:
    """In place of workers: arguments of `muster.MultiCollector` that a run may have."""

    num_collectors: int | None = option(
        None, "processes that step a share of the envs each, and act for it; None: this one acts for all", least=1
    )
    cluster: Literal["ray"] | None = option(_SET.cluster, "collectors run on its machines; None: on this one")
    nodes: int | None = option(None, "machines of the cluster; None: those that have a free CPU", least=1)
    working_dir: str | None = option(None, "a folder that is copied to the cluster's machines; None: none")
    collect_timeout: float | None = option(_SET.collect_timeout, "seconds for a part of a rollout; None: any", above=0)
    preemptive_threshold: float | None = option(
        _SET.preemptive_threshold,
        "the share of the collectors that a rollout waits for; rows that are missing are left out",
        above=0,
        most=1,
    )
    threads_per_collector: int = option(
        _SET.threads_per_collector, "threads of OpenMP, BLAS and torch in each", least=1
    )

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("nodes", "working_dir"):
            if self.cluster is None and (value := getattr(self, name)) is not None:
                raise ConfigError(name, "left out where no cluster is named", value)
        for name in fields_of(CollectorsOptions):
            if self.num_collectors is None and (value := getattr(self, name)) != getattr(CollectorsOptions, name):
                raise ConfigError(name, "left out without num_collectors", value)


# Of config.json.
PARTS: Mapping[str, type] = {"run": RunOptions, "make_vec": MakeVecOptions, "collectors": CollectorsOptions}
_OF_BOTH = ("context", "start_timeout", "close_timeout", "on_failure", "max_restarts")
_INSTEAD = {"step_timeout": ", which have collect_timeout", "threads_per_worker": ", which have threads_per_collector"}


def makers_of(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of `make_vec` and of collectors among the values, as far as they are not the defaults.

    Raises ConfigError, also for one of `make_vec` that collectors do not have.
    """
    made, collectors = (
        {name: value for name, value in asdict(options_of(kind, values)).items() if value != getattr(kind, name)}
        for kind in (MakeVecOptions, CollectorsOptions)
    )
    for name in made if collectors else ():
        if name not in _OF_BOTH:
            raise ConfigError(name, f"left out with collectors{_INSTEAD.get(name, '')}", made[name])
    return made, collectors


def options_of(kind: type, values: Mapping[str, Any]) -> Any:
    """The dataclass with the values that are its own. Raises ConfigError."""
    return kind(**{name: values[name] for name in fields_of(kind) if name in values})


@dataclass(frozen=True)
class TrainingPlan:
    """The env and the options of a run.

    env, wrappers: names, as `env_named` and `callable_named` take them, or what was handed over in Python.
    policy: what was handed over for `config.policy`, which has its name then.  env_kwargs: the user's own.
    preset: the name of the row that the options started from; its wrappers are around the env.
    options: further ones of `make_vec`, as far as they are not its defaults.  run: what else the run does.
    collectors: `CollectorsOptions` as far as they are not the defaults; empty where workers step the envs.
    given: the options that the user has named anew; the folder of a run that goes on holds the others.
    not_replayed: why a trial has found that the envs cannot be.
    """

    env: Any
    config: PPOConfig
    preset: str
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    wrappers: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    run: RunOptions = RunOptions()
    collectors: Mapping[str, Any] = field(default_factory=dict)
    policy: Any = None
    given: Collection[str] = ()
    not_replayed: str = ""

    def __post_init__(self) -> None:
        columns = [reported(name) for name in self.config.episode_info or ()]
        if taken := [name for name in columns if name.split("/")[0] in ("steps", *CHARTS) or columns.count(name) > 1]:
            raise ConfigError("episode_info", "names that no other column of metrics.csv has", taken[0])

    @property
    def names(self) -> dict[str, str]:
        """The names of the env, of the wrappers and, where the user has named one, of what makes the policy."""
        around = {f"wrappers[{i}]": _as_name(one) for i, one in enumerate(self.wrappers)}
        own = {} if self.config.policy in POLICIES else {"policy": self.config.policy}
        return {"env": _as_name(self.env), **around, **own}

    @property
    def without_objects(self) -> TrainingPlan:
        """The plan as its run's folder has it."""
        wrappers = tuple(map(_as_name, self.wrappers))
        return replace(self, env=_as_name(self.env), wrappers=wrappers, policy=None, given=())

    @cached_property
    def made_from(self) -> Any:
        """The argument of `make_vec` for the env."""
        return _found("env", self.env, env_named)

    @cached_property
    def network(self) -> Any:
        """The argument ``policy`` of the algorithm: None where it makes one of its own."""
        if self.policy is not None or self.config.policy in POLICIES:
            return self.policy
        try:
            return _found("policy", self.config.policy, callable_named)
        except (RecipeError, ModuleNotFoundError) as error:
            raise RecipeError(
                f"{str(error).rstrip('.')}. If the run's policy has moved, hand it over: "
                "muster.load_policy(run, policy=...), or muster.train(resume=run, policy=...)"
            ) from error

    @cached_property
    def around(self) -> list[Callable[[Any], Any]]:
        """The user's wrappers."""
        return [_found(f"wrappers[{i}]", one, callable_named) for i, one in enumerate(self.wrappers)]

    @property
    def name(self) -> str:
        """The env's name without a file's folders, as it can be printed."""
        name = _as_name(self.env)
        return printable(os.path.basename(name) if split_name(name)[0].endswith(".py") else name)

    @property
    def algorithm(self) -> str:
        return next(name for name, kind in CONFIGS.items() if type(self.config) is kind)

    @property
    def title(self) -> str:
        return f"{self.name}, {self.algorithm}, seed {self.config.seed}"

    def differences(self) -> str:
        """Values other than the preset's, as ``name=value``; but for what does not change how a run learns."""
        left_out = ("seed", "total_steps", "episode_info")
        preset = type(self.config)(**preset_named(self.preset).config)
        values = {name: one for name, one in asdict(self.config).items() if name not in left_out}
        changed = {name: one for name, one in values.items() if one != getattr(preset, name)}
        around = {"env_kwargs": dict(self.env_kwargs), "wrapper": ",".join(map(_as_name, self.wrappers))}
        around |= {"init_from": self.run.init_from or ""}
        differing = {name: one for name, one in around.items() if one} | changed
        return " ".join(f"{name}={_in_words(one)}" for name, one in differing.items())

    def printing_to(self, folder: Path | None) -> TrainingPlan:
        """The plan with `run.worker_output` as `make_vec` takes it, for a run in this folder."""
        if folder is None or not self.run.logs_in_run:
            return self
        return replace(self, run=replace(self.run, worker_output=str(folder / self.run.worker_output)))

    def to_dict(self) -> dict[str, Any]:
        """The plan as config.json holds it."""
        run = {"env": _as_name(self.env), "algorithm": self.algorithm, "preset": self.preset, **asdict(self.config)}
        made = {"env_kwargs": dict(self.env_kwargs), "wrappers": list(map(_as_name, self.wrappers))}
        kept = {name: value for name, value in asdict(self.run).items() if name != "worker_output"}
        parts = {"run": kept, "make_vec": dict(self.options), "collectors": dict(self.collectors)}
        return {**run, **made, **parts, "with": _versions()}

    @contextmanager
    def trusting(self, run: Path | None, trust: bool, **kept: Collection[str]) -> Iterator[None]:
        """Encloses what makes the envs of the run in the folder ``run``.

        Without trust nothing is imported from the working directory, neither here nor in workers that start meanwhile,
        but for what was handed over or named anew.
        Raises as `require_trust`, which has the arguments ``kept``.
        """
        if trust or run is None:
            yield
            return
        self.require_trust(run, **kept)
        with nullcontext() if self.names_code else installed_alone():
            yield

    @property
    def names_code(self) -> bool:
        """True if the user has named code anew, or handed it over; it may lie in the working directory."""
        names = [name for place, name in self.names.items() if place.partition("s[")[0] in self.given]
        return any(":" in name for name in [*names, *(self.run.log if "log" in self.given else ())])

    @property
    def reaching(self) -> dict[str, Any]:
        """The values that reach out of the run's folder, by the names of config.json's fields."""
        fields = self.to_dict()
        for part in PARTS:
            fields |= {f"{part}.{name}": value for name, value in fields[part].items()}
        return {name: fields[name] for name, stays in JUDGED.items() if not stays(fields.get(name))}

    def require_trust(self, run: Path, *, unused: Collection[str] = ("collectors", "run")) -> None:
        """Raises ConfigError for what reaches out of the folder ``run`` of the run, but for what the user has given.

        unused: the parts of config.json that nothing is done with. Raises UsageError where no name leads to what was
        handed over.
        """
        found = {name: one for name, one in self.reaching.items() if name.partition(".")[0] not in unused}
        options = {name: {"wrappers": "wrapper"}.get(name, name.rpartition(".")[2]) for name in found}
        refused = {name: one for name, one in found.items() if options[name] not in self.given}
        if not refused:
            return
        for place, name in self.names.items():
            if place.partition("[")[0] in refused:
                _found(place, name, str)
        if "env" in refused and is_known_id(self.env):
            refused["env"] += f", and no installed package has {not_installed(self.env)}"
        texts = (", ".join(one) if isinstance(one, (list, tuple)) else str(one) for one in refused.values())
        handed = ", or hand the policy over by policy=," if "policy" in refused else ","
        again = ", ".join(f"{name} by {option_of(options[name])}" for name in refused)
        raise ConfigError(
            f"{run} names code, or what lies outside of it: {', '.join(printable(text)[:200] for text in texts)}. With "
            f"--resume, name it anew: {again}. If you trust whoever made the folder, say trust=True in Python{handed} "
            "or --trust on a command line"
        )


def is_known_id(env: str) -> bool:
    """True for an env id of a known library, which may not be installed."""
    module, name = split_name(env)
    is_module = all(map(str.isidentifier, module.split("."))) and not module.endswith(".py")
    # A function is called, with arguments from the folder: that of a known library may do anything.
    return module == "" or (is_module and is_of_known_library(module) and not name.isidentifier())


def are_words(value: Any) -> bool:
    """True if all that JSON holds there are numbers, flags, None, and words that are no path, address or module."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str) and set(one) & set("/\\:"):
            return False
        left += [*one, *one.values()] if isinstance(one, dict) else one if isinstance(one, (list, tuple)) else []
    return True


# The other fields are numbers, flags, words of Muster's own, and the folder that a run was begun from, which resuming
# does not read.
JUDGED: Mapping[str, Callable[[Any], bool]] = {
    "env": lambda env: is_known_id(env) and not not_installed(env),
    "env_kwargs": are_words,
    "wrappers": operator.not_,
    "policy": POLICIES.__contains__,
    "run.device": lambda device: re.fullmatch(r"auto|cpu|mps|cuda(:[0-9]+)?", device) is not None,
    "run.log": set(IN_FOLDER).issuperset,
    "collectors.cluster": operator.not_,
    "collectors.working_dir": operator.not_,
}
"""Says for a value of the field if it stays in the folder: reaches no code, files, devices, machines or servers."""


def _in_words(value: Any) -> str:
    """The value as a header has it, without brackets and quotes; control characters as escapes."""
    is_named = isinstance(value, Mapping)
    return printable(",".join(f"{name}:{one}" for name, one in value.items()) if is_named else str(value))


def plan_of(path: Path) -> TrainingPlan:
    """The plan of the run in the folder ``path``; what it names is not imported.

    Raises UsageError where there is none, RunConfigError where this version of Muster cannot use it.
    """
    kinds = {"algorithm": str, "env": str, "preset": str, "env_kwargs": dict, "wrappers": list}
    kinds |= {**dict.fromkeys(PARTS, dict), "with": dict, "spaces": dict}
    # Not all of these are there in older runs.
    config = {**dict.fromkeys(kinds), "collectors": {}, "run": {}, "with": {}, "spaces": {}, **read_config(path)}
    kind = CONFIGS.get(str(config["algorithm"]))
    names = [field.name for field in dataclasses.fields(kind or PPOConfig)]
    unfit = [one for one in config if one not in names and not isinstance(config[one], kinds.get(one, ()))]
    if not unfit:
        unfit += ["wrappers"] * (not all(isinstance(wrapper, str) for wrapper in config["wrappers"]))
        for part, known in PARTS.items():
            unfit += [f"{part}.{name}" for name in config[part] if name not in fields_of(known)]
    if kind is None or unfit:
        raise RunConfigError(
            f"{path / 'config.json'} is not as this version of muster train writes it: look at "
            f"{', '.join(map(repr, unfit or ['algorithm']))}."
        )
    try:
        options, run = options_of(kind, config), options_of(RunOptions, {**config["run"], "worker_output": INHERIT})
        makers_of({**config["make_vec"], **config["collectors"]})
    except ConfigError as error:
        raise RunConfigError(f"{path / 'config.json'}: {error}") from None
    # Of recipes, and of eight numbers a step.
    require_room(path / "config.json", 400 * options.num_envs + 32 * options.batch_size)
    made = (config["env_kwargs"], tuple(config["wrappers"]), config["make_vec"])
    return TrainingPlan(config["env"], options, config["preset"], *made, run, config["collectors"])


def _found(place: str, one: Any, find: Callable[[str], Any]) -> Any:
    """The object that was handed over, or what ``find`` finds. Raises UsageError where no name leads to it."""
    if isinstance(one, str) and "<" in one:  # as `name_of` has it
        again = ", or muster.load_policy(run, policy=...)" if place == "policy" else ""
        raise UsageError(
            f"no name leads to {one}, which this run was begun with as {place}. Hand it over again: muster.train("
            f"env, resume=..., policy=...){again}"
        )
    return find(one) if isinstance(one, str) else one


def _as_name(one: Any) -> str:
    return one if isinstance(one, str) else name_of(one)


def _versions() -> dict[str, Any]:
    machine = {"python": platform.python_version(), "platform": platform.platform(), "cores": os.cpu_count()}
    return machine | {name: installed_version(name) for name in ("muster-rl", "torch", "numpy", "gymnasium")}
