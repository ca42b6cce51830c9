"""The messages between the caller and a worker."""

from __future__ import annotations

from dataclasses import dataclass

from muster.recipes.recipe import WorkerInfo
from muster.transport.big_arrays import Place

BUILD = "build"


@dataclass(frozen=True)
class StartOrder:
    """The first message to a worker."""

    recipes: bytes  # pickled; empty under fork
    info: WorkerInfo
    first_env: int
    argv: list[str]
    threads: int
    tells_building: bool  # whether it tells, before all else, of each of its first two envs
    awaits_build: bool = False  # whether it imports what its recipes need, but builds only when told BUILD
    replaces: bool = False  # it is a replacement: the facts of its envs are known
    freight: tuple[Place, ...] = ()  # where the big parts of the recipes lie
