"""Generators that a whole process shares: collectors' processes seed theirs, and the caller's stay as they are."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from chance_env import Built, Chance, Policy, ones

from local_nodes import LocalNodes
from muster.rollout.collector import Collector
from muster.rollout.multi_collector import MultiCollector

COMMON = {"num_envs": 3, "frames_per_batch": 60}


def alone(seed, **options):
    with Collector(Chance, ones, seed=seed, make_vec_options=options, **COMMON) as collector:
        return [collector.rollout() for _ in range(2)]


def serial(seed):
    random.seed(0)  # there the generators are the caller's
    np.random.seed(0)  # noqa: NPY002
    return alone(seed, backend="serial")


def processes(seed):
    return alone(seed, num_workers=2, context="fork")


def collectors(count, *, context="fork", cluster=None):
    def run(seed):
        options = {"num_collectors": count, "context": context, "cluster": cluster}
        with MultiCollector(Built, policy_factory=Policy, seed=seed, **options, **COMMON) as collector:
            first = collector.rollout()
            collector.reset()
            return [first, collector.rollout()]

    return run


def equal(some, others):
    return all(
        one[key].equal(other[key]) for one, other in zip(some, others, strict=True) for key in one.keys(True, True)
    )


@pytest.mark.parametrize(
    "run",
    [
        serial,
        processes,
        collectors(1),
        collectors(3),
    ],
    ids=["serial", "processes", "1 collector", "3 collectors"],
)
def test_a_seed_repeats_what_is_drawn_from_generators_of_the_whole_process(run):
    first, again, other = run(4), run(4), run(5)
    assert equal(first, again)
    assert not first[0]["observation"].equal(other[0]["observation"])
    rows = first[0]["observation"]
    assert len({tuple(env.flatten().tolist()) for env in rows}) == len(rows)


@pytest.mark.slow
def test_nodes_collect_what_collectors_at_home_do():
    assert equal(collectors(3)(4), collectors(3, context="auto", cluster=LocalNodes(2))(4))


def test_without_a_seed_nothing_repeats_and_the_callers_generators_stay():
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    first, again, _ = collectors(1)(None), collectors(1)(None), collectors(1)(3)
    assert not equal(first, again)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before  # noqa: NPY002


def test_what_takes_the_place_of_a_collector_that_died_repeats_and_draws_other_numbers():
    def run():
        envs = [lambda: Chance(dies_at=8)] * 2
        options = {"num_collectors": 2, "context": "fork", "on_failure": "restart", "max_restarts": 99}
        with MultiCollector(envs, ones, frames_per_batch=10, seed=4, **options) as collector:
            return [collector.rollout() for _ in range(4)]

    with pytest.warns(RuntimeWarning, match="was replaced"):
        first = run()
    with pytest.warns(RuntimeWarning, match="was replaced"):
        again = run()
    assert equal(first, again)
    before, _, after, _ = (batch["observation"] for batch in first)  # it dies in every second batch
    assert not before.equal(after)


def test_a_state_goes_on_alike_whatever_was_collected_before():
    def go_on(batches):
        options = {"num_collectors": 2, "num_envs": 2, "context": "fork"}
        with MultiCollector(Chance, ones, frames_per_batch=20, seed=4, **options) as collector:
            for _ in range(batches):
                collector.rollout()
            state = {"frames": 40, "batches": 2, "next_traj_id": 6}
            collector.load_state_dict(state)
            return [collector.rollout()]

    assert equal(go_on(0), go_on(3))


def test_worker_init_has_the_last_word():
    def run(seed):
        options = {"num_collectors": 1, "context": "fork", "make_vec_options": {"worker_init": lambda: random.seed(9)}}
        with MultiCollector(Chance, ones, frames_per_batch=20, seed=seed, **options) as collector:
            return collector.rollout()["observation"]

    first, other = run(4), run(5)
    assert first[..., 0].equal(other[..., 0])
    assert not first[..., 1].equal(other[..., 1])
