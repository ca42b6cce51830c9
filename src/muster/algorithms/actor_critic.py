"""The network that PPO trains, fitted to an env's spaces: encoder, actor, critic, action distribution; and how it acts.

Weights are drawn from a generator that the caller seeds; torch's global generator is never touched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict  # type: ignore[import-untyped]  # ships no types
from torch import Tensor, nn

from muster.algorithms.encoder import Choices, Encoder, ObservationNormalizer, as_observation, layer, mlp
from muster.errors import TrainingDiverged, UsageError
from muster.pool.resources import usable_cores
from muster.spaces.masks import usable

# The keys in collectors, and in batches, of a policy's memory and of what it drew; no observation has such a key.
MEMORY, CHOSEN = ("collector", "memory"), ("collector", "chosen")
FORBIDDEN = -1e30  # the logit of a choice that is not allowed; of -inf the entropy would be nan


class Sequences(NamedTuple):
    """The memory of S sequences of L steps each; `AgentsPolicy` has A agents in each of them."""

    start: Tensor  # [S, (A,) H], before the first step
    keeps: Tensor  # [S, L, (A)] bool, whether there is memory before a step; else it begins with zeros


def goes_on(batch: Any, trajectories: Tensor | None = None) -> Tensor:
    """Says for each row of a batch, [N, T], if it is of the same trajectory as the one before.

    trajectories: [N], those of the rows before the first; None: these go on.
    """
    ids = batch["collector", "traj_ids"]
    before = ids[:, 0] if trajectories is None else trajectories
    same: Tensor = ids == torch.cat([before.unsqueeze(1), ids[:, :-1]], 1)
    return same


def followers(rows: Tensor, last: Tensor, finals: Tensor, final_at: Tensor) -> Tensor:
    """The followers of ``rows`` [N, T, ...]: the next row each, ``last`` [N, ...] after the last one, and ``finals``
    [K, ...] after those that ended an episode."""
    following = torch.cat([rows[:, 1:], last.unsqueeze(1)], 1)
    if len(finals):
        following[final_at.unbind(-1)] = finals
    return following


class ActorCritic(nn.Module):
    """A policy and a value for one env: two networks of ``hidden_sizes``, or single layers on a shared CNN for images.

    With memory a GRU stands before them (Cho et al. 2014, arXiv:1406.1078). Then `forward` and `decide` take the memory
    before the step [B, H], and return that after it; or `Sequences`, for S * L observations.

    observation_space, action_space: of one env, or of one agent.
    rng: what weights are drawn from; None for torch's global generator.
    memory_size: H, the numbers of the memory; 0 for none.
    judges: whether there is a value; without, only `decide`.
    hidden_sizes: the layers of both networks, except for images.
    activation: between these: "tanh", "relu", "elu" or "gelu".
    log_std_init: logarithm of the deviation that continuous actions start with, 1 being half their range.
    sprite: pixels of a side of the square pictures that images are laid out of; None: of none.

    Raises UsageError for actions other than Box, Discrete, MultiDiscrete and MultiBinary, and for observations of no
    fixed shape.

    >>> import torch
    >>> from gymnasium import spaces
    >>> from muster.algorithms import ActorCritic
    >>> network = ActorCritic(spaces.Box(-1, 1, (4,)), spaces.Discrete(2))
    >>> params, values = network(torch.zeros(8, 4))
    >>> params.shape, values.shape
    (torch.Size([8, 2]), torch.Size([8]))
    """

    def __init__(
        self, observation_space: gym.Space[Any], action_space: gym.Space[Any], rng: torch.Generator | None = None, *,
        memory_size: int = 0, judges: bool = True, hidden_sizes: Sequence[int] = (64, 64), activation: str = "tanh",
        log_std_init: float = 0.0, sprite: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.memory_size = memory_size
        self.encoder = Encoder(observation_space, rng, sprite)
        seen = memory_size or self.encoder.num_features
        if memory_size:
            self.cell = layer(nn.GRUCell, self.encoder.num_features, memory_size, rng=rng, gain=1.0)
        self.head = head_of(action_space, log_std_init)
        hidden = hidden_sizes if self.encoder.needs_hidden else ()
        self.actor = mlp([seen, *hidden, self.head.num_params], activation=activation, gain=0.01, rng=rng)
        if judges:
            self.critic = mlp([seen, *hidden, 1], activation=activation, gain=1.0, rng=rng)

    def forward(self, obs: Tensor, masks: Tensor | None = None, memory: Tensor | Sequences | None = None) -> Any:
        """Parameters of the action distribution [B, P], and values [B], for observations `obs` [B, *obs_shape].

        memory: before the step; that after it is then returned, too.
        masks: of a discrete action space, bool [B, n], the choices that are allowed; None for all. Those of a
            MultiDiscrete space stand part after part, n = sum(nvec), and a MultiBinary one has two for each bit.
        """
        seen, after = self._recall(self.encoder(obs), memory)
        params, values = masked(self.actor(seen), masks), self.critic(seen).squeeze(-1)
        return (params, values) if memory is None else (params, values, after)

    def decide(
        self, obs: Tensor, masks: Tensor | None = None, memory: Tensor | Sequences | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """As `forward`, without the values, and with None for memory where there is none."""
        seen, after = self._recall(self.encoder(obs), memory)
        return masked(self.actor(seen), masks), after

    def act(self, obs: Tensor, rng: torch.Generator | None = None) -> Tensor:
        """Actions [B, K] drawn for `obs` [B, *obs_shape] with `rng`; ``head.to_env`` turns them into the env's."""
        return self.head.sample(self.decide(obs)[0], rng)

    def best(self, obs: Tensor) -> Tensor:
        """The likeliest actions [B, K] for observations `obs` [B, *obs_shape]."""
        return self.head.mode(self.decide(obs)[0])

    def _recall(self, features: Tensor, memory: Tensor | Sequences | None) -> tuple[Tensor, Tensor | None]:
        """The input of actor and critic, which is the memory after the steps where there is one; and that memory."""
        if memory is None:
            return features, None
        if isinstance(memory, Tensor):
            after: Tensor = self.cell(features, memory)
            return after, after
        steps, before = [], memory.start
        seen = features.view(*memory.keeps.shape, -1)
        for t in range(seen.shape[1]):
            before = self.cell(seen[:, t], before.masked_fill(~memory.keeps[:, t].unsqueeze(-1), 0.0))
            steps.append(before)
        return torch.stack(steps, 1).flatten(0, 1), before


