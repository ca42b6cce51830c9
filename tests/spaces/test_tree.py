"""Spaces as trees: casts, agreement, and the layout of the slab."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from muster.spaces.compare import first_difference
from muster.spaces.tree import keeps_kind, tree
from muster.transport.big_arrays import memfd
from muster.transport.mail import SharedMail
from muster.transport.slab import Slab, SlabPlan, contiguous, split_evenly


@pytest.mark.parametrize(
    ("value", "dtype", "fits"),
    [
        (np.float64(1.5), "f4", True),
        (np.int64(3), "f4", True),
        (np.bool_(True), "i8", True),
        (np.float32(3), "i8", False),
        (np.int64(3), "?", False),
        (np.complex64(3), "f8", False),
        (np.int64(300), "u1", False),
        (np.int64(-1), "u8", False),
        (np.uint64(2**63), "i8", False),
        (np.int64(255), "u1", True),
        (np.array([], np.int64), "u1", True),
        (np.array("text"), "f4", False),
    ],
)
def test_casts_lose_nothing_in_kind(value: Any, dtype: str, fits: bool) -> None:
    assert keeps_kind(np.asarray(value), np.dtype(dtype)) is fits


@pytest.mark.parametrize(
    ("got", "path", "field"),
    [
        (spaces.Dict({"b": spaces.Discrete(2), "a": spaces.Box(0, 1, (2,))}), None, None),
        (spaces.Dict({"a": spaces.Box(0, 1, (3,)), "b": spaces.Discrete(2)}), "obs['a']", "shape"),
        (spaces.Dict({"a": spaces.Box(0, 2, (2,)), "b": spaces.Discrete(2)}), "obs['a']", "high"),
        (spaces.Dict({"a": spaces.Box(0, 1, (2,)), "b": spaces.Discrete(3)}), "obs['b']", "n"),
        (spaces.Dict({"a": spaces.Box(0, 1, (2,))}), "obs", "keys"),
        (spaces.Tuple((spaces.Discrete(2),)), "obs", "type"),
    ],
)
def test_differences_are_named_whatever_the_order_of_keys(got: Any, path: str | None, field: str | None) -> None:
    expected = spaces.Dict({"a": spaces.Box(0, 1, (2,)), "b": spaces.Discrete(2)})
    found = first_difference(expected, got, "obs", bounds=True)
    assert (found.path, found.field) == (path, field) if found else path is None
    choices = first_difference(spaces.MultiDiscrete([2, 3]), spaces.MultiDiscrete([2, 4]), "act", bounds=True)
    assert choices is not None
    assert choices.field == "nvec"


def test_leaves_lie_apart_and_aligned() -> None:
    space = spaces.Dict({"odd": spaces.Box(0, 1, (3,), np.uint8), "wide": spaces.Box(0, 1, (2, 2), np.float64)})
    slab = Slab(SlabPlan(tree(space, "observation"), tree(spaces.Discrete(2), "action"), (0, 2, 5)))
    rows = [*slab.obs.arrays, *slab.final_obs.arrays, *slab.actions.arrays]
    assert [array.shape for array in slab.obs.arrays] == [(5, 3), (5, 2, 2)]
    assert all(array.ctypes.data % 64 == 0 for array in rows)
    for value, array in enumerate(rows):
        array[...] = value
    assert all((array == value).all() for value, array in enumerate(rows))


def test_envs_are_split_evenly() -> None:
    assert split_evenly(8, 3) == (0, 3, 6, 8)
    assert split_evenly(2, 2) == (0, 1, 2)
    assert contiguous([3, 4, 5]) == slice(3, 6)
    assert contiguous([3, 5]) is None


def test_letters_of_any_size_arrive() -> None:
    fd = memfd("test")
    mail = SharedMail(fd, 4)
    letters = [None, {"a": 1}, np.arange(1_000_000), "x" * 3_000_000]
    lengths = [mail.put(box, letter) for box, letter in enumerate(letters)]
    for box, letter in enumerate(letters):
        again = mail.get(box, lengths[box])
        assert np.array_equal(again, letter) if isinstance(letter, np.ndarray) else again == letter
    assert mail.get(9, 0) is None
