"""Plays an env by seeded random actions, of any API, and sums up what came of it."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from muster.envs.agents import AgentsEnv
from muster.envs.inbound import Inbound


class Player:
    """Plays one env. After `play`: infos, reuses_buffers and changes_action tell what was seen."""

    def __init__(self, env: Any) -> None:
        self._env = Inbound()(env)
        agents = isinstance(self._env, AgentsEnv)
        # The adapter of a multi-agent env takes [A, ...] for each group; its layout knows [N, A, ...].
        self._actions = self._env.layout.action_space(1) if agents else self._env.action_space
        self._act = (lambda: _first_row(self._actions.sample())) if agents else self._actions.sample
        self._over = True
        self.infos: list[dict[str, Any]] = []
        self.reuses_buffers = False
        self.changes_action = False

    def reset(self, seed: int) -> Any:
        """Starts an episode, and seeds the actions."""
        self._actions.seed(seed)
        self._over = False
        return self._env.reset(seed=seed, options=None)[0]

    def play(self, seed: int, rows: int, meanwhile: Callable[[], None] | None = None) -> str:
        """A digest of `rows` rows from a reset by `seed`; `meanwhile` is called between them."""
        digest = hashlib.sha256()
        obs = self.reset(seed)
        _feed(digest, obs)
        last, kept = obs, _copy(obs)
        for _ in range(rows):
            if meanwhile is not None:
                meanwhile()
            if self._over:
                obs, self._over = self._env.reset()[0], False
                _feed(digest, obs)
            else:
                action = self._act()
                before = pickle.dumps(action)
                obs, reward, terminated, truncated, info = self._env.step(action)
                self.changes_action |= pickle.dumps(action) != before
                self._over = bool(terminated or truncated)
                _feed(digest, (obs, reward, bool(terminated), bool(truncated)))
                if isinstance(info, dict):
                    self.infos.append(info)
            self.reuses_buffers |= kept is not None and not np.array_equal(
                last, kept, equal_nan=kept.dtype.kind in "fc"
            )
            last, kept = obs, _copy(obs)
        return digest.hexdigest()

    def step_some(self, count: int) -> None:
        """`count` rows."""
        for _ in range(count):
            if self._over:
                self._env.reset()
                self._over = False
                continue
            _, _, terminated, truncated, _ = self._env.step(self._act())
            self._over = bool(terminated or truncated)


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            digest.update(str(key).encode())
            _feed(digest, value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            _feed(digest, item)
    elif isinstance(value, (bool, int, float, np.generic, np.ndarray)) and np.asarray(value).dtype != object:
        digest.update(np.ascontiguousarray(value).tobytes())
    else:
        digest.update(type(value).__qualname__.encode())


def _first_row(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: _first_row(value) for key, value in batch.items()}
    return tuple(_first_row(value) for value in batch) if isinstance(batch, tuple) else batch[0]


def _copy(obs: Any) -> Any:
    return obs.copy() if isinstance(obs, np.ndarray) else None
