"""Batches, and parts of them, that are kept; and the memory of big arguments."""

import functools
import gc
import os

import numpy as np
import pytest
import torch
from torch import nn

import muster
from envs import Scripted
from muster.pool.resources import private_bytes


@pytest.mark.parametrize("sync", [True, False])
def test_parts_of_batches_stay_as_they_are_and_hold_no_file_open(sync):
    parts = [
        lambda batch: batch,
        lambda batch: batch["observation"][0],
        lambda batch: batch["next", "reward"].numpy(),
        lambda batch: batch["action"].unbind(1)[0],
        lambda batch: batch[0],
    ]
    options = {"num_collectors": 2, "num_envs": 2, "frames_per_batch": 4, "total_frames": 400, "sync": sync}
    with muster.MultiCollector(Scripted, **options) as collector:
        batches = iter(collector)
        kept = [next(batches)]
        copies = [kept[0].clone()]
        gc.collect()  # what errors of earlier tests still hold
        before = len(os.listdir("/proc/self/fd"))
        for i, batch in enumerate(batches):
            kept.append(parts[i % len(parts)](batch))
            copies.append(kept[-1].copy() if isinstance(kept[-1], np.ndarray) else kept[-1].clone())
        assert len(os.listdir("/proc/self/fd")) == before
    gc.collect()
    assert len(kept) >= 100
    for part, copy in zip(kept, copies, strict=True):
        assert np.array_equal(part, copy) if isinstance(part, np.ndarray) else (part == copy).all()


@pytest.mark.parametrize("sync", [True, False])
def test_a_forked_child_keeps_the_batch_that_it_was_forked_with(sync):
    options = {"num_collectors": 2, "num_envs": 2, "frames_per_batch": 4, "sync": sync}
    with muster.MultiCollector(Scripted, **options) as collector:
        batch = collector.rollout()
        copy = batch.clone()
        asks, answers = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(asks[1])
                os.read(asks[0], 1)
                os.write(answers[1], b"same" if (batch == copy).all() else b"other")
            finally:
                os._exit(0)
        del batch
        size = os.fstat(collector._collectors._pool._carrier._memory.fd).st_size
        for _ in range(10):
            collector.rollout()
        os.write(asks[1], b"x")
        assert os.read(answers[0], 100) == b"same"
        os.waitpid(child, 0)
        assert os.fstat(collector._collectors._pool._carrier._memory.fd).st_size <= size + 2 * 4096
    for fd in (*asks, *answers):
        os.close(fd)


def test_memory_of_dropped_batches_is_used_again():
    options = {"num_collectors": 1, "num_envs": 1, "frames_per_batch": 4}
    with muster.MultiCollector(Scripted, **options) as collector:
        for _ in range(20):
            collector.rollout()
        size = os.fstat(collector._collectors._pool._carrier._memory.fd).st_size
        for _ in range(20):
            collector.rollout()
        assert os.fstat(collector._collectors._pool._carrier._memory.fd).st_size == size


class Tabled(nn.Module):
    def __init__(self, table, size=0):
        super().__init__()
        self.table, self.weight = table, nn.Parameter(torch.ones(size, dtype=torch.uint8), requires_grad=False)

    def forward(self, obs):
        return torch.full((len(obs),), int(self.table[-1]))


class Spoiling(Scripted):
    def __init__(self, table):
        super().__init__()
        self.table = table

    def step(self, action):
        self.table[-1] = 0
        return super().step(action)


@pytest.mark.parametrize("how", ["policy", "policy_factory"])
def test_collectors_hold_big_arguments_once_for_all(how):
    table = np.ones(64 << 20, np.uint8)
    # Weights are each collector's own: once, without the pickle in which they came.
    policy = Tabled(table, table.size) if how == "policy" else functools.partial(Tabled, table)
    options = {"num_collectors": 2, "num_envs": 4, "frames_per_batch": 16, how: policy}
    with muster.MultiCollector(Spoiling, make_vec_options={"env_kwargs": {"table": table}}, **options) as collector:
        assert (collector.rollout()["action"] == 1).all()  # what an env does to its table is none of the policy's
        held = [private_bytes(worker["pid"]) for worker in collector.stats()["collectors"]["workers"]]
    assert max(held) < (96 if how == "policy" else 32) << 20


def test_big_arguments_hold_no_file_open_in_workers():
    class Reader(Scripted):
        def __init__(self, table):
            super().__init__()
            self.table = table

        def open_files(self):
            return len(os.listdir("/proc/self/fd"))

    counts = set()
    for table in (np.zeros(1), np.zeros(1 << 20)):
        with muster.make_vec(Reader, 2, env_kwargs={"table": table}, num_workers=2, context="forkserver") as envs:
            counts |= set(envs.call("open_files"))
            assert envs.get_attr("table")[0].shape == table.shape
    assert len(counts) == 1
