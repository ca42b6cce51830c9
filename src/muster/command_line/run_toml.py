"""The file of ``muster train --config``: options of the run, the env and the algorithm in TOML, by their names."""

from __future__ import annotations

import dataclasses
import tomllib
import typing
from pathlib import Path
from typing import Any

from muster.command_line.mistakes import Mistake
from muster.command_line.parser import check_value, near
from muster.command_line.train_options import EnvOptions, UncheckedPPO
from muster.command_line.values import read_value
from muster.training.plan import RunOptions


def read_run_toml(path: Path) -> dict[str, Any]:
    """The values in the file by the names of their fields. Raises Mistake, which names the file and the key."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else error
        raise Mistake(f"--config {path} cannot be read: {problem}") from None
    kinds: dict[str, Any] = {"env": str}
    for part in (RunOptions, EnvOptions, UncheckedPPO):
        hints = typing.get_type_hints(part)
        kinds |= {field.name: hints[field.name] for field in dataclasses.fields(part)}
    values = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        name = "env_kwargs" if name == "kwargs" else name
        if name not in kinds:
            raise Mistake(f"{path}: {key} is no option of the env or of PPO{near(name, kinds)}")
        values[name] = read_value(kinds[name], value)
        check_value(f"{path}: {key}", values[name])
    return values
