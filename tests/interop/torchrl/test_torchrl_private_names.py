"""The private names of TorchRL's that `muster.interop.torchrl` rests on: all listed, there, as they are used here."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import textwrap
import types
import warnings
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import programs

torchrl = pytest.importorskip("torchrl")

import muster.interop.torchrl  # noqa: E402, F401, I001  # first: it silences what TorchRL says of itself

from torchrl import collectors as their_collectors  # noqa: E402
from torchrl.collectors import _multi_base, _runner, _single  # noqa: E402
from torchrl.collectors import utils as collector_utils  # noqa: E402
from torchrl.envs import EnvBase  # noqa: E402
from torchrl.envs import ParallelEnv as TheirParallelEnv  # noqa: E402
from torchrl.envs.libs import gym as libs_gym  # noqa: E402
from torchrl.envs.libs.gym import GymEnv, GymWrapper  # noqa: E402
from torchrl.envs.libs.pettingzoo import PettingZooWrapper  # noqa: E402
from torchrl.testing.mocking_classes import CountingEnv  # noqa: E402

from muster._core import MARK  # noqa: E402
from muster.interop import private_names  # noqa: E402
from muster.interop.torchrl import ParallelEnv, parallel  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")

FOLDER = Path(parallel.__file__).parent
MODULES = [importlib.import_module(f"muster.interop.torchrl.{file.stem}") for file in sorted(FOLDER.glob("[a-z]*.py"))]
# Several tuples: each module that rests on private names has one of its own.
LISTED = {name for module in MODULES for name in getattr(module, "PRIVATE_NAMES", ())}
# What TorchRL documents for classes derived from it.
DOCUMENTED = {"_reset", "_step", "_set_seed"}

# The parameters of the functions among them, as they are called, or overridden, here.
SIGNATURES = {
    "_complete_done": ["cls", "done_spec", "data"],
    "_create_td": ["self"],
    "_get_collector_next_keys_to_exclude": ["self"],
    "_build_env": ["self", "env"],
    "_get_metadata": ["self", "create_env_fn", "create_env_kwargs"],
    "_gym_to_torchrl_spec_transform": ["spec", "dtype", "device", "categorical_action_encoding"],
    "_set_metadata": ["self", "meta_data"],
    "_shutdown_workers": ["self"],
    "_start_workers": ["self"],
    "_step": ["self", "tensordict"],
    "_step_and_maybe_reset": ["self", "tensordict"],
    "_step_proc_data": ["self", "next_tensordict_out"],
    "_validate_worker_env": ["env"],
    "_wait_for_workers": ["self", "workers_range"],
}

# Members of TorchRL's `ParallelEnv` that do their work here, too, through what is overridden.
INHERITED = {
    *("__doc__", "__module__", "__annotations__", "__parameters__", "__static_attributes__", "__firstlineno__"),
    *("__getattr__", "__getitem__", "__setitem__", "__reduce__", "__abstractmethods__", "_abc_impl"),
    *("make_parallel", "set_seed", "state_dict", "to", "_filter_warnings_subprocess", "_reset", "_reset_no_buffers"),
    *("_step_no_buffers", "_step_and_maybe_reset_no_buffers", "_get_collector_next_keys_to_exclude"),
}
# Members that only what is overridden has called.
UNUSED = {"_receive_worker_metadata", "_cleanup_failed_worker_startup", "_terminate_and_join_workers"}


def test_every_member_of_torchrls_class_is_overridden_or_inherited_on_purpose():
    assert set(vars(TheirParallelEnv)) - set(vars(ParallelEnv)) - INHERITED - UNUSED == set()
    # The lists name nothing that is gone, except what only some releases of Python have.
    pythons = {name for name in INHERITED if name.startswith("__")} | {"_abc_impl"}
    assert (INHERITED | UNUSED) - pythons <= set(vars(TheirParallelEnv))


class Watched:
    """Notes the names that are looked up in an object."""

    looked_up: ClassVar[set[str]]

    def __getattribute__(self, name: str) -> Any:
        type(self).looked_up.add(name)
        return super().__getattribute__(name)


class WatchedParallel(Watched, TheirParallelEnv):
    looked_up: ClassVar[set[str]] = set()


class WatchedGym(Watched, GymEnv):
    looked_up: ClassVar[set[str]] = set()


class WatchedCollector(Watched, their_collectors.Collector):
    looked_up: ClassVar[set[str]] = set()


class WatchedMulti(Watched, their_collectors.MultiSyncCollector):
    looked_up: ClassVar[set[str]] = set()


class WatchedCounting(Watched, CountingEnv):
    looked_up: ClassVar[set[str]] = set()


@pytest.fixture(scope="module")
def passed_through() -> set[str]:
    """The names that TorchRL's own classes look up while public methods are called."""
    called: set[str] = set()
    transform = libs_gym._gym_to_torchrl_spec_transform
    envs = WatchedParallel(2, CountingEnv, mp_start_method="fork")
    envs.rollout(3, break_when_any_done=False)
    envs.step(envs.rand_action(envs.reset()))
    envs.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            libs_gym, transform.__name__, lambda *a, **k: called.add(transform.__name__) or transform(*a, **k)
        )
        gym, counting = WatchedGym("CartPole-v1"), WatchedCounting()
    assert gym.env_name == "CartPole-v1"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **kwargs: function)
        counting.compile()
    called |= set(vars(counting))
    for env in (gym, counting):
        env.rollout(2)
        env.close()
    torch.manual_seed(0)
    one = WatchedCollector(GymEnv("CartPole-v1"), frames_per_batch=4, total_frames=4, reset_at_each_iter=True)
    several = WatchedMulti([CountingEnv], frames_per_batch=4, total_frames=4)
    for collector in (one, several):
        assert len(list(collector)) == 1
        collector.state_dict()
        collector.shutdown()
    called |= WatchedCollector.looked_up | WatchedMulti.looked_up
    return called | WatchedParallel.looked_up | WatchedGym.looked_up | WatchedCounting.looked_up


