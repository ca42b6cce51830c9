"""TorchRL's `ParallelEnv` and collectors on Muster's workers, and vector envs as TorchRL's batched `EnvBase`.

All other names of ``torchrl.collectors`` and ``torchrl.envs`` are TorchRL's own, handed on when somebody asks for one,
so that an import line needs no second one. So are those of its collectors for clusters and language models.
"""

import warnings
from importlib import import_module
from typing import Any

from muster.extras import imports_for
from muster.interop.private_names import parts_required, warn_if_newer

with (
    imports_for("muster.interop.torchrl needs", "muster-rl[torchrl]", "torchrl", "torch", "tensordict"),
    # TorchRL warns of classes of its own while it is imported.
    warnings.catch_warnings(action="ignore", category=DeprecationWarning),
    parts_required(),
):
    from torchrl.collectors import __all__ as _COLLECTORS
    from torchrl.envs import SerialEnv

    from muster.interop.torchrl.collectors import Collector, SyncDataCollector
    from muster.interop.torchrl.env import MusterEnv, as_torchrl
    from muster.interop.torchrl.libs import MeltingpotEnv, MeltingpotWrapper, PettingZooEnv
    from muster.interop.torchrl.multi_collectors import (
        AsyncCollector,
        MultiAsyncCollector,
        MultiaSyncDataCollector,
        MultiCollector,
        MultiSyncCollector,
        MultiSyncDataCollector,
    )
    from muster.interop.torchrl.parallel import ParallelEnv

warn_if_newer()

# The names of modules that need packages of their own are listed: a name that nobody has imports none of them.
_THEIRS = ("torchrl.collectors", "torchrl.envs")
_APART = {
    "torchrl.collectors.distributed": (
        *("DEFAULT_SLURM_CONF", "DistributedCollector", "DistributedSyncCollector", "DistributedWeightUpdater"),
        *("RPCCollector", "RPCWeightUpdater", "RayCollector", "RayEvalWorker", "submitit_delayed_launcher"),
    ),
    "torchrl.collectors.llm": ("LLMCollector", "RayLLMCollector", "vLLMUpdater", "vLLMUpdaterV2"),
}
__all__ = [
    "AsyncCollector",
    "Collector",
    "MeltingpotEnv",
    "MeltingpotWrapper",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiSyncCollector",
    "MultiSyncDataCollector",
    "MultiaSyncDataCollector",
    "MusterEnv",
    "ParallelEnv",
    "PettingZooEnv",
    "SerialEnv",
    "SyncDataCollector",
    "as_torchrl",
]
__all__ += sorted({*_COLLECTORS} - {*__all__})


def __getattr__(name: str) -> Any:
    owners = [module for module, names in _APART.items() if name in names] or _THEIRS
    for owner in owners if not name.startswith("_") else ():
        if hasattr(module := import_module(owner), name):
            return getattr(module, name)
    raise AttributeError(f"muster.interop.torchrl has no {name!r}, nor have {' and '.join(_THEIRS)}", name=name)


def __dir__() -> list[str]:
    theirs = {name for owner in _THEIRS for name in import_module(owner).__all__}
    return sorted({*globals(), *theirs, *(name for names in _APART.values() for name in names)})
