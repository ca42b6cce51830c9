"""The peers' own tests, unchanged, on the drop-ins: what passes with the originals must pass with Muster's classes.

Needs a checkout of the peer at the installed version, named by MUSTER_GYMNASIUM_CHECKOUT, MUSTER_SB3_CHECKOUT or
MUSTER_TORCHRL_CHECKOUT:
    MUSTER_GYMNASIUM_CHECKOUT=~/Gymnasium python -m pytest -m slow tests/interop/test_peer_suites.py
TorchRL's tests need PyYAML and its pytest.ini, and take ten minutes a file; those of its collectors take an hour. Those
of Melting Pot run with the light install, also with the originals: without chex, which comes with the bots, they could
not be collected.
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
_TORCHRL = [f"envs/{name}.py" for name in ("test_parallel", "test_nested", "test_env_base", "test_auto_reset")]
_TORCHRL += ["libs/test_gym.py", "libs/test_multiagent.py", "test_collectors.py"]
_DISPATCHED = [
    ("process", "torchrl.collectors._multi_base.MultiCollector"),
    ("multiprocessing", "torchrl.collectors._multi_base.MultiCollector"),
    ("ray", "torchrl.collectors.distributed.ray.RayCollector"),
    ("rpc", "torchrl.collectors.distributed.rpc.RPCCollector"),
    ("distributed", "torchrl.collectors.distributed.generic.DistributedCollector"),
    ("submitit", "torchrl.collectors.distributed.generic.DistributedCollector"),
]
# What tests of TorchRL's leave out of Muster's promises, by the end of their names, with the reason.
_EXCEPTED = {
    # The other workers' envs are not closed but killed: the error is raised at once.
    "test_metadata_from_workers_reports_construction_failure",
    # Looks at private attributes, which say that there are no columns; here there are.
    "test_num_workers_returns_parallel_env",
    # Backends for several machines are refused, with the way out, and "process" makes Muster's classes.
    *(f"test_backend_dispatch[{backend}-{target}]" for backend, target in _DISPATCHED),
    "test_backend_dispatch_validation",
    "test_context_backend_dispatch",
    "test_ray_backend_rejects_direct_replay_buffer",
    "test_sequence_inference_and_options_are_not_mutated",
    # Patch a method of tensordict's, by which TorchRL's loop writes into a buffer; here rows are stacked first.
    *(f"test_collector_with_rb_uses_lazy_stack[Lazy{kind}Storage]" for kind in ("Tensor", "Memmap")),
    # A weight_updater is refused, with the way out.
    "test_update_weights[weight_updater]",
}
_SUITES = [("MUSTER_GYMNASIUM_CHECKOUT", "swap_gymnasium", path) for path in _GYMNASIUM]
_SUITES += [("MUSTER_SB3_CHECKOUT", "swap_sb3", path) for path in _SB3]
_SUITES += [("MUSTER_TORCHRL_CHECKOUT", "swap_torchrl", f"test/{path}") for path in _TORCHRL]
_TIMEOUT_S = 7200


def _passed(checkout: str, path: str, report: Path, *options: str) -> set[str]:
    """Runs the peer's tests in `path`; the names of those that passed."""
    here = str(Path(__file__).parent)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}
    environ.setdefault("SDL_VIDEODRIVER", "dummy")
    environ.setdefault("MUJOCO_GL", "egl")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *options, path]
    if path.startswith("test/"):
        # Inside the folder: else the checkout's `torchrl` hides the installed one, which has its compiled parts.
        command[-1:] = ["-p", "melting_pot_alone", "--mp_fork_if_no_cuda", Path(path).name]
        checkout = str(Path(checkout) / Path(path).parent)
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
    assert sorted(name for name in originals - with_muster if name.rpartition("::")[2] not in _EXCEPTED) == []
