"""The modules that pickles name, those that a node lacks, versions that differ, and what is said of them."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import numpy as np
import pytest

import muster
from muster.rollout.cluster.node_probe import (
    compare_versions,
    missing_here,
    missing_text,
    modules_named,
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


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_name_by_reference_is_found_in_every_protocol(modules: Path, protocol: int):
    import loose_envs

    # The module's name comes from the memo the second time.
    value = [loose_envs.Env, {"again": loose_envs.Other}, loose_envs.Env(), loose_envs.make, "os.path"]
    assert set(modules_named({"env": pickle.dumps(value, protocol)})) - {"copyreg", "copy_reg"} == {"loose_envs"}


def test_modules_that_a_function_by_value_holds_are_found_with_their_argument(modules: Path):
    import loose_envs

    def build() -> object:
        return loose_envs.make(), np.zeros(1), np

    packed = cloudpickle.dumps(build)
    found = modules_named({"policy": cloudpickle.dumps(3), "factory": packed, "worker_init": packed})
    assert {"loose_envs", "numpy"} <= found.keys()
    assert {found["loose_envs"], found["numpy"]} == {"factory"}
    assert "__main__" not in found


def test_pickles_one_behind_the_other_count(modules: Path):
    import loose_envs

    file = io.BytesIO()
    pickler = cloudpickle.Pickler(file)  # which has one memo for both, as that for worker_init and envs
    for one in (loose_envs.Env, [loose_envs.Other, loose_envs.make]):
        pickler.dump(one)
    both = file.getvalue()
    assert "None" not in modules_named({"env": both})
    assert "loose_envs" in modules_named({"env": both})
    assert "loose_envs" in modules_named({"env": pickle.dumps([both])})


def test_what_is_registered_by_value_is_not_needed(modules: Path):
    import loose_envs

    cloudpickle.register_pickle_by_value(loose_envs)
    try:
        assert "loose_envs" not in modules_named({"env": cloudpickle.dumps(loose_envs.make)})
    finally:
        cloudpickle.unregister_pickle_by_value(loose_envs)


def test_a_pickle_in_a_pickle_counts_and_numbers_that_begin_like_one_do_not(modules: Path):
    import loose_envs

    inner = pickle.dumps(loose_envs.Env)
    assert "loose_envs" in modules_named({"env": pickle.dumps({"packed": inner})})
    assert modules_named({"env": pickle.dumps([inner[:-1], inner + b"\0", b"\x80\xff", b"\x80" * 1000])}) == {}


def test_what_is_missing_is_found_without_running_any_of_it(modules: Path):
    here = ["loose_envs", "probed_package", "probed_package.inner", "os.path", "numpy.linalg", "builtins", "torch._C"]
    assert missing_here([*here, "not_there", "not_there.inner", "no_code", "loose_envs.inner"]) == [
        *("not_there", "not_there.inner", "no_code", "loose_envs.inner")
    ]
    assert "probed_package" not in sys.modules
    (modules / "not_there.py").write_text("")
    assert missing_here(["not_there"]) == []


def test_a_module_that_its_parent_makes_is_not_missing(modules: Path, monkeypatch: pytest.MonkeyPatch):
    (modules / "making.py").write_text("import sys, types\nsys.modules['making.made'] = types.ModuleType('made')\n")
    assert missing_here(["making.made", "making.other"]) == ["making.other"]
    for name in ("making", "making.made"):
        monkeypatch.delitem(sys.modules, name)


def test_each_way_out_of_a_missing_module_works_to_the_letter(modules: Path):
    import loose_envs

    said = missing_text("env_kwargs['make']", "loose_envs", "node 10.77.0.4")
    place = modules / "loose_envs.py"
    assert said == (
        f"env_kwargs['make'] needs module 'loose_envs' (from {place}), which node 10.77.0.4 does not have. Ways out: "
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
    assert missing_text("policy", "numpy.linalg", "node 1").endswith("Install it there, as it is here")
    for name in ("probed_package", "probed_package.inner"):
        said = missing_text("policy", name, "node 1")
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
    ends = "What travels would not be understood: install the same versions"
    assert found.error == (f"node 10.77.0.4 has {error}. {ends}" if error else "")
    ends = "If something fails there, install the same versions"
    assert found.warning == (f"node 10.77.0.4 has {warning}. {ends}" if warning else "")
