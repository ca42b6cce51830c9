"""Drop-ins: vector envs with the constructors and the behaviour of Gymnasium's, Stable-Baselines3's and TorchRL's own.

Each module needs its library: ``muster.interop.gymnasium``, ``muster.interop.sb3``, ``muster.interop.torchrl``.
"""
