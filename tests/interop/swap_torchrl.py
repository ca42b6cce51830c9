"""A pytest plugin (``-p swap_torchrl``) that puts Muster's classes in the place of TorchRL's before collection."""

import torchrl.collectors
import torchrl.collectors.distributed
import torchrl.envs.libs.gym  # the modules that it loads hold the name, too
from rebinding import rebind
from torchrl.envs import ParallelEnv as TheirParallelEnv
from torchrl.envs.libs.pettingzoo import PettingZooEnv as TheirPettingZooEnv

from muster.interop.torchrl import Collector, MultiAsyncCollector, MultiSyncCollector, ParallelEnv, PettingZooEnv

rebind(
    {
        TheirParallelEnv: ParallelEnv,
        TheirPettingZooEnv: PettingZooEnv,
        torchrl.collectors.Collector: Collector,
        torchrl.collectors.MultiSyncCollector: MultiSyncCollector,
        torchrl.collectors.MultiAsyncCollector: MultiAsyncCollector,
    },
    "torchrl",
)
