"""Multi-agent networks copy, pickle, share, move and compile as any module does."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from muster.nn import MultiAgentMLP, MultiAgentNet, TargetParams, functionalize

X = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))


def any_layers() -> MultiAgentNet:
    return MultiAgentNet.from_modules([nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8)) for _ in range(3)])


NETS = {
    "unshared": lambda: MultiAgentMLP(5, 2, 3, centralised=False, share_params=False, depth=1),
    "centralised": lambda: MultiAgentMLP(5, 2, 3, centralised=True, share_params=False, depth=1),
    "shared": lambda: MultiAgentMLP(5, 2, 3, centralised=True, share_params=True, depth=1),
    "any layers": any_layers,
}


@pytest.fixture(params=NETS.values(), ids=NETS)
def net(request):
    return request.param()


def save_and_load(net: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("through", [copy.deepcopy, lambda n: pickle.loads(pickle.dumps(n)), save_and_load])
def test_copies_act_alike_and_are_apart(net, through):
    net(X)
    other = through(net)
    torch.testing.assert_close(other(X), net(X))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert net(X).abs().sum() > 0


def test_state_dict_round_trip(net):
    other = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    other.load_state_dict(net.state_dict())
    torch.testing.assert_close(other(X), net(X))
    assert all(name.startswith("net.") for name in net.state_dict())


def test_to_meta_and_back(net):
    net.to("meta")
    assert net(X.to("meta")).shape[:2] == (4, 3)
    net.to_empty(device="cpu")
    net.reset_parameters()
    assert torch.isfinite(net(X)).all()


def test_built_on_meta_and_materialised():
    net = MultiAgentMLP(5, 2, 3, centralised=False, share_params=False, depth=1, device="meta")
    source = NETS["unshared"]()
    net.load_state_dict(source.state_dict(), assign=True)
    torch.testing.assert_close(net(X), source(X))


def test_compiled_equals_eager_with_gradients(net):
    torch.compiler.reset()
    eager = copy.deepcopy(net)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    y, expected = compiled(X), eager(X)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    y.square().sum().backward()
    expected.square().sum().backward()
    for mine, other in zip(net.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_functional_calls_and_targets(net):
    call, params = functionalize(net)
    torch.testing.assert_close(call({name: p.detach() for name, p in params.items()}, X), net(X))
    target = TargetParams(net)
    before = net(X).detach()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1.0)
    torch.testing.assert_close(target(X), before)


# Raised by torch.func.jvp itself; its kind depends on torch's release.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")
def test_double_backward_and_forward_mode(net):
    x = X.clone().requires_grad_()
    (grad,) = torch.autograd.grad(net(x).tanh().sum(), x, create_graph=True)
    grad.square().sum().backward()
    assert x.grad is not None
    _, tangent = torch.func.jvp(net, (X,), (torch.ones_like(X),))
    assert tangent.shape == net(X).shape
