"""Vector envs of many agents: groups nest in the batch, with flags and masks of their agents next to observations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from muster.errors import SpecMismatch
from muster.rollout.env_side import EnvSide, discounts
from muster.rollout.fields import Array, Field, FieldTree, Key, flat
from muster.spaces.masks import MASK, mask_length, unusable
from muster.spaces.stacking import stacked_space
from muster.vector.multi_agent import MultiAgentVectorEnv

_BOOL = np.dtype(np.bool_)
_ENDS = ("terminated", "truncated", "done")


class MultiAgentEnvs(EnvSide):
    """Vector envs of groups g of A agents each.

    Observation fields: ``(g, "observation")``, ``(g, "alive")``, ``(g, "acting")`` ``[A]`` and, where the env may have
    masks, ``(g, "action_mask")`` ``[A, n]``; ``"shared"`` and ``"state"`` where it has them.
    Reward fields: ``(g, "reward")``, ``(g, "terminated")``, ``(g, "truncated")``, ``(g, "done")``, ``[A]``; of dm_env's
    envs ``(g, "discount")``, too.
    """

    has_agents = True

    def __init__(self, envs: MultiAgentVectorEnv) -> None:
        super().__init__(envs)
        self._sizes = {group: len(agents) for group, agents in envs.groups.items()}
        seen, acts = envs.single_observation_space.spaces, envs.single_action_space.spaces
        self._observation_trees, self._action_trees = (
            {g: FieldTree(stacked_space(spaces_of[g], (A,)), (g, name)) for g, A in self._sizes.items()}
            for spaces_of, name in ((seen, "observation"), (acts, "action"))
        )
        about_all = {"shared": seen.get("shared"), "state": envs.state_space}
        self._about_all = {name: FieldTree(one, (name,)) for name, one in about_all.items() if one is not None}
        self._masked = {group: (self._sizes[group], *shape) for group, shape in envs.mask_shapes.items()}
        self.observation_fields = [
            field for tree in (self._observation_trees | self._about_all).values() for field in tree.fields
        ]
        for group, A in self._sizes.items():
            self.observation_fields += [Field((group, name), (A,), _BOOL) for name in ("alive", "acting")]
            if group in self._masked:
                self.observation_fields.append(Field((group, "action_mask"), self._masked[group], _BOOL))
        self.reward_fields = [
            field
            for group, A in self._sizes.items()
            for field in (
                Field((group, "reward"), (A,), np.dtype(np.float32)),
                *(Field((group, name), (A,), _BOOL) for name in _ENDS),
            )
        ]
        if self.has_discounts:
            self.reward_fields += [
                Field((group, "discount"), (A,), np.dtype(np.float32)) for group, A in self._sizes.items()
            ]
        self.action_fields = [field for tree in self._action_trees.values() for field in tree.fields]
        self.action_spaces = [space for tree in self._action_trees.values() for space in tree.spaces]
        self._places = {field.key: i for i, field in enumerate(self.observation_fields)}
        fitting = {g: space for g, space in acts.items() if envs.mask_shapes.get(g) == (mask_length(space),)}
        self.masks = [
            (self._places[g, MASK], fitting[g]) if g in fitting else None
            for g, *_ in (f.key for f in self.action_fields)
        ]
        self._maskless = {str(one): acts[g] for g, agents in envs.groups.items() if g not in fitting for one in agents}

    def policy_input(self, rows: Sequence[Any]) -> dict[str, Any]:
        """Observations ``[N, A, ...]`` by group, ``"shared"`` and ``"state"``."""
        left = iter(rows)
        inputs: dict[str, Any] = {}
        for name, tree in (self._observation_trees | self._about_all).items():
            inputs[name] = tree.join([next(left) for _ in tree.fields])
        return inputs

    def policy_keywords(self, rows: Sequence[Tensor]) -> dict[str, Any]:
        """Bool masks ``[N, A, n]`` and ``alive`` ``[N, A]`` by group, and the envs' state, None where there is none."""
        return {
            "masks": {group: rows[self._places[group, "action_mask"]] for group in self._masked},
            "env_state": self.policy_input(rows).get("state"),
            "alive": {group: rows[self._places[group, "alive"]] for group in self._sizes},
        }

    def output_keys(self, outputs: Any) -> dict[Key, Any]:
        """The outputs by key. outputs: by group an action ``[N, A, ...]``, or a dict with ``"action"`` in it."""
        if not isinstance(outputs, dict):
            raise SpecMismatch(
                f"the policy gave a {type(outputs).__name__}, expected a dict of actions by group: {list(self._sizes)}"
            )
        return flat(
            {
                key: value if key not in self._sizes or isinstance(value, dict) else {"action": value}
                for key, value in outputs.items()
            }
        )

    def final(self, infos: dict[str, Any], row: int) -> list[Array] | None:
        if "_final_obs" not in infos or not infos["_final_obs"][row]:
            return None
        return [leaf[row] for leaf in self._observations(infos["final_obs"], infos["final_info"])]

    def mark_cut(self, before: Sequence[Array], after: Sequence[Array], rewards: Sequence[Array], ids: Array) -> None:
        for k, group in enumerate(self._sizes):
            _, _, truncated, done = rewards[k * (1 + len(_ENDS)) :][: 1 + len(_ENDS)]
            # This row is the last observation of agents that the step before has ended.
            alive = self._places[group, "alive"]
            cut = before[alive][ids] & after[alive][ids] & ~done[ids]
            truncated[ids] |= cut
            done[ids] |= cut

    def _observations(self, obs: Any, infos: dict[str, Any]) -> list[Array]:
        count = len(next(iter(infos["alive"].values())))
        leaves = [leaf for group, tree in self._observation_trees.items() for leaf in tree.split(obs[group])]
        for name, tree in self._about_all.items():
            leaves += tree.split(infos[name] if name == "state" else obs[name])
        masks = infos.get(MASK, {})
        if self._obeys and self._maskless and "agent_infos" in infos:
            for agent in self._maskless.keys() & infos["agent_infos"].keys():
                if MASK in (told := infos["agent_infos"][agent]):
                    raise unusable(told[MASK][0], self._maskless[agent], of=f"the action mask of {agent!r}")
        for group in self._sizes:
            leaves += [infos["alive"][group], infos["acting"][group]]
            if group in self._masked:
                leaves.append(masks[group] if group in masks else np.ones((count, *self._masked[group]), np.bool_))
        return leaves

    def _rewards(self, rewards: Any, terminated: Array, infos: dict[str, Any]) -> list[Array]:
        leaves = []
        for group in self._sizes:
            ended, cut = infos["agent_terminated"][group], infos["agent_truncated"][group]
            leaves += [rewards[group], ended, cut, ended | cut]
        if self.has_discounts:
            leaves += [discounts(infos["agent_terminated"][group], infos, group) for group in self._sizes]
        return leaves

    def _joined(self, actions: Sequence[Array]) -> dict[str, Any]:
        left = iter(actions)
        return {group: tree.join([next(left) for _ in tree.fields]) for group, tree in self._action_trees.items()}
