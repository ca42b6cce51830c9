"""`muster top --trace`: the file is one that Perfetto reads, and its spans are what the envs have done."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command import muster as command
from muster.errors import ConfigError
from muster.pool.watch import seconds
from muster.training.train import Run
from muster.view.looks import runs
from muster.view.trace import write_trace
from processes import left_of


def events_of(path: Path) -> list[dict[str, Any]]:
    """The events of a trace that the Trace Event Format allows: names, pids, times in order."""
    content = json.loads(path.read_text())
    assert set(content) == {"otherData", "displayTimeUnit", "traceEvents"}
    assert path.read_text().startswith(f'{{"otherData": {{"steps": "{content["otherData"]["steps"]}"')
    events: list[dict[str, Any]] = content["traceEvents"]
    needed = {"M": {"args"}, "X": {"ts", "dur"}, "i": {"ts", "s"}, "C": {"ts", "args"}}
    for event in events:
        assert {"name", "pid", "tid"} <= set(event)
        assert needed[event["ph"]] <= set(event)
        assert event.get("dur", 0) >= 0
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    return events


def spans_of(events: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """The spans by process; none overlaps the next."""
    found: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            found.setdefault(event["pid"], []).append(event)
    for spans in found.values():
        for one, after in itertools.pairwise(spans):
            assert one["ts"] + one["dur"] <= after["ts"] + 1  # microseconds: of rounding
    return found


def test_spans_are_the_steps_and_counters_those_of_the_record(spins: Callable[[str], int], tmp_path: Path) -> None:
    pid, path = spins("envs"), tmp_path / "trace.json"
    [run] = runs(pid)
    before = run.hosts()
    said = write_trace(pid, path, 1.5)
    after, events = run.hosts(), events_of(path)
    spans = spans_of(events)
    assert " steps and resets of envs seen" in said
    for old, new in zip(before, after, strict=True):
        own = spans[run.pids[run.about["names"][new.number]]]
        assert {one["name"] for one in own} == {f"step env {env}" for env in new.envs}
        # The looks begin and end a moment later and earlier.
        assert sum(one["dur"] for one in own) / 1e6 >= 0.95 * (-0.1 + seconds(new.in_env - old.in_env))
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"worker 0 (envs 0, 1)", "worker 1 (envs 2, 3)"} < names
    counted = [event["args"]["steps/s"] for event in events if event["name"] == "env steps/s"]
    assert len(counted) >= 5


def test_calls_resets_and_restarts_are_there(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    program = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "import muster, os\n"
        "from spinning import Spinning\n"
        "class Sleepy(Spinning):\n"
        "    def __init__(self, **options): time.sleep(0.05); super().__init__(**options)\n"
        "    def rest(self): time.sleep(0.05)\n"
        "if __name__ == '__main__':\n"
        "    options = dict(num_workers=2, on_failure='restart', max_restarts=99)\n"
        "    with muster.make_vec(Sleepy, 2, env_kwargs={'ms': 4, 'reset_ms': 20}, **options) as envs:\n"
        "        print('ready', flush=True)\n"
        "        for k in range(10**6):\n"
        "            if k == 3:\n"
        "                os.kill(envs.stats()['workers'][1]['pid'], 9)\n"
        "            envs.reset(); envs.step([0, 0]); envs.call('rest')\n"
    )
    script = tmp_path / "resting.py"
    script.write_text(program)
    words = [sys.executable, str(script), str(Path(__file__).parent.parent)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        write_trace(process.pid, path, 3.0)
        process.kill()
    events = events_of(path)
    spans_of(events)
    assert {"reset env 0", "step env 0", "call env 0", "build env 1", "at work", "restart"} <= {
        event["name"] for event in events
    }
    assert left_of("resting.py") == set()


def test_which_run_has_to_be_named_where_two_run(spins: Callable[[str], int], tmp_path: Path) -> None:
    pids = spins("envs"), spins("caller")
    with pytest.raises(ConfigError) as refused:
        write_trace(None, tmp_path / "trace.json", 1.0)
    assert all(f"\n  {pid}  " in str(refused.value) for pid in pids)
    assert not (tmp_path / "trace.json").exists()


def test_a_training_has_its_phases_its_shares_and_what_slows_it(tmp_path: Path) -> None:
    run, path = tmp_path / "run", tmp_path / "trace.json"
    words = [sys.executable, "-m", "muster", "train", "CartPole-v1", "--run-dir", str(run), "--total-steps", "60k"]
    with subprocess.Popen([*words, "--eval-every", "5k"], stdout=subprocess.PIPE, text=True) as process:
        while not (run / "metrics.csv").exists():
            time.sleep(0.05)
        shown = command("top", str(process.pid), "--once", "-n", "0.3").stdout
        write_trace(process.pid, path, 2.0)
        said = process.communicate()[0]
    assert f", in {run}\n" in shown
    assert {"rollout", "update", "checkpoint"} <= {event["name"] for event in events_of(path) if event["ph"] == "X"}
    columns = Run(run).metrics
    for envs, acting, learning in zip(*(columns[f"share_{of}"] for of in ("envs", "acting", "learning")), strict=True):
        assert 0.0 <= envs + acting + learning <= 1.01
        assert min(envs, acting, learning) >= 0.0
    assert "slowed by  learning takes 0." in said


def test_a_step_that_hangs_is_a_span_that_goes_on(spins: Callable[[str], int], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(spins("hang"), path, 1.0)
    longest = max((one for spans in spans_of(events_of(path)).values() for one in spans), key=lambda one: one["dur"])
    assert longest["name"] in ("step env 0", "step env 2")
    assert longest["dur"] > 0.5e6


def test_an_interrupt_keeps_what_was_seen(spins: Callable[[str], int], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    words = [sys.executable, "-m", "muster", "top", str(spins("envs")), "--trace", str(path), "--seconds", "600"]
    with subprocess.Popen(words) as process:
        while not path.exists():
            time.sleep(0.05)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
    assert spans_of(events_of(path))
