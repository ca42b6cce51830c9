"""Networks with stacked parameters run with the first one's layers: whatever else differs between them is refused."""

from __future__ import annotations

import random
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from muster.errors import CannotTravel, SpecMismatch
from muster.nn import MultiAgentNet

X = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0))


def loop(modules: list[nn.Module]) -> Tensor:
    return torch.stack([module(X[:, agent]) for agent, module in enumerate(modules)], 1)


def assert_equals_a_loop(modules: list[nn.Module], use_vmap: bool = True) -> MultiAgentNet:
    net = MultiAgentNet.from_modules(modules, use_vmap=use_vmap)
    torch.testing.assert_close(net(X), loop(modules), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loop(net.to_modules()), loop(modules), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(net.agent(1)(X[:, 1]), modules[1](X[:, 1]), rtol=1e-5, atol=1e-5)
    return net


class Holds(nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.linear, self.held = nn.Linear(4, 2), held

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@dataclass
class Options:
    scale: float
    names: list[str] = field(default_factory=list)


def times(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


HELD = {
    "list": ([1.0], [2.0], r"held\[0\]: 1.0 and 2.0"),
    "length": ([1], [1, 2], r"held: \[1\] and \[1, 2\]"),
    "dict": ({"k": 1}, {"k": 2}, r"held\['k'\]: 1 and 2"),
    "dict by objects": ({torch.float32: 1}, {torch.float64: 1}, r"held at 0\[0\]"),
    "tensors": (
        (torch.ones(2),),
        (torch.zeros(2),),
        r"held\[0\] \(neither parameter nor buffer\): tensor.* and tensor",
    ),
    "array": (np.arange(3), np.arange(3) + 1, "held"),
    "type": (1, 1.0, "held: 1 and 1.0"),
    "closure": (times(1.0), times(2.0), r"held\.<locals>\.factor: 1.0 and 2.0"),
    "default": (lambda x, k=1: k, lambda x, k=2: k, r"held\.__defaults__\[0\]: 1 and 2"),
    "code": (lambda x: x + 1, lambda x: x - 1, r"held\.__code__"),
    "partial": (partial(F.elu, alpha=1.0), partial(F.elu, alpha=2.0), r"held\.keywords\['alpha'\]: 1.0 and 2.0"),
    "wrapped": (lru_cache(times(1.0)), lru_cache(times(2.0)), r"held\.__wrapped__\.<locals>\.factor"),
    "object": (Options(1.0, ["a"]), Options(1.0, ["b"]), r"held\.names\[0\]: a and b"),
    "modules in a list": ([nn.Linear(1, 1)], [nn.Linear(1, 1)], r"held\[0\]\._parameters\['weight'\]"),
}


@pytest.mark.parametrize("use_vmap", [True, False])
@pytest.mark.parametrize(("mine", "its", "message"), HELD.values(), ids=HELD)
def test_what_networks_hold_may_not_differ(mine, its, message, use_vmap):
    with pytest.raises(SpecMismatch, match=f"modules 0 and 1 differ in {message}"):
        MultiAgentNet.from_modules([Holds(mine), Holds(its)], use_vmap=use_vmap)


@pytest.mark.parametrize(
    "build",
    [
        lambda: [1.0, {"k": (2, None)}, {3}],
        lambda: torch.eye(2).to_sparse(),
        lambda: np.arange(3.0),
        lambda: times(2.0),
        lambda: partial(F.elu, alpha=2.0),
        lambda: Options(2.0, ["a"]),
        lambda: nn.Tanh,
        lambda: torch.tanh,
        lambda: torch.distributions.Normal(0.0, 1.0),
        lambda: torch.Generator().manual_seed(random.randrange(2**30)),
        lambda: np.random.default_rng(),
    ],
)
def test_what_is_equal_but_not_the_same_object_is_no_difference(build):
    assert_equals_a_loop([Holds(build()) for _ in range(3)])


def test_what_cannot_be_compared_is_left_to_copying():
    with pytest.raises(CannotTravel, match="Holds cannot be copied"):
        MultiAgentNet.from_modules([Holds(threading.Event()) for _ in range(2)])


class RefersToItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.steps = [self.linear, self.add, partial(self.scale, by=2.0)]
        self.register_forward_hook(self.hook)

    def add(self, x: Tensor) -> Tensor:
        return x + self.linear.weight[:, 0]

    def scale(self, x: Tensor, by: float) -> Tensor:
        return x * self.linear.bias * by

    def hook(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output - self.linear.bias

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


@pytest.mark.parametrize("use_vmap", [True, False])
def test_networks_that_refer_to_their_own_parts(use_vmap):
    assert_equals_a_loop([RefersToItself() for _ in range(3)], use_vmap)


def test_functions_that_refer_to_their_module_are_refused():
    modules = [Holds(None) for _ in range(2)]
    for module in modules:
        module.held = lambda x, module=module: module.linear(x)
        module.load_state_dict(modules[0].state_dict())
    with pytest.raises(SpecMismatch, match=r"held\.__defaults__\[0\] \(functions are not copied .*: Holds and Holds"):
        MultiAgentNet.from_modules(modules)


LAYERS = {
    "LSTM": lambda: nn.LSTM(4, 4),
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "transformer": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 2),
    "batch norm": lambda: nn.BatchNorm1d(4),
    "dropout": lambda: nn.Dropout(0.5),
    "embedding": lambda: nn.Embedding(4, 4),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")  # from the transformer without batch_first
@pytest.mark.parametrize("build", LAYERS.values(), ids=LAYERS)
def test_layers_that_hold_lists_and_references_are_alike(build):
    net = MultiAgentNet.from_modules([build() for _ in range(3)])
    assert all(p.shape[0] == 3 for p in net.parameters())


def hooked(register: str, index: int | None, hook: Callable[..., Any]) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(4, 2), nn.Tanh())
    getattr(net if index is None else net[index], register)(hook)
    return net


HOOKS = {
    "register_forward_hook": lambda module, args, output: output * 3,
    "register_forward_pre_hook": lambda module, args: (args[0] * 3,),
}


@pytest.mark.parametrize("index", [0, 1, None])
@pytest.mark.parametrize("register", HOOKS)
def test_hooks_of_all_agents_are_called(register, index):
    assert_equals_a_loop([hooked(register, index, HOOKS[register]) for _ in range(3)])


@pytest.mark.parametrize("use_vmap", [True, False])
@pytest.mark.parametrize("index", [0, 1, None])
def test_backward_hooks_of_all_agents_are_called(index, use_vmap):
    def double(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        return tuple(None if grad is None else grad * 2 for grad in grad_input)

    modules = [hooked("register_full_backward_hook", index, double) for _ in range(3)]
    mine, other = (X.clone().requires_grad_() for _ in range(2))
    MultiAgentNet.from_modules(modules, use_vmap=use_vmap)(mine).sum().backward()
    torch.stack([module(other[:, agent]) for agent, module in enumerate(modules)], 1).sum().backward()
    torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("where", ["", "0."])
def test_hooks_of_one_agent_are_refused(where):
    modules = [nn.Sequential(nn.Linear(4, 2), nn.Tanh()) for _ in range(3)]
    (modules[1][0] if where else modules[1]).register_forward_hook(HOOKS["register_forward_hook"])
    with pytest.raises(SpecMismatch, match=rf"modules 0 and 1 differ in {where}_forward_hooks: \[\] and "):
        MultiAgentNet.from_modules(modules)


@pytest.mark.parametrize("index", [0, None])
def test_forwards_of_instances_are_called(index):
    modules = []
    for _ in range(3):
        modules.append(nn.Sequential(nn.Linear(4, 2), nn.Tanh()))
        part = modules[-1] if index is None else modules[-1][index]
        part.forward = types.MethodType(lambda self, x: type(self).forward(self, x) * 2, part)
    assert_equals_a_loop(modules)


def test_layers_in_another_mode_than_their_network_stay_in_it():
    modules = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5).eval(), nn.Linear(4, 2)) for _ in range(3)]
    assert_equals_a_loop(modules)


def test_values_are_not_loaded_into_another_layout():
    net = MultiAgentNet.from_modules([nn.Sequential(nn.Linear(4, 4)) for _ in range(3)])
    with pytest.raises(SpecMismatch, match="make a Sequential, this network has a StackedSequential"):
        net.init_agents(lambda agent, module: module.register_forward_hook(HOOKS["register_forward_hook"]))


PARAMETRIZED = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch, of _weight_norm under vmap
@pytest.mark.parametrize("use_vmap", [True, False])
@pytest.mark.parametrize("parametrize", PARAMETRIZED.values(), ids=PARAMETRIZED)
def test_parametrized_networks(parametrize, use_vmap):
    modules = [nn.Sequential(parametrize(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 2)).eval() for _ in range(3)]
    net = assert_equals_a_loop(modules, use_vmap)
    net(X).sum().backward()
    assert all(p.grad is not None and p.shape[0] == 3 for p in net.parameters())
    with pytest.raises(SpecMismatch, match="parametrizations.* absent"):
        MultiAgentNet.from_modules([modules[0], nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).eval()])


def test_spectral_norms_train_one_after_the_other():
    modules = [nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4))) for _ in range(3)]
    net = MultiAgentNet.from_modules(modules, use_vmap=False)
    for _ in range(2):
        torch.testing.assert_close(net(X), loop(modules))
    with pytest.raises(RuntimeError) as caught:
        MultiAgentNet.from_modules(modules)(X)
    assert "use_vmap=False" in caught.value.__notes__[0]
