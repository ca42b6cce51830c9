"""The folder that one training run fills: config.json, metrics.csv, checkpoint.pt.

Each file is whole at any moment: the CSV grows by whole lines, the others are written aside and then renamed.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from muster.errors import UsageError


class RunFolder:
    """Writes a run's files into ``path``, which is created. Raises UsageError where a run lies there already."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_path = path / "config.json"
        self.metrics_path = path / "metrics.csv"
        self.checkpoint_path = path / "checkpoint.pt"
        self.plot_path = path / "learning_curve.png"
        try:
            path.mkdir(parents=True, exist_ok=True)
            # Opened exclusively: of two runs that start here at once, only one gets it.
            self._metrics_file = self.metrics_path.open("x", newline="", encoding="utf-8")
        except FileExistsError:
            if not path.is_dir():
                raise UsageError(f"{path} is a file, not a folder; choose another run folder.") from None
            raise UsageError(f"{path} already holds a run; choose another run folder, or remove that one.") from None
        self._columns: list[str] = []

    @classmethod
    def create(cls, parent: Path, name: str) -> RunFolder:
        """A folder of its own for a run called ``name`` (any text, an env id for example), stamped with the time."""
        plain = "".join(char if char.isalnum() or char in "-_." else "-" for char in name)
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        path = parent / f"{plain}-{stamp}"
        number = 2
        while path.exists():
            path = parent / f"{plain}-{stamp}-{number}"
            number += 1
        return cls(path)

    def write_config(self, config: Mapping[str, Any]) -> None:
        """``config`` as JSON."""
        text = json.dumps(config, indent=2) + "\n"
        _replace(self.config_path, lambda file: file.write(text.encode()))

    def append_metrics(self, row: Mapping[str, float]) -> None:
        """One more line of metrics.csv. The first row names the columns; nan becomes an empty field."""
        writer = csv.writer(self._metrics_file)
        if not self._columns:
            self._columns = list(row)
            writer.writerow(self._columns)
        writer.writerow(["" if math.isnan(row[name]) else row[name] for name in self._columns])
        self._metrics_file.flush()

    def save_checkpoint(self, state: Mapping[str, Any]) -> None:
        """``state`` (state dicts, tensors, plain values), for ``torch.load(path, weights_only=True)``."""
        import torch

        _replace(self.checkpoint_path, lambda file: torch.save(dict(state), file))

    def close(self) -> None:
        self._metrics_file.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    aside = path.with_name(path.name + ".tmp")
    with aside.open("wb") as file:
        write(file)
    os.replace(aside, path)
