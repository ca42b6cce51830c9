"""Run folders that come from elsewhere: what they hold harms nobody who looks at them, evaluates them or goes on."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import operator
import os
import re
import shutil
import struct
import sys
import tempfile
import types
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path
from typing import Any

import pytest
import torch

import programs
from command import muster
from muster import load_policy
from muster.errors import ConfigError, UsageError
from muster.pool.resources import memory_left
from muster.training import run_folder
from muster.training.checkpoints import packed, read_checkpoint
from muster.training.picture import Picture
from muster.training.plan import plan_of
from slow import slow

SMALL = ("--backend=serial", "--num-envs=2", "--num-steps=16", "--num-minibatches=1", "--update-epochs=1")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "run"
    kept = ("--checkpoint-every=32", "--eval-every=32", "--eval-episodes=1")
    result = muster("train", "CartPole-v1", *SMALL, *kept, "--total-steps=64", "--run-dir", str(run))
    assert result.exit_code == 0, result.output
    return run


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A folder that others have made."""
    return Path(shutil.copytree(made, tmp_path / "run"))


def change(run: Path, **changes: Any) -> None:
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, **changes}))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


GO_ON = ("--total-steps=128", "--keep=1")


@pytest.mark.parametrize(
    "name",
    ["config.json", "metrics.csv", "checkpoint.safetensors", "best.safetensors", "learning_curve.png", "checkpoints",
     "checkpoints/000000000032.safetensors", "metrics.lost.csv", "logged.jsonl", "wandb", ".wandb"],
)  # fmt: skip
def test_no_link_is_followed(run: Path, tmp_path: Path, name: str):
    own = tmp_path / "own" / Path(name).name
    own.parent.mkdir()
    if (run / name).exists():
        (run / name).rename(own)
    (run / name).symlink_to(own)
    before, there = contents(own.parent), contents(run)
    result = muster("train", "--resume", str(run), *GO_ON)
    assert result.exit_code == 1
    assert f"{run / name} is a link, and none is followed inside a run folder." in result.stderr
    assert contents(run) == there
    for command in ("plot", "eval"):
        assert "is a link" in muster(command, str(run)).stderr
    with pytest.raises(UsageError, match="is a link"):
        load_policy(run)
    assert contents(own.parent) == before


