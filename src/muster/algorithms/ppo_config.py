"""The options of PPO."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np

from muster.algorithms.encoder import ACTIVATIONS
from muster.arguments import as_whole, at_least
from muster.errors import ConfigError

MOST_THREADS = 1024  # with very many OpenMP ends the process


@dataclass(frozen=True)
class PPOConfig:
    """The options of PPO; names as in CleanRL, defaults that solve CartPole-v1. Raises ConfigError for bad values.

    A value loss is half a squared error here, as in CleanRL, and the whole of it in Stable-Baselines3: a ``vf_coef``
    from there, or from the zoo, is doubled here.
    """

    total_steps: int = 200_000  # env steps, rounded up to whole rollouts
    seed: int = 0  # same seed, same policy, with any number of workers
    num_envs: int = 8  # envs stepped in parallel
    num_steps: int = 256  # per env and rollout
    num_minibatches: int = 4  # of one pass over a rollout
    update_epochs: int = 8  # passes over a rollout
    learning_rate: float = 1e-3  # of Adam
    anneal_lr: bool = True  # the learning rate falls in a line to 0
    gamma: float = 0.99  # discount of later rewards, for each step
    gae_lambda: float = 0.95  # 0: advantages of one step, 1: of whole episodes
    norm_adv: bool = True  # advantages to mean 0 and deviation 1 in each minibatch
    clip_coef: float = 0.2  # how far from 1 the ratio of new to old probabilities counts
    anneal_clip: bool = False  # clip_coef falls in a line to 0
    clip_vloss: bool = False  # values may move by clip_coef, in units of returns, from those that were collected
    ent_coef: float = 0.0  # weight of the entropy, which keeps the policy exploring
    vf_coef: float = 0.5  # weight of the value loss, half a squared error: twice Stable-Baselines3's number
    max_grad_norm: float = 0.5  # gradients are scaled down to this norm
    target_kl: float | None = None  # an update ends before the minibatch that finds the KL over 1.5 times this
    normalize_observations: bool = False  # to mean 0 and deviation 1, as far as they are known
    normalize_rewards: bool = False  # to returns of deviation 1; episodes' returns are reported as they are
    clip_rewards: float | None = None  # rewards count for learning at most so much, up or down; returns are unchanged
    hidden_sizes: tuple[int, ...] = (64, 64)  # layers of policy and value, each its own; images have a CNN instead
    activation: Literal["tanh", "relu", "elu", "gelu"] = "tanh"  # between those layers
    log_std_init: float = 0.0  # logarithm of continuous actions' deviation at the start, 1 being half their range
    torch_threads: int = 1  # the other cores belong to the envs' workers

    @property
    def batch_size(self) -> int:
        """Env steps in one rollout."""
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        return math.ceil(self.total_steps / self.batch_size)

    def __post_init__(self) -> None:
        self._check_each()
        if self.batch_size < 2 * self.num_minibatches:
            raise ConfigError(
                f"a rollout of num_envs={self.num_envs} x num_steps={self.num_steps} rows is too small for "
                f"num_minibatches={self.num_minibatches}; each needs at least 2 rows."
            )

    def _check_each(self) -> None:
        """Checks the values that are wrong whatever the others are."""
        if isinstance(self.total_steps, float) and self.total_steps % 1 == 0:  # 1e6 is fine
            self._set("total_steps", int(self.total_steps))
        for name in ("total_steps", "num_envs", "num_steps", "num_minibatches", "update_epochs", "torch_threads"):
            self._set(name, at_least(name, getattr(self, name), 1, end="."))
        if self.torch_threads > MOST_THREADS:
            raise ConfigError(f"torch_threads must be at most {MOST_THREADS}, got {self.torch_threads}.")
        sizes = self.hidden_sizes
        if not isinstance(sizes, (list, tuple)):  # JSON has lists
            raise ConfigError(f"hidden_sizes must be a tuple of whole numbers, got {sizes!r}.")
        self._set("hidden_sizes", tuple(at_least("each of hidden_sizes", size, 1, end=".") for size in sizes))
        if as_whole(self.seed) is None or self.seed < 0:
            kind = "be a whole number and " if as_whole(self.seed) is None else ""
            raise ConfigError(f"seed must {kind}not be negative, got {self.seed!r}.")
        self._set("seed", int(self.seed))
        for names, must, fits in (
            (("gamma", "gae_lambda"), "lie in [0, 1]", lambda x: 0 <= x <= 1),
            (("learning_rate", "clip_coef", "clip_rewards", "target_kl"), "be above 0 and finite", _is_finite_above_0),
            (("log_std_init",), "lie in [-20, 20]", lambda x: -20 <= x <= 20),
            (("ent_coef", "vf_coef"), "be at least 0 and finite", lambda x: 0 <= x < math.inf),
            (("max_grad_norm",), "be above 0", lambda x: x > 0),
        ):
            for name in names:
                value = getattr(self, name)
                if value is None and name in ("clip_rewards", "target_kl"):
                    continue
                if not _is_number(value) or not fits(value):
                    raise ConfigError(f"{name} must {must}, got {value!r}.")
                self._set(name, float(value))  # as JSON can hold it: NumPy's numbers are as good
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool):
                if not isinstance(value, (bool, np.bool_)):
                    raise ConfigError(f"{field.name} must be True or False, got {value!r}.")
                self._set(field.name, bool(value))
        if self.activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ConfigError(f"activation must be one of {known}, got {self.activation!r}.")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _is_finite_above_0(value: float) -> bool:
    return 0 < value < math.inf
