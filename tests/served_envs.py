"""Envs with a port of their own, by ``unique_index``."""

from __future__ import annotations

import socket
from typing import Any

import muster
from muster.worker_info import WorkerInfo
from sample_envs import Counter

BASE = 21_000


def here() -> WorkerInfo:
    info = muster.get_worker_info()
    assert info is not None
    return info


def indices(env: Any, i: int) -> tuple[int | None, int]:
    return here().env_index, here().unique_index


def unique_indices(envs: Any) -> list[int]:
    return [unique for _, unique in envs.call(indices)]


class Served(Counter):
    """Listens on a port, from its first reset on."""

    def __init__(self, length: int = 4) -> None:
        super().__init__(length=length)
        self.built_with, self.server = here().unique_index, None

    def reset(self, **arguments: Any) -> Any:
        assert here().unique_index == self.built_with
        if self.server is None:
            self.server = socket.create_server(("127.0.0.1", BASE + here().unique_index))
        return super().reset(**arguments)

    def port(self) -> int:
        assert self.server is not None
        return int(self.server.getsockname()[1])

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