def head_of(action_space: gym.Space[Any], log_std_init: float = 0.0) -> Categoricals | Gaussian:
    """The action distribution of a space, with ``num_params`` numbers as the parameters of each action: a `Head`.

    action_space: a Box, for a Gaussian, or Discrete, MultiDiscrete or MultiBinary.
    log_std_init: of a Gaussian, as for `ActorCritic`.

    Raises UsageError for other spaces.

    >>> import torch
    >>> from gymnasium import spaces
    >>> from muster.algorithms import head_of
    >>> head = head_of(spaces.Discrete(3, start=5))
    >>> head.num_params, head.to_env(head.mode(torch.tensor([[0.1, 2.0, 0.3]])))
    (3, array([6]))
    """
    return Gaussian(action_space, log_std_init) if isinstance(action_space, spaces.Box) else Categoricals(action_space)


def masked(logits: Tensor, masks: Tensor | None) -> Tensor:
    """Logits that give no choice a probability that masks do not allow.

    logits: float [..., n].
    masks: bool [..., n], the choices that are allowed; None allows all.

    >>> import torch
    >>> from muster.algorithms import masked
    >>> masked(torch.zeros(4), torch.tensor([True, False, True, False])).softmax(-1).tolist()
    [0.5, 0.0, 0.5, 0.0]
    """
    return logits if masks is None else logits.masked_fill(~masks, FORBIDDEN)


