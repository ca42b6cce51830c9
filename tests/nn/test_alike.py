"""Networks with stacked parameters run with the first one's layers: what differs otherwise is refused."""

from __future__ import annotations

import copy
import types
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from muster.errors import SpecMismatch, UsageError
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


def layers(*tail: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 2), *tail)


def linear(*args: Any, **options: Any) -> nn.Linear:
    return nn.Linear(4, *args or (2,), **options)


DIFFERENCES = {
    "class": (lambda: layers(nn.Tanh()), lambda: layers(nn.ReLU()), "the class of 1: Tanh and ReLU"),
    "number of layers": (layers, lambda: layers(nn.ReLU()), "the class of 1: absent and ReLU"),
    "slope": (
        lambda: layers(nn.LeakyReLU(0.01)),
        lambda: layers(nn.LeakyReLU(0.2)),
        r"repr: \(1\): LeakyReLU\(negative_slope=0.01\) and \(1\): LeakyReLU\(negative_slope=0.2\)",
    ),
    "sizes": (linear, lambda: linear(3), "line 1 of their repr: .*out_features=2.* and .*out_features=3"),
    "bias": (linear, lambda: linear(bias=False), "the tensor bias: .* and absent"),
    "mode": (linear, lambda: linear().eval(), "the mode of the module: train and eval"),
    "mode of a layer": (
        lambda: layers(nn.Dropout()),
        lambda: layers(nn.Dropout().eval()),
        "the mode of 1: train and eval",
    ),
    "frozen": (linear, lambda: linear().requires_grad_(False), "tensor weight: .*grad=True and .*grad=False"),
    "dtype": (linear, lambda: linear().double(), "the tensor weight: .*float32.* and .*float64"),
    "device": (linear, lambda: linear(device="meta"), "the tensor weight: .* on cpu.* and .* on meta"),
    "shape": (lambda: Named("scale", 2), lambda: Named("scale", 1), r"the tensor scale: \[2\].* and \[1\]"),
    "name": (lambda: Named("scale", 2), lambda: Named("factor", 2), r"the tensor scale: \[2\].* and absent"),
    "tied": (lambda: layers(nn.Linear(2, 2), nn.Linear(2, 2)), lambda: tied(), "tensors are tied: .* and .*2.weight"),
    "forward": (linear, lambda: patched(), "the forward of the module: that of its class and its own"),
    "hook": (layers, lambda: hooked_at(None), "the forward hooks of the module: none and .*<lambda>"),
    "hook of a layer": (layers, lambda: hooked_at(0), "the forward hooks of 0: none and .*<lambda>"),
    "order": (
        lambda: nn.Sequential(OrderedDict(a=nn.Linear(4, 4), b=nn.Tanh())),
        lambda: nn.Sequential(OrderedDict(b=nn.Tanh(), a=nn.Linear(4, 4))),
        r"line \d of their repr: \(a\): .* and \(b\): ",
    ),
}


class Named(nn.Module):
    def __init__(self, name: str, size: int) -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.ones(size)))


def tied() -> nn.Module:
    net = layers(nn.Linear(2, 2), nn.Linear(2, 2))
    net[2].weight = net[1].weight
    return net


def hooked_at(index: int | None) -> nn.Module:
    net = layers()
    (net if index is None else net[index]).register_forward_hook(lambda module, args, output: output * 3)
    return net


def patched() -> nn.Module:
    net = linear()
    net.forward = types.MethodType(lambda self, x: x, net)
    return net


