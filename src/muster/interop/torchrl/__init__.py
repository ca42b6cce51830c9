"""TorchRL's `ParallelEnv` and collectors on Muster's workers, and vector envs as TorchRL's batched `EnvBase`."""

import warnings

from muster.extras import imports_for
from muster.interop.private_names import parts_required, warn_if_newer

with (
    imports_for("muster.interop.torchrl needs", "muster-rl[torchrl]", "torchrl", "torch", "tensordict"),
    # TorchRL warns of classes of its own while it is imported.
    warnings.catch_warnings(action="ignore", category=DeprecationWarning),
    parts_required(),
):
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
