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
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict  # type: ignore[import-untyped]  # ships no types
from torch import nn

from muster.algorithms.actor_critic import CHOSEN, MEMORY, as_seen, followers, goes_on, torch_threads
from muster.algorithms.encoder import MEASURED, PLACES, ObservationNormalizer, kind_of, observed
from muster.algorithms.on_policy import OnPolicy, TrainingSpaces, facts_of, generator_of, placed, seed_of
from muster.algorithms.own_network import policy_of
from muster.algorithms.ppo import Experience, Rollout
from muster.algorithms.ppo_config import EpisodeWindow, MAPPOConfig, MAPPOMetrics, Rates, TeamFigures
from muster.algorithms.teams import (
    AgentsExplorer,
    AgentsPolicy,
    CentralisedCritic,
    Networks,
    Sight,
    Team,
    TeamExperience,
    TeamLearner,
)  # fmt: skip
from muster.errors import ConfigError
from muster.introspection import type_name
from muster.spaces.masks import MASK

STATE = "state"
Three = tuple[Any, Any, Any]  # observations, as `observed` gives them
# Those parts of what a group has collected that have its agents as their third dim.
OF_AGENTS = ["actions", "rewards", "terminated", "truncated", "counts", "masks", "memory", "keeps", "acts", "follows"]


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
        self, envs: Any, config: MAPPOConfig, policy: Any = None, *,
        device: str | torch.device = "cpu", collectors: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        facts = facts_of(envs, config, collectors)
        self.groups = facts.groups
        self.teams, self._sights = teams_of(facts, config), [one.name for one in sights_of(facts, config)]
        collecting, weights, minibatches = np.random.SeedSequence(config.seed).spawn(3)
        self.policies = policies_of(facts, config, weights, policy)
        self.normalizers = normalizers_of(facts, config)
        at = placed(device, self.policies.values(), self.normalizers.values(), config)
        seeds, shape = minibatches.spawn(len(self.teams)), (config.num_envs,)
        self.learners = {
            team.name: TeamLearner(self.policies[team.name], config, (*shape, team.num_agents), at, seed_of(seed))
            for team, seed in zip(self.teams, seeds, strict=True)
        }
        explorer = AgentsExplorer(self.network, config.learning_rate)
        episodes = EpisodeWindow(self.groups, [group for group in self.groups if not config.shares_params(group)])
        super().__init__(envs, facts, config, explorer, at, episodes, seed_of(collecting), collectors)
        self._begin_anew()

    @property
    def critic_sees(self) -> str:
        """The sight of the critic in a sentence; empty for own critics."""
        state = self.facts.state_space
        seen = "all agents' observations: the envs give no state" if state is None else f"the env's state, {state}"
        return f"The centralised critic sees {seen}." if self._sights else ""

    def _learn(self, rates: Rates) -> MAPPOMetrics:
        rollouts = self.collect_rollouts()
        steps, figures = self.collector.frames, {}
        for team in self.teams:
            rollout = rollouts[team.name]
            losses = self.learners[team.name].update(rollout, rates, steps)
            rest = self.episodes.mean_of(team.group), losses, rollout.explained_variance()
            figures[team.name] = TeamFigures(team.group, *rest)
        of_episodes = self.episodes.figures(), self.episodes.by_agent()
        return MAPPOMetrics(steps, self.episodes.summary(), figures, rates.learning_rate, *of_episodes)

    @torch.no_grad()
    def collect_rollouts(self) -> dict[str, Rollout]:
        """The next ``num_steps`` steps of every env, for each team by its name, going on where the last ones ended."""
        batch = self._collect()
        three = {name: self._three(batch, name) for name in dict.fromkeys([*self.groups, *self._sights])}
        collected = {group: self._collected(batch, group, three[group]) for group in self.groups}
        # Before anything else: what is not finite enters neither statistics nor returns.
        for group, agents in self.groups.items():
            self._require_finite(collected[group], agents)
        mask = batch["collector", "mask"]
        if STATE in three:
            self._require_finite(self._collected_states(batch, three[STATE]), what="a state")
        # A rollout that was cut short has its last step before rows that are left out.
        at = torch.arange(self.config.num_envs), mask.cumsum(1).argmax(1)
        self._ended = {group: batch["next", group, "done"][at].squeeze(-1) for group in self.groups}
        self._trajectories = batch["collector", "traj_ids"][:, -1].clone()
        self.episodes.add(self.collector.last_episodes)
        # By the statistics that the actors saw them by; the rollout's own rows count from the next one on.
        seen = {name: [as_seen(one, self.normalizers.get(name)) for one in parts] for name, parts in three.items()}
        for name, normalizer in self.normalizers.items():
            normalizer.update(three[name][0][mask if name == STATE else collected[name].counts])
        return {team.name: self._judged(team, collected[team.group], seen) for team in self.teams}

    def _three(self, batch: TensorDict, name: str) -> Three:
        """The observations of a group, or the states, as `observed` gives them."""
        if name == STATE:
            return observed(batch, self.facts.state_space, (STATE,))
        return observed(batch, self.facts.observation_space[name], (name, "observation"), 2)

    def _collected(self, batch: TensorDict, group: str, three: Three) -> TeamExperience:
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
        return TeamExperience(
            *three, final_at, batch[group, *CHOSEN], rewards, terminated, truncated,
            counts=batch["collector", "mask"].unsqueeze(-1) & alive & ~shows_end,
            keeps=going_on & torch.cat([alive[:, :1], alive[:, :-1]], 1),
            masks=batch.get((group, MASK), None),
            memory=batch[group].get(MEMORY, None),
            acts=acting,
            follows=followers(alive, alive_last, alive_finally, final_at),
            ends=batch["next", "done"],
        )  # fmt: skip

    def _collected_states(self, batch: TensorDict, three: Three) -> Experience:
        """The batch for one agent that observes the states, and gets no reward."""
        terminated, truncated = (batch["next", name].squeeze(-1) for name in ("terminated", "truncated"))
        final_at, mask = batch["collector", "final_at"], batch["collector", "mask"]
        return Experience(*three, final_at, terminated, terminated.float(), terminated, truncated, mask, keeps=mask)

    def _judged(self, team: Team, collected: TeamExperience, seen: Mapping[str, list[Any]]) -> Rollout:
        """The rollout of a team, from what its group has collected, with observations as `AgentsPolicy` takes them."""
        observations = []
        for part, lead in enumerate((2, 1, 1)):  # env and time, env, episode
            own = seen[team.group][part][(slice(None),) * lead + (team.agents,)]
            if self._sights:
                sights = {name: seen[name][part] for name in self._sights}
                own = TensorDict({"own": own, "sights": sights}, own.shape[:lead])
            observations.append(own)
        rows = {name: getattr(collected, name) for name in OF_AGENTS}
        its_own: Any = {name: None if one is None else one[:, :, team.agents] for name, one in rows.items()}
        its_own |= dict(zip(("observations", "last", "finals"), observations, strict=True))
        return self.learners[team.name].judge(replace(collected, **its_own))

    def _begin_anew(self) -> None:
        """Forgets the batch before: new episodes begin."""
        # Of the batch before: agents with an end in its last step, and the trajectories.
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

    def _carried(self) -> dict[str, Any]:
        teams = {name: learner.carried() for name, learner in self.learners.items()}
        return {"teams": teams, "ended": self._ended, "trajectories": self._trajectories}

    def _load_carried(self, state: Mapping[str, Any]) -> None:
        for name, learner in self.learners.items():
            learner.load_carried(state["teams"][name])
        for group, ended in self._ended.items():
            ended.copy_(state["ended"][group])
        self._trajectories = state["trajectories"].to(self.device)

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
    """The sights of a centralised critic; none where each critic sees what its agent observes."""
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
