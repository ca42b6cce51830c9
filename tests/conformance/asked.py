"""Questions to envs that no file of Muster knows, and the env that they are for."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from muster.hosts.questions import EnvQuestion


class Painted(gym.Env[Any, Any]):
    """Is white until it is painted, and dies or raises at an action of 1 or 2."""

    observation_space = action_space = gym.spaces.Discrete(3)

    def __init__(self) -> None:
        self.colour = "white"

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        if action == 1:
            os._exit(3)
        if action == 2:
            raise RuntimeError("as asked")
        return 0, 0.0, False, False, {}


@dataclass(eq=False)
class Colour(EnvQuestion):
    """Asks for each env's number and colour; joined to a text."""

    def on(self, host: Any, i: int) -> Any:
        return host.numbers[i], host.envs[i].unwrapped.colour

    def joined(self, answers: list[Any]) -> str:
        return " ".join(f"{env}:{colour}" for env, colour in answers)


@dataclass(eq=False)
class Paint(EnvQuestion):
    """Paints some envs, and again those that are built again."""

    colours: dict[int, str]

    @property
    def key(self) -> str:
        return "paint"

    def asks(self, env: int) -> bool:
        return env in self.colours

    def to(self, envs: Collection[int]) -> Paint:
        return Paint({env: self.colours[env] for env in envs if env in self.colours})

    def on(self, host: Any, i: int) -> None:
        if (colour := self.colours[host.numbers[i]]) == "invisible":
            raise ValueError("no such paint")
        host.envs[i].unwrapped.colour = colour
