"""Twins: copies that share all but the dicts of their tensors, for as long as a context lasts."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from muster.errors import CannotTravel
from muster.nn import shared_on_copy, uncopyable
from muster.nn.shared_copies import copied_as_twins

X = torch.ones(2, 3)


class Robot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.ones(3))
        self.call = self.last.forward
        self.parts = [self.first, "first"]
        self.first.register_forward_hook(self.hook)

    def hook(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * self.scale

    def __deepcopy__(self, memo: object) -> Robot:
        raise RuntimeError("there is one robot")

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return self.call(self.parts[0](x))


def attributes(module: nn.Module) -> list[dict[str, Any]]:
    return [dict(vars(part)) for part in module.modules()]


def test_a_twin_has_dicts_of_its_own_and_shares_all_else():
    robot = Robot()
    with copied_as_twins({"policy": [robot]}):
        twin = copy.deepcopy(robot)
    assert type(twin) is Robot
    assert twin.lock is robot.lock
    assert twin.first is not robot.first
    assert twin.first.weight is robot.first.weight is twin.last.weight
    assert twin.scale is robot.scale
    expected = robot(X)
    TensorDict.from_module(robot).apply(torch.zeros_like).to_module(twin, preserve_module_state=False)
    assert not twin(X).any()
    assert robot(X).equal(expected)
    twin.eval()
    assert robot.training


@pytest.mark.parametrize("raises", [False, True])
def test_the_modules_are_as_before(raises: bool):
    robot = nn.Sequential(Robot(), shared_on_copy(nn.Linear(3, 3)))
    before = attributes(robot)
    with pytest.raises(RuntimeError, match="there is one robot"), copied_as_twins(robot, robot[0]):
        with copied_as_twins(robot):
            copy.deepcopy(robot)
        twin = copy.deepcopy(robot)
        if raises:
            raise RuntimeError("there is one robot")
        assert "__deepcopy__" not in vars(twin[0])
        assert copy.deepcopy(twin[1]).weight is not twin[1].weight
        copy.deepcopy(twin)
    after = attributes(robot)
    assert [list(one) for one in after] == [list(one) for one in before]
    assert all(a[key] is b[key] for a, b in zip(after, before, strict=True) for key in a)
    with copied_as_twins():
        pass  # the lock is free


def test_what_is_no_module_is_passed_over_and_rings_are_no_harm():
    ring: list[Any] = [1, None, {"x": X}]
    ring.append(ring)
    robot = Robot()
    with copied_as_twins(ring, robot):
        assert copy.deepcopy([robot])[0].lock is robot.lock


def test_marks_stay_on_twins():
    robot = uncopyable(nn.Linear(3, 3), "drives the arm")
    with copied_as_twins(robot):
        twin = copy.deepcopy(robot)
    for one in (robot, twin):
        with pytest.raises(CannotTravel, match="drives the arm"):
            copy.deepcopy(one)


class Ending(nn.Linear):
    ended = 0

    def __del__(self) -> None:
        Ending.ended += 1


def test_a_twin_never_ends_what_it_shares_and_can_be_pickled():
    layer = Ending(3, 3)
    with copied_as_twins(layer):
        twin = copy.deepcopy(layer)
    arrived = pickle.loads(pickle.dumps(twin))
    assert type(arrived) is Ending
    assert arrived(X).equal(layer(X))
    ended = Ending.ended
    del twin
    gc.collect()
    assert Ending.ended == ended


def test_copies_that_other_threads_make_are_ordinary_ones():
    layer = nn.Linear(3, 3)
    copies: list[nn.Module] = []
    thread = threading.Thread(target=lambda: copies.append(copy.deepcopy(layer)))
    with copied_as_twins(layer):
        thread.start()
        thread.join(0.05)  # it may have begun: it waits then
        assert copy.deepcopy(layer).weight is layer.weight
    thread.join()
    assert copies[0].weight is not layer.weight
    assert copies[0].weight.equal(layer.weight)
