"""Vector envs as TorchRL's batched `EnvBase`, and a `ParallelEnv` that steps several envs in each worker process."""

from muster.interop.torchrl.env import MusterEnv, ParallelEnv, as_torchrl

__all__ = ["MusterEnv", "ParallelEnv", "as_torchrl"]
