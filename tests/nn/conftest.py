"""Policies that cannot be copied, each in its own way."""

from __future__ import annotations

import ctypes
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Holder(nn.Module):
    """A linear policy that holds an object that cannot be copied."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class RefusesCopies(Holder):
    def __deepcopy__(self, memo: dict[int, Any]) -> RefusesCopies:
        raise RuntimeError("this policy drives the arm")

    def __reduce_ex__(self, protocol: object) -> Any:
        raise RuntimeError("this policy drives the arm")


UNCOPYABLE: dict[str, Callable[[], nn.Module]] = {
    "lock": lambda: Holder(threading.Lock()),
    "socket": lambda: Holder(socket.socket()),
    "pointer": lambda: Holder(ctypes.pointer(ctypes.c_int(1))),
    "generator": lambda: Holder(i for i in range(3)),
    "non-leaf tensor": lambda: Holder(torch.ones(2, requires_grad=True) * 2),
    "deepcopy raises": lambda: RefusesCopies(None),
}


@pytest.fixture(params=UNCOPYABLE.values(), ids=UNCOPYABLE)
def uncopyable_policy(request: pytest.FixtureRequest) -> Iterator[nn.Module]:
    """A linear policy, [*B, 3] to [*B, 2], that holds an object in ``held`` that cannot be copied."""
    policy = request.param()
    yield policy
    if isinstance(policy.held, socket.socket):
        policy.held.close()