def test_no_link_that_lies_in_the_way_is_written_through(run: Path, tmp_path: Path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in ("checkpoint.safetensors.tmp", "config.json.tmp", "metrics.csv.tmp"):
        (run / name).symlink_to(victim)
    result = muster("train", "--resume", str(run), *GO_ON)
    assert result.exit_code == 0, result.output
    assert victim.read_text() == "mine"
    assert (run / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "words", [("plot", "."), ("plot", ".", "--output=own.png"), ("train", "CartPole-v1", *SMALL, "--total-steps=32",
              "--seeds=1", "--run-dir=.")], ids=["plot", "named", "seeds"]
)  # fmt: skip
def test_no_picture_is_written_through_a_link(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
):
    monkeypatch.chdir(run)
    picture = run / ("own.png" if "--output=own.png" in words else "comparison.png")
    (tmp_path / "victim").write_text("mine")
    picture.symlink_to(tmp_path / "victim")
    assert muster(*words).exit_code == 0
    assert (tmp_path / "victim").read_text() == "mine"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_no_link_is_followed_in_a_folder_to_begin_in(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="checkpoints is a link, and none is followed"):
        run_folder.RunFolder(tmp_path / "run")


def test_no_picture_is_written_through_a_link_in_memory():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        link, mine = Path(folder, "curve.png"), Path(folder, "mine")
        mine.write_text("mine")
        link.symlink_to(mine)
        Picture("a run").save(link)
        assert mine.read_text() == "mine"


def test_the_folder_itself_may_be_reached_by_a_link(run: Path, tmp_path: Path):
    (tmp_path / "link").symlink_to(run)
    assert muster("train", "--resume", str(tmp_path / "link"), *GO_ON).exit_code == 0
    own = tmp_path / "newest.safetensors"  # the user's own, outside of the folder
    own.symlink_to(run / "checkpoint.safetensors")
    assert load_policy(tmp_path / "link", checkpoint=own).steps == 128


def test_only_copies_that_have_names_of_musters_are_deleted(run: Path):
    own = [
        run / "checkpoints" / name
        for name in ("1.safetensors", "model.safetensors", "000000000032.pth", "000000000032.safetensors.bak")
    ]
    for path in own:
        path.write_text("mine")
    assert muster("train", "--resume", str(run), *GO_ON).exit_code == 0
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == sorted(
        [*(path.name for path in own), "000000000128.safetensors"]
    )


def test_a_pipe_in_the_place_of_a_file_keeps_nobody_waiting(made: Path, run: Path):
    for name in ("best.safetensors", "checkpoint.safetensors", "config.json"):
        (run / name).unlink()
        os.mkfifo(run / name)
        with pytest.raises(UsageError):
            load_policy(run, checkpoint="best" if name == "best.safetensors" else None)
        (run / name).unlink()
        shutil.copy(made / name, run / name)


CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")
ODD = "\x1b]0;title\x07\x9b31m\u202eCart\r\nPole"


@pytest.mark.parametrize(
    "changes",
    [
        {"env": f"{ODD}-v1"},
        {"env": f"{ODD}:make"},
        {"wrappers": [f"{ODD}:wrap"]},
        {"preset": ODD},
        {"policy": f"{ODD}:make"},
        {"env_kwargs": {"render_mode": ODD}},
        {"env_kwargs": {ODD: 1}},
        {"make_vec": {ODD: 1}},
        {"activation": ODD},
        {"spaces": {"observations": {"kind": ODD}, "actions": {"kind": "Discrete"}}},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_names_are_printed_without_control_characters(run: Path, changes: dict[str, Any]):
    change(run, **changes)
    words = (("eval", "--episodes=1", "--max-steps=64"), ("train", "--total-steps=96", "--resume"))
    said = [muster(*some, str(run)).output for some in (*words, ("plot", "--output", str(run / "picture.png")))]
    assert not CONTROL.search("".join(said)), said
    assert "Pole" in "".join(said)


def test_a_folder_of_any_name_is_used_and_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="run_dir must be a folder with a path of UTF-8"):
        run_folder.RunFolder(Path(os.fsdecode(b"\xff run")))
    folder, said = f"{ODD}$x^$ run", []
    for words in (
        ("train", "CartPole-v1", *SMALL, "--total-steps=64", "--run-dir", folder),
        ("train", "--resume", folder, "--total-steps=96"),
        ("eval", folder, "--episodes=1", "--max-steps=64"),
        ("plot", folder, "--output", f"{folder}.png"),
    ):
        result = muster(*words)
        assert result.exit_code == 0, result.output
        said.append(result.output)
    assert load_policy(folder).steps == 96
    assert not CONTROL.search("".join(said)), said
    "".join(said).encode()  # a terminal of UTF-8 can print it


def test_names_in_a_checkpoint_are_printed_without_control_characters(run: Path):
    state = read_checkpoint(run)
    (run / "checkpoint.safetensors").write_bytes(packed({**state, "policy": {**state["policy"], ODD: torch.zeros(1)}}))
    for command in ("eval", "train --resume"):
        result = muster(*command.split(), str(run), *(GO_ON if "train" in command else ()))
        assert "Pole" in result.stderr
        assert not CONTROL.search(result.output)


@pytest.mark.parametrize(
    ("file", "held", "said"),
    [
        ("best.safetensors", {ODD: 1}, "KeyError: 'steps'"),
        (
            "best.safetensors",
            {"steps": 1, "mean_return": ODD, "mean_length": 2},
            "ValueError: could not convert string to float",
        ),
        ("best.safetensors", {"steps": math.inf, "mean_return": 1, "mean_length": 2}, "OverflowError: "),
        ("metrics.csv", "steps,seconds\n16,\x1b]0;a\n", "ValueError: could not convert string to float"),
    ],
)
def test_damaged_numbers_are_one_line_without_control_characters(run: Path, file: str, held: Any, said: str):
    if file == "best.safetensors":
        (run / file).write_bytes(packed({**read_checkpoint(run, file), "evaluation": held}))
    else:
        (run / file).write_text(held)
    result = muster("train", "--resume", str(run), *GO_ON)
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1), result.output
    assert f"{file} is not that of the run in config.json: {said}" in result.stderr
    assert not CONTROL.search(result.output)


@pytest.mark.parametrize(
    ("path", "held", "said"),
    [
        (("episodes", "returns"), ["a"], "ValueError: could not convert string to float"),
        (("episodes", "lengths"), [None], "TypeError: int"),
        (("schedule", "first"), ["a", 1.0], "ValueError: could not convert string to float"),
        (("normalizers", "observations", "var"), torch.ones(7), "RuntimeError: The expanded size"),
        (("collector", "torch_rng"), [3], "TypeError: "),
        (("optimizer", "param_groups", 0, "betas"), "ab", "TypeError: '<=' not supported"),
        (("optimizer", "state", 0, "exp_avg"), torch.zeros(3), "RuntimeError: The size of tensor"),
        (("optimizer", "state", 0), {}, "KeyError: 'step'"),
    ],
    ids=lambda one: one[-1] if isinstance(one, tuple) else "",
)
def test_a_damaged_state_is_one_line(run: Path, path: tuple[Any, ...], held: Any, said: str):
    state = read_checkpoint(run)
    reduce(operator.getitem, path[:-1], state)[path[-1]] = held
    (run / "checkpoint.safetensors").write_bytes(packed(state))
    result = muster("train", "--resume", str(run), *GO_ON)
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1), result.output
    assert f"checkpoint.safetensors is not that of the run in config.json: {said}" in result.stderr


