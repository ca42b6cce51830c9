"""TensorBoard reads the event files."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from test_run_folder import files_of_at_most

from muster.training.events import EventLog


def test_scalars_are_read_back_with_their_steps_and_nan_is_left_out(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.add({"episodes/return": 1.5, "losses/value": math.nan}, 10)
    log.add({"episodes/return": 2.5, "losses/value": 0.25}, 20)
    log.write_out()
    log.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(one.step, one.value) for one in events.Scalars("episodes/return")] == [(10, 1.5), (20, 2.5)]
    assert [(one.step, one.value) for one in events.Scalars("losses/value")] == [(20, 0.25)]


def test_what_found_no_room_is_written_once_there_is_some(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = EventLog(tmp_path)
    for step in (1, 2):
        log.add({"losses/a": 0.5, "losses/b": 0.25}, step)
        log.write_out()
    (file,) = tmp_path.iterdir()
    for room in (file.stat().st_size + 30, 10):  # for a part of a record in this file, then for no other file
        with files_of_at_most(room), pytest.raises(OSError, match="too large"):
            log.add({"losses/a": 1.0, "losses/b": 2.0}, 3 if room > 10 else 4)
            log.write_out()
    assert list(tmp_path.iterdir()) == [file]
    log.add({"losses/a": 0.5}, 5)
    log.write_out()
    log.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(one.step, one.value) for one in events.Scalars("losses/a")] == [
        (1, 0.5),
        (2, 0.5),
        (3, 1),
        (4, 1),
        (5, 0.5),
    ]
    assert [one.step for one in events.Scalars("losses/b")] == [1, 2, 3, 4]
    assert capfd.readouterr().err == ""


def test_options_are_among_the_hparams(tmp_path: Path) -> None:
    options = {"env": "CartPole-v1", "num_envs": 8, "anneal_lr": True, "target_kl": None, "hidden_sizes": (64, 64)}
    log = EventLog(tmp_path, options=options)
    log.add({"losses/value": 0.5}, 1)
    log.write_out()
    log.close()
    assert [path.is_file() for path in tmp_path.iterdir()] == [True]
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    shown = HParamsPluginData.FromString(content).session_start_info.hparams
    texts = {name: shown[name].string_value for name in ("env", "target_kl", "hidden_sizes")}
    assert texts == {"env": "CartPole-v1", "target_kl": "None", "hidden_sizes": "(64, 64)"}
    assert (shown["num_envs"].number_value, shown["anneal_lr"].bool_value) == (8, True)