class Categoricals(nn.Module):
    """Independent categorical distributions over a space's choices. Parameters: logits [..., sum(nvec)]."""

    def __init__(self, space: gym.Space[Any]) -> None:
        super().__init__()
        self.choices = Choices(space, "actions")
        self.num_params = sum(self.choices.nvec)

    def sample(self, params: Tensor, rng: torch.Generator | None = None) -> Tensor:
        """Actions [..., K] int64."""
        # The first of several exponential clocks to ring is drawn in proportion to their rates (the Gumbel-max trick).
        scores = params - torch.empty_like(params).exponential_(generator=rng).log_()
        return self.mode(scores)

    def mode(self, params: Tensor) -> Tensor:
        """The likeliest actions [..., K] int64."""
        return torch.stack([s.argmax(-1) for s in torch.split(params, self.choices.nvec, -1)], -1)

    def log_prob_and_entropy(self, params: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy, [...] each, of actions [..., K]."""
        log_prob, entropy = params.new_zeros(2, *params.shape[:-1]).unbind()
        for logits, chosen in zip(torch.split(params, self.choices.nvec, -1), actions.unbind(-1), strict=True):
            log_probs = logits.log_softmax(-1)
            log_prob = log_prob + log_probs.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
            entropy = entropy - (log_probs.exp() * log_probs).sum(-1)
        return log_prob, entropy

    def to_elements(self, actions: Tensor) -> Tensor:
        """Actions [..., K] as the env wants them, [..., *shape]."""
        return self.choices.to_elements(actions)

    def to_env(self, actions: Tensor) -> np.ndarray[Any, Any]:
        """As `to_elements`, for NumPy."""
        return self.to_elements(actions).cpu().numpy()


class Gaussian(nn.Module):
    """A diagonal Gaussian with a learned deviation that does not depend on the observation. Parameters: means [..., K].

    In each dimension that has two finite bounds, -1 and 1 stand for them; actions beyond a bound are clipped to it.
    """

    def __init__(self, space: spaces.Box, log_std_init: float = 0.0) -> None:
        super().__init__()
        if not np.issubdtype(space.dtype, np.floating):
            raise UsageError(
                f"PPO learns continuous actions of a float dtype; this env has {space}. Turn them into Discrete, "
                "MultiDiscrete or floats with a wrapper, such as gymnasium.wrappers.TransformAction."
            )
        if not math.prod(space.shape):
            raise UsageError(f"PPO takes actions of at least one number, but this env has {space}.")
        self.shape = space.shape
        low, high = space.low.reshape(-1), space.high.reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):
            half = (high - low) / 2
            bounded = np.isfinite(half)
            center = np.where(bounded, low + half, 0).astype(space.dtype)
        scale = np.where(bounded, half, 1).astype(space.dtype)
        largest = np.finfo(space.dtype).max  # type: ignore[type-var]  # beyond it an action of a small dtype would be inf
        bounds = (center, scale, np.maximum(low, -largest), np.minimum(high, largest))
        # No buffers, which a device without the space's dtype would refuse.
        self.center, self.scale, self.low, self.high = map(torch.from_numpy, bounds)
        self.num_params = math.prod(space.shape)
        self.log_std = nn.Parameter(torch.full((self.num_params,), float(log_std_init)))

    def sample(self, params: Tensor, rng: torch.Generator | None = None) -> Tensor:
        """Actions [..., K] float32."""
        return params + self.log_std.exp() * torch.randn(params.shape, generator=rng, device=params.device)

    def mode(self, params: Tensor) -> Tensor:
        """The likeliest actions [..., K] float32."""
        return params

    def log_prob_and_entropy(self, params: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy, [...] each, of actions [..., K]."""
        normed = (actions - params) * (-self.log_std).exp()
        log_norm = self.log_std.sum() + 0.5 * self.num_params * math.log(2 * math.pi)
        log_prob = -0.5 * normed.square().sum(-1) - log_norm
        return log_prob, (log_norm + 0.5 * self.num_params).expand(params.shape[:-1])

    def to_elements(self, actions: Tensor) -> Tensor:
        """Actions [..., K] as the env wants them, [..., *shape], within its bounds."""
        center, scale, low, high = (x.to(actions.device) for x in (self.center, self.scale, self.low, self.high))
        scaled = center + scale * actions.to(center.dtype)
        return scaled.clamp(low, high).reshape(*actions.shape[:-1], *self.shape)

    def to_env(self, actions: Tensor) -> np.ndarray[Any, Any]:
        """As `to_elements`, for NumPy."""
        return self.to_elements(actions.cpu()).numpy()


class Explorer(nn.Module):
    """The actor while PPO collects: a policy, and statistics of observations.

    It may be copied to other processes; steps, which a message names, follow there as weights and statistics do.

    steps: env steps after which it acts.  initial_state: of collectors, where the policy has memory.
    takes_rng: whether it draws from `rng` alone, where it is called with one: networks of users may have dropout.
    """

    def __init__(self, policy: Any, observations: ObservationNormalizer | None, learning_rate: float) -> None:
        super().__init__()
        self.policy, self.observations, self.takes_rng = policy, observations, type(policy) is ActorCritic
        self.steps, self.learning_rate = 0, learning_rate
        self.initial_state = Network(policy, observations).initial_state

    def forward(
        self, obs: Tensor, state: Mapping[Any, Tensor] | None = None, *,
        masks: Tensor | None = None, rng: torch.Generator | None = None,
    ) -> Any:  # fmt: skip
        """Drawn actions [B, K] for observations [B, *obs_shape], CHOSEN, and as the env wants them, "action".

        state: the memory before the step; that after it is returned, too.  masks: allowed choices, as
        for `ActorCritic`.  rng: None for torch's global generator. Raises TrainingDiverged for
        actions that are not finite.
        """
        memory = None if state is None else state[MEMORY]
        network = Network(self.policy, self.observations)
        chosen, after = network.choose(as_observation(obs), masks, memory, sample=True, rng=rng)
        if chosen.is_floating_point() and not chosen.isfinite().all():
            raise TrainingDiverged(
                f"PPO diverged: after step {self.steps} the policy's actions are not finite, and were not sent. Lower "
                f"learning_rate, which is {self.learning_rate:g}, or look for huge observations."
            )
        outputs = {CHOSEN: chosen, "action": torch.from_numpy(self.policy.head.to_env(chosen))}
        return outputs if after is None else (outputs, {MEMORY: after})


class Network(NamedTuple):
    """A policy, and statistics of observations, which stay as they are while it acts."""

    policy: Any
    statistics: ObservationNormalizer | None

    @property
    def initial_state(self) -> dict[Any, Tensor] | None:
        """The first memory of one env, as `Collector` takes it; None without memory."""
        size = getattr(self.policy, "memory_size", 0)
        return {MEMORY: torch.zeros(size)} if size else None

    @torch.no_grad()
    def act(
        self, obs: Tensor, state: Mapping[Any, Tensor] | None = None, *, sample: bool, threads: int,
        masks: Tensor | None = None, alive: Any = None,
    ) -> tuple[Any, dict[Any, Tensor] | None]:  # fmt: skip
        """Actions for observations [B, *obs_shape], as the env wants them: the likeliest ones, or drawn if ``sample``.

        state: the memory before the step; None for that of new episodes.  masks: allowed choices, as for `ActorCritic`.
        threads: torch's, meanwhile; results differ in their last digits with another number.
        Also returns the memory after the step; None without.
        """
        obs = as_observation(obs)
        memory = begun(self.initial_state, state, len(obs)).get(MEMORY)
        device = next((one.device for one in self.policy.parameters()), None)
        masks, memory = (one if one is None else one.to(device) for one in (masks, memory))
        with torch_threads(threads):
            chosen, after = self.choose(obs.to(device), masks, memory, sample=sample)
            actions = torch.from_numpy(self.policy.head.to_env(chosen))
        return actions, None if after is None else {MEMORY: after}

    def choose(
        self, obs: Tensor, masks: Tensor | None, memory: Tensor | None, *,
        sample: bool, rng: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Actions [B, K] for observations [B, *obs_shape], and the memory after the step."""
        params, after = self.policy.decide(as_seen(obs, self.statistics), masks, memory)
        head, drawn_by = self.policy.head, () if rng is None else (rng,)
        return (head.sample(params, *drawn_by) if sample else head.mode(params)), after


def as_allowed(masks: Any, space: gym.Space[Any], *lead: int) -> Tensor | None:
    """The masks of an action space as policies take them, bool [*lead, n]; None for None. Raises as `usable`."""
    masks = masks.cpu() if isinstance(masks, Tensor) else masks
    return None if masks is None else torch.from_numpy(usable(masks, space, *lead, of="policy: masks"))


def begun(initial: Mapping[Any, Tensor] | None, state: Mapping[Any, Tensor] | None, count: int) -> Mapping[Any, Tensor]:
    """The state of ``count`` envs: as given, or where there is none that of new episodes; empty without memory."""
    if initial is None or state is not None:
        return state if initial is not None and state is not None else {}
    return {key: one.expand(count, *one.shape) for key, one in initial.items()}


def as_seen(obs: Any, observations: ObservationNormalizer | None = None) -> Any:
    """Observations [B, *obs_shape] as the policy sees them: normalised, and with 0 for numbers that are not finite.

    PPO refuses such numbers once the rollout is complete, except where nothing is learnt from them: the action for a
    row in which an env is only reset is not used.
    """
    if isinstance(obs, TensorDict):
        obs = obs.apply(as_seen)
    elif obs.is_floating_point():
        obs = obs.nan_to_num(0.0, 0.0, 0.0)
    return obs if observations is None else observations(obs)


@cache
def threads_for(count: int) -> int:
    """The threads that torch computes with where `count` are asked for: no more than this process has cores."""
    return min(count, usable_cores())


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Has torch compute with this number of threads in the ``with`` block, or with one for each usable core."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads_for(count))
    try:
        yield
    finally:
        torch.set_num_threads(before)