def test_negative_steps_are_those_of_no_run(run: Path):
    (run / "checkpoint.safetensors").write_bytes(packed({**read_checkpoint(run), "steps": -5}))
    rows = (run / "metrics.csv").read_text()
    result = muster("train", "--resume", str(run), *GO_ON)
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1), result.output
    assert "checkpoint.safetensors is that of no run: its steps are -5" in result.stderr
    assert (run / "metrics.csv").read_text() == rows


def written(file: Path, header: dict[str, Any] | bytes, data: bytes = b"", size: int | None = None) -> None:
    """Writes a file of safetensors as its format says. size: of the header, where it is to say another one."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + data)


def span(start: int, end: int, *shape: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": list(shape) or [(end - start) // 4], "data_offsets": [start, end]}


def stated(state: str) -> dict[str, Any]:
    """A header with this JSON in the place of a state."""
    return {"__metadata__": {"muster": state}}


def halved(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


class Trap:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return pytest.fail, ("a pickle was read",)


def piped(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (partial(written, header={"a": span(0, 8), "b": span(4, 12)}, data=bytes(12)), "SafetensorError: .*"),
        (partial(written, header={"a": span(0, 4), "b": span(8, 12)}, data=bytes(12)), "SafetensorError: .*"),
        (partial(written, header={"a": span(0, 4, 10**7, 10**7)}, data=bytes(4)), "SafetensorError: .*"),
        (partial(written, header={"a": span(0, 1 << 62, 1 << 60)}), "SafetensorError: .*"),
        (partial(written, header=b"[" * 10**6), "SafetensorError: .*"),
        (partial(written, header=stated("[" * 10**6)), "RecursionError: .*"),
        (partial(written, header=stated('{"steps": %s}' % ("9" * 10**6))), "ValueError: .*"),
        (partial(written, header=stated("[1]")), "TypeError: .*"),
        (partial(written, header=stated('{"policy": {"$tensor": "a"}}')), "SafetensorError: .*"),
        (partial(written, header={"a": span(0, 4)}, data=bytes(4)), "KeyError: 'muster'"),
        (partial(written, header=b"{}" + b" " * (17 << 20)), r"its header would take 17,[\d,]+ bytes"),
        (partial(written, header={}, size=(1 << 64) - 1), r"its header would take 18,[\d,]+ bytes"),
        (halved, "SafetensorError: .*"),
        (lambda file: file.write_bytes(b""), "SafetensorError: .*"),
        (partial(torch.save, {"steps": Trap()}), r"its header would take [\d,]+ bytes"),
        (piped, None),
    ],
    ids=["overlap", "hole", "shape", "beyond", "deep", "deep state", "number", "list", "no tensor", "not ours", "long",
         "longest", "half", "empty", "pickle", "pipe"],
)  # fmt: skip
def test_an_altered_checkpoint_is_one_sentence(run: Path, write: Callable[[Path], None], said: str | None):
    write(run / "checkpoint.safetensors")
    said = r"checkpoint\.safetensors is no " + ("file. .*" if said is None else f"checkpoint of muster train: {said}")
    for command in ("eval", "train --resume"):
        result = muster(*command.split(), str(run), *(GO_ON if "train" in command else ()))
        assert result.exit_code == 1
        assert re.fullmatch(rf"muster \w+: error: .*{said}\n", result.stderr), result.stderr
        assert len(result.stderr) < 600


def test_what_a_file_repeats_takes_memory_once(run: Path):
    zeros = b"".join(b'{"$tensor": "a"}, ' for _ in range(10_000))
    state = f'{{"steps": 1, "policy": {{"a": {{"$tensor": "a"}}}}, "more": [{zeros.decode()} 1]}}'
    written(run / "checkpoint.safetensors", {**stated(state), "a": span(0, 4 << 20)}, bytes(4 << 20))
    more = read_checkpoint(run)["more"]
    assert {one.data_ptr() for one in more[:-1]} == {more[0].data_ptr()}


def test_sizes_that_no_memory_holds_are_refused_before_they_are_read(run: Path, monkeypatch: pytest.MonkeyPatch):
    box = {"kind": "Box", "shape": [10**7, 10**7], "dtype": "float32", "low": 0, "high": 1}
    spaces = json.loads((run / "config.json").read_text())["spaces"]
    for changes in (
        {"hidden_sizes": [10**8, 10**8]},
        {"num_envs": 10**13},
        {"spaces": {**spaces, "observations": box}},
        {"spaces": {**spaces, "actions": {"kind": "Discrete", "n": 10**15, "start": 0, "dtype": "int64"}}},
    ):
        kept = (run / "config.json").read_text()
        change(run, **changes)
        said = r"config\.json(: .* describes no space: MemoryError| asks for more memory than there is: [\d,]+ bytes)"
        with pytest.raises(UsageError, match=said):
            load_policy(run)
        goes_on = muster("train", "--resume", str(run), *GO_ON)
        assert (goes_on.exit_code, goes_on.stderr.count("\n")) == (2, 1), goes_on.output
        (run / "config.json").write_text(kept)
    for changes in ({"num_steps": 10**12}, {"update_epochs": 10**400}):
        kept = (run / "config.json").read_text()
        change(run, **changes, spaces={})
        goes_on = muster("train", "--resume", str(run), *GO_ON)
        assert (goes_on.exit_code, goes_on.stderr.count("\n")) == (2, 1), goes_on.output
        (run / "config.json").write_text(kept)
    with (run / "best.safetensors").open("wb") as file:
        file.truncate(2 * memory_left()[0])
    with pytest.raises(UsageError, match=r"best\.safetensors asks for more memory than there is: [\d,]+ bytes"):
        load_policy(run, checkpoint="best")
    (run / "best.safetensors").unlink()
    monkeypatch.setattr(run_folder, "memory_left", lambda: (1_000_000, "of a small machine"))
    for changes in (
        {"hidden_sizes": [1], "spaces": {**spaces, "observations": {**box, "shape": [24_000]}}},
        {"env_kwargs": {"a": [[]] * 50_000}},
    ):
        kept = (run / "config.json").read_text()
        change(run, **changes)
        with pytest.raises(UsageError, match=r"config\.json asks for more memory than there is: [\d,]+ bytes"):
            load_policy(run)
        (run / "config.json").write_text(kept)
    (run / "metrics.csv").write_text("steps,mean_return,low_return,high_return\n" + "1,1,1,1\n" * 5_000)
    for words in (("plot", str(run), "--output", str(run / "own.png")), ("train", "--resume", str(run), *GO_ON)):
        assert "metrics.csv asks for more memory than there is: " in muster(*words).stderr


# ---- code in the working directory


LIBRARIES = ("minigrid", "mpe2", "meltingpot", "ale_py", "pettingzoo", "dm_control", "cv2", "av")
NAMED = ("minigrid:MiniGrid-Empty-5x5-v0", "ALE/Pong-v5", "PongNoFrameskip-v4", "pettingzoo/mpe/simple_v3",
         "meltingpot/commons_harvest__open", "dm_control/cartpole-balance-v0")  # fmt: skip


@pytest.mark.parametrize("how", [*slow("load_policy"), "commands"])
def test_what_only_the_folder_names_is_not_imported_from_the_working_directory(run: Path, tmp_path: Path, how: str):
    here = tmp_path / "here"
    here.mkdir()
    for name in LIBRARIES:
        (here / f"{name}.py").write_text("import os; open(__name__ + '.imported', 'w'); os.chmod = 1")
    change(run, make_vec={"num_workers": 1})
    words = json.dumps([how, str(run), NAMED if how == "load_policy" else NAMED[:2]])
    done = programs.run("-c", IN_FOLDER, words, cwd=here, imports=programs.TORCH)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in here.iterdir()) == sorted(f"{name}.py" for name in LIBRARIES)
    if how == "load_policy":
        assert json.loads(done.stdout.splitlines()[-1])["minigrid:MiniGrid-Empty-5x5-v0"] == "made"


IN_FOLDER = """
import json, os, sys
import muster
from muster import cli
how, run, named = json.loads(sys.argv[1])
assert sys.path[0] == "" or os.path.samefile(sys.path[0], ".")
config, found = os.path.join(run, "config.json"), {}
for env in named:
    with open(config) as file:
        values = json.load(file)
    with open(config, "w") as file:
        json.dump({**values, "env": env, "preset": "Atari" if "Pong" in env else "numbers"}, file)
    try:
        if how == "load_policy":
            muster.load_policy(run).make_vec(1).close()
        else:
            cli.run(["eval", run])
            cli.run(["train", "--total-steps=128", "--resume", run])
        found[env] = "made"
    except Exception as error:
        found[env] = str(error)
