"""States of training, compared."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def alike(one: Any, other: Any) -> bool:
    """Whether two states hold the same, bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def not_finite(state: Any) -> bool:
    """Whether one of its numbers is nan or infinite."""
    numbers = [torch.as_tensor(one) for one in tree_leaves(state) if isinstance(one, (float, torch.Tensor))]
    return not all(bool(one.isfinite().all()) for one in numbers)
