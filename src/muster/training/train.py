"""`muster.train`: the command ``muster train`` for Python, with the same options."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from muster.errors import ConfigError
from muster.extras import imports_for
from muster.introspection import type_name
from muster.recipes.named import name_of, refuse_while_importing

with imports_for(
    "muster.train needs", "muster-rl[train]", "torch", "tensordict", "safetensors", "rich", "tensorboard", "matplotlib"
):
    from torch import nn

    from muster.algorithms import PPOConfig
    from muster.command_line.train_plan import OPTIONS, order_of, read_run_file, values_in
    from muster.training.plan import plan_of
    from muster.training.run import Run
    from muster.training.runs import Callback
    from muster.training.stopping import raise_again


def train(
    env: str | Callable[..., Any] | None = None,
    config: Mapping[str, Any] | PPOConfig | str | os.PathLike[str] | None = None,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    seed: int | None = None,
    policy: Any = None,
    callback: Callback | None = None,
    **options: Any,
) -> Any:
    """Trains PPO, or MAPPO where an env has agents, as ``muster train`` does, and returns the `Run`.

    With the same values both leave the same weights and the same metrics. Options override ``config``, and ``config``
    overrides the preset for the env's kind. ``run.path`` is the folder, ``run.metrics`` has its columns,
    ``run.policy`` acts, ``run.plot()`` is a figure, and ``run.film()`` a film.

    env: an env id, ``module:factory``, ``file.py:factory``, or a function or class that makes one env. None with
        ``resume``, where a name leads to the run's env.
    config: options by their names; a `PPOConfig` or `MAPPOConfig`, all of whose values count; or the path of a TOML
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
        table = read_run_file(Path(config))
    elif isinstance(config, PPOConfig):
        table = asdict(config)
    else:
        raise ConfigError("config", "a dict of options, a PPOConfig, or the path of a TOML file", config)
    named = {"env": env, "run_dir": run_dir, "seed": seed, "policy": policy}
    table |= {**options, **{name: one for name, one in named.items() if one is not None}}
    run, objects = table.get("resume"), dict[str, Any]()
    settled = plan_of(Path(run)).names if isinstance(run, (str, os.PathLike)) else {}

    def name(place: str, one: Any) -> str:
        if isinstance(one, str):
            return one
        if not callable(one):
            raise ConfigError(place, "a name, or something that can be called", one)
        objects[place] = one
        before = settled.get(place, "")
        return before if "<" in before else name_of(one)  # what no name leads to is what is handed over for it

    log = table.get("log", ())
    if any(map(callable, log if isinstance(log, (list, tuple)) else [log])):
        raise ConfigError("log", "names, such as csv and module:function; a function itself is callback=", log)
    if around := table.pop("wrappers", table.pop("wrapper", ())):
        around = [around] if isinstance(around, str) or callable(around) else around
        table["wrapper"] = tuple(name(f"wrappers[{i}]", one) for i, one in enumerate(around))
    table |= {place: name(place, table[place]) for place in ("env", "policy") if place in table}
    values = values_in(table, [name for name in OPTIONS if name not in ("config", "resume_or_begin")])
    if not _is_json(kwargs := values.get("env_kwargs", {})):
        expected = (
            "values that JSON has, for runs that go on; a function of a module that builds the others, as env=, leads "
            "there again; functools.partial(make_env, ...) has to be handed over again"
        )
        raise ConfigError("env_kwargs", expected, kwargs)
    if "seeds" in values and isinstance(own := objects.get("policy"), nn.Module):
        raise ConfigError("policy", "with seeds a function, which makes a network for each run", type_name(own))
    order = order_of(values, objects)
    ended = order.carry_out(callback)
    raise_again(ended.stopped)
    found = [Run(path, objects) for path in ended.paths]
    return found[0] if order.seeds is None else found


def _is_json(kwargs: Mapping[str, Any]) -> bool:
    try:
        return bool(json.loads(json.dumps(dict(kwargs))) == kwargs)
    except (TypeError, ValueError):
        return False