assert sys.path[0] == "" or os.path.samefile(sys.path[0], ".")
print(json.dumps(found))
"""


@pytest.mark.parametrize("context", ["forkserver", "fork"])
def test_a_worker_that_is_replaced_does_not_look_there_either(run: Path, tmp_path: Path, context: str):
    (tmp_path / "minigrid.py").write_text("raise ImportError('that of the working directory')")
    change(run, env="minigrid:MiniGrid-Empty-5x5-v0", make_vec={"context": context, "on_failure": "restart"})
    done = programs.run("-c", REPLACED, run, cwd=tmp_path, imports=programs.TORCH)
    assert (done.returncode, done.stdout) == (0, "replaced\n"), done.stderr


REPLACED = """
import os, signal, sys, warnings
import muster
warnings.simplefilter("ignore")
with muster.load_policy(sys.argv[1]).make_vec(1) as envs:
    envs.reset()
    os.kill(envs.stats()["workers"][0]["pid"], signal.SIGKILL)
    while not envs.stats()["restarts"]:
        envs.step(envs.action_space.sample())
    envs.step(envs.action_space.sample())
print("replaced")
"""


def distribution(site: Path, name: str, **files: str) -> None:
    """A distribution as pip installs it. files: of its .dist-info, by their names without dots."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    for file, text in files.items():
        (info / file.replace("_json", ".json")).write_text(text)


