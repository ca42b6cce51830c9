"""`MultiAgentVectorEnv`: N envs of many agents behind the methods of `VectorEnv`, with agents batched by group.

An env's observation is a row that holds everything one step says of its agents. Here rows are split by group.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from muster._core import FLAG_NAMES, split_agents, verb
from muster.envs import layout
from muster.envs.agents import AWAY
from muster.envs.groups import Agent
from muster.errors import CannotTravel, EnvError
from muster.introspection import caller_stacklevel
from muster.spaces.compare import handed_out
from muster.spaces.masks import obey, require_obeyable
from muster.spaces.tree import Array
from muster.transport.infos import InfoReader, Infos, merge
from muster.vector.parts import Assembled
from muster.vector.results import AgentBatch, AgentsStepResult, Batch, Bools, ByGroup, Rewards, Rows
from muster.vector.vector_env import SteppedEnvs

# Key in the infos of a same_step batch: the last rows of ended episodes, from which final_obs and final_info are made.
_FINAL_ROWS = "final_rows"


class MultiAgentVectorEnv(SteppedEnvs[AgentsStepResult, AgentBatch]):
    """Many multi-agent envs, stepped by a backend. Made by `muster.make_vec`.

    Agents stand in fixed slots: group g has A slots, in the order of ``groups[g]``; arrays are ``[N, A, ...]``. An
    agent that is not there is a row of zeros with ``alive`` False; the row of the step in which it ends still
    holds its observation. So is one that has left without an end, from then until it returns, with one RuntimeWarning
    for all; the end of the env truncates it. A restart truncates only those that the env's last row has.

    obs: by group, an array or a structure of arrays ``[N, A, ...]``; what all agents observe alike stands once under
    ``obs["shared"]``, ``[N, ...]``.  rewards: float32 ``[N, A]`` by group.
    terminated, truncated: bool ``[N]``, of the whole env: terminated if every agent ended and none was truncated.
    infos: by group, bool ``[N, A]``: ``alive``, the agent's row holds something; ``acting``, the agent's action counts
    in the next step; ``agent_terminated`` and ``agent_truncated``, the agent ended in this step. ``action_mask``
    ``[N, A, n]`` where the env provides masks, or announces them in its spaces, never all False. ``state``
    ``[N, ...]`` and ``_state`` ``[N]``, all True, where the env has a state and `make_vec` was called with
    ``state=True``. ``discount``, float64, and ``_discount`` ``[N]`` where the discounts of a dm_env env of several
    players are not what the ends of its agents say. ``agent_infos`` by agent: everything else that the env reports.
    With same_step autoreset `obs`, ``alive``, ``acting``, ``action_mask`` and ``state`` are the new episode's;
    ``final_obs`` and ``final_info`` hold those of the old episode in the rows where ``_final_obs`` is True.

    Actions are ``[N, A, ...]`` by group; those of agents that are not acting are ignored. With ``copy=False`` obs,
    ``action_mask`` and ``state`` are views, valid until that env's next send.

    >>> import muster
    >>> with muster.make_vec("pettingzoo/mpe/simple_spread_v3", num_envs=2) as envs:
    ...     obs, infos = envs.reset(seed=0)
    ...     obs, rewards, terminated, truncated, infos = envs.step(envs.sample_actions())
    >>> envs.groups
    {'agent': ['agent_0', 'agent_1', 'agent_2']}
    >>> obs["agent"].shape, rewards["agent"].shape
    ((2, 3, 18), (2, 3))
    """

    _batch = AgentBatch

    def __init__(self, assembled: Assembled) -> None:
        super().__init__(assembled)
        assert isinstance(self._obs, layout.RowNode)
        self._layout = self._obs.layout
        self._slots = self._layout.slots()
        self._bounds = [(name, slot.start, slot.stop) for name, slot in self._slots.items()]
        self.single_observation_space = handed_out(self._layout.observation_space())
        self.single_action_space = handed_out(self._layout.action_space())
        self._observation_space: spaces.Dict | None = None
        self._action_space: spaces.Dict | None = None
        self._told_away = False

    @property
    def groups(self) -> dict[str, list[Agent]]:
        """The agents of each group, in the order of their slots."""
        return {name: list(agents) for name, agents in self._layout.groups.items()}

    # Both are made when somebody asks, as their bounds may take much memory. A cached_property reads the `__dict__` of
    # the instance, and from then on Python looks up each of its attributes more slowly.

    @property
    def observation_space(self) -> spaces.Dict:
        """The space of `obs`: ``[N, A, ...]`` by group."""
        if self._observation_space is None:
            self._observation_space = self._layout.observation_space(self.num_envs)
        return self._observation_space

    @property
    def action_space(self) -> spaces.Dict:
        """The space of actions: ``[N, A, ...]`` by group."""
        if self._action_space is None:
            self._action_space = self._layout.action_space(self.num_envs)
        return self._action_space

    @verb
    def sample_actions(self) -> dict[str, Any]:
        """Random actions ``[N, A, ...]`` by group that the envs allow, of `action_space`. Its ``seed`` seeds them.

        Of n choices an agent has those of the last ``infos["action_mask"]``; all of them without one, and while the env
        owes an answer.
        """
        ids, actions = self._backend.settled(), self.action_space.sample()
        rows = self._backend.obs_again(ids, copies=False)
        self.require_obeyable_masks()
        for group, masks in zip(self._layout.mask_shapes, rows[layout.MASKS], strict=True):
            if rows[layout.HAS_MASKS].any():
                space = self._layout.action_spaces[group]
                own, rng = actions[group], self.action_space[group].np_random
                own[ids] = obey(own[ids], space, masks, rng, of=f"the action mask of {group!r}")
        return actions

    @property
    def state_space(self) -> spaces.Space[Any] | None:
        """The space of one env's ``infos["state"]``; None for envs without a state, or without ``state=True``."""
        return self._layout.state_space

    @property
    def mask_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of one agent's action mask, for the groups that may have masks."""
        return dict(self._layout.mask_shapes)

    def require_obeyable_masks(self) -> None:
        """Raises SpecMismatch where observations of agents hold a mask that fits no action."""
        for group, acts in self._layout.action_spaces.items():
            seen, shape = self._layout.observation_spaces[group], self._layout.mask_shapes.get(group)
            require_obeyable(seen, acts, shape, of=f" of {group!r}")

    # ---- inside

    def _read(self, copies: bool, reader: InfoReader | None) -> Rows:
        try:
            return self._split_rows(super()._read(copies, reader), copies)
        except (EnvError, CannotTravel) as error:
            if isinstance(error.batch, Batch):
                error.batch = AgentBatch._make(self._split_rows((*error.batch, 0), copies)[:6])
            raise

    def _all_after_reset(self, ids: Array, infos: Infos, copies: bool) -> tuple[Any, Infos]:
        rows, infos = super()._all_after_reset(ids, infos, copies)
        lost = None
        if self._recovery is not None:
            # Agents that act though their episode is over: a restart has cut it off, and the row is the last one.
            lost = self.needs_reset & rows[layout.FLAGS][:, layout.ACTING].any(1)
        obs, _, infos = self._by_group(rows, infos, lost, copies)
        return obs, infos

    def _split_rows(self, rows: Rows, copies: bool) -> Rows:
        ids, obs, _, terminated, truncated, infos, unusual = rows
        for reports in (infos, infos.get("final_info", {})):  # same_step: the last step's are with its final info
            if AWAY in reports:
                agents, have_left = reports.pop(AWAY), reports.pop(f"_{AWAY}")
                self._warn_of_away(ids[have_left][0], agents[have_left][0])
        lost = infos["_restarted"] & truncated if "_restarted" in infos else None
        by_group, rewards, infos = self._by_group(obs, infos, lost, copies)
        return ids, by_group, rewards, terminated, truncated, infos, unusual

    def _by_group(self, rows: Any, infos: Infos, lost: Bools | None, copies: bool) -> tuple[ByGroup, Rewards, Infos]:
        rewards, flags = rows[layout.REWARDS], rows[layout.FLAGS]
        if not copies:  # only observations are views, as from `VectorEnv`
            rewards, flags = rewards.copy(), flags.copy()
        final = infos.pop(_FINAL_ROWS, None) if infos else None
        if lost is not None and lost.any():
            if final is None:
                rewards, flags = _cut_off(rewards, flags, lost)
            else:
                final = dict(enumerate(final))
                final[layout.REWARDS], final[layout.FLAGS] = _cut_off(final[layout.REWARDS], final[layout.FLAGS], lost)
        if final is not None:
            over = infos["_final_obs"]
            rewards = np.where(over[:, None], final[layout.REWARDS], rewards)
            flags = flags.copy()
            flags[over, layout.TERMINATED :] = final[layout.FLAGS][over, layout.TERMINATED :]
            infos["final_obs"] = self._obs_by_group(final)
            _, about = split_agents(final[layout.REWARDS], final[layout.FLAGS], self._bounds, FLAG_NAMES)
            infos["final_info"] |= self._about_agents(final, about)
        by_group, about = split_agents(rewards, flags, self._bounds, FLAG_NAMES)
        infos |= self._about_agents(rows, about)
        return self._obs_by_group(rows), by_group, infos

    def _warn_of_away(self, env: int, agents: Sequence[Agent]) -> None:
        if not self._told_away:
            self._told_away = True
            warnings.warn(
                f"env {env}: {agents} left env.agents, but have no True in terminations or truncations. Agents "
                "that do so pause, neither alive nor acting, until they return; the env's end truncates those that do "
                "not. If their episodes are over, have the env say so. This is said once",
                RuntimeWarning,
                stacklevel=caller_stacklevel(),
            )

    def _obs_by_group(self, rows: Any) -> ByGroup:
        obs = dict(zip(self._slots, rows[layout.OBS], strict=True))
        if rows[layout.SHARED]:
            obs["shared"] = rows[layout.SHARED]
        return obs

    def _about_agents(self, rows: Any, about: Infos) -> Infos:
        """`about`, with the other parts of a row that belong into infos: action masks and the state."""
        if any_true(rows[layout.HAS_MASKS]):
            about["action_mask"] = dict(zip(self._layout.mask_shapes, rows[layout.MASKS], strict=True))
        if self._layout.state_space is not None:
            about["state"], about["_state"] = rows[layout.STATE], np.ones(len(rows[layout.REWARDS]), np.bool_)
        return about

    def _add_finals(self, infos: Infos, ids: Array, objects: Sequence[Any], reader: InfoReader) -> None:
        ended = self._records["has_final"][ids].copy()
        if not ended.any():
            return

        def take(array: Array) -> Array:
            taken = np.zeros((len(ids), *array.shape[1:]), array.dtype)
            taken[ended] = array[ids[ended]]
            return taken

        infos["final_info"] = {}
        for row in np.flatnonzero(ended).tolist():
            merge(infos, {"final_info": reader.final(int(ids[row]), objects[row])}, row, len(ids))
        infos["_final_info"] = ended
        infos["_final_obs"] = ended.copy()
        infos[_FINAL_ROWS] = self._obs.batch(self._backend.slab.final_obs, take, [])


def _cut_off(rewards: Array, flags: Array, lost: Bools) -> tuple[Array, Array]:
    """Copies of `rewards` and `flags` in which the envs `lost` truncate all agents that were left.

    lost: bool ``[n]``, the envs that were restarted. Their rows repeat the last ones, so their rewards become 0.
    """
    rewards, flags = rewards.copy(), flags.copy()
    left = flags[lost, layout.ALIVE] & ~flags[lost, layout.TERMINATED] & ~flags[lost, layout.TRUNCATED]
    rewards[lost], flags[lost] = 0, False
    flags[lost, layout.ALIVE] = flags[lost, layout.TRUNCATED] = left
    return rewards, flags


def any_true(flags: Bools) -> bool:
    """True if any flag is; ``flags.any()`` takes five times as long for a few flags."""
    return 1 in flags.tobytes()
