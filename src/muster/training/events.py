"""TensorBoard's event files, in the same folder as metrics.csv, and the names that it shows its columns by."""

from __future__ import annotations

import math
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from muster.errors import printable
from muster.extras import imports_for

# By the column: CleanRL's name where it has one, else SB3's.
CHARTS = {
    "mean_return": "charts/episodic_return", "mean_length": "charts/episodic_length", "steps_per_second": "charts/SPS",
    "learning_rate": "charts/learning_rate", "policy_loss": "losses/policy_loss", "value_loss": "losses/value_loss",
    "entropy": "losses/entropy", "approx_kl": "losses/approx_kl", "clip_fraction": "losses/clipfrac",
    "explained_variance": "losses/explained_variance", "episodes": "rollout/episodes", "restarts": "rollout/restarts",
    "low_return": "rollout/low_return", "high_return": "rollout/high_return", "eval_return": "eval/mean_reward",
    "eval_length": "eval/mean_ep_length", "seconds": "time/time_elapsed", "share_envs": "time/share_envs",
    "share_acting": "time/share_acting", "share_learning": "time/share_learning",
}  # fmt: skip
_ROOM = 1 << 16  # bytes that a disk must have for another event file


class EventLog:
    """Scalars in event files in the folder ``run``, by torch's SummaryWriter. Raises ImportError without tensorboard.

    after_step: the step from which the run goes on: TensorBoard then drops later steps that earlier files hold. -1 for
    a run that begins.  options: what the run was started with, shown among TensorBoard's hparams; whole numbers,
    floats and booleans as such, the rest by its text.
    """

    def __init__(self, run: Path, *, after_step: int = -1, options: Mapping[str, Any] | None = None) -> None:
        with imports_for("Event files need", "muster-rl[train]", "tensorboard"):
            import tensorboard.summary.writer  # noqa: F401  (by its own name, for the error)
        self._run, self._after, self._options = run, after_step, options
        self._rows: list[tuple[int, Mapping[str, float]]] = []  # those that may not be in a file
        self._writer: Any = None

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """Adds scalars for one step. scalars: by ``group/name``, the name of the chart; nan is left out."""
        self._rows.append((step, {tag: value for tag, value in scalars.items() if not math.isnan(value)}))

    def write_out(self) -> None:
        """Writes what was added. Raises OSError; the next call then writes it to another file."""
        with patch.object(threading, "excepthook", _said_here(threading.excepthook)):
            try:
                self._writer = self._writer or self._begun()
                for step, scalars in self._rows:
                    for tag, value in scalars.items():
                        self._writer.add_scalar(tag, value, step)
                self._writer.flush()
            except OSError:  # which this writer would raise for ever
                self.close()
                raise
        self._after, self._rows = self._rows[-1][0] if self._rows else self._after, []

    def _begun(self) -> Any:
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from torch.utils.tensorboard import SummaryWriter

        with tempfile.TemporaryFile(dir=self._run) as file:  # else each try would leave an empty file
            file.write(bytes(_ROOM))
        if any(self._run.glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
            time.sleep(1)  # TensorBoard reads files by the order of their names, and those of one second have none
        # The first file has a START, too: only a START after another START shows TensorBoard that a run goes on.
        writer: Any = SummaryWriter(str(self._run), purge_step=self._after + 1)
        if self._options:
            kept = (bool, int, float)
            plain = {name: one if isinstance(one, kept) else printable(str(one)) for name, one in self._options.items()}
            writer.file_writer.add_summary(hparams_pb(plain, trial_id=self._run.name))
        return writer

    def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()


def _said_here(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A `threading.excepthook` that leaves out OSErrors in TensorBoard's threads: who writes or flushes raises them."""

    def excepthook(raised: threading.ExceptHookArgs) -> None:
        if not (issubclass(raised.exc_type, OSError) and type(raised.thread).__module__.startswith("tensorboard.")):
            hook(raised)

    return excepthook


def charts(row: Mapping[str, float]) -> dict[str, float]:
    """The values of a row of metrics.csv by the names of their charts; "steps", their x axis, is none.

    A group of agents, which stands after a slash, does so in both. Figures of last infos are "rollout/name", as in SB3,
    and in evaluations "eval/name".
    """
    split = {name: name.partition("/") for name in row if name != "steps"}
    of_infos = {of: f"rollout/{of}".replace("rollout/eval_", "eval/") for of, _, _ in split.values()}
    return {{**of_infos, **CHARTS}[of] + slash + group: row[name] for name, (of, slash, group) in split.items()}
