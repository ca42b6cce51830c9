"""Teams: agents that share a policy, with values of its own or of a centralised critic; how they act, and learn."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import torch
from tensordict import TensorDict  # type: ignore[import-untyped]  # ships no types
from torch import Tensor, nn

from muster.algorithms.actor_critic import MEMORY, ActorCritic, Explorer, Network, Sequences, as_allowed, begun
from muster.algorithms.encoder import Encoder, as_observation, mlp
from muster.algorithms.ppo import Experience, Learner, Rollout
from muster.algorithms.ppo_config import Losses, Rates


class Team(NamedTuple):
    """Agents that share a network: those of a group, or one of them."""

    name: str  # the group's; "group/agent" for one
    group: str
    agents: slice  # of the group's
    num_agents: int
    action_space: gym.Space[Any]  # of one agent


class Sight(NamedTuple):
    """A part of what a centralised critic sees of an env: the state, or the observations of each group's agents."""

    name: str  # "state", or the group's
    space: gym.Space[Any]
    num_agents: int | None  # of the group; None for the state


class CentralisedCritic(nn.Module):
    """Values of A agents, from what is seen of the env, and the agent's index.

    hidden_sizes, activation, sprite: as for `ActorCritic`.
    """

    def __init__(
        self, sights: Sequence[Sight], num_agents: int, rng: torch.Generator | None, *,
        hidden_sizes: Sequence[int], activation: str, sprite: int | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.sights, self.num_agents = list(sights), num_agents
        encoders = [Encoder(sight.space, rng, sprite) for sight in sights]
        self.encoders = nn.ModuleList(encoders)
        seen = sum(one.num_features * (sight.num_agents or 1) for one, sight in zip(encoders, sights, strict=True))
        self.critic = mlp([seen + num_agents, *hidden_sizes, 1], activation=activation, gain=1.0, rng=rng)

    def forward(self, seen: TensorDict) -> Tensor:
        """Values [B, A] for the states [B, *shape], or the observations [B, num_agents, *shape], by their names."""
        parts = []
        for sight, encoder in zip(self.sights, self.encoders, strict=True):
            rows = seen[sight.name]
            parts.append(encoder(rows if sight.num_agents is None else rows.flatten(0, 1)).reshape(len(seen), -1))
        of_env = torch.cat(parts, -1).unsqueeze(1).expand(-1, self.num_agents, -1)
        with_index = torch.cat([of_env, torch.eye(self.num_agents, device=of_env.device).expand(len(seen), -1, -1)], -1)
        values: Tensor = self.critic(with_index).squeeze(-1)
        return values


class AgentsPolicy(nn.Module):
    """One agent's policy as that of A agents, with shapes [B, A] for [B]; their values are its own, or of a critic.

    Observations are [B, A, *obs_shape]; with a critic a TensorDict [B] that has them as "own", and what the critic sees
    as "sights".
    """

    def __init__(self, policy: Any, critic: CentralisedCritic | None) -> None:
        super().__init__()
        self.policy, self.critic = policy, critic
        self.head, self.memory_size = policy.head, getattr(policy, "memory_size", 0)

    def forward(self, obs: Any, masks: Tensor | None = None, memory: Any = None) -> list[Any]:
        """As `ActorCritic.forward`."""
        if self.critic is None:
            return self._by_agent(self.policy, obs, masks, memory)
        params, after = self._by_agent(self.policy.decide, obs["own"], masks, memory)
        values = self.critic(obs["sights"])
        return [params, values] if memory is None else [params, values, after]

    def decide(self, obs: Any, masks: Tensor | None = None, memory: Any = None) -> list[Any]:
        """As `ActorCritic.decide`, for the agents' own observations alone."""
        return self._by_agent(self.policy.decide, obs, masks, memory)

    def _by_agent(self, call: Callable[..., Any], obs: Any, masks: Tensor | None, memory: Any) -> list[Any]:
        """The results [B, A, ...] of a function of [B, ...], called for the agents one behind the other."""
        if isinstance(memory, Sequences):  # each agent's become sequences of their own: [S * L, A] is [S * A * L]
            S, L, A = memory.keeps.shape
            own = [x if x is None else x.unflatten(0, (S, L)).transpose(1, 2).flatten(0, 2) for x in (obs, masks)]
            alone = Sequences(memory.start.flatten(0, 1), memory.keeps.transpose(1, 2).flatten(0, 1))
            *found, _ = call(*own, alone)
            return [*(x.view(S, A, L, *x.shape[1:]).transpose(1, 2).flatten(0, 1) for x in found), None]
        flat = [x if x is None else x.flatten(0, 1) for x in (obs, masks, memory)]
        return [x if x is None else x.view(*obs.shape[:2], *x.shape[1:]) for x in call(*flat)]


@dataclass(frozen=True, kw_only=True)
class TeamExperience(Experience):
    """An `Experience` of A agents, with [N, T, A] for [N, T]."""

    acts: Tensor  # [N, T, A] bool, the rows in which the action counted
    follows: Tensor  # [N, T, A] bool, whether the agent is there after the step
    ends: Tensor  # [N, T, 1] bool, whether the step ended the env's episode


class TeamLearner(Learner):
    """PPO's learner for a team, with rows [B, A] in which some agents wait, or are not there."""

    def update(self, rollout: Rollout, rates: Rates, steps: int) -> Losses:
        nobody = rollout.counts is not None and not rollout.counts.any()
        return Losses(*[math.nan] * 5) if nobody else super().update(rollout, rates, steps)

    def _following(self, collected: TeamExperience, values: Tensor, last: Tensor, finals: Tensor) -> Tensor:
        """The value of what an agent observes next, be it after several steps in which it is not there.

        Of an agent that is not there again in its episode, or in the rollout, it is the value of its last observation.
        """
        following = super()._following(collected, values, last, finals).clone()
        later = nothing = torch.full_like(values[:, 0], torch.nan)
        for t in reversed(range(values.shape[1])):
            ended = torch.where(collected.ends[:, t], nothing, later)
            following[:, t] = later = torch.where(collected.follows[:, t], following[:, t], ended)
        return torch.where(following.isnan(), values, following)

    def _learnt_from(self, collected: TeamExperience, rows: Rollout) -> Rollout:
        counts, acts = (x.flatten(0, 1) for x in (collected.counts, collected.acts & collected.counts))
        rows = rows._replace(counts=counts, acts=acts)
        if collected.memory is not None:
            return rows.in_sequences(collected.memory, collected.keeps, self.config.sequence_length)
        there = counts.any(-1)
        return rows if there.all() else rows.at(torch.nonzero(there).squeeze(1))


class AgentsExplorer(nn.Module):
    """The actors while MAPPO collects: an explorer for each team. takes_rng: as of `Explorer`."""

    def __init__(self, networks: Networks, learning_rate: float) -> None:
        super().__init__()
        self.teams = list(networks.teams)
        self.explorers: Any = nn.ModuleList(Explorer(*one, learning_rate) for one in networks.networks)
        self.takes_rng = all(type(one.policy.policy) is ActorCritic for one in networks.networks)
        self.steps = 0  # env steps after which it acts
        self.initial_state = networks.initial_state

    def forward(
        self, obs: Mapping[str, Any], state: Mapping[Any, Tensor] | None = None, *,
        masks: Mapping[str, Tensor], alive: Mapping[str, Tensor], rng: torch.Generator | None = None,
    ) -> Any:  # fmt: skip
        """As `Explorer`, by group, for observations [N, A, *obs_shape] and masks [N, A, n] by group."""
        for explorer in self.explorers:
            explorer.steps = self.steps
        explorations = [partial(explorer.forward, rng=rng) for explorer in self.explorers]
        outputs, after = _by_team(self.teams, explorations, obs, state, masks, alive)
        return outputs if after is None else (outputs, after)


class Networks(NamedTuple):
    """The actors of agents after training: a `Network` for each team, in their order."""

    teams: Sequence[Team]
    networks: Sequence[Network]

    @classmethod
    def of(cls, teams: Sequence[Team], policies: Mapping[str, Any], normalizers: Mapping[str, Any]) -> Networks:
        """Those of policies by the team, which see observations by statistics that are by the group."""
        return cls(teams, [Network(policies[team.name], normalizers.get(team.group)) for team in teams])

    @property
    def initial_state(self) -> dict[Any, Tensor] | None:
        """The first memories of one env's agents, [A, H] by ``(group, *MEMORY)``; None without memory."""
        sizes: dict[Any, list[int]] = {}
        for team, network in zip(self.teams, self.networks, strict=True):
            sizes.setdefault((team.group, *MEMORY), []).extend([network.policy.memory_size] * team.num_agents)
        return {key: torch.zeros(len(each), each[0]) for key, each in sizes.items() if each[0]} or None

    def act(
        self, obs: Mapping[str, Any], state: Mapping[Any, Tensor] | None = None, *, sample: bool, threads: int,
        masks: Mapping[str, Tensor] | None = None, alive: Mapping[str, Tensor] | None = None,
    ) -> tuple[dict[str, Tensor], dict[Any, Tensor] | None]:  # fmt: skip
        """As `Network.act`, by group: obs [B, A, *obs_shape], masks [B, A, n], alive [B, A]; None: all are."""
        count = len(as_observation(obs[self.teams[0].group], 2))
        spaces, sizes = {team.group: team.action_space for team in self.teams}, Counter[str]()
        for team in self.teams:
            sizes[team.group] += team.num_agents
        allowed = {group: as_allowed(one, spaces[group], count, sizes[group]) for group, one in (masks or {}).items()}
        acts = [partial(network.act, sample=sample, threads=threads) for network in self.networks]
        memories = begun(self.initial_state, state, count) or None
        return _by_team(self.teams, acts, obs, memories, allowed, alive or {})


def _by_team(
    teams: Sequence[Team], acts: Iterable[Callable[..., Any]], obs: Mapping[str, Any],
    state: Mapping[Any, Tensor] | None, masks: Mapping[str, Tensor | None], alive: Mapping[str, Tensor],
) -> tuple[dict[str, Any], dict[Any, Tensor] | None]:  # fmt: skip
    """The results of the teams' functions for their agents, joined by group; and the memories, None without.

    Who is not alive, and begins again later, begins without memory.
    """
    outputs: dict[str, list[Any]] = {}
    memories: dict[Any, list[Tensor]] = {}
    for team, act in zip(teams, acts, strict=True):
        group, own = team.group, (slice(None), team.agents)
        before = None if state is None else {MEMORY: state[group, *MEMORY][own]}
        allowed = None if (one := masks.get(group)) is None else one[own]
        found = act(as_observation(obs[group], 2)[own], before, masks=allowed)
        output, after = found if isinstance(found, tuple) else (found, None)
        outputs.setdefault(group, []).append(output)
        if after is not None:
            there = alive[group][own].unsqueeze(-1) if group in alive else True
            memories.setdefault((group, *MEMORY), []).append(after[MEMORY] * there)
    joined = {group: _joined(parts) for group, parts in outputs.items()}
    return joined, {key: torch.cat(parts, 1) for key, parts in memories.items()} or None


def _joined(parts: Sequence[Any]) -> Any:
    """Tensors [B, A, ...] of teams, or dicts of them, as one for the group."""
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts), 1)
    return {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}
