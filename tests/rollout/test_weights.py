"""Weights in shared memory, and what keeps a policy from travelling."""

from __future__ import annotations

import ctypes
import os
import pickle
import random
import signal
import socket
import threading

import pytest
import torch
from torch import nn

import muster
from muster.rollout.replicas import policy_travel
from muster.rollout.replicas.policy_travel import obstacle_to, pack_policy
from muster.rollout.replicas.shared_weights import SharedWeights
from muster.transport.big_arrays import memfd


class Holding(nn.Module):
    def __init__(self, what) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.what = what


class OnlyOne:
    def __deepcopy__(self, memo):
        raise RuntimeError("there is only one of me")


@pytest.fixture
def registry():
    yield
    policy_travel._factories_of_types.clear()


def test_ordinary_policies_travel():
    policy = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert obstacle_to(policy) is None
    assert torch.equal(pickle.loads(pack_policy(policy))[0].weight, policy[0].weight)


@pytest.mark.parametrize(
    ("make", "type_name"),
    [
        (threading.Lock, "_thread.lock"),
        (lambda: ctypes.pointer(ctypes.c_int(3)), "LP_c_int"),
        (lambda: (i for i in range(3)), "generator"),
        (lambda: torch.ones(2, requires_grad=True) * 2, "Tensor"),
        (OnlyOne, "OnlyOne"),
    ],
)
def test_what_cannot_be_copied_is_found_by_path_and_type(make, type_name):
    found = obstacle_to(Holding({"deep": [make()]}))
    assert found is not None
    assert found.path == 'policy.what["deep"][0]'
    assert type_name in found.type_name


def test_open_socket_is_an_obstacle():
    with socket.socket() as held:
        assert "socket" in obstacle_to(Holding(held)).reason


def test_the_hooks_own_message_is_quoted():
    assert obstacle_to(Holding(OnlyOne())).reason == "its __deepcopy__ raised RuntimeError: there is only one of me"


def test_what_can_be_rebuilt_is_named_as_one_would_write_it():
    inner = Holding(None)
    inner.layer.lock = threading.Lock()
    found = obstacle_to(nn.Sequential(inner))
    assert found.path == "policy.0.layer.lock"
    assert any("muster.rebuild_with(policy.0.layer, a_factory)" in way for way in found.ways_out())
    found = obstacle_to(Holding(OnlyOne()))
    assert any("muster.rebuild_with(OnlyOne, a_factory)" in way for way in found.ways_out())


def test_meta_tensors_are_no_obstacle():
    policy = Holding([torch.empty(2, device="meta")])
    policy.placeholder = nn.Parameter(torch.empty(2, device="meta"), requires_grad=False)
    assert obstacle_to(policy) is None
    assert pickle.loads(pack_policy(policy)).placeholder.is_meta


def test_components_are_rebuilt_by_type_or_by_object(registry):
    by_type, by_object = Holding(OnlyOne()), Holding(None)
    muster.rebuild_with(OnlyOne, dict)
    assert obstacle_to(by_type) is None
    assert pickle.loads(pack_policy(by_type)).what == {}
    by_object.layer.lock = threading.Lock()
    muster.rebuild_with(by_object.layer, torch.nn.Identity)
    assert obstacle_to(by_object) is None
    assert isinstance(pickle.loads(pack_policy(by_object)).layer, nn.Identity)
    with pytest.raises(TypeError, match="callable"):
        muster.rebuild_with(OnlyOne, 3)
    with pytest.raises(TypeError, match=r"target must be a class, or one object such as a submodule; got .* type int"):
        muster.rebuild_with(3, int)


def test_no_reader_ever_sees_half_an_update():
    """10,000 updates by another process, of weights that all have one value."""
    weights = {"a": torch.zeros(3000), "b": torch.zeros(50, 40)}
    shared = SharedWeights(weights, memfd("weights"))
    pid = os.fork()
    if not pid:
        writer = SharedWeights(weights, os.open(f"/proc/self/fd/{shared.fd}", os.O_RDWR))
        for value in range(1, 10_001):
            writer.write({name: torch.full_like(tensor, value) for name, tensor in weights.items()})
        os._exit(0)
    version, seen = 0, 0
    try:
        while version < 10_000:
            latest, _ = shared.read_into(weights, version)
            if latest != version:
                seen += 1
                assert all(bool((tensor == latest).all()) for tensor in weights.values())
                version = latest
    finally:
        os.waitpid(pid, 0)
    assert seen > 1


def test_nor_does_one_in_another_thread():
    shared = SharedWeights({name: torch.zeros(3000) for name in "ab"}, memfd("weights"))
    threads = [threading.Thread(target=_write, args=(shared, value)) for value in (1, 2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert len(torch.stack(list(shared.read().values())).unique()) == 1
    assert shared.version == 2000


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt in a callback is lost
def test_ctrl_c_leaves_no_half_update():
    names = [f"layer {i}" for i in range(100)]
    shared = SharedWeights({name: torch.zeros(1000) for name in names}, memfd("weights"))
    before, interrupts = signal.signal(signal.SIGALRM, signal.default_int_handler), 0
    try:
        for value in range(1, 60):
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(5e-5, 1e-3))
                for _ in range(200):  # more than the alarm lets it
                    shared.write({name: torch.full((1000,), float(value)) for name in names})
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupts += 1
            assert len({float(tensor[-1]) for tensor in shared.read().values()}) == 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupts > 30


def _write(shared, value):
    for _ in range(1000):
        shared.write({name: torch.full((3000,), float(value)) for name in "ab"})
