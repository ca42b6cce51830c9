"""Layouts of infos reach the caller whole, while workers go on to find new ones."""

from __future__ import annotations

import functools
import os
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import muster
from muster.transport.mail import LocalMail, Mail, SharedMail
from slow import slow

ROWS = 4000


class Changing(gym.Env[Any, Any]):
    """An env whose info has another key in every episode of two steps; its value tells the key."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, first: int = 0) -> None:
        self.episode, self.steps = first, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.episode, self.steps = self.episode + 1, 0
        return np.zeros(2, np.float32), self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return np.zeros(2, np.float32), 0.0, self.steps == 2, False, self._info()

    def _info(self) -> dict[str, Any]:
        return {f"key{self.episode % 50}": self.episode % 50}


@pytest.mark.parametrize("options", [{"num_workers": 2}, *slow({"backend": "thread", "num_workers": 2})], ids=str)
def test_every_info_is_right_while_new_layouts_come_up(options: dict[str, Any]) -> None:
    recipes = [functools.partial(Changing, 6 * i) for i in range(8)]
    with muster.make_vec(recipes, **options) as envs:
        envs.reset(seed=0)
        envs.send(np.zeros(8, int))
        rows = 0
        while rows < ROWS:
            batch = envs.recv(min_envs=1)
            for row in range(len(batch.env_ids)):
                told = {
                    key: batch.infos[key][row] for key in batch.infos if key[0] != "_" and batch.infos[f"_{key}"][row]
                }
                ((key, value),) = told.items()
                assert key == f"key{value}"
            rows += len(batch.env_ids)
            envs.send(np.zeros(len(batch.env_ids), int), batch.env_ids)


@pytest.mark.parametrize("kind", ["between processes", "within one"])
def test_what_was_appended_stays_while_more_is(kind: str) -> None:
    fd = os.memfd_create("mail")
    mail: Mail = SharedMail(fd, 4) if kind == "between processes" else LocalMail()
    first = mail.append(3, ("a", 1), 0)
    second = mail.append(3, ("b", 2), first)
    assert mail.appended(3, 0, first) == [("a", 1)]
    assert mail.appended(3, first, second) == [("b", 2)]
    assert mail.appended(3, 0, second) == [("a", 1), ("b", 2)]
    os.close(fd)
