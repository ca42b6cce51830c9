"""Networks with stacked parameters run with the first one's layers: whatever else differs between them is refused."""

from __future__ import annotations

import copy
import random
import re
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial, wraps
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from muster.errors import CannotTravel, SpecMismatch, UsageError
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


def with_attribute(scale: float, wrapped: bool) -> Callable[[Tensor], Tensor]:
    def act(x: Tensor) -> Tensor:
        return x * act.scale

    act.scale = scale
    return wraps(act)(lambda x: x) if wrapped else act


class CopiesItself:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError("no")

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesItself:
        return CopiesItself(self.scale)


REFERENTS = [Options(1.0), Options(2.0)]


HELD = {
    "list": ([1.0], [2.0], r"held\[0\]: 1.0 and 2.0"),
    "length": ([1], [1, 2], r"held: \[1\] and \[1, 2\]"),
    "dict": ({"k": 1}, {"k": 2}, r"held\['k'\]: 1 and 2"),
    "order": ({"k": 1, "l": 2}, {"l": 2, "k": 1}, "held: {'k': 1, 'l': 2} and {'l': 2, 'k': 1}"),
    "dict by objects": ({torch.float32: 1}, {torch.float64: 1}, r"held at 0\[0\]"),
    "tensors": (
        (torch.ones(2),),
        (torch.zeros(2),),
        r"held\[0\] \(neither parameter nor buffer\): tensor.* and tensor",
    ),
    "array": (np.arange(3), np.arange(3) + 1, "held"),
    "type": (1, 1.0, "held: 1 and 1.0"),
    "zeros": (0.0, -0.0, "held: 0.0 and -0.0"),
    "complex zeros": (0j, -0j, "held: 0j and "),
    "zeros in a tensor": (torch.zeros(1), -torch.zeros(1), "held .neither parameter nor buffer"),
    "constant": (lambda x: x + 0.0, lambda x: x + -0.0, r"held\.__code__\.co_consts\[1\]: 0.0 and -0.0"),
    "pattern": (re.compile("a+"), re.compile("b+"), r"held.*: a\+ and b\+"),
    "weak reference": (*map(weakref.ref, REFERENTS), r"held \(which cannot be looked into\): <weakref.* and <weakref"),
    "copies itself": (CopiesItself(1.0), CopiesItself(2.0), r"held \(which cannot be looked into\): .*CopiesItself"),
    "closure": (times(1.0), times(2.0), r"held\.<locals>\.factor: 1.0 and 2.0"),
    "attribute": (*(with_attribute(s, False) for s in (1.0, 2.0)), r"held\.<locals>\.act\.scale: 1.0 and 2.0"),
    "wrapped attribute": (*(with_attribute(s, True) for s in (1.0, 2.0)), r"held\..*scale: 1.0 and 2.0"),
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
        lambda: [float("nan"), complex("nan"), np.float64("nan")],
        lambda: torch.tensor([float("nan"), -0.0]),
        lambda: re.compile("a+"),
        lambda: weakref.ref(REFERENTS[0]),
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


class InTurn(nn.Module):
    def __init__(self, parts: nn.ModuleDict | nn.ParameterDict) -> None:
        super().__init__()
        self.linear, self.parts = nn.Linear(4, 4), parts

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        for part in self.parts.values():
            x = part(x) if isinstance(part, nn.Module) else x * part + 1
        return x


PARTS = {
    "sequential": lambda parts: nn.Sequential(OrderedDict(parts)),
    "module dict": lambda parts: InTurn(nn.ModuleDict(parts)),
    "parameter dict": lambda parts: InTurn(nn.ParameterDict([(name, torch.ones(4)) for name, _ in parts])),
}


@pytest.mark.parametrize("build", PARTS.values(), ids=PARTS)
def test_parts_in_another_order_are_refused(build):
    parts = [("a", nn.Linear(4, 4)), ("b", nn.Tanh())]
    with pytest.raises(SpecMismatch, match=r"the order of their parts: .*a and .*b|parts._keys: {'a'.* and {'b'"):
        MultiAgentNet.from_modules([build(parts), build([("b", nn.Tanh()), ("a", nn.Linear(4, 4))])])


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
    "object": (lambda net: Options(net.scale), r"'scale' in refs\.scale"),
    "closure": (lambda net: times(net.shift), r"'shift' in refs\.<locals>\.factor"),
}


@pytest.mark.parametrize("n_agents", [1, 2])
@pytest.mark.parametrize(("refer", "message"), REFERENCES.values(), ids=REFERENCES)
def test_references_to_own_tensors_are_refused(refer, message, n_agents):
    with pytest.raises(UsageError, match=f"module 0 refers to its tensor {message} too"):
        MultiAgentNet.from_modules([Refers(refer) for _ in range(n_agents)])


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


@pytest.mark.parametrize("where", ["", "0."])
def test_hooks_of_one_agent_are_refused(where):
    modules = [nn.Sequential(nn.Linear(4, 2), nn.Tanh()) for _ in range(3)]
    (modules[1][0] if where else modules[1]).register_forward_hook(HOOKS["register_forward_hook"])
    with pytest.raises(SpecMismatch, match=rf"modules 0 and 1 differ in {where}_forward_hooks: \[\] and "):
        MultiAgentNet.from_modules(modules)


@pytest.mark.parametrize("register", HOOKS)
def test_a_hook_that_one_agent_calls_with_keywords_is_refused(register):
    def hook(*args: Any) -> None: ...

    modules = [hooked(register, 0, hook, with_kwargs=with_kwargs) for with_kwargs in (False, True)]
    with pytest.raises(SpecMismatch, match=r"0\._forward\w*hooks_with_kwargs\[0\]: False and True"):
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


class Equipped(nn.Module):
    """What ordinary modules keep beside their layers."""

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
