"""What exists on this machine alone is refused here, before a node gets anything; the ways out that are told work."""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.managers
import queue
import threading
from multiprocessing import shared_memory

import numpy as np
import pytest
import torch
from collecting import Constant
from counting_env import CountingEnv

import muster
from local_nodes import LocalNodes
from muster.errors import CannotTravel
from muster.pool.far_worker import opened
from muster.rollout.cluster.node_resident import NodePlan
from muster.rollout.multi_collector import MultiCollector

pytestmark = pytest.mark.timeout(120)
CTX = multiprocessing.get_context("forkserver")


class Holding(Constant):
    """Holds something."""

    def __init__(self, held=None, action=0):
        super().__init__(action)
        self.held = held


class Locked(Holding):
    def __init__(self, action=0):
        super().__init__(threading.Lock(), action)


@muster.nn.uncopyable("drives the arm")
class Marked(Constant):
    pass


class Taking(CountingEnv):
    def __init__(self, held=None):
        super().__init__()
        self.held = held

    def put(self, item):
        self.held.put(item)


def memory():
    made = shared_memory.SharedMemory(create=True, size=8)
    made.unlink()
    return made


HELD = {
    "a queue": CTX.Queue,
    "a simple queue": CTX.SimpleQueue,
    "a lock": CTX.Lock,
    "an event": CTX.Event,
    "an array": lambda: CTX.Array("i", 2),
    "a pipe": lambda: CTX.Pipe()[0],
    "memory": memory,
}
PLACES = {
    "env_kwargs": lambda held: {"make_vec_options": {"env_kwargs": {"held": [held]}}},
    "worker_init": lambda held: {"make_vec_options": {"worker_init": lambda: held}},
    "policy_factory": lambda held: {"policy_factory": functools.partial(Holding, held)},
    "policy": lambda held: {"policy": Holding(held)},
}


def refusal(cluster=None, **options):
    """What is said before anything starts."""
    cluster = cluster or LocalNodes()
    with pytest.raises(CannotTravel) as raised:
        MultiCollector(Taking, num_collectors=2, frames_per_batch=8, cluster=cluster, **options)
    assert not cluster.hosts
    return offers_ways_out(str(raised.value))


def offers_ways_out(said):
    assert not [word for word in ("fork", "serial", "hands over") if word in said]
    return said


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", HELD)
def test_what_exists_here_alone_is_refused_before_anything_starts(kind, place):
    said = refusal(**PLACES[place](HELD[kind]()))
    assert "it exists on this machine alone" in said
    assert f"{place}" in said
    assert "policy_factory" in said if "policy" in place else "connect there" in said


def test_other_obstacles_offer_no_way_that_a_cluster_lacks():
    assert "muster.lazy(" in refusal(make_vec_options={"env_kwargs": {"held": threading.Lock()}})
    assert "Let the factory build it" in refusal(policy_factory=functools.partial(Holding, threading.Lock()))
    for policy, way in ((Locked(), "call muster.rebuild_with("), (Marked(), "take the mark off policy")):
        said = refusal(policy=policy)
        assert way in said
        assert "pass policy_factory=, which builds the policy in each collector" in said
        assert "cannot act for envs on other machines" in said


def lock_of(env, i):
    return threading.Lock()


class Refusing(LocalNodes):
    """Starts no collectors, and keeps the plan."""

    def start(self, index, collectors):
        host = super().start(index, collectors)
        ask = host.ask

        def refuse(order, *, beside=False):
            content = opened(order[1:])
            if isinstance(content, NodePlan):
                self.plan = content
                raise RuntimeError("no room")
            return ask(order, beside=beside)

        host.ask = refuse
        return host


def test_a_big_argument_travels_once_to_all_collectors_of_a_node():
    cluster, kwargs = Refusing(1), {"held": np.zeros(4 << 20, np.uint8)}
    with pytest.raises(RuntimeError, match="no room"):
        MultiCollector(
            Taking, num_collectors=3, frames_per_batch=9, make_vec_options={"env_kwargs": kwargs}, cluster=cluster
        )
    assert 1.0 <= sum(one.nbytes for one, _ in cluster.plan.buffers) / (4 << 20) < 1.1


class Served(multiprocessing.managers.BaseManager):
    pass


Served.register("get_queue")


def connected(address):
    served = Served(address, authkey=b"key")
    served.connect()
    return served.get_queue()


@pytest.mark.slow
def test_calls_refuse_it_before_they_send_anything_and_a_server_is_a_way_out():
    kept = queue.Queue()
    server = multiprocessing.managers.BaseManager(("127.0.0.1", 0), authkey=b"key")
    server.register("get_queue", lambda: kept)
    serving = server.get_server()
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    kwargs = {"held": muster.lazy(connected, serving.address)}
    with MultiCollector(
        Taking, num_collectors=2, frames_per_batch=8, make_vec_options={"env_kwargs": kwargs}, cluster=LocalNodes()
    ) as collector:
        for held in (CTX.Queue(), memory(), {"lock": CTX.Lock()}):
            for act in (collector.call, collector.set_attr):
                with pytest.raises(CannotTravel, match="cannot be sent to other machines") as raised:
                    act("put", held)
                assert "connect there" in offers_ways_out(str(raised.value))
        with pytest.raises(CannotTravel, match="cannot be sent from the worker") as raised:
            collector.call(lock_of)
        page = "\nMore: docs/problems/files-and-locks.md"
        assert offers_ways_out(str(raised.value)).endswith(f"such as an attribute of it{page}")
        collector.call("put", 3)
        assert collector.get_attr("length") == (3, 3)
    assert [kept.get(timeout=5) for _ in range(2)] == [3, 3]
    assert kept.empty()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["policy_factory", "rebuild_with"])
def test_a_policy_with_a_lock_travels_as_it_is_told_and_its_weights_follow(way):
    class Own(Locked):
        pass

    policy, options = Own(5), {}
    if way == "policy_factory":
        options = {"policy_factory": Own}
    else:
        muster.rebuild_with(Own, Own)
    with MultiCollector(
        CountingEnv, policy, num_collectors=2, frames_per_batch=8, cluster=LocalNodes(), **options
    ) as collector:
        assert (collector.rollout()["action"] == 5).all()
        with torch.no_grad():
            policy.best.fill_(7)
        collector.update_policy_weights_()
        assert (collector.rollout()["action"] == 7).all()
