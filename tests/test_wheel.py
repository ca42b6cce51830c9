"""The built wheel works by itself, away from the sources."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# The first build on a slow machine compiles the whole core.
pytestmark = pytest.mark.timeout(900)

SMOKE_TEST = """
import sys
import muster
import muster._core

for module in (muster, muster._core):
    assert module.__file__.startswith(sys.prefix), module.__file__
for backend in ("serial", "process"):
    envs = muster.make_vec("CartPole-v1", num_envs=2, backend=backend)
    envs.reset(seed=0)
    for _ in range(50):
        obs, rewards, *_ = envs.step(envs.action_space.sample())
    print(backend, obs.shape, rewards.tolist())
    envs.close()
"""


def run(*command: str, cwd: Path | None = None) -> str:
    """What ``command`` prints. It fails the test, with all its output, where it does not end well."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd, env=environment, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of the wheel, built with the build requirements of this environment and without a network."""
    target = tmp_path_factory.mktemp("wheel")
    # A build folder of its own: the editable install keeps its configuration in build/.
    options = ["--no-build-isolation", "--no-deps", "--no-index", f"--config-settings=build-dir={target}/build"]
    run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(target), str(ROOT))
    (path,) = target.glob("*.whl")
    return path


@pytest.mark.slow
def test_wheel_ships_the_core_and_not_its_sources_and_requires_three_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (path,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        requires = Parser().parsestr(archive.read(path).decode()).get_all("Requires-Dist", [])
    required = sorted(line.split(">")[0] for line in requires if "extra ==" not in line)
    assert required == ["cloudpickle", "gymnasium", "numpy"]
    suffix = sysconfig.get_config_var("EXT_SUFFIX") if sys.version_info < (3, 12) else ".abi3.so"
    assert f"muster/_core{suffix}" in names
    assert "muster/py.typed" in names
    assert "muster/envs/install_meltingpot.py" in names
    assert "muster/docs/problems/zeromq.md" in names  # errors name these pages
    code = [name for name in names if name.startswith("muster/") and not name.startswith("muster/docs/")]
    assert {Path(name).suffix for name in code} <= {".py", ".pyi", ".so", ".typed", ".toml", ".mplstyle"}
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"muster"}
    assert {Path(name).name for name in names if "/licenses/" in name} == {"LICENSE", "THIRD_PARTY_LICENSES"}


@pytest.mark.parametrize("platform", ["win32", pytest.param("darwin", marks=pytest.mark.slow)])
def test_other_systems_are_told_in_one_sentence_where_muster_runs(platform: str, tmp_path: Path) -> None:
    build = f"import sys; sys.platform = {platform!r}; import scikit_build_core.build as backend; "
    build += f"backend.prepare_metadata_for_build_wheel({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    (line,) = (done.stdout + done.stderr).splitlines()
    assert line == "Muster runs on Linux only: install it in WSL 2 on Windows, in a Linux container on macOS."


@pytest.mark.slow
def test_the_readmes_line_builds_a_wheel_without_a_compiler_and_installs_it(tmp_path: Path) -> None:
    line = next(one for one in (ROOT / "README.md").read_text().splitlines() if one.startswith("make wheel"))
    run("git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(tmp_path / "checkout"))
    venv.create(tmp_path / "venv", with_pip=True)
    path = f"{tmp_path / 'venv' / 'bin'}:{Path(sys.base_prefix) / 'bin'}:{os.environ['PATH']}"
    (tmp_path / "tools").mkdir()
    for compiler in ("cc", "c++", "gcc", "g++", "clang++"):
        (tmp_path / "tools" / compiler).symlink_to("/bin/false")
    run("env", f"PATH={tmp_path / 'tools'}:{path}", "bash", "-ec", line, cwd=tmp_path / "checkout")
    script = tmp_path / "smoke.py"
    script.write_text(SMOKE_TEST, encoding="utf-8")
    assert "process (2, 4)" in run(str(tmp_path / "venv" / "bin" / "python"), str(script), cwd=tmp_path)


@pytest.mark.slow
def test_wheel_works_in_an_environment_without_the_sources(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    python = str(home / "bin" / "python")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", str(wheel))
    # The dependencies come from this environment. A path that a .pth file adds comes after the environment's own, and
    # the .pth files inside it, that of an editable install among them, are not read.
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(packages, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    script = tmp_path / "smoke.py"
    script.write_text(SMOKE_TEST, encoding="utf-8")
    printed = run(python, str(script), cwd=tmp_path)
    assert [line.split(" [")[0] for line in printed.splitlines()] == ["serial (2, 4)", "process (2, 4)"]