def test_a_library_is_known_where_an_installed_distribution_has_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    change(run, env="dm_control:Swimmer-v0")
    plan, site, project = plan_of(run), tmp_path / "site", tmp_path / "project"

    def is_refused() -> bool:
        importlib.invalidate_caches()
        with contextlib.suppress(ConfigError):
            plan.require_trust(run)
            return False
        with pytest.raises(ConfigError, match=r"Swimmer-v0, and no installed package has dm_control\. With"):
            plan.require_trust(run)
        return True

    project.mkdir()
    editable = json.dumps({"url": project.as_uri(), "dir_info": {"editable": True}})
    (project / "dm_control.py").write_text("")
    assert is_refused()  # it is nowhere on the path
    monkeypatch.setattr(sys, "path", [*sys.path, str(site), str(project)])
    distribution(site, "another", RECORD="another.py,,\n", direct_url_json=editable)
    assert is_refused()  # the user's own project, or a stranger's file in it
    distribution(site, "dm-control", RECORD="__editable__.pth,,\n", direct_url_json=editable)
    assert not is_refused()
    monkeypatch.chdir(project)
    assert not is_refused()
    shutil.rmtree(site)
    distribution(site, "dm-control", RECORD="dm_control.py,sha256=x,0\n")
    assert is_refused()
    (site / "dm_control.py").write_text("")
    assert not is_refused()
    monkeypatch.setitem(sys.modules, "dm_control", types.ModuleType("dm_control"))
    assert is_refused()
