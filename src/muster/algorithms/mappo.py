"""MAPPO (Yu et al. 2022, arXiv:2103.01955) and IPPO over envs with agents, to be read from top to bottom.

    envs = muster.make_vec("pettingzoo/mpe/simple_spread_v3", num_envs=16, autoreset_mode="same_step", state=True)
    mappo = MAPPO(envs, MAPPOConfig(total_steps=500_000))
    for metrics in mappo.train():
        print(metrics.steps, metrics.episodes.mean_return)

It is PPO with an actor for each group of agents. Its critic sees the env's state, or what all agents observe, and the
agent's index; with ``critic="own"`` it sees what the agent observes, which is IPPO. Rows count where an agent is there:

- An agent that waits for its turn is learnt from by its value, and by its policy where its action counted.
- A row in which an agent is not there, or that shows how its episode has ended, is not learnt from. What follows the
  last row before an absence is the row in which the agent is there again.
- A choice that an action mask forbids has no probability, neither in acting nor in learning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict  # type: ignore[import-untyped]  # ships no types
from torch import Tensor, nn

from muster.algorithms.actor_critic import CHOSEN, MEMORY, as_seen, torch_threads
from muster.algorithms.encoder import MEASURED, ObservationNormalizer, kind_of, observed
from muster.algorithms.learner import Experience, Learner, Rollout, followers, goes_on
from muster.algorithms.on_policy import (
    OnPolicy,
    TrainingSpaces,
    facts_of,
    generator_of,
    placed,
    require_finite_rows,
    seed_of,
)
from muster.algorithms.own_network import policy_of
from muster.algorithms.ppo_config import EpisodeWindow, MAPPOConfig, MAPPOMetrics, Rates, TeamFigures
from muster.algorithms.teams import AgentsExplorer, AgentsPolicy, CentralisedCritic, Networks, Sight, Team
from muster.errors import ConfigError
from muster.introspection import type_name
from muster.spaces.masks import MASK

STATE = "state"
PLACES = (), ("collector", "last"), ("collector", "final")  # of the three parts of a batch's observations


class MAPPO(OnPolicy[MAPPOMetrics]):
    """Trains the agents of ``envs``, by group, with Box, Discrete, MultiDiscrete or MultiBinary spaces.

    envs: a `muster.MultiAgentVectorEnv` of ``config.num_envs``, else as for `PPO`. A centralised critic sees the state
        of envs that were made with ``state=True`` and have one; of others the observations of all agents.
    config: the options, a `MAPPOConfig`.
    policy: as for `PPO`, for the spaces of one agent: a function makes the network of each team, and an object is that
        of the only one.
    device, collectors: as for `PPO`.

    groups: the agents of each group.  teams: those that share a network: a group, or with ``share_params=False`` one of
    its agents.  policies: the network of each team, by its name.

    Raises UsageError for other envs, ConfigError for options that do not fit them, and what `MultiCollector` raises.

    >>> import muster
    >>> from muster.algorithms import MAPPO, MAPPOConfig
    >>> name, config = "pettingzoo/mpe/simple_spread_v3", MAPPOConfig(total_steps=128, num_envs=2, num_steps=32)
    >>> with muster.make_vec(name, num_envs=2, autoreset_mode="same_step", state=True) as envs:
    ...     mappo = MAPPO(envs, config)
    ...     [list(metrics.teams) for metrics in mappo.train()]
    [['agent'], ['agent']]
    """

    def __init__(
        self,
        envs: Any,
        config: MAPPOConfig,
        policy: Any = None,
        *,
        device: str | torch.device = "cpu",
        collectors: Mapping[str, Any] | None = None,
    ) -> None:
        facts = facts_of(envs, config, collectors)
        self.groups = facts.groups
        self.teams, self._sights = teams_of(facts, config), sights_of(facts, config)
        collecting, weights, minibatches = np.random.SeedSequence(config.seed).spawn(3)
        self.policies = policies_of(facts, config, weights, policy)
        self.normalizers = normalizers_of(facts, config)
        at = placed(device, self.policies.values(), self.normalizers.values(), config)
        self.learners = {
            team.name: Learner(self.policies[team.name], config, (config.num_envs, team.num_agents), at, seed_of(one))
            for team, one in zip(self.teams, minibatches.spawn(len(self.teams)), strict=True)
        }
        explorer = AgentsExplorer(self.network, config.learning_rate)
        episodes = EpisodeWindow(self.groups, [group for group in self.groups if not config.shares_params(group)])
        super().__init__(envs, facts, config, explorer, at, episodes, seed_of(collecting), collectors)
        self._begin_anew()

    @property
    def critic_sees(self) -> str:
        """What the critic sees, in a sentence; empty for own critics."""
        state = self.facts.state_space
        seen = "all agents' observations: the envs give no state" if state is None else f"the env's state, {state}"
        return f"The centralised critic sees {seen}." if self._sights else ""

    def _learn(self, rates: Rates) -> MAPPOMetrics:
        rollouts = self.collect_rollouts()
        steps, figures = self.collector.frames, {}
        for team in self.teams:
            learner, rollout = self.learners[team.name], rollouts[team.name]
            losses = learner.update(rollout, rates, steps)
            figures[team.name] = TeamFigures(
                team.group, self.episodes.mean_of(team.group), losses, rollout.explained_variance()
            )
        of_episodes = self.episodes.figures(), self.episodes.by_agent()
        return MAPPOMetrics(steps, self.episodes.summary(), figures, rates.learning_rate, *of_episodes)

    @torch.no_grad()
    def collect_rollouts(self) -> dict[str, Rollout]:
        """The next ``num_steps`` steps of every env, for each team by its name, going on where the last ones ended."""
        batch = self._collect()
        collected = {group: self._collected(batch, group) for group in self.groups}
        # Before anything else: what is not finite enters neither statistics nor returns.
        for group, agents in self.groups.items():
            require_finite_rows(collected[group], self._steps_before, self.steps, agents)
        if self.facts.state_space is not None and self._sights:
            require_finite_rows(self._collected_states(batch), self._steps_before, self.steps, what="a state")
        # A rollout that was cut short has its last step before rows that are left out.
        at = torch.arange(self.config.num_envs), batch["collector", "mask"].cumsum(1).argmax(1)
        self._ended = {group: batch["next", group, "done"][at].squeeze(-1) for group in self.groups}
        self._trajectories = batch["collector", "traj_ids"][:, -1].clone()
        self.episodes.add(self.collector.last_episodes)
        # By the statistics that the actors saw them by; the rollout's own rows count from the next one on.
        seen = {name: self._seen(batch, name) for name in {**self.groups, **{one.name: one for one in self._sights}}}
        for name, normalizer in self.normalizers.items():
            counts = batch["collector", "mask"] if name == STATE else collected[name].counts
            normalizer.update(self._three(batch, name)[0][counts])
        rollouts = {}
        for team in self.teams:
            observations, last, finals = self._observed(seen, team)
            rows = _of_agents(collected[team.group], team.agents)
            rows = rows._replace(observations=observations, last=last, finals=finals)
            rollouts[team.name] = self.learners[team.name].judge(rows)
        return rollouts

    def _collected(self, batch: TensorDict, group: str) -> Experience:
        """The batch as a group sees it."""
        rewards, terminated, truncated = (
            batch["next", group, name].squeeze(-1) for name in ("reward", "terminated", "truncated")
        )
        final_at = batch["collector", "final_at"]
        going_on = goes_on(batch, self._trajectories).unsqueeze(-1)
        alive, alive_last, alive_finally = (batch[(*at, group, "alive")] for at in PLACES)
        acting = batch[group, "acting"]
        # The row after an agent's end shows how it ended, unless the agent has begun again there.
        ended = torch.cat([self._ended[group].unsqueeze(1), (terminated | truncated)[:, :-1]], 1)
        shows_end = ended & going_on & ~acting
        observations, last, finals = self._three(batch, group)
        counts = batch["collector", "mask"].unsqueeze(-1) & alive & ~shows_end
        return Experience(
            observations, last, finals, final_at, batch[group, *CHOSEN], rewards, terminated, truncated, counts,
            acts=acting,
            masks=batch.get((group, MASK), None),
            follows=followers(alive, alive_last, alive_finally, final_at),
            ends=batch["next", "done"],
            memory=batch[group].get(MEMORY, None),
            keeps=going_on & torch.cat([alive[:, :1], alive[:, :-1]], 1),
        )  # fmt: skip

    def _collected_states(self, batch: TensorDict) -> Experience:
        """The batch as one agent sees it whose observations are the states, and who gets no reward."""
        terminated, truncated = (batch["next", name].squeeze(-1) for name in ("terminated", "truncated"))
        rows, last, finals = self._three(batch, STATE)
        rest = (batch["collector", "final_at"], terminated, terminated.float(), terminated, truncated)
        return Experience(rows, last, finals, *rest, counts=batch["collector", "mask"])

    def _observed(self, seen: Mapping[str, list[Tensor]], team: Team) -> list[Any]:
        """What the network of a team takes, see `AgentsPolicy`, in the three parts of `seen`."""
        rows, last, finals = seen[team.group]
        own = [rows[:, :, team.agents], last[:, team.agents], finals[:, team.agents]]
        if not self._sights:
            return own
        by_name = [{one.name: seen[one.name][part] for one in self._sights} for part in range(3)]
        leads = (2, 1, 1)  # dims of a batch: env and time, env, episode
        return [
            TensorDict({"own": one, "sights": sights}, one.shape[:lead])
            for one, sights, lead in zip(own, by_name, leads, strict=True)
        ]

    def _seen(self, batch: TensorDict, name: str) -> list[Tensor]:
        """The observations of a group, or the states, as networks see them: in rows, last ones and final ones."""
        return [as_seen(one, self.normalizers.get(name)) for one in self._three(batch, name)]

    def _three(self, batch: TensorDict, name: str) -> list[Any]:
        """Those in the rows [N, T, ...], after the last of them [N, ...], and at the ends of episodes [K, ...]."""
        is_state = name == STATE
        space = self.facts.state_space if is_state else self.facts.observation_space[name]
        key = (STATE,) if is_state else (name, "observation")
        dims = (2, 1, 1) if is_state else (3, 2, 2)
        return [observed(batch, space, at, key, of) for at, of in zip(PLACES, dims, strict=True)]

    def _begin_anew(self) -> None:
        """Forgets the batch before: new episodes begin."""
        # Of the batch before: agents whose episodes ended in its last step, and the trajectories.
        self._ended = {
            group: torch.zeros(self.config.num_envs, len(agents), dtype=torch.bool, device=self.device)
            for group, agents in self.groups.items()
        }
        self._trajectories = torch.full((self.config.num_envs,), -1, device=self.device)

    @property
    def network(self) -> Networks:
        return Networks.of(self.teams, self.policies, self.normalizers)

    def _learnt(self) -> dict[str, Any]:
        return {
            "teams": {name: learner.state_dict() for name, learner in self.learners.items()},
            "normalizers": {name: one.to_dict() for name, one in self.normalizers.items()},
        }

    def _load_learnt(self, state: Mapping[str, Any]) -> None:
        for name, learner in self.learners.items():
            learner.load_state_dict(state["teams"][name])
        for name, normalizer in self.normalizers.items():
            normalizer.load(state["normalizers"][name])
        self._begin_anew()


def teams_of(facts: TrainingSpaces, config: MAPPOConfig) -> list[Team]:
    """The agents that share a network: those of each group, or each of them by itself."""
    teams = []
    for group, agents in facts.groups.items():
        acts = facts.action_space[group]
        if config.shares_params(group):
            teams.append(Team(group, group, slice(0, len(agents)), len(agents), acts))
        else:
            teams += [Team(f"{group}/{agent}", group, slice(i, i + 1), 1, acts) for i, agent in enumerate(agents)]
    return teams


def sights_of(facts: TrainingSpaces, config: MAPPOConfig) -> list[Sight]:
    """What a centralised critic sees; nothing where each sees what its agent observes."""
    if config.critic == "own":
        return []
    if facts.state_space is not None:
        return [Sight(STATE, facts.state_space, None)]
    return [Sight(group, facts.observation_space[group], len(agents)) for group, agents in facts.groups.items()]


def policies_of(
    facts: TrainingSpaces, config: MAPPOConfig, seeds: np.random.SeedSequence, policy: Any = None
) -> dict[str, AgentsPolicy]:
    """The policy of each team by its name, with weights drawn from the seeds. Raises as `policy_of`.

    policy: as for `MAPPO`.
    """
    teams, sights = teams_of(facts, config), sights_of(facts, config)
    if isinstance(policy, nn.Module) and len(teams) > 1:
        expected = f"a function that makes a network for each of {[team.name for team in teams]}"
        raise ConfigError("policy", expected, type_name(policy))
    policies = {}
    with torch_threads(config.torch_threads):  # orthogonal weights differ with the number of threads
        for team, seed in zip(teams, seeds.spawn(len(teams)), strict=True):
            rng, spaces = generator_of(seed), (facts.observation_space[team.group], facts.action_space[team.group])
            own = policy_of(config, *spaces, rng, policy, judges=not sights)
            options = {name: getattr(config, name) for name in ("hidden_sizes", "activation", "sprite")}
            critic = CentralisedCritic(sights, team.num_agents, rng, **options) if sights else None
            policies[team.name] = AgentsPolicy(own, critic)
    return policies


def normalizers_of(facts: TrainingSpaces, config: MAPPOConfig) -> dict[str, ObservationNormalizer]:
    """The statistics of each group's observations, and of the states where a critic sees them."""
    if not config.normalize_observations:
        return {}
    seen = {**facts.observation_space, **{one.name: one.space for one in sights_of(facts, config)}}
    return {name: ObservationNormalizer(space) for name, space in seen.items() if kind_of(space) in MEASURED}


def _of_agents(collected: Experience, agents: slice) -> Experience:
    """The part of some agents, without the observations."""
    parts: Any = {
        name: None if rows is None else rows[:, :, agents]
        for name, rows in collected._asdict().items()
        if name not in ("observations", "last", "finals", "final_at", "ends")
    }
    return collected._replace(**parts)
