"""The vector env as a collector sees it: fields, and the results of each step as plain lists of arrays."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch import Tensor

from muster.envs.dm_env import DISCOUNTS
from muster.errors import ConfigError, ReplayDiffers, UsageError
from muster.hosts.env_states import EnvState
from muster.rollout.fields import Array, Field, Key
from muster.spaces.masks import require_obeyable
from muster.vector.checks import is_replaced
from muster.vector.multi_agent import MultiAgentVectorEnv
from muster.vector.vector_env import VectorEnv


class StepRows(NamedTuple):
    """The results of one step of n envs.

    observations, rewards: an array ``[n, ...]`` for each field.  terminated, truncated: bool ``[n]``.
    """

    observations: list[Array]
    rewards: list[Array]
    terminated: Array
    truncated: Array
    infos: dict[str, Any]

    def select(self, keep: Array) -> StepRows:
        """The rows where `keep`, bool ``[n]``, is True. infos, a dict of columns, are cut to them, too."""
        return StepRows(
            [array[keep] for array in self.observations],
            [array[keep] for array in self.rewards],
            self.terminated[keep],
            self.truncated[keep],
            _select(self.infos, keep),
        )


class EnvSide(ABC):
    """A vector env as collectors use it.

    observation_fields, reward_fields, action_fields: the arrays of observations, rewards and actions.
    action_spaces: one env's, by action field.
    has_discounts: whether rewards come with a field of discounts: those of dm_env's envs do.
    fields_known: False until the first reset: its infos may bring a field.
    masks: for each action field the index of the observation field ``[n]``, of agents ``[A, n]``, that says which of n
        choices are allowed, and the action space of one agent; None where there is none.
    """

    observation_fields: list[Field]
    reward_fields: list[Field]
    action_fields: list[Field]
    action_spaces: list[spaces.Space[Any]]
    masks: list[tuple[int, spaces.Space[Any]] | None]
    fields_known = True
    has_agents = False  # whether these are multi-agent envs
    _obeys = False  # whether somebody acts by the masks

    def __init__(self, envs: Any) -> None:
        self.envs = envs
        self.num_envs: int = envs.num_envs
        mode = envs.metadata.get("autoreset_mode")
        if mode == AutoresetMode.DISABLED:
            raise ConfigError(
                'a collector needs envs that reset themselves, got autoreset_mode="disabled"; use "same_step", or hand '
                "the recipe over instead of the vector env"
            )
        if mode is None:
            raise UsageError(
                f'{type(envs).__name__} does not say in metadata["autoreset_mode"] how its envs are reset; set it to a '
                "gymnasium.vector.AutoresetMode"
            )
        self.autoreset_mode = AutoresetMode(mode)
        self.has_discounts = bool(envs.metadata.get(DISCOUNTS))
        # It has send and recv, and no subclass expects to see the steps.
        self.takes_turns = isinstance(envs, (VectorEnv, MultiAgentVectorEnv)) and not is_replaced(
            envs, "step", "step_async", "step_wait", "send", "recv"
        )

    @abstractmethod
    def policy_input(self, rows: Sequence[Any]) -> Any:
        """The argument that a plain policy is called with. rows: one entry for each observation field."""

    @abstractmethod
    def policy_keywords(self, rows: Sequence[Tensor]) -> dict[str, Any]:
        """The arguments that a plain policy may ask for by name: ``masks``, ``env_state`` and ``alive``.

        rows: as for `policy_input`.
        """

    @abstractmethod
    def output_keys(self, outputs: Any) -> dict[Key, Any]:
        """The outputs of a plain policy by key. outputs: what the policy returned."""

    @abstractmethod
    def final(self, infos: dict[str, Any], row: int) -> list[Array] | None:
        """The final observation of the episode that this row ended, None if the row itself holds it."""

    @abstractmethod
    def mark_cut(self, before: Sequence[Array], after: Sequence[Array], rewards: Sequence[Array], ids: Array) -> None:
        """Ends the episodes of the agents in the envs `ids`: the collector has cut their episodes after a step.

        before, after, rewards: that step's rows ``[N, ...]`` for each observation and reward field; ends are written
        into `rewards`.
        """

    @abstractmethod
    def _observations(self, obs: Any, infos: dict[str, Any]) -> list[Array]: ...

    @abstractmethod
    def _rewards(self, rewards: Any, terminated: Array, infos: dict[str, Any]) -> list[Array]: ...

    @abstractmethod
    def _joined(self, actions: Sequence[Array]) -> Any: ...

    def obey_masks(self) -> None:
        """Refuses masks that fit no action from now on, by a SpecMismatch: somebody asks for masks, to act by them."""
        self._obeys = True
        if self.has_agents:
            self.envs.require_obeyable_masks()
        else:
            require_obeyable(self.envs.single_observation_space, self.envs.single_action_space)

    def cast_observations(self, dtype: np.dtype[Any]) -> None:
        """Gives observations of floating-point numbers this dtype, in which they are written into a batch."""
        self.observation_fields = [
            field._replace(dtype=dtype) if field.dtype.kind == "f" else field for field in self.observation_fields
        ]

    def reset(self, seeds: Sequence[int] | None, mask: Array | None = None) -> list[Array]:
        """Resets all envs, or those in `mask`; returns the observations of every env."""
        options = None if mask is None else {"reset_mask": mask}
        obs, infos = self.envs.reset(seed=None if seeds is None else list(seeds), options=options)
        return self._observations(obs, infos)

    def set_states(self, states: Sequence[EnvState]) -> tuple[list[Array], ReplayDiffers | None]:
        """Sets all envs to `states`; returns the observations, and the error where some have begun new episodes."""
        differs = None
        try:
            obs, infos = self.envs.set_states(states)
        except ReplayDiffers as error:
            (obs, infos), differs = error.result, error
        return self._observations(obs, infos), differs

    def step(self, actions: Sequence[Array]) -> StepRows:
        """Steps all envs; actions: an array ``[N, ...]`` for each action field.

        Observations are views, valid until the next step: they are copied into the batch at once.
        """
        if not self.takes_turns:
            return self._rows(*self.envs.step(self._joined(actions)))
        return self._rows(*self.envs.step(self._joined(actions), _copies=False))

    def send(self, actions: Sequence[Array], ids: Array) -> None:
        """Starts a step of the envs `ids`; `recv` returns its results."""
        self.envs.send(self._joined(actions), ids)

    def recv(self, min_envs: int) -> tuple[Array, StepRows]:
        """Waits for at least `min_envs` envs; returns the ids of all that are ready, int64 ``[n]``, and their steps."""
        ids, *result = self.envs.recv(min_envs, _copies=False)
        return ids, self._rows(*result)

    def are_stepped_here(self) -> bool:
        """True if this process steps some of them, or may."""
        return not self.takes_turns or os.getpid() in [one["pid"] for one in self.envs.stats()["workers"]]

    def drop_pending(self) -> None:
        """Drops the results that an error has left behind: nothing may be pending when envs are reset."""
        if self.takes_turns:
            self.envs.drop_pending()

    def _rows(self, obs: Any, rewards: Any, terminated: Array, truncated: Array, infos: dict[str, Any]) -> StepRows:
        leaves = self._rewards(rewards, terminated, infos)
        return StepRows(self._observations(obs, infos), leaves, terminated, truncated, infos)


def discounts(terminated: Array, infos: dict[str, Any], group: str | None = None) -> Array:
    """The discounts of a step, float32 of the shape of `terminated`.

    Where infos report none, it is 0 for those that are terminated, and 1 for all others.
    terminated: of envs, ``[n]``, or of the agents of `group`, ``[n, A]``.
    """
    values = np.where(terminated, np.float32(0), np.float32(1))
    for reports in (infos, infos.get("final_info", {})):  # same_step: the last step's are with its final info
        if "discount" in reports:
            column, provided = reports["discount"], reports["_discount"]
            values[provided] = (column if group is None else column[group])[provided]
    return values


def _select(infos: dict[str, Any], keep: Array) -> dict[str, Any]:
    return {key: _select(value, keep) if isinstance(value, dict) else value[keep] for key, value in infos.items()}
