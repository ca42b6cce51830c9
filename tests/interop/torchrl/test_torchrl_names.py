"""An import line of TorchRL's needs no second one: what Muster does not change is handed on."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

torchrl = pytest.importorskip("torchrl")

import muster.interop.torchrl as ours  # noqa: E402

# TorchRL warns of classes of its own.
pytestmark = pytest.mark.filterwarnings("ignore:Creating .*Updater:DeprecationWarning")
PAGE = Path(__file__).parents[3] / "docs" / "migration" / "from-parallel-env.md"
IN_PROCESSES = {"AsyncCollector", "Collector", "MultiAsyncCollector", "MultiCollector", "MultiSyncCollector"}


def test_all_collectors_that_need_processes_are_ours_and_all_other_names_are_torchrls():
    names = {name for name in (*torchrl.collectors.__all__, *dir(torchrl.collectors)) if not name.startswith("_")}
    assert names >= IN_PROCESSES
    changed = {name for name in names if getattr(ours, name) is not getattr(torchrl.collectors, name)}
    assert changed == IN_PROCESSES
    for name in changed:
        assert issubclass(getattr(ours, name), getattr(torchrl.collectors, name))
        assert getattr(ours, name).__module__.startswith("muster.")
    assert set(torchrl.collectors.__all__) <= set(ours.__all__) <= set(dir(ours))


def test_what_needs_ray_rpc_or_language_models_is_handed_on():
    for module in map(import_module, ("torchrl.collectors.distributed", "torchrl.collectors.llm")):
        for name in module.__all__:
            assert getattr(ours, name) is getattr(module, name)
            assert name in dir(ours)


def test_names_of_torchrl_envs_that_the_page_imports_come_from_there_too():
    imported = re.findall(r"^-?from torchrl\.envs import ([\w, ]+)", PAGE.read_text(), re.MULTILINE)
    names = {name for line in imported for name in line.split(", ")}
    assert names >= {"ParallelEnv", "TransformedEnv", "GymEnv", "StepCounter"}
    for name in names - {"ParallelEnv"}:
        assert getattr(ours, name) is getattr(torchrl.envs, name)
    assert issubclass(ours.ParallelEnv, torchrl.envs.ParallelEnv)


def test_a_name_that_nobody_has_is_an_error_that_says_where_it_was_looked_for():
    with pytest.raises(AttributeError, match="'MultiSinkCollector', nor have torchrl.collectors and torchrl.envs"):
        _ = ours.MultiSinkCollector
    with pytest.raises(ImportError):
        from muster.interop.torchrl import MultiSinkCollector  # noqa: F401


@pytest.mark.slow
def test_the_import_loads_none_of_what_is_apart():
    program = (
        "import sys, muster.interop.torchrl as ours; ours.WeightUpdaterBase; getattr(ours, 'nothing', None)\n"
        "print({'torchrl.collectors.llm', 'torchrl.collectors.distributed', 'ray'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.stdout == "set()\n", done.stderr
