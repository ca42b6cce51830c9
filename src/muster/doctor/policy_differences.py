"""The differences between two policies, in words: of their weights' layouts, and of their outputs. Needs PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_TOLERANCE = 1e-6
_SHOWN = 4


def layout_differences(expected: Mapping[str, list[Any]], got: Mapping[str, list[Any]]) -> list[str]:
    """The differences of ``got`` from ``expected``: shape and dtype's name by a parameter's or buffer's name."""
    found = []
    if missing := [repr(name) for name in expected if name not in got]:
        found.append(f"missing {_listed(missing)}")
    if unexpected := [repr(name) for name in got if name not in expected]:
        found.append(f"unexpected {_listed(unexpected)}")
    for name, (shape, dtype) in expected.items():
        if name in got and got[name] != [shape, dtype]:
            found.append(f"{name!r} is {got[name][0]} {got[name][1]}, expected {shape} {dtype}")
    return found


def output_differences(expected: Mapping[str, Tensor], got: Mapping[str, Tensor], *, values: bool = True) -> list[str]:
    """The differences of ``got`` from ``expected``, outputs by key. values: compares values, too, to 1e-6."""
    found = []
    if missing := [key for key in expected if key not in got]:
        found.append(f"it gives no {_listed(missing)}")
    if unexpected := [key for key in got if key not in expected]:
        found.append(f"it gives {_listed(unexpected)} besides")
    unequal: list[str] = []
    most = 0.0
    for key, its in expected.items():
        if (mine := got.get(key)) is None:
            continue
        if (mine.shape, mine.dtype) != (its.shape, its.dtype):
            found.append(f"it gives {key} as {_kind(mine)}, expected {_kind(its)}")
        elif values and (wrong := ~_close(mine, its)).any():
            most = max(most, (mine.to(torch.float64) - its.to(torch.float64)).abs()[wrong].max().item())
            unequal.append(key)
    if unequal:
        found.append(
            f"with equal weights {_listed(unequal)} differ by up to {most:.1g}: something that they are computed with "
            "is neither a parameter nor a buffer"
        )
    return found


def _close(mine: Tensor, its: Tensor) -> Tensor:
    """Where two outputs are equal, bool."""
    if not its.is_floating_point():
        return mine == its
    return torch.isclose(mine, its, _TOLERANCE, _TOLERANCE, equal_nan=True)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape[1:])}"
