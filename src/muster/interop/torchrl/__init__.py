"""Vector envs as TorchRL's batched `EnvBase`, and a `ParallelEnv` with a worker process for each env."""

from muster.interop.torchrl.env import MusterEnv, ParallelEnv, as_torchrl
from muster.interop.torchrl.libs import PettingZooEnv

__all__ = ["MusterEnv", "ParallelEnv", "PettingZooEnv", "as_torchrl"]
