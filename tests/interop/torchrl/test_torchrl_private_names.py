"""The private names of TorchRL's that `muster.interop.torchrl` rests on: all listed, there, as they are used here."""

from __future__ import annotations

import ast
import inspect
import os
import re
import types
import warnings
from pathlib import Path

import pytest

import programs

torchrl = pytest.importorskip("torchrl")

import muster.interop.torchrl  # noqa: E402, F401, I001  # first: it silences what TorchRL says of itself

from torchrl import collectors as their_collectors  # noqa: E402
from torchrl.collectors import _multi_base, _runner, _single  # noqa: E402
from torchrl.collectors import utils as collector_utils  # noqa: E402
from torchrl.envs import batched_envs, common, gym_like  # noqa: E402
from torchrl.envs import ParallelEnv as TheirParallelEnv  # noqa: E402
from torchrl.envs.libs import gym as libs_gym  # noqa: E402
from torchrl.envs.libs.pettingzoo import PettingZooWrapper  # noqa: E402

from muster._core import MARK  # noqa: E402
from muster.interop import private_names  # noqa: E402
from muster.interop.torchrl import ParallelEnv, parallel  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")

FOLDER = Path(parallel.__file__).parent
OF_CLASSES = {name for names in private_names.PRIVATE_NAMES.values() for name in names}
# What only objects of TorchRL's classes have: no import can look for it, so the extra names the releases that have it.
OF_OBJECTS = {
    *("_auto_register_policy_transforms", "_carrier", "_carrier_has_no_device", "_cast_to_policy_device", "_closed"),
    *("_compact_next_keys", "_compiled_step_and_maybe_reset", "_env", "_env_input_keys"),
    *("_events", "_fallback_policy", "_final_rollout", "_info_dict_reader", "_memmap", "_mp_start_method"),
    *("_non_tensor_keys", "_owns_workers", "_policy_output_keys", "_selected_reset_keys", "_selected_step_keys"),
    *("_share_memory", "_shared_tensordict_parent_next", "_shared_tensordict_parent_root", "_single_task", "_storage"),
    *("_torchrl_native_autoreset", "_use_buffers", "_worker_init_fn", "_worker_post_collect_hook"),
    *("_worker_pre_collect_hook", "_worker_trajs_per_batch", "_workers"),
}
LISTED = OF_CLASSES | OF_OBJECTS
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


def sources() -> str:
    """The code of the modules of TorchRL's whose private names are used."""
    modules = (_single, _multi_base, _runner, collector_utils, their_collectors._base, common, gym_like, batched_envs)
    modules += (libs_gym,)
    return "".join(map(inspect.getsource, modules))


def test_what_only_objects_have_is_there():
    found = set(re.findall(r"\b_[a-z]\w+", sources()))
    assert sorted(OF_OBJECTS - found) == []


def test_methods_have_the_parameters_that_they_are_given():
    for name in SIGNATURES:
        check_parameters(name)


def check_parameters(name: str) -> None:
    owners = (TheirParallelEnv, PettingZooWrapper, libs_gym)
    member = next((found for owner in owners if (found := getattr(owner, name, None)) is not None), None)
    member = getattr(member, "__func__", member)  # of a class method
    while inspect.isfunction(member) and list(inspect.signature(member).parameters)[1:2] == ["args"]:
        member = wrapped_in(member)
    parameters = list(inspect.signature(member).parameters) if inspect.isfunction(member) else []
    assert parameters[: len(SIGNATURES[name])] == SIGNATURES[name], name


def wrapped_in(function: types.FunctionType) -> types.FunctionType | None:
    """The function that a decorator has wrapped, if any."""
    held = (cell.cell_contents for cell in function.__closure__ or ())
    return next((one for one in held if inspect.isfunction(one)), None)


# ---- no others


def private_names_used(source: str) -> set[str]:
    """The private names that code touches, but those that it imports, and attributes of objects of its own classes."""
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
    theirs = set(re.findall(r"\b_[a-z]\w+", sources()))
    touched = {file.name: private_names_used(file.read_text()) & theirs for file in FOLDER.glob("*.py")}
    assert {name: more for name, used in touched.items() if (more := used - LISTED - DOCUMENTED)} == {}


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
