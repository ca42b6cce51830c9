"""What is said where an optional package is missing or too old, by every command and class that needs one."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
from pathlib import Path

import pytest

import programs
from command import muster
from fake_packages import pretend_installed
from muster.extras import PACKAGES, require

DOCTOR, TORCH, SB3, TORCHRL, TRAIN, MARL, RAY = (
    f"pip install 'muster-rl[{name}]'" for name in ("doctor", "torch", "sb3", "torchrl", "train", "marl", "ray")
)
SUBSTRATES = "python -m muster.envs.install_meltingpot"
LOAD_SUBSTRATES = "from muster.envs.melting_pot import load_substrates; load_substrates()"
WRITE_EVENTS = "from pathlib import Path; from muster.training.events import EventLog; EventLog(Path())"
PLOT = "from muster.training.picture import learning_curve; learning_curve(1, title='')"
CONNECT = "from muster.rollout.cluster.ray_connection import connect; connect()"
DIAGNOSE = "muster.diagnose('CartPole-v1', policy=1)"
OLD_PONG = "muster.make_vec('PongNoFrameskip-v4')"
PONG, CLEAN_UP = "muster.make_vec('ALE/Pong-v5')", "muster.make_vec('meltingpot/clean_up')"
TAG, WALKER = "muster.make_vec('pettingzoo/mpe/simple_tag_v3')", "muster.make_vec('pettingzoo/sisl/multiwalker_v9')"
BUILD_WALKER = "muster.make_vec('pettingzoo/sisl/multiwalker_v9', backend='serial')"

# What is missing, what a user writes, the sentence, and the line that it ends with.
MISSING = [
    ("torch", "import muster.nn", "muster.nn needs PyTorch", TORCH),
    ("tensordict", "import muster.nn", "muster.nn needs TensorDict", TORCH),
    ("torch", "import muster.algorithms", "muster.algorithms needs PyTorch", TORCH),
    ("torch", "import muster.rollout", "Collectors need PyTorch", TORCH),
    ("torch", "muster.Collector", "Collectors need PyTorch", TORCH),
    ("tensordict", "from muster import MultiCollector", "Collectors need TensorDict", TORCH),
    ("torch", "muster.rebuild_with", "Collectors need PyTorch", TORCH),
    ("torch", DIAGNOSE, "diagnose(policy=...) needs PyTorch", TORCH),
    ("stable_baselines3", "import muster.interop.sb3", "muster.interop.sb3 needs Stable-Baselines3", SB3),
    ("torch", "import muster.interop.sb3", "muster.interop.sb3 needs PyTorch", SB3),
    ("torchrl", "import muster.interop.torchrl", "muster.interop.torchrl needs TorchRL", TORCHRL),
    ("torch", "import muster.interop.torchrl", "muster.interop.torchrl needs PyTorch", TORCHRL),
    ("torchrl", "import muster.interop.torchrl.losses", "muster.interop.torchrl needs TorchRL", TORCHRL),
    ("tensorboard", WRITE_EVENTS, "Event files need TensorBoard", TRAIN),
    ("matplotlib", PLOT, "Plots need matplotlib", TRAIN),
    ("pettingzoo", WALKER, "'pettingzoo/sisl/multiwalker_v9' needs pettingzoo", MARL),
    ("mpe2", TAG, "'pettingzoo/mpe/simple_tag_v3' needs mpe2", MARL),
    ("Box2D", BUILD_WALKER, "pettingzoo.sisl.multiwalker_v9 needs Box2D", "pip install 'pettingzoo[sisl]'"),
    ("meltingpot", CLEAN_UP, "'meltingpot/clean_up' needs Melting Pot", SUBSTRATES),
    ("ray", CONNECT, "cluster='ray' needs Ray", RAY),
    ("meltingpot", LOAD_SUBSTRATES, "Substrates need Melting Pot", SUBSTRATES),
    ("ml_collections", LOAD_SUBSTRATES, "Melting Pot needs ml_collections", SUBSTRATES),
    ("ale_py", PONG, "'ALE/Pong-v5' needs the Arcade Learning Environment", "pip install ale-py"),
    ("ale_py", OLD_PONG, "'PongNoFrameskip-v4' needs the Arcade Learning Environment", "pip install ale-py"),
]
# What a user writes, and the beginning of the sentence, where all packages of the extras are of version 0.1.
TOO_OLD = [
    ("import muster.nn", "muster.nn needs PyTorch", "muster-rl[torch]"),
    ("import muster.algorithms", "muster.algorithms needs PyTorch", "muster-rl[torch]"),
    ("muster.Collector", "Collectors need PyTorch", "muster-rl[torch]"),
    ("import muster.interop.sb3", "muster.interop.sb3 needs Stable-Baselines3", "muster-rl[sb3]"),
    ("import muster.interop.torchrl", "muster.interop.torchrl needs TorchRL", "muster-rl[torchrl]"),
]
TRY_EACH = """
import importlib, json, sys, muster
said = []
for hidden, code in json.loads(sys.argv[1]):
    kept = sys.modules.get(hidden)
    sys.modules[hidden] = None
    try:
        exec(code)
    except Exception as error:
        said.append([type(error).__name__, str(error)])
    else:
        said.append(["nothing", ""])
    if kept is None:
        del sys.modules[hidden]
    else:
        sys.modules[hidden] = kept
