"""TensorBoard reads the event files."""

from __future__ import annotations

import math
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from muster.training.events import EventWriter, next_events_name


def test_scalars_are_read_back_with_their_steps_and_nan_is_left_out(tmp_path: Path) -> None:
    with (tmp_path / next_events_name([])).open("wb") as file:
        writer = EventWriter(file.write)
        writer.add({"episodes/return": 1.5, "losses/value": math.nan}, 10)
        writer.add({"episodes/return": 2.5, "losses/value": 0.25}, 20)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(one.step, one.value) for one in events.Scalars("episodes/return")] == [(10, 1.5), (20, 2.5)]
    assert [(one.step, one.value) for one in events.Scalars("losses/value")] == [(20, 0.25)]


def test_options_are_among_the_hparams(tmp_path: Path) -> None:
    options = {"env": "CartPole-v1", "num_envs": 8, "anneal_lr": True, "target_kl": None, "hidden_sizes": (64, 64)}
    with (tmp_path / next_events_name([])).open("wb") as file:
        EventWriter(file.write, options=options)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    shown = HParamsPluginData.FromString(content).session_start_info.hparams
    texts = {name: shown[name].string_value for name in ("env", "target_kl", "hidden_sizes")}
    assert texts == {"env": "CartPole-v1", "target_kl": "None", "hidden_sizes": "(64, 64)"}
    assert (shown["num_envs"].number_value, shown["anneal_lr"].bool_value) == (8, True)
