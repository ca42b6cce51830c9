"""The options of PPO."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from muster.arguments import check_options, explained, option
from muster.errors import ConfigError

POLICIES = ("feedforward", "gru")
MOST_THREADS = 1024  # with very many OpenMP ends the process


@explained
@dataclass(frozen=True)
class PPOConfig:
    """The options of PPO, named as in CleanRL, with defaults that solve CartPole-v1.

    Raises ConfigError for bad values. A value loss is half a squared error here, as in CleanRL, and the whole of it in
    Stable-Baselines3: a ``vf_coef`` from there, or from the zoo, is doubled here.

    >>> from muster.algorithms import PPOConfig
    >>> config = PPOConfig(total_steps=100_000, num_envs=4, num_steps=128)
    >>> config.batch_size, config.num_iterations
    (512, 196)
    """

    total_steps: int = option(200_000, "env steps, rounded up to whole rollouts", least=1)
    seed: int = option(0, "same seed, same policy, with any number of workers", least=0)
    num_envs: int = option(8, "envs stepped in parallel", least=1)
    num_steps: int = option(256, "steps of each env in a rollout", least=1)
    num_minibatches: int = option(4, "pieces of a rollout, each learnt from by itself in a pass", least=1)
    update_epochs: int = option(8, "passes over a rollout", least=1)
    learning_rate: float = option(1e-3, "of Adam, at the start", above=0)
    anneal_lr: bool = option(True, "the learning rate falls in a line to 0")
    gamma: float = option(0.99, "discount of later rewards, for each step", least=0, most=1)
    gae_lambda: float = option(0.95, "0: advantages of one step, 1: of whole episodes", least=0, most=1)
    norm_adv: bool = option(True, "advantages to mean 0 and deviation 1 in each minibatch")
    clip_coef: float = option(0.2, "how far from 1 the ratio of new to old probabilities counts", above=0)
    anneal_clip: bool = option(False, "clip_coef falls in a line to 0")
    clip_vloss: bool = option(
        False, "values may move by clip_coef, in units of returns, from those that were collected"
    )
    ent_coef: float = option(0.0, "weight of the entropy, which keeps the policy exploring", least=0)
    vf_coef: float = option(
        0.5, "weight of the value loss, half a squared error: twice Stable-Baselines3's number", least=0
    )
    max_grad_norm: float = option(0.5, "gradients are scaled down to this norm", above=0, most=math.inf)
    target_kl: float | None = option(
        None, "an update ends before the minibatch that finds the KL over 1.5 times this", above=0
    )
    normalize_observations: bool = option(False, "to mean 0 and deviation 1, as far as they are known")
    normalize_rewards: bool = option(False, "to returns of deviation 1; episodes' returns are reported as they are")
    clip_rewards: float | None = option(
        None, "rewards count for learning at most so much, up or down; returns are unchanged", above=0
    )
    policy: str = option(
        "feedforward", "feedforward; gru, which has a memory; or module:function, which makes one from the two spaces"
    )
    memory_size: int = option(128, "numbers in the memory of gru", least=1)
    sequence_length: int = option(64, "steps that memory learns from in one piece of a rollout, at most", least=1)
    hidden_sizes: tuple[int, ...] = option(
        (64, 64), "layers of policy and value, each its own; images have a CNN instead", least=1
    )
    sprite: int | None = option(
        None, "pixels of a side of the pictures that images are laid out of, such as 8; None: they are not", least=2
    )
    activation: Literal["tanh", "relu", "elu", "gelu"] = option("tanh", "what stands between those layers")
    log_std_init: float = option(
        0.0, "logarithm of continuous actions' deviation at the start, 1 being half their range", least=-20, most=20
    )
    episode_info: tuple[str, ...] | None = option(
        ("is_success",), "names of numbers and flags in episodes' last infos, whose means are reported; none: none"
    )
    torch_threads: int = option(1, "of the learner; other cores are for the envs' workers", least=1, most=MOST_THREADS)

    @property
    def batch_size(self) -> int:
        """Env steps in one rollout."""
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        """Rollouts until ``total_steps``."""
        return math.ceil(self.total_steps / self.batch_size)

    @property
    def network(self) -> dict[str, Any]:
        """The options of `ActorCritic`."""
        options = {name: getattr(self, name) for name in ("hidden_sizes", "activation", "log_std_init", "sprite")}
        return {**options, "memory_size": self.memory_size if self.policy == "gru" else 0}

    def __post_init__(self) -> None:
        check_options(self)
        if self.policy not in POLICIES and ":" not in self.policy:
            raise ConfigError(
                "policy", f"{' or '.join(POLICIES)}, or module:function, or file.py:function", self.policy
            )
        most = self.batch_size // 2
        if self.num_minibatches > most:
            expected = f"at most {most}, for each to have 2 of the {self.batch_size} rows of a rollout"
            raise ConfigError("num_minibatches", expected, self.num_minibatches)


@dataclass(frozen=True)
class AgentsOptions:
    """For envs with agents, which MAPPO trains."""

    critic: Literal["centralised", "own"] = option(
        "centralised", "what values are computed from: the env's state, or else all observations (MAPPO); own (IPPO)"
    )
    share_params: Mapping[str, bool] | bool = option(
        True, "whether a group's agents share a network: true, false, or by group, as in '{\"agent\": false}'"
    )

    def shares_params(self, group: str) -> bool:
        """Whether the agents of `group` share one network; those of a group that is not named do."""
        return self.share_params if isinstance(self.share_params, bool) else self.share_params.get(group, True)


@explained
@dataclass(frozen=True)
class MAPPOConfig(AgentsOptions, PPOConfig):
    """The options of MAPPO: those of PPO, and what concerns agents. ``critic="own"`` makes it IPPO.

    ``total_steps`` and ``num_steps`` count env steps, in each of which all agents of an env may act. Raises ConfigError
    for bad values.

    >>> from muster.algorithms import MAPPOConfig
    >>> config = MAPPOConfig(critic="own", share_params={"wolves": False})
    >>> config.shares_params("wolves"), config.shares_params("sheep")
    (False, True)
    """