print(json.dumps(said))
"""


def said_by(cases: list[tuple[str, str]], **environment: str) -> list[list[str]]:
    """The class and the message of what is raised by each case: a module to hide, and code. All run in one process."""
    command = ["-W", "ignore", "-c", TRY_EACH, json.dumps(cases)]
    done = programs.run(*command, env={**os.environ, **environment}, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def said_when_missing() -> list[list[str]]:
    return said_by([(hidden, code) for hidden, code, *_ in MISSING])


@pytest.fixture(scope="module")
def said_when_old(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    folder = tmp_path_factory.mktemp("old")
    for package in PACKAGES.values():
        pretend_installed(folder, package.distribution, "0.1")
    return said_by([("nothing", code) for code, *_ in TOO_OLD], PYTHONPATH=str(folder))


@pytest.mark.parametrize("index", range(len(MISSING)), ids=[f"{code}, no {hidden}" for hidden, code, *_ in MISSING])
def test_what_is_missing_is_told_with_the_line_that_installs_it(index: int, said_when_missing: list[list[str]]):
    hidden, _, beginning, line = MISSING[index]
    kind, message = said_when_missing[index]
    assert kind == ("EnvError" if hidden == "Box2D" else "ModuleNotFoundError")
    assert message.endswith(f"{beginning}. Install it with: {line}")


@pytest.mark.parametrize("index", range(len(TOO_OLD)), ids=[code for code, *_ in TOO_OLD])
def test_what_is_too_old_is_told_at_import(index: int, said_when_old: list[list[str]]):
    _, beginning, requirement = TOO_OLD[index]
    kind, message = said_when_old[index]
    assert kind == "ImportError"
    assert re.fullmatch(
        rf"{beginning}>=[\d.]+, found 0\.1\. Upgrade it with: pip install --upgrade '{re.escape(requirement)}'", message
    )


def test_an_old_original_is_not_imported_first(tmp_path: Path):
    pretend_installed(tmp_path, "stable-baselines3", "1.8.0")
    (tmp_path / "stable_baselines3.py").write_text("raise AttributeError('module numpy has no attribute bool8')")
    ((kind, message),) = said_by([("nothing", "import muster.interop.sb3")], PYTHONPATH=str(tmp_path))
    assert (kind, message) == (
        "ImportError",
        "muster.interop.sb3 needs Stable-Baselines3>=2.9, found 1.8.0. "
        "Upgrade it with: pip install --upgrade 'muster-rl[sb3]'",
    )


@pytest.mark.parametrize("found", ["2.9", "2.9.0", "2.9.0a3", "v2.10.1", "3", "2.13.0+cpu", "unknown", "0"])
def test_a_version_that_is_new_enough_or_says_nothing_is_no_reason_to_complain(
    found: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    require("A test needs", "muster-rl[sb3]", "stable_baselines3")


@pytest.mark.parametrize("found", ["2.8.99", "2.8.0+cpu", "1.30", "0.9"])
def test_a_version_that_is_too_old_is_named(found: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    with pytest.raises(ImportError, match=re.escape(f"Stable-Baselines3>=2.9, found {found}.")):
        require("A test needs", "muster-rl[sb3]", "stable_baselines3")


def test_a_package_without_metadata_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch):
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    require("A test needs", "muster-rl[torch]", "torch")  # a nightly build of tensordict has another name


def test_a_broken_package_raises_its_own_error(tmp_path: Path):
    (tmp_path / "stable_baselines3").mkdir()
    (tmp_path / "stable_baselines3" / "__init__.py").write_text("")
    ((kind, message),) = said_by([("nothing", "import muster.interop.sb3")], PYTHONPATH=str(tmp_path))
    assert (kind, message) == ("ModuleNotFoundError", "No module named 'stable_baselines3.common'")


def test_help_on_muster_can_be_read_without_torch():
    code = "import sys; sys.modules['torch'] = None; import muster; help(muster); print('DIR', dir(muster))"
    done = programs.run("-c", code, check=True)
    assert "make_vec(" in done.stdout
    names = done.stdout.rpartition("DIR")[2]
    assert "'diagnose'" in names
    assert "'Collector'" not in names


# ---- the commands


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        ("train CartPole-v1", "train"),
        ("eval runs/some", "train"),
        ("doctor CartPole-v1 --seconds 2", "doctor"),
        ("bench CartPole-v1", "doctor"),
    ],
)
def test_a_command_without_its_packages_names_its_own_extra(
    arguments: str, extra: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "rich", None)
    result = muster(*arguments.split())
    sentence = f"this command needs rich. Install it with: pip install 'muster-rl[{extra}]'"
    assert (result.exit_code, result.stderr) == (1, f"muster {arguments.split()[0]}: error: {sentence}\n")


def test_the_overview_needs_no_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert muster("--help").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "hidden", "beginning", "line"),
    [
        ("train CartPole-v1", "torch", "this command needs PyTorch", TRAIN),
        ("train CartPole-v1", "tensordict", "this command needs TensorDict", TRAIN),
        ("train CartPole-v1", "tensorboard", "this command needs TensorBoard", TRAIN),
        ("train CartPole-v1", "matplotlib", "this command needs matplotlib", TRAIN),
        ("eval runs/some", "torch", "this command needs PyTorch", TRAIN),
        ("doctor", "psutil", "this command needs psutil", DOCTOR),
        ("doctor CartPole-v1 --policy json:loads", "torch", "--policy needs PyTorch", TORCH),
    ],
)
def test_what_a_command_lacks_is_told_before_it_begins(
    arguments: str, hidden: str, beginning: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, hidden, None)
    result = muster(*arguments.split())
    assert result.exit_code == 1
    assert result.stderr == f"muster {arguments.split()[0]}: error: {beginning}. Install it with: {line}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_command_says_what_is_too_old_for_it(tmp_path: Path):
    pretend_installed(tmp_path, "rich", "13.9.4")
    command = ["-c", "from muster.cli import main; main()", "doctor", "CartPole-v1"]
    done = programs.run(*command, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert done.stderr == (
        f"muster doctor: error: this command needs rich>={PACKAGES['rich'].oldest}, found 13.9.4. "
        "Upgrade it with: pip install --upgrade 'muster-rl[doctor]'\n"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        "bench CartPole-v1 --num-envs 2 --rounds 1 --seconds 0.02",
        pytest.param("doctor CartPole-v1 --num-envs 2 --seconds 0.02", marks=pytest.mark.slow),
        "doctor NoSuchEnv-v0",
        "--help",
    ],
)
def test_doctor_bench_and_help_import_nothing_that_trains(arguments: str, tmp_path: Path):
    for module in ("torch", "tensordict", "tensorboard", "matplotlib"):
        (tmp_path / f"{module}.py").write_text(f"raise SystemExit('{module} was imported')")
    command = ["-c", "from muster.cli import main; main()", *arguments.split()]
    done = programs.run(*command, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert "was imported" not in done.stdout + done.stderr
    assert done.returncode == (1 if "NoSuchEnv" in arguments else 0), done.stderr


@pytest.mark.parametrize(
    ("said", "imports", "found"),
    [
        ({}, "", "1000 None"),
        ({"GOMP_SPINCOUNT": "7"}, "", "7 None"),
        ({"OMP_WAIT_POLICY": "active"}, "", "None active"),
        ({}, "import torch; ", "None None"),
    ],
)
def test_threads_of_torch_sleep_soon_where_it_is_not_imported_yet(said: dict[str, str], imports: str, found: str):
    names = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
    environ = {name: value for name, value in os.environ.items() if name not in names} | said
    code = f"{imports}import muster, os; muster.train; print(*map(os.environ.get, {names}))"
    assert programs.run("-c", code, env=environ).stdout == f"{found}\n"
