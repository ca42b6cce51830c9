"""Vector envs as TorchRL's batched `EnvBase`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDictBase  # type: ignore[import-untyped]  # it ships no py.typed
from torchrl._utils import seed_generator
from torchrl.data import Binary
from torchrl.envs import EnvBase

from muster.errors import ConfigError, WrongType
from muster.interop.starting import require_copies
from muster.interop.torchrl.layouts import AgentGroups, SingleAgent, chosen, ends
from muster.transport.infos import spread
from muster.vector.multi_agent import MultiAgentVectorEnv
from muster.vector.vector_env import VectorEnv

__all__ = ["MusterEnv", "as_torchrl"]

AnyVectorEnv = VectorEnv | MultiAgentVectorEnv


class MusterEnv(EnvBase):  # type: ignore[misc]  # TorchRL has no type information here
    """TorchRL's `EnvBase` of batch size ``[N]`` around a vector env of Muster's. Made by `as_torchrl`.

    Keys of one agent: ``observation`` (or those of a Dict space), ``action``, and ``("next", "observation" | "reward" |
    "terminated" | "truncated" | "done")``; the last four ``[N, 1]``, rewards float32.

    Keys of several agents, for each group of `group_map`: ``(group, "observation" | "action" | "alive" | "acting" |
    "action_mask")`` ``[N, A, ...]`` and ``("next", group, "reward" | "terminated" | "truncated" | "done")``
    ``[N, A, 1]``; an agent's three flags are set in the step in which the agent ends, and in no later one. At the root
    are the env's own ``done``, ``terminated`` and ``truncated``, ``[N, 1]``, which decide about resets, and ``state``
    and ``shared`` where the env has them. Random actions keep to the masks.

    ``reset(seed=, options=)`` takes Gymnasium's arguments: env i receives ``seed + i``, or the i-th seed of a list;
    every env receives the options.

    >>> import muster
    >>> from muster.interop.torchrl import as_torchrl
    >>> name = "pettingzoo/mpe/simple_spread_v3"
    >>> env = as_torchrl(muster.make_vec(name, num_envs=2, autoreset_mode="same_step"))
    >>> env.rollout(5)["next", "agent", "reward"].shape
    torch.Size([2, 5, 3, 1])
    >>> env.close()
    """

    def __init__(
        self,
        envs: AnyVectorEnv,
        *,
        categorical_action_encoding: bool | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if not isinstance(envs, AnyVectorEnv):
            raise WrongType(f"as_torchrl takes what muster.make_vec returns, got {type(envs).__name__}")
        mode = envs.metadata["autoreset_mode"]
        if mode is AutoresetMode.NEXT_STEP:
            raise ConfigError(
                "TorchRL resets the envs that ended between two steps; make the vector env with "
                'autoreset_mode="same_step" (faster) or "disabled"'
            )
        require_copies(envs)
        super().__init__(device=device, batch_size=torch.Size([envs.num_envs]))
        self.is_closed = False  # EnvBase takes every env for closed until this is set
        self.vector_env = envs
        self.group_map: dict[str, list[Any]] = {}
        self._resets_itself = mode is AutoresetMode.SAME_STEP
        # Envs with a new episode already begun in their current observation: the last step returned the final one.
        self._fresh = np.zeros(envs.num_envs, np.bool_)
        self._masked_groups: set[str] = set()
        self._td_shape: SingleAgent | AgentGroups
        if isinstance(envs, VectorEnv):
            self._td_shape = SingleAgent(envs, categorical=bool(categorical_action_encoding), device=self.device)
        else:
            self.group_map = {group: list(agents) for group, agents in envs.groups.items()}
            categorical = categorical_action_encoding is not False
            self._td_shape = AgentGroups(envs, categorical=categorical, device=self.device)
        self.observation_spec, self.action_spec = self._td_shape.observation, self._td_shape.action
        self.reward_spec, self.done_spec = self._td_shape.reward, self._td_shape.done
        self._no_ends = self._td_shape.done.zero()  # made once: a spec takes 0.12 ms for it
        # `_current` holds the observations that the next actions are for, `_arrived` those that the last step returned.
        # They differ for fresh envs: the last step returned the final observation of the episode that ended.
        self._current: Any = self.observation_spec.zero()
        self._arrived = self._current

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Resets env 0 with `seed`, each further env with TorchRL's next seed (`static_seed`: with the same one).

        Returns the seed that comes after the last env's.
        """
        seeds = []
        for _ in range(self.vector_env.num_envs):
            seeds.append(seed)
            if seed is not None and not static_seed:
                seed = seed_generator(seed)
        # The seeds take effect at once, as in TorchRL's envs: the reset that follows continues from this one.
        self._reset(seed=seeds)
        return seed

    # ---- what EnvBase calls

    def _reset(
        self,
        tensordict: TensorDictBase | None = None,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        asked = np.True_ if mask is None else mask.reshape(self.batch_size[0], -1).any(-1).cpu().numpy()
        rows = asked
        if mask is not None and seed is None and options is None:
            rows = rows & ~self._fresh
        if rows.any():
            self.vector_env.drop_pending()  # results of a step that Ctrl-C has ended
            provided = dict(options or {}) if mask is None else {**(options or {}), "reset_mask": rows}
            obs, infos = self.vector_env.reset(seed=seed, options=provided or None)
            self._keep_observation(self._td_shape.observation_fields(obs, infos), infos)
        self._fresh = self._fresh & ~asked
        return self._td_shape.joined(self._current).update(self._no_ends, clone=True)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        mask = tensordict.get("_step", None)
        if mask is None or mask.all():
            return self._stepped(self.vector_env.step(self._td_shape.actions(tensordict)))
        return self._step_some(tensordict, mask.reshape(self.batch_size).to(self.device))

    def _step_some(self, tensordict: TensorDictBase, mask: torch.Tensor) -> TensorDictBase:
        """Steps the envs in `mask`, bool ``[N]``. The others repeat their last observation, and have no new reward."""
        shown = chosen(torch.from_numpy(~self._fresh).to(self.device), self._current, self._arrived)
        skipped = self._td_shape.joined(shown).update(self.full_reward_spec.zero()).update(self._no_ends, clone=True)
        # An env that is done stays done. Observations are not taken from `tensordict`: transforms may have changed them
        # there already, and the result goes through the transforms again.
        skipped.update(tensordict.select(*self.reward_keys, *self.done_keys, strict=False).clone())
        if not mask.any():
            return skipped
        actions = self._td_shape.actions(tensordict.select(*self.action_keys)[mask])
        self.vector_env.send(actions, np.flatnonzero(mask.cpu().numpy()))
        batch = self.vector_env.recv()
        rows = tuple(spread(column, batch.env_ids, self.vector_env.num_envs) for column in batch[1:])
        stepped = self._stepped(rows, mask)
        self._arrived = chosen(mask, self._arrived, shown)
        return torch.where(mask, stepped, skipped)

    def _stepped(self, result: tuple[Any, ...], mask: torch.Tensor | None = None) -> TensorDictBase:
        """Turns a step's `result` into a tensordict. mask: bool ``[N]``, the envs that stepped; None for all."""
        obs, rewards, terminated, truncated, infos = result
        observations = self._td_shape.observation_fields(obs, infos)
        self._keep_observation(observations if mask is None else chosen(mask, observations, self._current), infos)
        self._arrived = self._current
        over = terminated | truncated
        if self._resets_itself:
            self._fresh = over if mask is None else np.where(mask.cpu().numpy(), over, self._fresh)
            if over.any():
                self._arrived = self._td_shape.with_finals(self._current, infos, over)
        return self._td_shape.joined(
            self._arrived, self._td_shape.reward_fields(rewards, infos), ends(terminated, truncated, self.device)
        )

    def _keep_observation(self, observations: Any, infos: Mapping[str, Any]) -> None:
        self._current = observations
        # A group that once had masks is updated even where no env provides one now: its spec would keep the last mask.
        self._masked_groups.update(infos.get("action_mask", ()))
        for group in self._masked_groups:
            spec = self.input_spec["full_action_spec", group, "action"]
            if not isinstance(spec, Binary):  # which has masks of another kind
                spec.update_mask(self._current[group]["action_mask"].clone())

    def _set_seed(self, seed: int | None) -> None:
        self.set_seed(seed)

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Closes envs and workers. `raise_if_closed`: whether a second call raises, as TorchRL's does."""
        self.vector_env.close()
        super().close(raise_if_closed=raise_if_closed)

    def __del__(self) -> None:
        """Does nothing: the vector env may have other users, and closes when it has none."""


def as_torchrl(
    envs: AnyVectorEnv, *, categorical_action_encoding: bool | None = None, device: torch.device | str | None = None
) -> MusterEnv:
    """A vector env as a TorchRL env of batch size ``[N]``, with agents nested by group where there are several.

    envs: what `muster.make_vec` returns, made with ``autoreset_mode="same_step"`` or "disabled".
    categorical_action_encoding: True for discrete actions as integers, False for one-hot vectors, None for TorchRL's
        own default: one-hot for one agent, as its GymEnv, integers for several, as its PettingZooEnv.
    device: where the tensors lie that the env returns.

    Raises ConfigError for ``autoreset_mode="next_step"``, and WrongType for what is no vector env of Muster's.

    >>> import muster
    >>> from muster.interop.torchrl import as_torchrl
    >>> env = as_torchrl(muster.make_vec("CartPole-v1", num_envs=2, autoreset_mode="same_step"))
    >>> env.rollout(5)["observation"].shape
    torch.Size([2, 5, 4])
    >>> env.close()
    """
    return MusterEnv(envs, categorical_action_encoding=categorical_action_encoding, device=device)
