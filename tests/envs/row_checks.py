"""Comparisons of a vector env's rows, infos and spaces with those of one env, and actions that its masks allow."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces


def sample(envs: Any, masks: Any, rng: np.random.Generator) -> Any:
    """Random actions, by group for agents, allowed by the masks where there are any."""
    actions = envs.action_space.sample()
    envs.action_space.seed(int(rng.integers(1 << 30)))
    for group, mask in (masks or {}).items():
        chances = rng.random(mask.shape) * mask
        actions[group] = chances.argmax(-1) + envs.single_action_space[group].start
    return actions


def at(batch: Any, *where: int) -> Any:
    """The part of a batch, which may be a structure of arrays, at the indices `where`."""
    if isinstance(batch, dict):
        return {key: at(one, *where) for key, one in batch.items()}
    if isinstance(batch, tuple):
        return tuple(at(one, *where) for one in batch)
    return batch[where[0]] if len(where) == 1 else batch[where]


def assert_all_zero(row: Any) -> None:
    if isinstance(row, (dict, tuple)):
        for one in row.values() if isinstance(row, dict) else row:
            assert_all_zero(one)
    else:
        assert not np.any(row)


def assert_same(row: Any, value: Any) -> None:
    """Asserts that a row holds an env's `value`: dicts in any order, tuples for lists, dtypes of the space."""
    if isinstance(row, dict):
        assert set(row) == set(value)
        for key, one in row.items():
            assert_same(one, value[key])
    elif isinstance(row, tuple):
        for one, other in zip(row, value, strict=True):
            assert_same(one, other)
    else:
        if type(row) is int:  # of a Discrete space: a final row has the type that the env gave
            assert type(value) is int
            row = np.int64(row)
        assert np.shape(row) == np.shape(value)
        np.testing.assert_array_equal(row, np.asarray(value).astype(row.dtype))


def assert_info(infos: Any, i: int, info: dict[str, Any]) -> None:
    """Asserts that infos in Gymnasium's format hold the env's own `info` for env i, and nothing else."""
    for key, value in info.items():
        assert infos[f"_{key}"][i], key
        if isinstance(value, dict):
            assert_info(infos[key], i, value)
        else:
            np.testing.assert_array_equal(infos[key][i], value)
    for key in infos:
        if f"_{key}" in infos and key not in (*info, "final_obs", "final_info"):
            assert not infos[f"_{key}"][i], key


def assert_obs_equal(row: Any, obs: Any, infos: Any, group: str, i: int, a: int) -> None:
    if isinstance(obs, dict) and "action_mask" in obs:
        mask = np.asarray(obs["action_mask"]).astype(bool)
        np.testing.assert_array_equal(infos["action_mask"][group][i, a], mask if mask.any() else ~mask)
        rest = {key: one for key, one in obs.items() if key != "action_mask"}
        obs = rest["observation"] if list(rest) == ["observation"] else rest
    assert_same(row, obs)


def without_mask(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """The rest of an agent's observation space once its action mask is among the infos."""
    if not isinstance(space, spaces.Dict) or "action_mask" not in space.spaces:
        return space
    rest = {key: one for key, one in space.spaces.items() if key != "action_mask"}
    return rest["observation"] if list(rest) == ["observation"] else spaces.Dict(rest)


def assert_spec(space: Any, spec: Any) -> None:
    """Asserts that a space has a dm_env spec's structure, shape, dtype and bounds."""
    if isinstance(spec, dict):
        assert set(space.spaces) == set(spec)
        for key, one in spec.items():
            assert_spec(space[key], one)
    elif isinstance(spec, (list, tuple)):
        for one, other in zip(space.spaces, spec, strict=True):
            assert_spec(one, other)
    else:
        assert (space.shape, space.dtype) == (spec.shape, spec.dtype)
        if isinstance(space, spaces.Discrete):
            assert (space.start, space.n) == (0, spec.num_values)
        elif hasattr(spec, "minimum"):
            assert np.array_equal(space.low, np.broadcast_to(spec.minimum, spec.shape))
            assert np.array_equal(space.high, np.broadcast_to(spec.maximum, spec.shape))
