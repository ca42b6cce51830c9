"""Run folders that reach out of themselves: which fields need trust, and that nothing is reached without it."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import programs
from command import muster
from muster import load_policy
from muster.algorithms import MAPPOConfig
from muster.errors import ConfigError
from muster.training.plan import JUDGED, CollectorsOptions, MakeVecOptions, RunOptions, TrainingPlan, are_words

# Numbers, flags, words of Muster's own, and the folder that a run was begun from, which resuming does not read. A new
# field has to be judged: it goes here, or into JUDGED.
HARMLESS = (
    "algorithm preset total_steps seed num_envs num_steps num_minibatches update_epochs learning_rate anneal_lr gamma "
    "gae_lambda norm_adv clip_coef anneal_clip clip_vloss ent_coef vf_coef max_grad_norm target_kl clip_rewards "
    "normalize_observations normalize_rewards memory_size sequence_length hidden_sizes sprite activation log_std_init "
    "torch_threads critic share_params episode_info make_vec.num_workers make_vec.backend make_vec.context "
    "make_vec.caller_steps make_vec.one_env_per_process make_vec.threads_per_worker make_vec.start_timeout "
    "make_vec.step_timeout make_vec.close_timeout make_vec.on_failure make_vec.max_restarts make_vec.memory_check "
    "collectors.num_collectors collectors.nodes collectors.collect_timeout collectors.preemptive_threshold "
    "collectors.threads_per_collector run.eval_every run.eval_episodes run.checkpoint_every run.keep run.init_from "
    "run.replayable with spaces"
)
SIZE = ("--num-envs=2", "--num-steps=16", "--num-minibatches=1", "--update-epochs=1", "--backend=serial")
OWN = "from pathlib import Path\nPath(__file__).with_name('imported').touch()\n"


def test_each_field_of_a_config_is_judged():
    held = {"spaces", *TrainingPlan("CartPole-v1", MAPPOConfig(), "numbers").to_dict()}
    for part, kind in (("make_vec", MakeVecOptions), ("collectors", CollectorsOptions), ("run", RunOptions)):
        held.remove(part)
        held |= {f"{part}.{field.name}" for field in dataclasses.fields(kind)}
    held.remove("run.worker_output")  # not of a config: see `test_a_config_says_not_where_workers_print`
    assert sorted(held) == sorted([*HARMLESS.split(), *JUDGED])


@pytest.mark.parametrize(
    ("value", "needs_none"),
    [
        ({"a": [1, 2.5, True, None, "words of any kind", {"b": [["c.d"]]}]}, True),
        ({"a": "/etc/passwd"}, False),
        ({"a": "C:model.xml"}, False),
        ({"a": [{"b": [["..\\x"]]}]}, False),
        ({"a": {"b/c": 1}}, False),
        (json.loads('{"a":' * 900 + '"b:c"' + "}" * 900), False),
    ],
    ids=lambda one: str(one)[:30],
)
def test_words_that_are_no_path_address_or_module_need_no_trust(value: Any, needs_none: bool):
    assert are_words(value) is needs_none


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "run"
    result = muster("train", "CartPole-v1", *SIZE, "--total-steps=64", "--run-dir", str(run))
    assert result.exit_code == 0, result.output
    return run


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listening.setblocking(False)
        yield listening


@pytest.fixture
def foreign(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listener: socket.socket
) -> Iterator[Callable[..., None]]:
    """Makes the folder ``run`` in a working directory that has code and settings; no code runs, nobody is called."""
    monkeypatch.chdir(tmp_path)
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    for name, value in {"RAY_ADDRESS": address, "WANDB_API_KEY": "a" * 40}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text(f"[default]\nbase_url = http://{address}\nmode = online\n")
    (tmp_path / "own_code.py").write_text(OWN)
    shutil.copytree(made, tmp_path / "run")

    def change(**changes: Any) -> None:
        config = json.loads((made / "config.json").read_text())
        (tmp_path / "run" / "config.json").write_text(json.dumps({**config, **changes}))

    yield change
    assert not (tmp_path / "imported").exists()
    assert not list((tmp_path / "run").glob("wandb*"))
    with pytest.raises(BlockingIOError):
        listener.accept()


FAR: dict[str, Any] = {"make_vec": {"context": "fork"}, "collectors": {"num_collectors": 2, "cluster": "ray"}}
ALL, GOING_ON, LOADING = "load_policy eval --resume", "--resume", "make_vec eval --resume"


@pytest.mark.parametrize(
    ("changes", "said", "refused"),
    [
        ({"env": "own_code:make"}, ("own_code:make", "env by ENV"), LOADING),
        ({"env": "own_code:Id-v0"}, ("own_code:Id-v0", "env by ENV"), LOADING),
        ({"env_kwargs": {"path": "/\x1bx"}}, ("{'path': '/\\x1bx'}", "env_kwargs by --env-kwargs"), LOADING),
        ({"env_kwargs": {"a": [{"b:c": 1}]}}, ("{'a': [{'b:c': 1}]}", "env_kwargs by --env-kwargs"), LOADING),
        ({"wrappers": ["own_code:around"]}, ("own_code:around", "wrappers by --wrapper"), LOADING),
        ({"policy": "own_code:network"}, ("own_code:network", "policy by --policy"), ALL),
        ({"run": {"device": "xpu"}}, ("xpu", "run.device by --device"), GOING_ON),
        ({"run": {"log": ["csv", "wandb"]}}, ("csv, wandb", "run.log by --log"), GOING_ON),
        ({"run": {"log": ["own_code.py:log"]}}, ("own_code.py:log", "run.log by --log"), GOING_ON),
        (FAR, ("ray", "collectors.cluster by --cluster"), GOING_ON),
        (
            {**FAR, "collectors": {**FAR["collectors"], "working_dir": "here"}},
            ("ray, here", "collectors.working_dir by --working-dir"),
            GOING_ON,
        ),
    ],
    ids=str,
)
def test_what_reaches_out_of_the_folder_is_refused_by_name(
    foreign: Callable[..., None], changes: dict[str, Any], said: tuple[str, ...], refused: str
):
    foreign(**changes)
    for command in ("eval", "--resume"):
        words = ("eval", "run", "--episodes=1") if command == "eval" else ("train", "--resume=run", "--total-steps=96")
        result = muster(*words)
        assert result.exit_code == (2 if command in refused else 0), result.output
        if command in refused:
            assert all(part in result.stderr for part in (*said, "or --trust on a command line"))
            assert result.stderr.count("\n") == 1
    if "collectors" in changes:  # the line names neither cluster nor folder
        line = ("train", "CartPole-v1", *SIZE[:-1], "--num-collectors=2", "--run-dir=run", "--resume-or-begin")
        result = muster(*line, "--total-steps=96")
        assert (result.exit_code, said[1] in result.stderr) == (2, True), result.output
    if "load_policy" in refused:
        with pytest.raises(ConfigError, match="trust=True"):
            load_policy("run")
    elif "make_vec" in refused:
        with pytest.raises(ConfigError, match="trust=True"):
            load_policy("run").make_vec(1)
    assert muster("plot", "run", "--output=picture.png").exit_code == 0


def test_what_the_line_gives_needs_no_trust(foreign: Callable[..., None], tmp_path: Path):
    around = f"{tmp_path}/own_around.py:around"
    (tmp_path / "own_around.py").write_text("def around(env):\n    return env\n")
    kwargs = {"sutton_barto_reward": True}
    foreign(run={"device": "cpu", "log": ["csv", "wandb"]}, wrappers=[around], env_kwargs=kwargs)
    result = muster("train", "--resume=run", "--total-steps=96", "--log", "csv", "--wrapper", around)
    assert result.exit_code == 0, result.output
    line = ("train", "CartPole-v1", *SIZE, "--run-dir=run", "--resume-or-begin", "--total-steps=128")
    result = muster(*line, "--env-kwargs", json.dumps(kwargs), "--wrapper", around)
    assert result.exit_code == 0, result.output


@pytest.mark.slow
def test_wandb_writes_anew_and_reads_no_settings_of_the_working_directory(
    made: Path, tmp_path: Path, listener: socket.socket
):
    pytest.importorskip("wandb")
    (tmp_path / "own").mkdir()
    run = Path(shutil.copytree(made, tmp_path / "run"))
    for name in ("wandb", ".wandb"):
        (run / name).symlink_to(tmp_path / "own")
        (tmp_path / name).mkdir()
        settings = f"[default]\nbase_url = http://127.0.0.1:{listener.getsockname()[1]}\nentity = stranger\n"
        (tmp_path / name / "settings").write_text(settings)
    environ = {**os.environ, "WANDB_MODE": "offline", "WANDB_API_KEY": "a" * 40}
    done = programs.run("-c", STARTED, cwd=tmp_path, env=environ, imports=programs.TORCH)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [2, False, None]
    assert not list((tmp_path / "own").iterdir())
    with pytest.raises(BlockingIOError):
        listener.accept()


STARTED = """
import json
from pathlib import Path
from muster.training.loggers import wandb_run
runs = [wandb_run(Path("run"), one) for one in ("1234abcd", "abcd1234")]
places = {Path(run.dir).parents[2] for run in runs if Path(run.dir).parents[3].resolve() == Path("run").resolve()}
print(json.dumps([len(places), "127.0.0.1" in runs[0].settings.base_url, runs[0].settings.entity]))
for run in runs:
    run.finish()
"""


def test_a_config_says_not_where_workers_print(foreign: Callable[..., None], tmp_path: Path):
    foreign(run={"worker_output": str(tmp_path / "elsewhere")})
    result = muster("train", "--resume", "run", "--total-steps=96")
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "elsewhere").exists()
