"""Vector envs of many agents: groups nest in the batch, with what is known of their agents beside observations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from muster.errors import SpecMismatch
from muster.rollout.env_side import EnvSide
from muster.rollout.fields import Array, Field, Key, Layout, flat
from muster.spaces.stacking import stacked_space
from muster.vector.multi_agent import MultiAgentVectorEnv

_BOOL = np.dtype(np.bool_)
_ENDS = ("terminated", "truncated", "done")


class MultiAgentEnvs(EnvSide):
    """Observed, for each group g of A agents: ``(g, "observation")``, ``(g, "alive")``, ``(g, "acting")`` ``[A]`` and,
    where the env may give masks, ``(g, "action_mask")`` ``[A, n]``; ``"shared"`` and ``"state"`` where it has them.

    Earned: ``(g, "reward")``, ``(g, "terminated")``, ``(g, "truncated")``, ``(g, "done")``, ``[A]``.
    """

    has_agents = True

    def __init__(self, envs: MultiAgentVectorEnv) -> None:
        super().__init__(envs)
        self._sizes = {group: len(agents) for group, agents in envs.groups.items()}
        seen, acts = envs.single_observation_space.spaces, envs.single_action_space.spaces
        self._observations = {
            group: Layout(stacked_space(seen[group], (A,)), (group, "observation")) for group, A in self._sizes.items()
        }
        self._actions = {
            group: Layout(stacked_space(acts[group], (A,)), (group, "action")) for group, A in self._sizes.items()
        }
        self._shared = Layout(seen["shared"], ("shared",)) if "shared" in seen else None
        self._state = Layout(envs.state_space, ("state",)) if envs.state_space is not None else None
        self._masked = {group: (self._sizes[group], *shape) for group, shape in envs.mask_shapes.items()}
        self.observed = self._observed_fields()
        self.earned = [
            field
            for group, A in self._sizes.items()
            for field in (
                Field((group, "reward"), (A,), np.dtype(np.float32)),
                *(Field((group, name), (A,), _BOOL) for name in _ENDS),
            )
        ]
        self.actions = [field for layout in self._actions.values() for field in layout.fields]
        self.action_spaces = [space for layout in self._actions.values() for space in layout.spaces]
        places = {field.key: i for i, field in enumerate(self.observed)}
        self.masks = [
            places.get((field.key[0], "action_mask")) if isinstance(acts[field.key[0]], spaces.Discrete) else None
            for field in self.actions
        ]

    def policy_input(self, rows: Sequence[Any]) -> dict[str, Any]:
        """Observations ``[N, A, ...]`` by group, ``"shared"`` and ``"state"``; masks and flags need TensorDict keys."""
        left = iter(rows)
        given: dict[str, Any] = {}
        for group, layout in self._observations.items():
            given[group] = layout.join([next(left) for _ in layout.fields])
        for name, part in (("shared", self._shared), ("state", self._state)):
            if part is not None:
                given[name] = part.join([next(left) for _ in part.fields])
        return given

    def output_keys(self, outputs: Any) -> dict[Key, Any]:
        """outputs: by group an action ``[N, A, ...]``, or a dict with ``"action"`` in it."""
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
        return [leaf[row] for leaf in self._observed(infos["final_obs"], infos["final_info"])]

    def mark_cut(self, observed: Sequence[Array], earned: Sequence[Array], t: int, ids: Array) -> None:
        alive = {group: i for i, (group, *name) in enumerate(field.key for field in self.observed) if name == ["alive"]}
        for k, group in enumerate(self._sizes):
            _, _, truncated, done = earned[k * (1 + len(_ENDS)) :][: 1 + len(_ENDS)]
            # Those that the step before had ended have this row for their last observation.
            cut = observed[alive[group]][t, ids] & observed[alive[group]][t + 1, ids] & ~done[t, ids]
            truncated[t, ids] |= cut
            done[t, ids] |= cut

    def _observed_fields(self) -> list[Field]:
        fields = [field for layout in self._observations.values() for field in layout.fields]
        for part in (self._shared, self._state):
            fields += part.fields if part is not None else []
        for group, A in self._sizes.items():
            fields += [Field((group, "alive"), (A,), _BOOL), Field((group, "acting"), (A,), _BOOL)]
            if group in self._masked:
                fields.append(Field((group, "action_mask"), self._masked[group], _BOOL))
        return fields

    def _observed(self, obs: Any, infos: dict[str, Any]) -> list[Array]:
        count = len(next(iter(infos["alive"].values())))
        leaves = [leaf for group, layout in self._observations.items() for leaf in layout.split(obs[group])]
        if self._shared is not None:
            leaves += self._shared.split(obs["shared"])
        if self._state is not None:
            leaves += self._state.split(infos["state"])
        masks = infos.get("action_mask", {})
        for group in self._sizes:
            leaves += [infos["alive"][group], infos["acting"][group]]
            if group in self._masked:
                leaves.append(masks[group] if group in masks else np.ones((count, *self._masked[group]), np.bool_))
        return leaves

    def _earned(self, rewards: Any, infos: dict[str, Any]) -> list[Array]:
        earned = []
        for group in self._sizes:
            terminated, truncated = infos["agent_terminated"][group], infos["agent_truncated"][group]
            earned += [rewards[group], terminated, truncated, terminated | truncated]
        return earned

    def _joined(self, actions: Sequence[Array]) -> dict[str, Any]:
        left = iter(actions)
        return {group: layout.join([next(left) for _ in layout.fields]) for group, layout in self._actions.items()}
