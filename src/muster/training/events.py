"""TensorBoard's event files, written beside metrics.csv."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class EventWriter:
    """Writes scalars into a new event file in the folder ``path``. Raises ImportError without tensorboard.

    after_step: the run goes on from there; TensorBoard then forgets what earlier files say of later steps. -1 where it
    begins.
    """

    def __init__(self, path: Path, *, after_step: int = -1) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise ImportError("Event files need tensorboard. Install it with: pip install 'muster-rl[cli]'") from error
        self._event, self._summary = Event, Summary
        # TensorBoard reads a folder's files in the order of their names. Written without its EventFileWriter, whose
        # `close` waits for ever after a Ctrl-C within its queue: each record is in the file before the next is made.
        name = f"events.out.tfevents.{time.time():.6f}"
        self._records = RecordWriter((path / name).open("xb"))
        self._write(file_version="brain.Event:2")
        # In the first file, too: TensorBoard takes only what follows another START for a run that goes on.
        self._write(step=after_step + 1, session_log=SessionLog(status=SessionLog.START))

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """scalars: by ``group/name``, the chart's; nan is left out."""
        known = {tag: value for tag, value in scalars.items() if not math.isnan(value)}
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in known.items()]
        self._write(step=step, summary=self._summary(value=values))

    def close(self) -> None:
        """What has been added is in the file already."""
        self._records.close()

    def _write(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())
        self._records.flush()
