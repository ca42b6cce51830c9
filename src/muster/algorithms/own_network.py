"""The network that PPO and MAPPO train: an `ActorCritic`, or one of the user's own, which is checked at the start.

`PolicyNetwork` says what such a network offers.
"""

from __future__ import annotations

import copy
from typing import Any, Protocol

import numpy as np
import torch
from gymnasium.vector.utils import batch_space
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from muster.algorithms.actor_critic import ActorCritic, Sequences, as_seen, torch_threads
from muster.algorithms.encoder import MEASURED, ObservationNormalizer, as_observation, kind_of
from muster.algorithms.ppo_config import POLICIES, PPOConfig
from muster.errors import UsageError
from muster.introspection import type_name
from muster.nn.turns import generators_kept
from muster.recipes.named import callable_named


class Head(Protocol):
    """A distribution over actions of K numbers or choices, with P parameters. `head_of` gives the one of a space.

    num_params: P.

    >>> import torch
    >>> from gymnasium import spaces
    >>> from muster.algorithms import head_of
    >>> head = head_of(spaces.Box(-1, 1, (2,)))
    >>> log_prob, entropy = head.log_prob_and_entropy(torch.zeros(8, head.num_params), torch.zeros(8, 2))
    >>> log_prob.shape, float(head.to_env(torch.full((8, 2), 3.0)).max())
    (torch.Size([8]), 1.0)
    """

    num_params: int

    def sample(self, params: Tensor, rng: torch.Generator | None = None, /) -> Tensor:
        """Drawn actions [B, K], for parameters `params` [B, P]. `rng`: None for torch's global generator."""

    def mode(self, params: Tensor, /) -> Tensor:
        """The likeliest actions [B, K], for parameters `params` [B, P]."""

    def log_prob_and_entropy(self, params: Tensor, actions: Tensor, /) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy, [B] each, of `actions` [B, K]. They carry gradients to `params` [B, P]."""

    def to_env(self, actions: Tensor, /) -> np.ndarray[Any, Any]:
        """The `actions` [B, K] as the env's space has them, [B, *shape]."""


class PolicyNetwork(Protocol):
    """The interface of a custom network: a `torch.nn.Module` with a head and two methods.

    obs: a tensor [B, *obs_shape] of the space's dtype, float32 where observations are normalised. Of a Dict or a Tuple
        it is a TensorDict [B], with a tensor for each part; the positions of a Tuple are "0", "1" and so on.
    masks: bool [B, n], the choices of a discrete space that are allowed, as for `ActorCritic`, which
        `muster.algorithms.masked` takes into account; None or left out: all are.
    memory: only where the network has an attribute ``memory_size``, which is H and not 0. Then it is the memory before
        the step, float32 [B, H], or `Sequences` of S * L = B observations.

    MAPPO gives each team of agents such a network, and B counts agents of envs then. An `ActorCritic` is one.

    >>> import torch
    >>> from gymnasium import spaces
    >>> from muster.algorithms import ActorCritic
    >>> network = ActorCritic(spaces.Box(-1, 1, (4,)), spaces.Discrete(2))
    >>> params, memory = network.decide(torch.zeros(3, 4), None, None)
    >>> network.head.to_env(network.head.mode(params)).shape
    (3,)
    """

    head: Head

    def forward(self, obs: Any, masks: Tensor | None = None, memory: Tensor | Sequences | None = None, /) -> Any:
        """Parameters of the action distribution [B, P], and values [B], for `obs`, `masks` and `memory`.

        With memory, also the memory after the step [B, H]; anything after `Sequences`. It is not called where a
        centralised critic has the values.
        """

    def decide(self, obs: Any, masks: Tensor | None, memory: Tensor | Sequences | None, /) -> tuple[Tensor, Any]:
        """The parameters [B, P] for `obs` and `masks`, and the `memory` after the step [B, H], None without."""


