"""Copies that share what cannot be copied, and have weights of their own."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import zmq
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from muster.errors import CannotTravel, WrongType
from muster.nn import MultiAgentMLP, MultiAgentNet, shared_on_copy, uncopyable

X = torch.linspace(-1, 1, 12).view(4, 3)


@uncopyable("drives the arm")
class Arm(nn.Module):
    """Computes with a lock held, and counts in ``closed`` how often it was closed."""

    closed = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.lock = threading.Lock()
        self.socket = zmq.Context.instance().socket(zmq.PAIR)

    def __del__(self) -> None:
        type(self).closed += 1
        self.socket.close(0)

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return self.linear(x)


class Pair(NamedTuple):
    name: str
    module: nn.Module


class Notes:
    """No module, hence shared."""


class Everywhere(nn.Module):
    """Reaches its parts from many places, besides their names."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.layer = nn.Linear(3, 3)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scale", torch.ones(3), persistent=False)
        self.normed = parametrizations.weight_norm(nn.Linear(3, 3))
        self.in_list = [self.layer.weight, Pair("layer", self.layer)]
        self.in_dict = {"layers": (self.layer,)}
        self.method = self.layer.forward
        self.partial = functools.partial(Everywhere.scaled, self)
        self.tensordict = TensorDict({"weight": self.layer.weight})
        self.__dict__["hidden"] = nn.Sequential(self.layer)  # a module that is not registered
        self.layer.register_forward_hook(self.hook)
        self.notes = Notes()

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale

    def hook(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * self.scale

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) + self.second(x) + self.normed(self.norm(x)) + self.partial(x) + self.method(x)
        y = y + x @ self.in_list[0] + self.in_list[1].module(x) + self.in_dict["layers"][0](x)
        return y + x @ self.tensordict["weight"] + self.hidden(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.lstm = nn.LSTM(3, 3, num_layers=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Agents(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.unsqueeze(-2).expand(-1, 2, -1))


def torchrl_net() -> nn.Module:
    modules = pytest.importorskip("torchrl.modules")
    return modules.MultiAgentMLP(3, 2, 2, centralized=False, share_params=False, depth=1, num_cells=4)


POLICIES: dict[str, Callable[[], nn.Module]] = {
    "marked": Arm,
    "marked inside": lambda: nn.Sequential(nn.Tanh(), nn.Sequential(Arm())),
    "everywhere": Everywhere,
    "recurrent": Recurrent,
    "of agents": lambda: Agents(
        MultiAgentMLP(3, 2, 2, centralised=False, share_params=False, depth=1, num_cells=4, activation_class=nn.Tanh)
    ),
    "of agents, under vmap": lambda: Agents(MultiAgentNet(lambda: nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), 2)),
    "of agents, TorchRL's": lambda: Agents(torchrl_net()),
}


@pytest.fixture(params=POLICIES.values(), ids=POLICIES)
def policy(request: pytest.FixtureRequest) -> Iterator[nn.Module]:
    torch.manual_seed(0)
    made = request.param()
    with torch.no_grad():
        made(X)
    made.eval()
    yield shared_on_copy(made)
    for part in made.modules():
        if isinstance(part, Arm):
            part.socket.close(0)


@torch.no_grad()
def change(module: nn.Module) -> None:
    for tensor in [*module.parameters(), *module.buffers()]:
        tensor += 1


def test_a_copy_computes_the_same_with_weights_of_its_own(policy: nn.Module):
    copied = copy.deepcopy(policy)
    expected = policy(X).detach()
    assert list(copied.state_dict()) == list(policy.state_dict())
    assert copied(X).equal(expected)
    change(policy)
    assert copied(X).equal(expected)
    assert not policy(X).equal(expected)


def test_a_change_of_the_copy_leaves_the_original(policy: nn.Module):
    copied = copy.deepcopy(policy)
    expected = policy(X).detach()
    change(copied)
    assert policy(X).equal(expected)
    copied(X).sum().backward()
    assert any(parameter.grad is not None for parameter in copied.parameters())
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_copies_can_be_copied(policy: nn.Module):
    once = copy.deepcopy(policy)
    twice = copy.deepcopy(once)
    expected = policy(X).detach()
    change(policy)
    change(once)
    assert twice(X).equal(expected)


def test_it_is_the_policy_itself_and_everything_but_its_weights_is_shared():
    policy = Everywhere()
    assert shared_on_copy(policy) is policy
    copied = copy.deepcopy(policy)
    assert type(copied) is Everywhere
    assert copied.lock is policy.lock
    assert copied.notes is policy.notes
    copied.train(False)
    assert policy.training
    assert policy.norm.training


def test_what_is_tied_stays_tied_also_with_what_is_copied_at_the_same_time():
    policy = shared_on_copy(Everywhere())
    for whole in ([policy, policy.layer, {"weight": policy.first.weight}], [policy.layer, policy, {}]):
        both = copy.deepcopy(whole)
        copied = next(part for part in both if isinstance(part, Everywhere))
        assert copied.layer in both
        assert copied.first.weight is copied.second.weight
        assert copied.in_list[0] is copied.layer.weight
        assert both[2].get("weight", copied.first.weight) is copied.first.weight


def test_a_lazy_module_s_copy_finds_its_own_shapes():
    policy = shared_on_copy(Agents(nn.LazyLinear(2)))
    copied = copy.deepcopy(policy)
    copied(X)
    assert copied.net.weight.shape == (2, 3)
    assert nn.parameter.is_lazy(policy.net.weight)
    assert policy(X).shape == (4, 2, 2)


def test_a_policy_that_was_compiled_in_place_has_copies_with_weights_of_their_own():
    policy = shared_on_copy(Agents(nn.Linear(3, 2)))
    policy.compile(backend="eager")
    copied = copy.deepcopy(policy)
    expected = policy(X).detach()
    change(policy)
    assert copied(X).equal(expected)


def test_a_compiled_policy_has_compiled_copies():
    policy = shared_on_copy(torch.compile(Arm(), backend="eager"))
    copied = copy.deepcopy(policy)
    expected = policy(X).detach()
    change(policy)
    assert list(copied.state_dict()) == ["_orig_mod.linear.weight", "_orig_mod.linear.bias"]
    assert copied(X).equal(expected)
    copied._orig_mod.socket.close(0)


def test_what_the_hardware_needs_is_released_once_with_the_original():
    policy = Arm()
    closed, copied = Arm.closed, copy.deepcopy(shared_on_copy(policy))
    assert isinstance(copied, Arm)
    del copied
    gc.collect()
    assert Arm.closed == closed
    assert not policy.socket.closed
    del policy
    assert Arm.closed == closed + 1


def test_the_mark_still_refuses_all_other_copies():
    policy = shared_on_copy(Arm())
    for refused in (copy.copy, pickle.dumps):
        for part in (policy, copy.deepcopy(policy)):
            with pytest.raises(CannotTravel, match="drives the arm"):
                refused(part)
    policy.socket.close(0)


def test_what_can_be_pickled_can_still_be():
    policy = shared_on_copy(TensorDictModule(nn.Linear(3, 2), ["observation"], ["action"]))
    arrived = pickle.loads(pickle.dumps(policy))
    assert arrived.module(X).equal(policy.module(X))
    assert copy.deepcopy(arrived).module(X).equal(policy.module(X))


def test_averaged_models_of_it_average():
    policy = shared_on_copy(nn.Sequential(Arm()))
    average = torch.optim.swa_utils.AveragedModel(policy, avg_fn=lambda mine, its, count: (mine + its) / 2)
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    average.update_parameters(policy)
    change(policy)
    average.update_parameters(policy)
    for mine, first in zip(average.module.parameters(), before, strict=True):
        assert mine.allclose(first + 0.5)
    assert average(X).shape == (4, 3)
    policy[0].socket.close(0)


def test_only_modules_can_be_copied_so():
    with pytest.raises(WrongType, match=r"expected a torch\.nn\.Module, got object"):
        shared_on_copy(object())
