"""TensorBoard reads the event files."""

from __future__ import annotations

import math
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from muster.training.events import EventWriter


def test_scalars_are_read_back_with_their_steps_and_nan_is_left_out(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path)
    writer.add({"episodes/return": 1.5, "losses/value": math.nan}, 10)
    writer.add({"episodes/return": 2.5, "losses/value": 0.25}, 20)
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(one.step, one.value) for one in events.Scalars("episodes/return")] == [(10, 1.5), (20, 2.5)]
    assert [(one.step, one.value) for one in events.Scalars("losses/value")] == [(20, 0.25)]
