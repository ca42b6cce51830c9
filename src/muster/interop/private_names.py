"""TorchRL's private names, on which `muster.interop.torchrl` rests: where one is gone, its import says so by name."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from muster._core import MARK
from muster.extras import installed_version, is_installed, is_older
from muster.introspection import caller_stacklevel

# The newest release that has been tried.
TRIED = "0.14.1"

# What is overridden, called or read of TorchRL's classes, besides what is imported by name.
PRIVATE_NAMES = {
    "torchrl.envs:EnvBase": (
        *("_collector", "_complete_done", "_has_dynamic_specs", "_post_step_mdp_hooks", "_step"),
        *("_step_and_maybe_reset", "_step_mdp", "_step_proc_data"),
    ),
    "torchrl.envs:ParallelEnv": (
        *("_create_td", "_get_collector_next_keys_to_exclude", "_get_metadata", "_set_metadata", "_shutdown_workers"),
        *("_start_workers", "_validate_worker_env", "_wait_for_workers"),
    ),
    "torchrl.envs.libs.pettingzoo:PettingZooEnv": ("_build_env",),
    "torchrl.collectors:Collector": (
        *("_BACKENDS", "_RESERVED_OPTIONS", "_drop_inapplicable_defaults", "_get_policy_and_device", "_ignore_rb"),
        *("_maybe_set_truncated", "_normalize_direct_env_fn", "_normalize_env_fns", "_post_collect_hook"),
        *("_read_compile_kwargs", "_should_use_random_frames", "_start_new_trajectories", "_traj_pool"),
        "_wrapped_policy",
    ),
    "torchrl.collectors:MultiSyncCollector": (
        *("_run_processes", "_setup_multi_weight_sync", "_shutdown_main", "_total_workers_from_env"),
        *("_weight_sync_schemes", "_weight_update_impl"),
    ),
}


@contextmanager
def parts_required() -> Iterator[None]:
    """Encloses the imports there. Raises ImportError, with the versions, where one of TorchRL's parts is gone."""
    try:
        gone = _first_gone()
        if gone is None:
            yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("torchrl", "tensordict") or not is_installed(package):
            raise
        raise ImportError(f"{_needs('a part of TorchRL')} ({error})", name=error.name) from error
    if gone is not None:
        raise ImportError(_needs(f"the private name {gone}"), name="torchrl")


def _first_gone() -> str | None:
    """The first of `PRIVATE_NAMES` that its class does not have, in words."""
    for owner, names in PRIVATE_NAMES.items():
        module, _, name = owner.partition(":")
        cls = getattr(import_module(module), name, None)
        if gone := next((one for one in names if not hasattr(cls, one)), None):
            return f"{gone} of TorchRL's {name}"
    return None


def _needs(what: str) -> str:
    found = installed_version("torchrl") or "of an unknown version"
    return (
        f"muster.interop.torchrl needs {what}, which the installed TorchRL {found} does not have; it was tried with "
        f"{TRIED}. Install that one with: pip install 'torchrl=={TRIED}', or a newer Muster with: "
        "pip install --upgrade muster-rl"
    )


def warn_if_newer() -> None:
    """Warns where TorchRL is newer than what has been tried; in workers, which import this once more, it does not."""
    found = installed_version("torchrl")
    if found is not None and is_older(TRIED, found) and f"{MARK}{os.getpid()}" not in os.environ:
        warnings.warn(
            f"TorchRL {found} is newer than {TRIED}, the newest that muster.interop.torchrl was tried with. If "
            f"something fails, try pip install 'torchrl=={TRIED}', or pip install --upgrade muster-rl",
            UserWarning,
            stacklevel=caller_stacklevel(),
        )
