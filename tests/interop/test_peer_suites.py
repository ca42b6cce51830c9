"""The peers' own tests, unchanged, on the drop-ins: what passes with the originals must pass with Muster's classes.

Needs a checkout of the peer at the installed version, named by MUSTER_GYMNASIUM_CHECKOUT or MUSTER_SB3_CHECKOUT:
    MUSTER_GYMNASIUM_CHECKOUT=~/Gymnasium python -m pytest -m slow tests/interop/test_peer_suites.py
"""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

_GYMNASIUM = [
    "tests/vector/test_async_vector_env.py",
    "tests/vector/test_autoreset_mode.py",
    "tests/vector/test_vector_env.py",
    "tests/vector/test_vector_env_info.py",
    "tests/vector/test_observation_mode.py",
    "tests/vector/test_sync_vector_env.py",
    "tests/vector/test_vector_wrapper.py",
    "tests/envs/registration/test_make_vec.py",
    "tests/wrappers/vector",
]
_SB3 = [
    "tests/test_vec_envs.py",
    "tests/test_vec_normalize.py",
    "tests/test_vec_monitor.py",
    "tests/test_vec_check_nan.py",
    "tests/test_vec_extract_dict_obs.py",
    "tests/test_vec_stacked_obs.py",
    "tests/test_utils.py",
    "tests/test_dict_env.py",
    "tests/test_monitor.py",
]
_SUITES = [("MUSTER_GYMNASIUM_CHECKOUT", "swap_gymnasium", path) for path in _GYMNASIUM]
_SUITES += [("MUSTER_SB3_CHECKOUT", "swap_sb3", path) for path in _SB3]
_TIMEOUT_S = 1800


def _passed(checkout: str, path: str, report: Path, *options: str) -> set[str]:
    """Runs the peer's tests in `path`; the names of those that passed."""
    here = str(Path(__file__).parent)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}
    environ.setdefault("SDL_VIDEODRIVER", "dummy")
    environ.setdefault("MUJOCO_GL", "egl")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *options, path]
    subprocess.run(command, cwd=checkout, env=environ, timeout=_TIMEOUT_S, capture_output=True, check=False)
    cases = ElementTree.parse(report).iter("testcase")
    return {f"{case.get('classname')}::{case.get('name')}" for case in cases if not len(case)}


@pytest.mark.slow
@pytest.mark.timeout(2 * _TIMEOUT_S)
@pytest.mark.parametrize(("variable", "plugin", "path"), _SUITES, ids=[path for *_, path in _SUITES])
def test_all_that_pass_with_the_originals_pass(variable, plugin, path, tmp_path):
    checkout = os.environ.get(variable)
    if not checkout:
        pytest.skip(f"{variable} names no checkout")
    originals = _passed(checkout, path, tmp_path / "originals.xml")
    assert originals, f"no test of {path} in {checkout} passes with the originals: is it a whole checkout?"
    with_muster = _passed(checkout, path, tmp_path / "muster.xml", "-p", plugin)
    assert sorted(originals - with_muster) == []
