"""TensorBoard reads the event files."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
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


@pytest.mark.parametrize(
    "there",
    [
        [],
        ["events.out.tfevents.99999999999999999999.000000"],
        ["events.out.tfevents.host.7", "metrics.csv"],
        [f"events.out.tfevents.{'z' * 235}"],
    ],
)
def test_the_next_name_comes_after_those_that_are_there(monkeypatch: pytest.MonkeyPatch, there: list[str]) -> None:
    names = [name for name in there if "tfevents" in name]
    for now in (300.0, 1.7e9, 1.7e9, 4.0):
        monkeypatch.setattr("time.time", lambda now=now: now)
        names.append(next_events_name([*there, *names]))
    assert names == sorted(set(names))
    assert max(map(len, names)) <= 255  # bytes, of a file's name


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
