"""Big arrays in recipes: all workers read the same memory, and what one writes stays its own."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest

import muster
from envs import Scripted
from muster.recipes.recipe import make_recipes, pack, unpack
from muster.transport.big_arrays import BigArrays, map_big_arrays, memfd
from slow import slow

pytestmark = pytest.mark.usefixtures("leaves_nothing")
MEGABYTE = 1 << 20


class Keeper(Scripted):
    """Keeps arrays of its own."""

    def __init__(self, big, text=b"", other=None):
        super().__init__()
        self.big, self.text, self.other = big, text, other

    def sums(self):
        return int(self.big.sum()), len(self.text), None if self.other is None else int(self.other.sum())

    def spoil(self):
        self.big[:] = 7

    def shared_bytes(self):
        """How much of the process's memory others have, too."""
        with open("/proc/self/smaps_rollup") as file:
            return sum(int(line.split()[1]) * 1024 for line in file if line.startswith("Shared_"))


@pytest.mark.parametrize("context", ["forkserver", *slow("spawn")])
def test_workers_read_the_same_memory_and_write_to_their_own(context):
    big = np.ones(16 * MEGABYTE, np.uint8)
    # Reversed it is not in one piece, and travels as a copy.
    kwargs = {"big": big, "text": bytes(2 * MEGABYTE), "other": big[::-8]}
    with muster.make_vec(Keeper, 4, num_workers=2, env_kwargs=kwargs, context=context) as envs:
        big[:] = 3  # too late to be seen by workers
        assert envs.call("sums") == ((16 * MEGABYTE, 2 * MEGABYTE, 2 * MEGABYTE),) * 4
        assert all(shared > 16 * MEGABYTE for shared in envs.call("shared_bytes"))
        envs.set_attr("text", [b"", b"", b"", b""])
        envs.call(lambda env, index: env.unwrapped.spoil() if index == 0 else None)
        # The two envs of a worker have one array, as they would have in the caller's process.
        assert [total for total, *_ in envs.call("sums")] == [112 * MEGABYTE, 112 * MEGABYTE, *[16 * MEGABYTE] * 2]


def test_an_array_that_a_worker_gets_twice_is_two_in_it():
    big, fd = np.ones(MEGABYTE, np.uint8), memfd("test")
    big_arrays = BigArrays(fd, [[pickle.PickleBuffer(big)] * 2])
    first, second = (np.frombuffer(one, np.uint8) for one in map_big_arrays(fd, big_arrays.places[0]))
    first[:] = 7
    assert (first.sum(), second.sum()) == (7 * MEGABYTE, MEGABYTE)
    os.close(fd)


def test_a_replaced_worker_gets_them_as_they_were_at_first():
    with muster.make_vec(
        Keeper, 2, num_workers=2, env_kwargs={"big": np.ones(2 * MEGABYTE, np.uint8)}, on_failure="restart"
    ) as envs:
        envs.reset()
        envs.call("spoil")
        with pytest.raises(muster.errors.MusterError):
            envs.call(lambda env, index: os._exit(1) if index == 0 else None)
        envs.reset()
        assert [total for total, *_ in envs.call("sums")] == [2 * MEGABYTE, 14 * MEGABYTE]


def test_each_array_is_stored_once_and_stays_read_only():
    big, fixed = np.arange(MEGABYTE, dtype=np.int32), np.zeros((MEGABYTE, 2), np.uint8, order="F")
    fixed.flags.writeable = False
    loads, packed = [[], []], []
    for load in loads:
        packed.append(
            pack(make_recipes(Keeper, 1, {"big": big, "other": [fixed, big]}), start_method="spawn", big=load)
        )
    fd = memfd("test")
    big_arrays = BigArrays(fd, loads)
    assert big_arrays.places[0] == big_arrays.places[1]
    assert len(set(big_arrays.places[0])) == 2
    (recipe,) = unpack(packed[0], map_big_arrays(fd, big_arrays.places[0]))
    big_arrays.close()
    again = recipe.kwargs["other"][0]
    assert (again.shape, again.flags.f_contiguous, again.flags.writeable) == (fixed.shape, True, False)
    assert recipe.kwargs["big"].flags.writeable
    np.testing.assert_array_equal(recipe.kwargs["big"], big)
    os.close(fd)
