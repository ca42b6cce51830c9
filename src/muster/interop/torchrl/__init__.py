"""TorchRL's `ParallelEnv` on Muster's workers, and vector envs as TorchRL's batched `EnvBase`."""

from muster.extras import imports_for

with imports_for("muster.interop.torchrl needs", "muster-rl[torchrl]", "torchrl", "torch", "tensordict"):
    from torchrl.envs import SerialEnv

    from muster.interop.torchrl.env import MusterEnv, as_torchrl
    from muster.interop.torchrl.libs import PettingZooEnv
    from muster.interop.torchrl.parallel import ParallelEnv

__all__ = ["MusterEnv", "ParallelEnv", "PettingZooEnv", "SerialEnv", "as_torchrl"]
