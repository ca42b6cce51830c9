"""TensorBoard's event files, written beside metrics.csv."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path


class EventWriter:
    """Writes scalars into a new event file in the folder ``path``. Raises ImportError without tensorboard.

    after_step: the run goes on from there; TensorBoard then forgets what earlier files say of later steps.
    """

    def __init__(self, path: Path, *, after_step: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("Event files need tensorboard. Install it with: pip install 'muster-rl[cli]'") from error
        purge_step = None if after_step is None else after_step + 1
        self._writer = SummaryWriter(str(path), purge_step=purge_step)

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """scalars: by ``group/name``, the chart's; nan is left out."""
        for tag, value in scalars.items():
            if not math.isnan(value):
                self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        """Flushes what is left."""
        self._writer.close()