# What is looked for, and how a sentence about it ends where it is not there.
PIECES = {
    "parameters": ": it is no torch.nn.Module",
    "head": ": write self.head = muster.algorithms.head_of(action_space)",
    "head.num_params": ", the P numbers of an action's distribution",
    "head.sample": "(params), which draws actions [B, K]",
    "head.mode": "(params), which returns the likeliest actions [B, K]",
    "head.log_prob_and_entropy": "(params, actions), which returns both [B]",
    "head.to_env": "(actions), which returns them as the env has them",
    "decide": "(obs, masks, memory), which returns the parameters [B, P] of the actions, and the memory or None",
    "forward": "(obs, masks=None, memory=None), which returns the parameters [B, P] and the values [B]",
}


def policy_of(
    config: PPOConfig, observation_space: Any, action_space: Any, rng: torch.Generator, policy: Any = None,
    *, judges: bool = True,
) -> Any:  # fmt: skip
    """The policy that the config names, an `ActorCritic` or a network of the user's, for one agent's spaces.

    policy: a `PolicyNetwork` in the place of it, or a function that makes one of the two spaces.
    judges: as for `ActorCritic`. Raises UsageError for what is no such network, and what it and the function raise.
    """
    with torch_threads(config.torch_threads):  # orthogonal weights differ with the number of threads
        if policy is None and config.policy in POLICIES:
            return ActorCritic(observation_space, action_space, rng, judges=judges, **config.network)
        policy = callable_named(config.policy) if policy is None else policy
        with generators_kept():  # a function draws weights from torch's global generator
            torch.manual_seed(rng.initial_seed())
            if not isinstance(policy, nn.Module):
                policy = policy(observation_space, action_space)
            missing = [name for name in PIECES if not _has(policy, name) and (judges or name != "forward")]
            problems = [
                f"It has no {name}{PIECES[name]}." for name in missing if name.rpartition(".")[0] not in missing
            ]
            if not problems:
                modes = {layer: layer.training for layer in policy.modules()}
                policy.eval()  # statistics and dropout's draws stay as they are
                problems = _misshaped(policy, config, observation_space, action_space, judges)
                for layer, mode in modes.items():
                    layer.training = mode
    if problems:
        raise UsageError(
            f"{type_name(policy)} is no network that can be trained here. {' '.join(problems)} "
            "muster.algorithms.PolicyNetwork says what a network offers."
        )
    return policy


def _has(policy: Any, name: str) -> bool:
    found = policy
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is not None and getattr(found, "__func__", None) is not nn.Module.forward


@torch.no_grad()
def _misshaped(policy: Any, config: PPOConfig, observation_space: Any, action_space: Any, judges: bool) -> list[str]:
    """A sentence for each result for two observations that has other shapes than those of a `PolicyNetwork`."""
    measured = config.normalize_observations and kind_of(observation_space) in MEASURED
    two = batch_space(copy.deepcopy(observation_space), 2)  # its own draws stay as they are
    two.seed(0)
    drawn = as_observation(tree_map(torch.as_tensor, two.sample()))
    obs = as_seen(drawn, ObservationNormalizer(observation_space) if measured else None)
    device = next((one.device for one in policy.parameters()), None)
    head, size, obs = policy.head, getattr(policy, "memory_size", 0), obs.to(device)
    memory = torch.zeros(2, size, device=device) if size else None
    of_params, of_memory = [2, head.num_params], [2, size] if size else None
    decided = policy.decide(obs, None, memory)
    found = [("decide", decided, [of_params, of_memory])]
    if judges:
        judged = policy(obs, None, memory) if size else policy(obs)
        found.append(("forward", judged, [of_params, [2], *[of_memory] * bool(size)]))
    if _shapes(decided)[0] == of_params:
        actions = head.mode(decided[0])
        found.append(("head.log_prob_and_entropy", head.log_prob_and_entropy(decided[0], actions), [[2], [2]]))
        found.append(("head.to_env", [head.to_env(actions)], [[2, *action_space.shape]]))
    return [
        f"{name} returned the shapes {_shapes(got)} for 2 observations, expected {expected}."
        for name, got, expected in found
        if _shapes(got) != expected
    ]


def _shapes(found: Any) -> list[Any]:
    """The shapes of arrays, one or several; None where something is none."""
    several = found if isinstance(found, (tuple, list)) else [found]
    return [list(one.shape) if hasattr(one, "shape") else None for one in several]
