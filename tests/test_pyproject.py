"""What pyproject.toml says is true: the version, the extras, and the lines that install them everywhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import muster
from muster.envs.install_meltingpot import REQUIREMENTS
from muster.extras import PACKAGES

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def test_the_package_the_changelog_and_the_tag_have_the_same_version():
    assert muster.__version__ == PROJECT["version"]
    newest = re.search(
        r"^## (\S+) \((unreleased|\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert newest is not None
    assert newest[1] == PROJECT["version"]
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        return  # a source distribution
    pointing_here = subprocess.run(
        [git, "tag", "--points-at", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    tags = [tag for tag in pointing_here.stdout.split() if re.match(r"v\d", tag)]
    assert tags in ([], [f"v{PROJECT['version']}"])
    if tags:
        assert newest[2] != "unreleased", "CHANGELOG.md gives the day of a release"


def packages_of(extra: str) -> set[str]:
    """The requirements of an extra, and of the extras that it names."""
    found = set()
    for requirement in EXTRAS[extra]:
        if inner := re.fullmatch(r"muster-rl\[(.*)\]", requirement):
            found.update(*(packages_of(name.strip()) for name in inner[1].split(",")))
        else:
            found.add(requirement)
    return found


def names_of(extra: str) -> set[str]:
    return {re.split(r"[>=<\[;]", requirement)[0] for requirement in packages_of(extra)}


def test_the_extra_for_melting_pot_and_its_command_bring_the_same():
    assert packages_of("meltingpot") == set(REQUIREMENTS)


def test_the_extra_all_has_everything_that_users_may_need():
    extras = ("doctor", "train", "torch", "marl", "meltingpot", "sb3", "torchrl", "loggers")
    assert packages_of("all") == set().union(*map(packages_of, extras))


def test_the_tests_have_everything_and_nothing_of_the_benchmarks_alone():
    assert packages_of("all") <= packages_of("dev")
    assert "envpool" not in names_of("dev")
    assert "envpool" in names_of("bench")


@pytest.mark.parametrize("module", PACKAGES)
def test_the_oldest_versions_are_those_of_the_extras(module: str):
    lowest = {one.partition(",")[0] for one in packages_of("all") | packages_of("ray")}
    assert f"{PACKAGES[module].distribution}>={PACKAGES[module].oldest}" in lowest


def texts() -> dict[str, str]:
    """What users read, by path."""
    patterns = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md", "examples/*.py", "src/muster/**/*.py")
    paths = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def test_no_line_installs_the_other_project_that_is_called_muster():
    # `muster` on PyPI is not this one.
    wrong = re.compile(r"(?:pip|uv) (?:install|add)[^\n]*?\bmuster(?![\w.-])|\bmuster\[")
    assert [(path, found[0]) for path, text in texts().items() for found in wrong.finditer(text)] == []


def test_every_extra_that_is_named_exists():
    named = {(path, name) for path, text in texts().items() for group in re.findall(r"muster-rl\[([^]{}<]+)\]", text)
             for name in group.split(",")}  # fmt: skip
    assert {name for _, name in named} >= {"doctor", "train", "torch", "marl", "sb3", "torchrl"}
    assert [(path, name) for path, name in named if name not in EXTRAS and name != "extra"] == []
