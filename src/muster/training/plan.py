"""The plan of a run: what it trains on, and with which options; as the run folder's config.json holds it."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from muster.algorithms.ppo_config import POLICIES, MAPPOConfig, PPOConfig
from muster.arguments import check_options, fields_of, option
from muster.errors import ConfigError, UsageError, printable
from muster.extras import installed_version
from muster.recipes.known_envs import installed_alone, is_of_known_library, not_installed
from muster.recipes.named import callable_named, env_named, split_name
from muster.training.presets import preset_named
from muster.training.run_folder import read_config, require_room

CONFIGS: Mapping[str, type[PPOConfig]] = {"PPO": PPOConfig, "MAPPO": MAPPOConfig}
"""The options of each algorithm."""
KNOWN_LOGGERS = ("csv", "tensorboard", "wandb")
SINCE_AGENTS = ("policy", "memory_size", "sequence_length", "sprite")  # options that older runs have not


@dataclass(frozen=True)
class RunOptions:
    """Options of a run besides training, also when it is resumed."""

    eval_every: int | None = option(
        None, "env steps between two evaluations, in envs of their own; the best state is kept; None: none", least=1
    )
    eval_episodes: int = option(
        10, "whole episodes of an evaluation, the same each time, played by the likeliest actions", least=1
    )
    checkpoint_every: int | None = option(
        None, "env steps between two copies of the checkpoint; None: no copies", least=1
    )
    keep: int | None = option(None, "how many of these copies stay, the newest; None: all", least=1)
    device: str = option(
        "auto", "what computes: cpu, cuda, cuda:1 or mps; auto: the GPU for images and large networks, else the CPU"
    )
    log: tuple[str, ...] = option(
        ("csv", "tensorboard"),
        "where the metrics go: csv (always), tensorboard, wandb, and module:function or file.py:function, which gets "
        "each iteration's as a dict",
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
    def log_functions(self) -> list[str]:
        """The loggers that are functions of the user's."""
        return [name for name in self.log if name not in KNOWN_LOGGERS]


@dataclass(frozen=True)
class MakeVecOptions:
    """What steps the envs: arguments of `muster.make_vec` that a run may have."""

    num_workers: int | Literal["auto"] | None = option(
        None, "processes that share the envs; auto: as many as a trial finds safe; None: as in make_vec", least=1
    )
    backend: Literal["process", "thread", "serial"] = option("process", "what steps the envs")
    context: Literal["auto", "forkserver", "spawn", "fork"] = option("auto", "how workers start")
    caller_steps: bool = option(False, "the training process steps some of the envs itself")
    one_env_per_process: bool = option(False, "for libraries that can be loaded only once per process")
    threads_per_worker: int = option(1, "threads of OpenMP, BLAS and torch in each worker", least=1)
    start_timeout: float = option(300.0, "seconds for a worker to build its envs", above=0)
    step_timeout: float | None = option(None, "seconds for one step or reset of an env; None: any", above=0)
    close_timeout: float | None = option(60.0, "seconds for an env to close; None: any", above=0)
    on_failure: Literal["raise", "restart"] = option(
        "raise", "of an env or a worker; restart: its episode ends truncated"
    )
    max_restarts: int = option(10, "how often one worker may fail within a minute", least=0)
    memory_check: Literal["error", "warn", "off"] = option("error", "where the envs will not fit into memory")

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class CollectorsOptions:
    """In place of workers: arguments of `muster.MultiCollector` that a run may have."""

    num_collectors: int | None = option(
        None, "processes that step a share of the envs each, and act for it; None: this one acts for all", least=1
    )
    cluster: Literal["ray"] | None = option(None, "has collectors run on a cluster's machines; None: on this one")
    nodes: int | None = option(None, "machines of the cluster; None: those that have a free CPU", least=1)
    working_dir: str | None = option(None, "a folder that is copied to the cluster's machines; None: none")
    collect_timeout: float | None = option(None, "seconds for a collector's part of a rollout; None: any", above=0)
    preemptive_threshold: float | None = option(
        None,
        "the share of the collectors that a rollout waits for; rows that are missing are left out",
        above=0,
        most=1,
    )
    threads_per_collector: int = option(1, "threads of OpenMP, BLAS and torch in each", least=1)

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("nodes", "working_dir"):
            if self.cluster is None and (value := getattr(self, name)) is not None:
                raise ConfigError(name, "left out where no cluster is named", value)
        for name in fields_of(CollectorsOptions):
            if self.num_collectors is None and (value := getattr(self, name)) != getattr(CollectorsOptions, name):
                raise ConfigError(name, "left out without num_collectors", value)


