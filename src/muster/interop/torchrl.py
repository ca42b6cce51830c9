"""Vector envs as TorchRL's batched `EnvBase`, and a `ParallelEnv` that steps several envs in each worker process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from muster.backends.share import Failure
from muster.errors import EnvError, UsageError
from muster.interop.starting import original_error, original_of, recipes_of, require_copies, with_processes
from muster.interop.torchrl_worker import ENCODING, gymnasium_env_of
from muster.vector import Batch, VectorEnv

try:
    import torch
    from tensordict import TensorDict, TensorDictBase  # type: ignore[import-untyped]  # it ships no py.typed
    from torchrl.data import Binary, Categorical, Composite, MultiOneHot, OneHot, Unbounded
    from torchrl.envs import EnvBase
    from torchrl.envs.libs.gym import _gym_to_torchrl_spec_transform
except ImportError as error:
    raise ImportError('muster.interop.torchrl needs TorchRL: pip install "muster-rl[torchrl]"') from error

__all__ = ["MusterEnv", "ParallelEnv", "as_torchrl"]

EnvFn = Callable[..., Any]


class MusterEnv(EnvBase):  # type: ignore[misc]  # TorchRL has no type information here
    """TorchRL's `EnvBase` of batch size ``[N]`` around a `muster.VectorEnv`. Made by `as_torchrl`.

    Keys: ``observation`` (or those of a Dict space), ``action``, and ``("next", "observation" | "reward" |
    "terminated" | "truncated" | "done")``; the last four ``[N, 1]``, rewards float32.
    """

    def __init__(
        self, envs: VectorEnv, *, categorical_action_encoding: bool = False, device: torch.device | str | None = None
    ) -> None:
        if not isinstance(envs, VectorEnv):
            raise TypeError(f"as_torchrl takes single-agent vector envs (muster.VectorEnv), got {type(envs).__name__}")
        mode = envs.metadata["autoreset_mode"]
        if mode is AutoresetMode.NEXT_STEP:
            raise ValueError(
                "TorchRL resets the envs that ended between two steps; make the vector env with "
                'autoreset_mode="same_step" (faster) or "disabled"'
            )
        require_copies(envs)
        super().__init__(device=device, batch_size=torch.Size([envs.num_envs]))
        self.vector_env = envs
        self._resets_itself = mode is AutoresetMode.SAME_STEP
        self._next_seed: int | None = None
        # Envs whose current observation is the first of a new episode already.
        self._fresh = np.zeros(envs.num_envs, np.bool_)
        self._make_specs(categorical_action_encoding)

    def _make_specs(self, categorical: bool) -> None:
        envs, batch = self.vector_env, self.batch_size

        def spec_of(space: gymnasium.Space[Any]) -> Any:
            if isinstance(space, (gymnasium.spaces.Tuple, gymnasium.spaces.OneOf, gymnasium.spaces.Sequence)):
                raise UsageError(f"TorchRL has no tensors for {space}; wrap the env so that it has a Dict or Box space")
            spec = _gym_to_torchrl_spec_transform(
                space, device=self.device, categorical_action_encoding=categorical, remap_state_to_observation=False
            )
            return spec.expand(*batch, *spec.shape)

        observation = spec_of(envs.single_observation_space)
        if not isinstance(observation, Composite):
            observation = Composite(observation=observation, shape=batch, device=self.device)
        flag = Categorical(2, shape=(*batch, 1), dtype=torch.bool, device=self.device)
        self.observation_spec = observation
        self.action_spec = self._encoded_action = spec_of(envs.single_action_space)
        self.reward_spec = Unbounded(shape=(*batch, 1), device=self.device)
        self.done_spec = Composite(
            done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=batch, device=self.device
        )

    # ---- what EnvBase calls

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        rows = None if mask is None else mask.reshape(self.batch_size[0], -1).any(-1).cpu().numpy()
        if rows is None or (rows.all() and self._next_seed is not None):
            obs, _ = self.vector_env.reset(seed=self._next_seed, options=kwargs or None)
            self._current = self._as_tensors(obs)
            self._next_seed = None
        elif (rows & ~self._fresh).any():
            obs, _ = self.vector_env.reset(options={**kwargs, "reset_mask": rows & ~self._fresh})
            self._current = self._as_tensors(obs)
        self._fresh = np.zeros_like(self._fresh)
        flags = {
            name: self._flag(np.zeros(self.batch_size[0], np.bool_)) for name in ("done", "terminated", "truncated")
        }
        return TensorDict({**self._current, **flags}, self.batch_size, device=self.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        actions = _decoded(tensordict.get("action"), self._encoded_action)
        obs, rewards, terminated, truncated, infos = self.vector_env.step(actions)
        self._current = arrived = self._as_tensors(obs)
        over = terminated | truncated
        if self._resets_itself:
            self._fresh = over.copy()  # the flags below share its memory
            if over.any():
                arrived = self._with_finals(arrived, infos["final_obs"], np.flatnonzero(over).tolist())
        return TensorDict(
            {
                **arrived,
                "reward": torch.from_numpy(rewards.astype(np.float32)).unsqueeze(-1).to(self.device),
                "terminated": self._flag(terminated),
                "truncated": self._flag(truncated),
                "done": self._flag(over),
            },
            self.batch_size,
            device=self.device,
        )

    def _set_seed(self, seed: int | None) -> None:
        self._next_seed = seed

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Closes envs and workers."""
        if not self.is_closed:
            self.vector_env.close()
        super().close(raise_if_closed=raise_if_closed)

    # ---- inside

    def _flag(self, values: Any) -> torch.Tensor:
        return torch.from_numpy(values).unsqueeze(-1).to(self.device)

    def _as_tensors(self, obs: Any) -> dict[str, Any]:
        tree = obs if isinstance(obs, Mapping) else {"observation": obs}
        encoded: dict[str, Any] = _encoded(tree, self.observation_spec, self.device)
        return encoded

    def _with_finals(self, current: dict[str, Any], finals: Any, rows: list[int]) -> dict[str, Any]:
        """`current`, with the final observations of the envs `rows` in their places."""
        arrived: dict[str, Any] = _map(torch.clone, current)
        for row in rows:
            final = finals[row]
            tree = final if isinstance(final, Mapping) else {"observation": final}
            _put(arrived, _encoded(tree, self.observation_spec, self.device), row)
        return arrived