# Functions, members of metaclasses, and what only some envs, policies and updates of weights need.
IN_SOURCES = {
    *(
        "_BACKENDS",
        "_RESERVED_OPTIONS",
        "_TrajectoryPool",
        "_closed",
        "_drop_inapplicable_defaults",
        "_fallback_policy",
    ),
    *("_ensure_derived_policy_output_keys", "_get_mp_ctx", "_get_service_backend", "_ignore_rb", "_weight_update_impl"),
    *("_maybe_normalize_replay_buffer_tensordict_device", "_normalize_direct_env_fn", "_normalize_env_fns"),
    *("_has_dynamic_specs", "_torchrl_native_autoreset"),
}


def test_a_public_call_of_torchrls_passes_through_each_private_name(passed_through: set[str]):
    modules = (_single, _multi_base, _runner, collector_utils, their_collectors._base, torchrl.envs.common)
    sources = "".join(map(inspect.getsource, modules))
    assert [name for name in sorted(LISTED & IN_SOURCES) if name not in sources] == []
    assert sorted(LISTED - IN_SOURCES - passed_through) == []


def test_methods_have_the_parameters_that_they_are_given():
    for name in sorted(LISTED):
        check_parameters(name)


def check_parameters(name: str) -> None:
    owners = (TheirParallelEnv, PettingZooWrapper, libs_gym)
    member = next((found for owner in owners if (found := getattr(owner, name, None)) is not None), None)
    member = getattr(member, "__func__", member)  # of a class method
    while inspect.isfunction(member) and list(inspect.signature(member).parameters)[1:2] == ["args"]:
        member = wrapped_in(member)
    parameters = list(inspect.signature(member).parameters) if inspect.isfunction(member) else []
    expected = SIGNATURES.get(name, [])
    assert parameters[: len(expected)] == expected, name
    assert bool(parameters) == bool(expected), name


