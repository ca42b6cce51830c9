"""Modules that a node lacks, versions that differ, and the messages about them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import numpy as np
import pytest

import muster
from muster.errors import CannotTravel
from muster.rollout.cluster.node_probe import (
    compare_versions,
    missing_text,
    versions_here,
)

SAME = {"Python": "3.11.7", "muster": "0.1.0", "torch": "2.5.1", "numpy": "2.1.0"}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path with a loose file, a package and a folder without code."""
    (tmp_path / "loose_envs.py").write_text("class Env: pass\nclass Other: pass\ndef make(): return Env()\n")
    (tmp_path / "probed_package").mkdir()
    (tmp_path / "probed_package" / "__init__.py").write_text("raise SystemExit('was imported')")
    (tmp_path / "probed_package" / "inner.py").write_text("")
    (tmp_path / "no_code").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("loose_envs", None)


def lacking(module: str) -> Exception:
    """An error that is caused by a module that is not there."""
    error = CannotTravel("the envs cannot be rebuilt there")
    error.__cause__ = ModuleNotFoundError(f"No module named {module!r}", name=module)
    return error


@pytest.mark.parametrize(
    "error", [None, ValueError("no"), lacking("not_there"), lacking("no_code.inner"), ImportError("x", name="os")]
)
def test_of_other_errors_and_of_modules_that_are_nowhere_nothing_is_said(modules: Path, error: Exception | None):
    assert missing_text(error, "node 1") == ""


def test_each_way_out_of_a_missing_module_works_to_the_letter(modules: Path):
    import loose_envs

    said = missing_text(lacking("loose_envs"), "node 10.77.0.4")
    place = modules / "loose_envs.py"
    assert said == (
        f"a collector needs module 'loose_envs' (from {place}), which node 10.77.0.4 does not have. Ways out: "
        f"RayCluster(runtime_env={{'working_dir': {str(modules)!r}}}); install it there; "
        "`import loose_envs, cloudpickle; cloudpickle.register_pickle_by_value(loose_envs)` before. "
        f"On a command line: --working-dir {modules}"
    )
    unpickle = [sys.executable, "-c", "import pickle, sys; pickle.load(sys.stdin.buffer)()"]
    packed = cloudpickle.dumps(loose_envs.make)
    assert subprocess.run(unpickle, input=packed, stderr=subprocess.DEVNULL).returncode == 1
    assert subprocess.run(unpickle, input=packed, cwd=modules).returncode == 0
    exec(said.rpartition("; `")[2].rpartition("`")[0])
    try:
        assert subprocess.run(unpickle, input=cloudpickle.dumps(loose_envs.make)).returncode == 0
    finally:
        cloudpickle.unregister_pickle_by_value(loose_envs)


def test_an_installed_package_is_to_be_installed_and_a_packages_folder_is_above_it(modules: Path):
    (modules / "probed_package" / "__init__.py").write_text("")
    assert missing_text(lacking("numpy.linalg"), "node 1").endswith("Install it there, as it is here")
    for name in ("probed_package", "probed_package.inner"):
        said = missing_text(lacking(name), "node 1")
        assert f"{{'working_dir': {str(modules)!r}}}" in said
        assert "register_pickle_by_value(probed_package)" in said
    sys.modules.pop("probed_package", None)


def test_this_process_has_the_versions_that_it_says():
    found = versions_here()
    assert (found["muster"], found["numpy"]) == (muster.__version__, np.__version__)
    assert found["cloudpickle"] == cloudpickle.__version__
    assert compare_versions(found, found, "node 1") == compare_versions(SAME, SAME, "node 1")


@pytest.mark.parametrize(
    ("there", "error", "warning"),
    [
        ({}, "", ""),
        ({"torch": "2.5.1+cu124", "numpy": "2.1.9"}, "", ""),
        ({"torch": "2.6.1"}, "torch 2.6.1 instead of 2.5.1", ""),
        ({"muster": "0.2.0"}, "muster 0.2.0 instead of 0.1.0", ""),
        ({"torch": None}, "torch (none) instead of 2.5.1", ""),
        ({"torch": "2.5"}, "", "torch 2.5 instead of 2.5.1"),
        ({"muster": "0.1.3", "numpy": "1.26.0"}, "", "muster 0.1.3 instead of 0.1.0, numpy 1.26.0 instead of 2.1.0"),
        ({"Python": "3.12.7", "numpy": "2.2"}, "Python 3.12.7 instead of 3.11.7", "numpy 2.2 instead of 2.1.0"),
    ],
)
def test_versions_that_differ_are_named_by_their_weight(there: dict[str, str | None], error: str, warning: str):
    found = compare_versions(SAME, {**SAME, **there}, "node 10.77.0.4")
    ends = "They would not understand what is sent: install the same versions"
    assert found.error == (f"node 10.77.0.4 has {error}. {ends}" if error else "")
    ends = "If something fails there, install the same versions"
    assert found.warning == (f"node 10.77.0.4 has {warning}. {ends}" if warning else "")
