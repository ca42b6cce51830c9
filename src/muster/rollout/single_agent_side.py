"""Vector envs of single agents, and the opening of a collector's `envs` argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv as GymnasiumVectorEnv
from torch import Tensor

from muster.envs.adapt import with_torchrl
from muster.errors import ConfigError, SpecMismatch
from muster.pickling import MAKE_VEC, called_as
from muster.rollout.env_side import EnvSide, discounts
from muster.rollout.fields import Array, Field, FieldTree, Key, flat
from muster.rollout.multi_agent_side import MultiAgentEnvs
from muster.spaces.masks import MASK, mask_length, unusable, usable
from muster.vector.make import make_vec
from muster.vector.multi_agent import MultiAgentVectorEnv

COLLECTOR = replace(
    MAKE_VEC,
    name="muster.Collector",
    factory="envs",
    kwargs='make_vec_options["env_kwargs"]',
    context='make_vec_options={{"context": "{method}"}}',
    in_process='make_vec_options={"backend": "serial"}',
    one_each='make_vec_options={"one_env_per_process": True}',
)


class SingleAgentEnvs(EnvSide):
    """A vector env with Gymnasium's API, Muster's or any other.

    Where an observation of a Dict space, or the infos of the first reset, hold an ``"action_mask"`` ``[n]`` of a
    discrete action space, the field ``("action_mask",)`` has it as bool: all True where the env gives none, and in a
    part of it that allows nothing.
    """

    _mask_at: int | None = None  # the number of the observation field with the masks

    def __init__(self, envs: GymnasiumVectorEnv[Any, Any, Any]) -> None:
        super().__init__(envs)
        self._observation = FieldTree(envs.single_observation_space, ("observation",), at_root=True)
        self._action = FieldTree(envs.single_action_space, ("action",))
        self.observation_fields = [*self._observation.fields]
        names = ("reward", "discount") if self.has_discounts else ("reward",)
        self.reward_fields = [Field((name,), (), np.dtype(np.float32)) for name in names]
        self.action_fields = self._action.fields
        self.action_spaces = self._action.spaces
        self.masks = [None] * len(self.action_fields)
        self._choices = mask_length(envs.single_action_space)
        named = [i for i, field in enumerate(self.observation_fields) if field.key[0] == MASK]
        self.fields_known = bool(named) or not self._choices
        if self._choices and [self.observation_fields[i][:2] for i in named] == [((MASK,), (self._choices,))]:
            self.have_masks(named[0])

    def have_masks(self, at: int) -> None:
        """Makes the observation field of this number that of masks, or adds it."""
        self.observation_fields[at : at + 1] = [Field((MASK,), (self._choices,), np.dtype(np.bool_))]
        self.masks, self._mask_at = [(at, self.envs.single_action_space)], at

    def policy_input(self, rows: Sequence[Any]) -> Any:
        """The tensor of the observation, or a dict or tuple of tensors."""
        at, own = self._mask_at, self._observation.fields
        if at is not None and at < len(own):  # as the env gives it
            rows = [*rows[:at], rows[at].to(torch.from_numpy(np.empty(0, own[at].dtype)).dtype), *rows[at + 1 :]]
        return self._observation.join(rows)

    def policy_keywords(self, rows: Sequence[Tensor]) -> dict[str, Any]:
        """Bool masks ``[N, n]``, None where the env has none; no state; and ``alive`` ``[N]``, all True."""
        masks = None if self._mask_at is None else rows[self._mask_at]
        alive = torch.ones(len(rows[0]), dtype=torch.bool, device=rows[0].device)
        return {"masks": masks, "env_state": None, "alive": alive}

    def output_keys(self, outputs: Any) -> dict[Key, Any]:
        """The outputs by key. outputs: an action, or a dict with ``"action"`` in it."""
        return flat(outputs) if isinstance(outputs, dict) else {("action",): outputs}

    def final(self, infos: dict[str, Any], row: int) -> list[Array] | None:
        if "final_obs" not in infos or infos["final_obs"][row] is None:
            return None
        leaves = self._observation.split(infos["final_obs"][row])
        return self._with_masks(leaves, infos.get("final_info", {}), len(infos["final_obs"]), row)

    def mark_cut(self, before: Sequence[Array], after: Sequence[Array], rewards: Sequence[Array], ids: Array) -> None:
        """Does nothing: the flags of the env are enough."""

    def _observations(self, obs: Any, infos: dict[str, Any]) -> list[Array]:
        if MASK in infos and self._mask_at is None:
            self._find_masks(infos)
        self.fields_known = True
        leaves = self._observation.split(obs)
        return leaves if self._mask_at is None else self._with_masks(leaves, infos, len(leaves[0]))

    def _find_masks(self, infos: dict[str, Any]) -> None:
        """Adds the field of masks, where the first reset brings such. Others are refused where somebody obeys masks."""
        column, space = infos[MASK], self.envs.single_action_space
        first = column[np.argmax(infos.get(f"_{MASK}", 1))] if isinstance(column, np.ndarray) else column
        with nullcontext() if self._obeys else suppress(SpecMismatch):
            usable(first, space)
            if self.fields_known:
                raise unusable(first, space, expected="one from the first reset on, be it of ones alone")
            self.have_masks(len(self.observation_fields))

    def _with_masks(self, leaves: list[Array], infos: dict[str, Any], count: int, row: Any = ...) -> list[Array]:
        """The leaves of observations, with masks as bool, those of `row` among the `count` that `infos` are of."""
        if (at := self._mask_at) is None:
            return leaves
        space = self.envs.single_action_space
        if at == len(leaves):
            masks, column = np.ones((count, self._choices), np.bool_), infos.get(MASK, np.ones((count, 0)))
            if np.shape(column)[:1] != (count,):  # of a vector env that makes its infos itself
                raise unusable(column, space, count)
            there = np.flatnonzero(infos.get(f"_{MASK}", np.full(count, MASK in infos)))
            masks[there] = usable(column[there], space, len(there)) if len(there) else True
            leaves.append(masks[row])
        else:
            leaves[at] = usable(leaves[at], space, *np.shape(leaves[at])[:-1])
        return leaves

    def _rewards(self, rewards: Any, terminated: Array, infos: dict[str, Any]) -> list[Array]:
        return [rewards, discounts(terminated, infos)] if self.has_discounts else [rewards]

    def _joined(self, actions: Sequence[Array]) -> Any:
        return self._action.join(actions)


def open_envs(envs: Any, num_envs: int | None, make_vec_options: Mapping[str, Any] | None) -> tuple[EnvSide, bool]:
    """The envs of a vector env or of a recipe, and whether they were made here.

    Recipes get ``same_step`` autoreset and no copies of observations other than the collector's own.
    """
    if isinstance(envs, (GymnasiumVectorEnv, MultiAgentVectorEnv)):
        if num_envs is not None or make_vec_options:
            raise ConfigError(
                "num_envs and make_vec_options are for recipes; this is a vector env, made already: "
                f"{type(envs).__name__} of {envs.num_envs} envs"
            )
        return _side_of(envs), False
    options = {"autoreset_mode": "same_step", "copy": False, "state": True, **(make_vec_options or {})}
    options["wrappers"] = with_torchrl(options.get("wrappers"))
    with called_as(COLLECTOR):
        made = make_vec(envs, num_envs, **options)
    try:
        return _side_of(made), True
    except BaseException:
        made.close()
        raise


def _side_of(envs: Any) -> EnvSide:
    return MultiAgentEnvs(envs) if isinstance(envs, MultiAgentVectorEnv) else SingleAgentEnvs(envs)