@pytest.mark.parametrize(("mine", "its", "message"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_networks_that_differ_are_refused_with_the_first_difference(mine, its, message):
    modules = [mine(), mine(), its()]
    with pytest.raises(SpecMismatch, match=f"modules 0 and 2 differ in .*{message}") as caught:
        MultiAgentNet.from_modules(modules)
    assert "let one function build them all" in str(caught.value)


class Shown(Holds):
    def extra_repr(self) -> str:
        return f"held={self.held}"


def test_addresses_in_the_repr_are_no_difference():
    assert_equals_a_loop([Shown(lambda x: x) for _ in range(3)])
    with pytest.raises(SpecMismatch, match=r"held=1.* and .*held=2"):
        MultiAgentNet.from_modules([Shown(1), Shown(2)])


@pytest.mark.parametrize("layer", [nn.LSTM, nn.MultiheadAttention])
def test_layers_that_hold_lists_and_references_are_alike(layer):
    net = MultiAgentNet.from_modules([layer(4, 2) for _ in range(3)])
    assert all(p.shape[0] == 3 for p in net.parameters())


def times(factor: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


class Refers(nn.Module):
    def __init__(self, refer: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 2), nn.Parameter(torch.ones(2))
        self.register_buffer("shift", torch.zeros(2))
        self.refs = refer(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale + self.shift


REFERENCES = {
    "list": (lambda net: [net.scale], r"'scale' in refs\[0\]"),
    "dict": (lambda net: {"k": net.linear.bias}, r"'linear.bias' in refs\['k'\]"),
    "tuple": (lambda net: (1, (net.shift,)), r"'shift' in refs\[1\]\[0\]"),
    "buffer": (lambda net: net.shift, "'shift' in refs"),
    "TensorDict": (lambda net: TensorDict({"k": net.shift}), r"'shift' in refs\['k'\]"),
    "function": (lambda net: times(net.shift), r"'shift' in refs\.<locals>\.factor"),
    "default": (lambda net: [lambda x, by=net.shift: x * by], r"'shift' in refs\[0\]\.__defaults__\[0\]"),
    "module in a function": (lambda net: lambda x: net.linear(x), r"'scale' in refs\.<locals>\.net\.scale"),
    "method in a function": (
        lambda net: lambda x, forward=net.linear.forward: forward(x) * 2,
        r"'linear.weight' in refs\.__defaults__\[0\]\.weight",
    ),
    "hook": (
        lambda net: net.linear.register_forward_hook(lambda *_: net.shift) and None,
        r"'scale' in linear\._forward_hooks\[\d+\]\.<locals>\.net\.scale",
    ),
}


@pytest.mark.parametrize("n_agents", [1, 2])
@pytest.mark.parametrize(("refer", "message"), REFERENCES.values(), ids=REFERENCES)
def test_references_to_own_tensors_are_refused(refer, message, n_agents):
    with pytest.raises(UsageError, match=f"module 0 refers to its tensor {message} too"):
        MultiAgentNet.from_modules([Refers(refer) for _ in range(n_agents)])


def test_lists_that_hold_themselves_and_functions_that_are_not_whole_yet_are_passed():
    held: list[Any] = [lambda: later]
    held.append(held)
    MultiAgentNet.from_modules([Holds(held) for _ in range(2)])
    later = None


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


def hooked(register: str, index: int | None, hook: Callable[..., Any], **options: bool) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(4, 2), nn.Tanh())
    getattr(net if index is None else net[index], register)(hook, **options)
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
    with pytest.raises(SpecMismatch, match="parametrizations.* and absent"):
        MultiAgentNet.from_modules([modules[0], nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).eval()])


class Equipped(nn.Module):
    """The attributes that ordinary modules keep in addition to their layers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.optimizer = torch.optim.Adam(self.parameters())
        self.td = TensorDict({"b": torch.zeros(2), "a": torch.ones(2)}, [2])
        self.conjugate = torch.ones(2, dtype=torch.complex64).conj()

    def forward(self, x):
        return self.layer(x)


def test_optimizers_tensordicts_and_conjugate_views_are_no_difference():
    modules = [Equipped() for _ in range(2)]
    modules.append(copy.deepcopy(modules[0]))
    x = torch.randn(1, 3, 2)
    y = MultiAgentNet.from_modules(modules)(x)
    torch.testing.assert_close(y[0], torch.stack([module(row) for module, row in zip(modules, x[0], strict=True)]))
