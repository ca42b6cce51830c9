"""CONTRIBUTING names every file that a step executes, and there are few of them."""

from __future__ import annotations

import json
import os
import re
import site
import subprocess
import sys
import venv
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "muster"
# The bindings, and references to Python objects: every call into the core passes them.
NOT_COUNTED = {"_core/module.cpp", "_core/python.hpp"}

CARTPOLES = {
    "serial": "muster.make_vec('CartPole-v1', 8, backend='serial')",
    "process": "muster.make_vec('CartPole-v1', 8, num_workers=2)",
    "caller_steps": "muster.make_vec('CartPole-v1', 8, num_workers=2, caller_steps=True)",
}
AGENTS = {
    "simple_spread": "muster.make_vec('pettingzoo/mpe/simple_spread_v3', 2, backend='serial')",
    "multiwalker": "muster.make_vec('pettingzoo/sisl/multiwalker_v9', 2, backend='serial')",
}

# Steps so many times, then reports which files of the package run Python code in one more step.
PROGRAM = """
import json, sys
import muster
envs = {make}
envs.reset(seed=0)
envs.action_space.seed(0)
actions = envs.action_space.sample()
for _ in range(int(sys.argv[1])):
    envs.step(actions)
seen = set()
sys.settrace(lambda frame, event, argument: seen.add(frame.f_code.co_filename))
envs.step(actions)
sys.settrace(None)
print(json.dumps(sorted(seen)))
envs.close()
"""


@pytest.fixture(scope="module")
def measured_core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a core that counts how often each of its lines is executed, and an environment that uses it."""
    folder = tmp_path_factory.mktemp("coverage")
    cmake = Path(sys.executable).with_name("cmake")
    flags = ("-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS=--coverage", f"-DPython_EXECUTABLE={sys.executable}")
    subprocess.run([cmake, "-S", ROOT, "-B", folder / "build", *flags], check=True, capture_output=True)
    subprocess.run([cmake, "--build", folder / "build"], check=True, capture_output=True)
    package = folder / "site" / "muster"
    package.mkdir(parents=True)
    for path in PACKAGE.iterdir():
        if not path.name.startswith("_core.c"):
            (package / path.name).symlink_to(path)
    (core,) = (folder / "build").glob("_core*.so")
    (package / core.name).symlink_to(core)
    # The environment finds all other packages, but not an editable install: .pth files count in its own folder only.
    venv.create(folder / "venv", symlinks=True)
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    (packages / "paths.pth").write_text("\n".join([str(folder / "site"), *site.getsitepackages()]) + "\n")
    return folder


def files_of_a_step(make: str, folder: Path, counts: Path) -> set[str]:
    """The files that a step executes: in the core those with lines that run more often where more steps are made."""
    executed: list[Counter[str]] = []
    for steps in (5, 8):
        environment = {**os.environ, "GCOV_PREFIX": str(counts / str(steps))}
        command = [folder / "venv" / "bin" / "python", "-c", PROGRAM.format(make=make), str(steps)]
        result = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        executed.append(lines_executed(folder, counts / str(steps)))
    seen = {Path(name).resolve() for name in json.loads(result.stdout.splitlines()[-1])}
    python = {str(path.relative_to(PACKAGE)) for path in seen if path.is_relative_to(PACKAGE)}
    more = executed[1] - executed[0]
    return (python | {place.partition(":")[0] for place in more}) - NOT_COUNTED


def lines_executed(folder: Path, counts: Path) -> Counter[str]:
    """How often each line of the core was executed, by "file:line"."""
    (data,) = counts.rglob("*module.cpp.gcda")
    (notes,) = (folder / "build").rglob("*module.cpp.gcno")
    (data.parent / notes.name).unlink(missing_ok=True)
    (data.parent / notes.name).symlink_to(notes)
    text = subprocess.run(
        ["gcov", "--json-format", "--stdout", data.name], cwd=data.parent, check=True, capture_output=True, text=True
    ).stdout
    executed: Counter[str] = Counter()
    for file in json.loads(text)["files"]:
        path = (folder / "build" / file["file"]).resolve()
        if path.is_relative_to(PACKAGE):
            for line in file["lines"]:
                executed[f"{path.relative_to(PACKAGE)}:{line['line_number']}"] += line["count"]
    return executed


def story() -> str:
    """The part of CONTRIBUTING that tells how a step goes."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return text.partition("## How a step goes")[2].partition("\n## ")[0]


def lines_of(files: set[str]) -> int:
    return sum((PACKAGE / file).read_text(encoding="utf-8").count("\n") for file in files)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_story_names_the_files_of_a_step(measured_core: Path, tmp_path: Path) -> None:
    of_cartpoles = set().union(
        *(files_of_a_step(one, measured_core, tmp_path / name) for name, one in CARTPOLES.items())
    )
    named = set(re.findall(r"`([\w/]+\.\w+)`", story()))
    assert of_cartpoles <= named
    assert len(of_cartpoles) <= 9
    assert lines_of(of_cartpoles) <= 2_400
    for name, make in AGENTS.items():
        of_agents = files_of_a_step(make, measured_core, tmp_path / name)
        assert {file for file in of_agents if not file.startswith("envs/pettingzoo")} <= named
        assert len(of_agents | of_cartpoles) <= 14
        assert lines_of(of_agents | of_cartpoles) <= 3_500