def wrapped_in(function: types.FunctionType) -> types.FunctionType | None:
    """The function that a decorator has wrapped, if any."""
    held = (cell.cell_contents for cell in function.__closure__ or ())
    return next((one for one in held if inspect.isfunction(one)), None)


# ---- no others

THEIRS = {
    name
    for name in set().union(*map(private_names.mentioned, (TheirParallelEnv, EnvBase, GymWrapper)))
    if name.startswith("_") and not name.startswith("__")
}


def private_names_used(source: str) -> set[str]:
    """The private names that code touches, but attributes that it gives to objects of classes of its own."""
    tree = ast.parse(source)
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {
        node.args[1].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("getattr", "setattr", "hasattr", "delattr")
        and isinstance(node.args[1], ast.Constant)
    }
    imported = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("torchrl", "tensordict"))
    ]
    used |= {alias.name for node in imported for alias in node.names}
    outside = {alias.asname or alias.name for node in imported for alias in node.names}
    own = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
            defined = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
            if bases & outside:
                used |= defined
            else:
                stored = [one for one in ast.walk(node) if isinstance(one, ast.Attribute)]
                own |= defined | {one.attr for one in stored if isinstance(one.ctx, ast.Store)}
                own |= {one.target.id for one in node.body if isinstance(one, ast.AnnAssign)}  # type: ignore[union-attr]
    return {name for name in used - own if name.startswith("_") and not name.startswith("__")}


def test_no_other_private_name_of_torchrls_is_touched():
    touched = {file.name: private_names_used(file.read_text()) & THEIRS for file in FOLDER.glob("*.py")}
    assert {name: more for name, used in touched.items() if (more := used - LISTED - DOCUMENTED)} == {}


def test_the_check_of_other_private_names_finds_them():
    code = """
        from torchrl.envs.common import _EnvWrapper
        from torchrl.envs import EnvBase as Base

        class Own:
            def __init__(self):
                self._env = None

        class Derived(Base):
            def _create_td(self):
                self._use_buffers, own = True, Own()._env
                return getattr(self, "_events")
    """
    expected = {"_EnvWrapper", "_create_td", "_use_buffers", "_events"}
    assert private_names_used(textwrap.dedent(code)) == expected


# ---- other releases


def test_a_newer_torchrl_is_warned_of_where_it_is_imported_but_in_workers(monkeypatch: pytest.MonkeyPatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        private_names.warn_if_newer()  # the installed one
    monkeypatch.setattr(private_names, "installed_version", lambda name: "9.8.7")
    with pytest.warns(UserWarning, match="TorchRL 9.8.7 is newer than 0.14.1"):
        private_names.warn_if_newer()
    monkeypatch.setenv(f"{MARK}{os.getpid()}", "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        private_names.warn_if_newer()


def test_the_release_that_was_tried_is_the_one_that_is_tested():
    pins = (Path(__file__).parents[3] / "constraints.txt").read_text()
    assert f"\ntorchrl=={private_names.TRIED}\n" in pins


CHANGED = """
import importlib.metadata as metadata
version = metadata.version
metadata.version = lambda name: "9.8.7" if name == "torchrl" else version(name)
import torchrl.envs.common
{change}
try:
    import muster.interop.torchrl
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("change", "gone"),
    [
        ("torchrl.envs.ParallelEnv = type('ParallelEnv', (), {})", "the private name _create_td of TorchRL's "),
        pytest.param("del torchrl.envs.common.EnvMetaData", "EnvMetaData", marks=pytest.mark.slow),
    ],
    ids=["private name", "public name"],
)
def test_a_torchrl_that_lacks_a_name_is_told_with_the_versions(change: str, gone: str):
    code = CHANGED.format(change=change)
    out = programs.run("-c", code, check=True, imports=programs.TORCHRL).stdout
    assert gone in out
    assert "which the installed TorchRL 9.8.7 does not have; it was tried with 0.14.1" in out
    assert "pip install 'torchrl==0.14.1'" in out
