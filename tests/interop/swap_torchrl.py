"""A pytest plugin (``-p swap_torchrl``) that puts Muster's `ParallelEnv` in TorchRL's place before collection."""

import torchrl.collectors
import torchrl.envs.libs.gym  # noqa: F401  # the modules that it loads hold the name, too
from rebinding import rebind
from torchrl.envs import ParallelEnv as TheirParallelEnv

from muster.interop.torchrl import ParallelEnv

rebind({TheirParallelEnv: ParallelEnv}, "torchrl")
