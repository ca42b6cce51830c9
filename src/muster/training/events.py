"""TensorBoard's event files, in the same folder as metrics.csv, and the names that it shows its columns by."""

from __future__ import annotations

import io
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from muster.errors import printable
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
    "restarts": "rollout/restarts",
    "low_return": "rollout/low_return",
    "high_return": "rollout/high_return",
    "eval_return": "eval/mean_reward",
    "eval_length": "eval/mean_ep_length",
    "seconds": "time/time_elapsed",
}
_PREFIX = "events.out.tfevents."
_LONGEST = 255  # bytes of a file's name


def next_events_name(names: Iterable[str]) -> str:
    """The name of a run's next event file. names: of all in its folder.

    TensorBoard reads a folder's files in the order of their names, so it is later than those, whatever the clock says.
    """
    last = max((name for name in names if name.startswith(_PREFIX)), default="")
    later = f"{last}0" if len(os.fsencode(last)) < _LONGEST else f"{_PREFIX}~"  # which comes after digits and letters
    return max(f"{_PREFIX}{time.time():017.6f}", later)


class EventWriter:
    """Passes scalars to ``write`` as records of an event file. Raises ImportError without tensorboard.

    after_step: the step from which the run goes on: TensorBoard then drops later steps that earlier files hold. -1 for
    a run that begins.  options: what the run was started with, shown among TensorBoard's hparams; whole numbers,
    floats and booleans as such, the rest by its text.  run: the run's name there.
    """

    def __init__(
        self,
        write: Callable[[bytes], object],
        *,
        after_step: int = -1,
        options: Mapping[str, Any] | None = None,
        run: str = "",
    ) -> None:
        with imports_for("Event files need", "muster-rl[train]", "tensorboard"):
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.plugins.hparams.summary_v2 import hparams_pb
            from tensorboard.summary.writer.record_writer import RecordWriter
        self._event, self._summary, self._records, self._write = Event, Summary, RecordWriter, write
        # Without TensorBoard's EventFileWriter, whose `close` never returns after a Ctrl-C inside its queue.
        self._add(file_version="brain.Event:2")
        # The first file has a START, too: only a START after another START shows TensorBoard that a run goes on.
        self._add(step=after_step + 1, session_log=SessionLog(status=SessionLog.START))
        if options:
            kept = (bool, int, float)
            plain = {name: one if isinstance(one, kept) else printable(str(one)) for name, one in options.items()}
            self._add(summary=hparams_pb(plain, trial_id=printable(run)))  # a folder's name may be no UTF-8

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """Writes scalars for one step. scalars: by ``group/name``, the name of the chart; nan is left out."""
        known = {tag: value for tag, value in scalars.items() if not math.isnan(value)}
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in known.items()]
        self._add(step=step, summary=self._summary(value=values))

    def _add(self, **fields: Any) -> None:
        record = io.BytesIO()
        self._records(record).write(self._event(wall_time=time.time(), **fields).SerializeToString())
        self._write(record.getvalue())


def charts(row: Mapping[str, float]) -> dict[str, float]:
    """The values of a row of metrics.csv by the names of their charts; "steps", their x axis, is none.

    A group of agents, which stands after a slash, does so in both. Figures of last infos are "rollout/name", as in SB3,
    and in evaluations "eval/name".
    """
    split = {name: name.partition("/") for name in row if name != "steps"}
    of_infos = {of: f"rollout/{of}".replace("rollout/eval_", "eval/") for of, _, _ in split.values()}
    return {{**of_infos, **CHARTS}[of] + slash + group: row[name] for name, (of, slash, group) in split.items()}