_OF_BOTH = ("context", "start_timeout", "close_timeout", "on_failure", "max_restarts")
_INSTEAD = {"step_timeout": ", which have collect_timeout", "threads_per_worker": ", which have threads_per_collector"}


def makers_of(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of `make_vec` and of collectors among the values, as far as they have not the defaults.

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

    env: as `env_named` takes it.  preset: the name of the row that the options started from, and whose wrappers are
    around the env.  env_kwargs, wrappers: the user's own, the latter as `callable_named` takes them.
    options: further ones of `make_vec`, as far as they have not its own values.  run: what the run does besides.
    collectors: `CollectorsOptions` as far as they have not the defaults; empty where workers step the envs.
    objects: what was handed over in Python in the place of names, by the keys of `names`.
    """

    env: str
    config: PPOConfig
    preset: str
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    wrappers: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    run: RunOptions = RunOptions()
    collectors: Mapping[str, Any] = field(default_factory=dict)
    objects: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> dict[str, str]:
        """The names of the env, of the wrappers and, where the user has named one, of what makes the policy."""
        around = {f"wrappers[{i}]": name for i, name in enumerate(self.wrappers)}
        own = {} if self.config.policy in POLICIES else {"policy": self.config.policy}
        return {"env": self.env, **around, **own}

    def _found(self, place: str, find: Callable[[str], Any]) -> Any:
        """What was handed over in a place, or else what ``find`` finds. Raises UsageError where no name leads to it."""
        if place in self.objects:
            return self.objects[place]
        if "<" in (name := self.names[place]):  # as `name_of` has it
            raise UsageError(
                f"no name leads to {name}, which this run was begun with. Hand it over again: muster.train(env, "
                "resume=..., policy=...), or muster.load_policy(run, policy=...)"
            )
        return find(name)

    @property
    def made_from(self) -> Any:
        """The argument of `make_vec` for the env."""
        return self._found("env", env_named)

    @property
    def network(self) -> Any:
        """The argument ``policy`` of the algorithm: None where it makes one of its own."""
        return self._found("policy", callable_named) if "policy" in self.names else None

    @property
    def around(self) -> list[Callable[[Any], Any]]:
        """The user's wrappers."""
        return [self._found(f"wrappers[{i}]", callable_named) for i in range(len(self.wrappers))]

    @property
    def name(self) -> str:
        """The env's name without a file's folders, as it can be printed."""
        return printable(os.path.basename(self.env) if split_name(self.env)[0].endswith(".py") else self.env)

    @property
    def algorithm(self) -> str:
        return next(name for name, kind in CONFIGS.items() if type(self.config) is kind)

    @property
    def title(self) -> str:
        return f"{self.name}, {self.algorithm}, seed {self.config.seed}"

    def differences(self) -> str:
        """What is not as the preset has it, as ``name=value``; seed and total_steps are each run's own."""
        kind = type(self.config)
        preset = kind(**preset_named(self.preset).config)
        names = [one.name for one in dataclasses.fields(kind) if one.name not in ("seed", "total_steps")]
        values = {name: getattr(self.config, name) for name in names}
        changed = {name: value for name, value in values.items() if value != getattr(preset, name)}
        around = {"env_kwargs": dict(self.env_kwargs), "wrapper": printable(",".join(self.wrappers))}
        differing = {name: value for name, value in around.items() if value} | changed
        return " ".join(f"{name}={_in_words(value)}" for name, value in differing.items())

    def to_dict(self) -> dict[str, Any]:
        """The plan as config.json holds it."""
        run = {"env": self.env, "algorithm": self.algorithm, "preset": self.preset, **asdict(self.config)}
        made = {"env_kwargs": dict(self.env_kwargs), "wrappers": list(self.wrappers), "make_vec": dict(self.options)}
        besides = {"collectors": dict(self.collectors), "run": asdict(self.run), "with": _versions()}
        return {**run, **made, **besides}

    @contextmanager
    def trusting(self, run: Path | None, trust: bool) -> Iterator[None]:
        """Encloses what makes the envs of the run in the folder ``run``.

        Without trust nothing is imported from the working directory, neither here nor in workers that start meanwhile,
        but for what was handed over.
        Raises as `require_trust`.
        """
        if trust or run is None:
            yield
            return
        with nullcontext() if self.objects else installed_alone():
            self.require_trust(run)
            yield

    def require_trust(self, run: Path, *besides: str) -> None:
        """Raises ConfigError where to make the envs is to run code that the folder ``run`` of the run names.

        besides: further names of code that is to be run.
        """
        if code := [*self.code, *besides]:
            raise ConfigError(
                f"{run} names code: {printable(', '.join(code))}. To use it is to run that code. If you trust "
                "whoever made the folder, say trust=True in Python, or --trust on a command line"
            )

    @property
    def code(self) -> list[str]:
        """What makes envs and policies by code of its own: files, functions, and ids of modules that Muster does not
        know, or that no installed package has. Raises UsageError where it was handed over, and no name leads to it."""
        module, name = split_name(self.env)
        is_module = all(map(str.isidentifier, module.split("."))) and not module.endswith(".py")
        # A function is called, with arguments from the folder: that of a known library may do anything.
        is_id = module == "" or (is_module and is_of_known_library(module) and not name.isidentifier())
        places = [place for place in self.names if place not in self.objects and not (is_id and place == "env")]
        code = [self._found(place, str) for place in places]
        if not code and "env" not in self.objects and (package := not_installed(self.env)):
            code = [f"{self.env}, whose {package} no installed package has"]
        return code


def _in_words(value: Any) -> Any:
    """The value as a header has it, without brackets and quotes; control characters as escapes."""
    if isinstance(value, Mapping):
        return printable(",".join(f"{name}:{one}" for name, one in value.items()))
    return value


def plan_of(path: Path) -> TrainingPlan:
    """The plan of the run in the folder ``path``; what it names is not imported.

    Raises UsageError where this version of Muster cannot use it.
    """
    config = read_config(path)
    config = {**{name: getattr(PPOConfig, name) for name in SINCE_AGENTS}, **config}
    kind = CONFIGS.get(str(config.get("algorithm")))
    names = [] if kind is None else [field.name for field in dataclasses.fields(kind)]
    missing = [name for name in ("env", "preset", "env_kwargs", "wrappers", "make_vec", *names) if name not in config]
    if kind is None or missing:
        raise UsageError(
            f"{path / 'config.json'} is not that of a run of this version of Muster, by {' or '.join(CONFIGS)}"
            + (f": it lacks {', '.join(missing)}." if missing else ".")
        )
    kinds = {"env": str, "preset": str, "env_kwargs": dict, "wrappers": list, "make_vec": dict}
    kinds |= {"collectors": dict, "run": dict}
    config = {"collectors": {}, "run": {}, **config}  # not there in older runs
    unfit = [name for name, kind in kinds.items() if not isinstance(config[name], kind)]
    if not unfit:
        unfit += ["wrappers"] * (not all(isinstance(wrapper, str) for wrapper in config["wrappers"]))
        for part, known in (("make_vec", MakeVecOptions), ("collectors", CollectorsOptions)):
            unfit += [f"{part}.{name}" for name in config[part] if name not in fields_of(known)]
    if unfit:
        raise UsageError(
            f"{path / 'config.json'} is not as muster train writes it: look at {', '.join(map(repr, unfit))}."
        )
    try:
        options = kind(**{name: config[name] for name in names})
        run = options_of(RunOptions, config["run"])
        makers_of({**config["make_vec"], **config["collectors"]})
    except ConfigError as error:
        raise UsageError(f"{path / 'config.json'}: {error}") from None
    require_room(path / "config.json", 400 * options.num_envs)  # of the envs' recipes
    made = (config["env_kwargs"], tuple(config["wrappers"]), config["make_vec"])
    return TrainingPlan(config["env"], options, config["preset"], *made, run, config["collectors"])


def _versions() -> dict[str, Any]:
    versions = {name: installed_version(name) for name in ("muster-rl", "torch", "numpy", "gymnasium")}
    python, system = platform.python_version(), platform.platform()
    return {"python": python, "platform": system, **versions, "cores": os.cpu_count()}
