"""Memory that big arguments of envs take in the caller once the workers have read them."""

import os
from pathlib import Path

import numpy as np
import pytest

import muster
from envs import Scripted

MEGABYTE = 1 << 20


class Reader(Scripted):
    def __init__(self, blob, table=None):
        super().__init__()
        self.blob, self.table = blob, table

    def step(self, action):
        if action:
            os._exit(3)
        obs, _, *rest = super().step(action)
        return obs, float(len(self.blob)), *rest

    def total(self):
        return self.table.sum()


def _shared_bytes():
    """Bytes of all files in memory that this process has open."""
    files = {}
    for fd in Path("/proc/self/fd").iterdir():
        try:
            if "memfd:" in os.readlink(fd):
                status = os.stat(fd)
                files[status.st_ino] = status.st_blocks * 512
        except FileNotFoundError:  # the folder's own
            continue
    return sum(files.values())


@pytest.mark.parametrize(
    "blob", [os.urandom(8 * MEGABYTE), {i: os.urandom(MEGABYTE) for i in range(8)}], ids=["bytes", "dict"]
)
def test_arguments_without_arrays_are_given_back_once_they_were_read(blob):
    before = _shared_bytes()
    with muster.make_vec(Reader, 3, env_kwargs={"blob": blob}, context="forkserver") as envs:
        assert _shared_bytes() - before < MEGABYTE
        envs.reset()
        assert envs.step(np.zeros(3, int))[1].tolist() == [len(blob)] * 3


def test_workers_that_are_replaced_get_them_again():
    kwargs = {"blob": os.urandom(2 * MEGABYTE), "table": np.ones(MEGABYTE)}
    with muster.make_vec(Reader, 2, env_kwargs=kwargs, context="forkserver", on_failure="restart") as envs:
        envs.reset()
        infos = envs.step(np.array([0, 1]))[4]
        assert "died" in infos["restarted"][1]
        assert envs.step(np.zeros(2, int))[1][0] == 2 * MEGABYTE
        assert envs.call("total") == (MEGABYTE, MEGABYTE)
