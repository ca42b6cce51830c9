"""Plays an env of any API by seeded random actions, and sums up its trajectory."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium.vector.utils import iterate

from muster.envs.adapt import Adapter
from muster.envs.agents import AgentsEnv
from muster.envs.layout import HAS_MASKS, MASKS
from muster.spaces.masks import MASK, mask_length, obey
from muster.spaces.tree import tree

_FEWEST_ROWS = 3


class RandomPlayer:
    """Steps one env by random actions, those that its masks allow; keeps nothing of what happens.

    over: whether an episode has to be begun before the next step.
    """

    def __init__(self, env: Any) -> None:
        self._env = Adapter()(env)
        agents = isinstance(self._env, AgentsEnv)
        # The adapter of a multi-agent env takes [A, ...] for each group; its layout knows [N, A, ...].
        # A class may have one space for all its envs: actions drawn from a copy change nothing for another env.
        self._actions = self._env.layout.action_space(1) if agents else copy.deepcopy(self._env.action_space)
        self._act = self._act_of_agents if agents else self._act_of_one
        self._draw = np.random.default_rng(0)
        self._seen: tuple[Any, Any] = (None, None)  # the last observation and info
        self.over = True

    def seed(self, seed: int) -> None:
        """Seeds the actions."""
        self._actions.seed(seed)
        self._draw = np.random.default_rng(seed)

    def act(self) -> Any:
        """A random action that is allowed now."""
        return self._act()

    def begin_episode(self, **arguments: Any) -> Any:
        """Resets the env; returns the first observation. arguments: those of ``env.reset``."""
        self._seen = self._env.reset(**arguments)[:2]
        self.over = False
        return self._seen[0]

    def take_step(self, action: Any) -> Any:
        """The five values of ``env.step(action)``."""
        stepped = self._env.step(action)
        self._seen = stepped[0], stepped[4]
        self.over = bool(stepped[2] or stepped[3])
        return stepped

    def _act_of_one(self) -> Any:
        drawn = self._actions.sample()
        for seen in self._seen if mask_length(self._actions) else ():
            if isinstance(seen, dict) and MASK in seen:
                return obey(np.array(drawn), self._actions, seen[MASK], self._draw)[()]
        return drawn

    def _act_of_agents(self) -> Any:
        (actions,) = iterate(self._actions, self._actions.sample())  # of a batch of one env
        layout, row = self._env.layout, self._seen[0]
        for group, mask in zip(layout.mask_shapes, row[MASKS], strict=True) if row[HAS_MASKS][0] else ():
            if mask_length(layout.action_spaces[group]):
                obey(actions[group], layout.action_spaces[group], mask, self._draw)
        return actions


class Player(RandomPlayer):
    """Plays one env. rows and changes_action describe what `play` has seen.

    Digests sum up all that the env has returned since the last reset by a seed.

    steps_s, resets_s: seconds of each step and reset.  on_row: called before every row: is the env reset there?
    """

    def __init__(self, env: Any, on_row: Callable[[bool], None] = lambda resets: None) -> None:
        super().__init__(env)
        self._on_row = on_row
        self._digest = hashlib.sha256()
        self._info_digests: dict[str, Any] = {}
        self.rows = self._seen_rows = 0
        self.steps_s: list[float] = []
        self.resets_s: list[float] = []
        self.changes_action = False

    @property
    def digest(self) -> str:
        """The digest of observations, rewards and flags."""
        return self._digest.hexdigest()

    @property
    def info_digests(self) -> dict[str, str]:
        """The digest of each value in the infos, of reset and step, by its place: ``infos['episode']['r']``."""
        return {place: digest.hexdigest() for place, digest in self._info_digests.items()}

    def reset(self, seed: int) -> None:
        """Starts an episode, and seeds the actions."""
        self.seed(seed)
        self._digest, self._info_digests = hashlib.sha256(), {}
        self._seen_rows = 0
        self._start_episode(seed=seed, options=None)

    def obs_bytes(self) -> int:
        """Bytes of one observation, counted by its space: leaves of fixed layout alone."""
        agents = isinstance(self._env, AgentsEnv)
        space = self._env.layout.observation_space(1) if agents else self._env.observation_space
        return sum(leaf.row_bytes for leaf in tree(space, "observation").leaves)

    def play(self, seed: int, rows: int, enough_s: float = math.inf) -> str:
        """The digest of `rows` rows after a reset by `seed`, or of fewer rows once `enough_s` seconds have passed."""
        start = time.monotonic()
        self.reset(seed)
        for self.rows in range(rows):
            if self.rows >= _FEWEST_ROWS and time.monotonic() - start > enough_s:
                return self.digest
            self.play_row()
        self.rows = rows
        return self.digest

    def play_row(self, resets: bool = False) -> None:
        """Takes one step, or resets the env: where its episode is over, and by `resets`."""
        if self.over or resets:
            self._start_episode()
        else:
            self._on_row(False)
            action = self.act()
            before = pickle.dumps(action)
            obs, reward, terminated, truncated, _ = self.take_step(action)
            self.changes_action |= pickle.dumps(action) != before
            self._see(obs, reward, bool(terminated), bool(truncated))

    def _start_episode(self, **arguments: Any) -> None:
        self._on_row(True)
        start = time.perf_counter()
        obs = self.begin_episode(**arguments)
        self.resets_s.append(time.perf_counter() - start)
        self._see(obs)

    def _see(self, obs: Any, *flags: Any) -> None:
        _feed(self._digest, (obs, *flags))
        self._seen_rows += 1
        with contextlib.suppress(Exception):  # of a key's repr, or a dict that holds itself: no failure of the env
            self._see_info(self._seen[1])

    def _see_info(self, info: Any) -> None:
        for place, value in _values_in(info, "infos"):
            digest = self._info_digests.setdefault(place, hashlib.sha256())
            digest.update(b"%d:" % self._seen_rows)
            _feed(digest, value, pickles=True)

    def take_step(self, action: Any) -> Any:
        start = time.perf_counter()
        stepped = super().take_step(action)
        self.steps_s.append(time.perf_counter() - start)
        return stepped


def _values_in(info: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(info, Mapping):
        for key, value in info.items():
            yield from _values_in(value, f"{place}[{key!r}]")
    else:
        yield place, info


def _feed(digest: Any, value: Any, *, pickles: bool = False) -> None:
    """Adds a value to a digest. pickles: adds pickles of objects of unknown types too, not just the types' names."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            digest.update(str(key).encode())
            _feed(digest, value[key], pickles=pickles)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _feed(digest, item, pickles=pickles)
    elif isinstance(value, (bool, int, float, np.generic, np.ndarray)) and np.asarray(value).dtype != object:
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, (str, bytes)):
        digest.update(value if isinstance(value, bytes) else value.encode(errors="surrogatepass"))
    else:
        digest.update(type(value).__qualname__.encode())
        if pickles:
            with contextlib.suppress(Exception):
                digest.update(pickle.dumps(value))