class ParallelEnv(MusterEnv):
    """`num_workers` envs in worker processes, one per usable core, several envs in each where they bear that.

    create_env_fn: returns TorchRL's `GymEnv` or `GymWrapper`, or a Gymnasium env; or a list of such functions.
    create_env_kwargs: keyword arguments for it, one dict or a list of them; values may be `muster.lazy`.
    mp_start_method: None starts fresh processes.  num_processes: None for one per usable core.

    Transforms belong around the batch: ``TransformedEnv(ParallelEnv(...), ...)``. The other options of TorchRL's class
    say how it moves its data; there is nothing here for them to do, so they are not taken.
    """

    def __init__(
        self,
        num_workers: int,
        create_env_fn: EnvFn | Sequence[EnvFn],
        *,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        device: torch.device | str | None = None,
        mp_start_method: str | None = None,
        num_processes: int | None = None,
    ) -> None:
        fns = list(create_env_fn) if isinstance(create_env_fn, Sequence) else [create_env_fn] * num_workers
        kwargs = list(create_env_kwargs) if isinstance(create_env_kwargs, Sequence) else [create_env_kwargs] * len(fns)
        if len(fns) != num_workers or len(kwargs) != num_workers:
            raise ValueError(
                f"num_workers={num_workers} envs need as many create_env_fn and create_env_kwargs, got {len(fns)} and "
                f"{len(kwargs)}"
            )
        recipes = [
            replace(recipe, kwargs=dict(given or {}))
            for recipe, given in zip(recipes_of(fns, (gymnasium_env_of,)), kwargs, strict=True)
        ]
        made: list[_Envs] = []
        try:
            with_processes(
                lambda backend, **options: made.append(_Envs(backend, **options)),
                recipes,
                context=mp_start_method,
                num_workers=num_processes,
            )
        except EnvError as error:
            raise original_of(error) from None
        categorical = bool(made[0].metadata.get(ENCODING, False))
        super().__init__(made[0], categorical_action_encoding=categorical, device=device)


class _Envs(VectorEnv):
    def __init__(self, backend: Any, **options: Any) -> None:
        super().__init__(
            backend,
            autoreset_mode=AutoresetMode.SAME_STEP,
            observation_mode="same",
            copy=True,
            lenient=True,
            **options,
        )

    def _raise_failures(self, failures: Sequence[Failure], batch: Batch | None) -> None:
        if failures:
            raise original_error(failures[0])


def as_torchrl(
    envs: VectorEnv, *, categorical_action_encoding: bool = False, device: torch.device | str | None = None
) -> MusterEnv:
    """`envs` as a TorchRL env of batch size ``[N]``.

    categorical_action_encoding: True for discrete actions as integers, False for one-hot vectors, TorchRL's default.
    Raises ValueError for ``autoreset_mode="next_step"``.
    """
    return MusterEnv(envs, categorical_action_encoding=categorical_action_encoding, device=device)


def _encoded(value: Any, spec: Any, device: torch.device | None) -> Any:
    if isinstance(value, Mapping):
        return {key: _encoded(item, spec[key], device) for key, item in value.items()}
    tensor = torch.as_tensor(np.asarray(value))
    if isinstance(spec, (OneHot, MultiOneHot)):
        single = spec[(0,) * (len(spec.shape) - 1)] if tensor.ndim < len(spec.shape) - 1 else spec
        tensor = single.encode(tensor)
    elif isinstance(spec, Binary):
        tensor = tensor.to(spec.dtype)
    return tensor.to(device)


def _decoded(action: Any, spec: Any) -> Any:
    if isinstance(spec, Composite):
        return {key: _decoded(action.get(key), spec[key]) for key in spec.keys()}  # noqa: SIM118  # no dict
    return spec.to_numpy(action, safe=False)


def _map(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    return {key: _map(function, item) for key, item in tree.items()} if isinstance(tree, dict) else function(tree)


def _put(tree: Any, row_tree: Any, row: int) -> None:
    for key, item in row_tree.items():
        if isinstance(item, dict):
            _put(tree[key], item, row)
        else:
            tree[key][row] = item
