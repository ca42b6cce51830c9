"""TensorBoard's event files, in the same folder as metrics.csv, and the names that it shows its columns by."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from muster.extras import imports_for

# By the column: CleanRL's name where it has one, else SB3's.
CHARTS = {
    "mean_return": "charts/episodic_return",
    "mean_length": "charts/episodic_length",
    "steps_per_second": "charts/SPS",
    "learning_rate": "charts/learning_rate",
    "policy_loss": "losses/policy_loss",
    "value_loss": "losses/value_loss",
    "entropy": "losses/entropy",
    "approx_kl": "losses/approx_kl",
    "clip_fraction": "losses/clipfrac",
    "explained_variance": "losses/explained_variance",
    "episodes": "rollout/episodes",
    "low_return": "rollout/low_return",
    "high_return": "rollout/high_return",
    "eval_return": "eval/mean_reward",
    "eval_length": "eval/mean_ep_length",
    "seconds": "time/time_elapsed",
}


class EventWriter:
    """Writes scalars into a new event file in the folder ``path``. Raises ImportError without tensorboard.

    after_step: the step from which the run goes on: TensorBoard then drops later steps that earlier files hold. -1 for
    a run that begins.  options: what the run was started with, shown among TensorBoard's hparams; whole numbers,
    floats and booleans as such, the rest by its text.
    """

    def __init__(self, path: Path, *, after_step: int = -1, options: Mapping[str, Any] | None = None) -> None:
        with imports_for("Event files need", "muster-rl[train]", "tensorboard"):
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.plugins.hparams.summary_v2 import hparams_pb
            from tensorboard.summary.writer.record_writer import RecordWriter
        self._event, self._summary = Event, Summary
        # TensorBoard reads a folder's files in the order of their names. The file is written without TensorBoard's
        # EventFileWriter, whose `close` never returns after a Ctrl-C inside its queue. Each record is in the file
        # before the next is made.
        name = f"events.out.tfevents.{time.time():.6f}"
        self._records = RecordWriter((path / name).open("xb"))
        self._write(file_version="brain.Event:2")
        # The first file has a START, too: only a START after another START shows TensorBoard that a run goes on.
        self._write(step=after_step + 1, session_log=SessionLog(status=SessionLog.START))
        if options:
            plain = {name: one if isinstance(one, (bool, int, float)) else str(one) for name, one in options.items()}
            self._write(summary=hparams_pb(plain, trial_id=path.name))

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """Writes scalars for one step. scalars: by ``group/name``, the name of the chart; nan is left out."""
        known = {tag: value for tag, value in scalars.items() if not math.isnan(value)}
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in known.items()]
        self._write(step=step, summary=self._summary(value=values))

    def close(self) -> None:
        """Closes the file. All scalars that were added are already in it."""
        self._records.close()

    def _write(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())
        self._records.flush()


def charts(row: Mapping[str, float]) -> dict[str, float]:
    """The values of a row of metrics.csv by the names of their charts; "steps", their x axis, is none."""
    return {CHARTS[name]: value for name, value in row.items() if name != "steps"}
