"""MultiAgentMLP and MultiAgentConvNet against single networks and against TorchRL's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torchrl.modules
from torch import nn

from muster.errors import SpecMismatch
from muster.nn import MultiAgentConvNet, MultiAgentMLP, MultiAgentNet, functionalize, stacked

FLAGS = pytest.mark.parametrize(("centralised", "share_params"), [(c, s) for c in (False, True) for s in (False, True)])
BATCHES = pytest.mark.parametrize("batch", [(), (1,), (6,), (2, 3), (0,), (2, 0)])


def mlp(centralised: bool, share_params: bool, **options: object) -> MultiAgentMLP:
    options = {"depth": 2, "num_cells": 8, **options}
    return MultiAgentMLP(5, 2, 3, centralised=centralised, share_params=share_params, **options)


def conv(centralised: bool, share_params: bool) -> MultiAgentConvNet:
    return MultiAgentConvNet(3, centralised, share_params, in_features=2, num_cells=[4, 6], kernel_sizes=3)


def one_by_one(net: MultiAgentNet, x: torch.Tensor) -> torch.Tensor:
    """The output of a loop over the single networks for x, [B, A, *F]."""
    modules = net.to_modules() * (net.n_agents if net.share_params else 1)
    inputs = [x.flatten(1, 2)] * net.n_agents if net.centralised else x.unbind(1)
    return torch.stack([module(one) for module, one in zip(modules, inputs, strict=True)], 1)


@pytest.fixture(params=["together", "looped"])
def way(request, monkeypatch):
    """Both ways to compute unshared networks, whatever the size."""
    threshold = -1 if request.param == "looped" else 2**62
    monkeypatch.setattr(stacked, "LOOP_ABOVE_HIDDEN", threshold)
    monkeypatch.setattr(stacked, "LOOP_ABOVE_PIXELS", threshold)


@pytest.mark.usefixtures("way")
@FLAGS
@pytest.mark.parametrize("images", [False, True])
def test_outputs_and_gradients_equal_a_loop_of_single_networks(centralised, share_params, images):
    net = (conv if images else mlp)(centralised, share_params)
    x = torch.randn(4, 3, 2, 12, 12) if images else torch.randn(4, 3, 5)
    x_net, x_loop = x.clone().requires_grad_(), x.clone().requires_grad_()
    modules = net.to_modules()
    y = net(x_net)
    inputs = [x_loop.flatten(1, 2)] * 3 if centralised else x_loop.unbind(1)
    singles = modules * (3 if share_params else 1)
    expected = torch.stack([module(one) for module, one in zip(singles, inputs, strict=True)], 1)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    y.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x_net.grad, x_loop.grad, rtol=1e-4, atol=1e-5)
    for name, parameter in net.net.named_parameters():
        grads = [dict(module.named_parameters())[name].grad for module in modules]
        linear = not share_params and parameter.ndim == 3  # stacked as [A, in, out]
        expected_grad = grads[0] if share_params else torch.stack([g.t() if linear else g for g in grads])
        torch.testing.assert_close(parameter.grad, expected_grad, rtol=1e-4, atol=1e-4)


@BATCHES
@FLAGS
def test_mlp_equals_torchrls_from_the_same_seed(centralised, share_params, batch):
    torch.manual_seed(3)
    ours = mlp(centralised, share_params)
    torch.manual_seed(3)
    theirs = torchrl.modules.MultiAgentMLP(
        5, 2, 3, centralised=centralised, share_params=share_params, depth=2, num_cells=8
    )
    x = torch.randn(*batch, 3, 5)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-6)


def test_parameters_are_stacked_with_the_agents_in_front():
    shapes = {name: tuple(p.shape) for name, p in mlp(False, False).named_parameters()}
    assert shapes == {
        "net.0.weight": (3, 5, 8),
        "net.0.bias": (3, 8),
        "net.2.weight": (3, 8, 8),
        "net.2.bias": (3, 8),
        "net.4.weight": (3, 8, 2),
        "net.4.bias": (3, 2),
    }
    assert tuple(conv(True, False).net[0].weight.shape) == (3, 4, 6, 3, 3)


def test_both_spellings_of_centralised():
    assert MultiAgentMLP(5, 2, 3, centralized=True, share_params=True).centralised
    assert not MultiAgentConvNet(3, centralized=False, share_params=True, in_features=2).centralised
    with pytest.raises(TypeError, match="give one of centralised and centralized"):
        MultiAgentMLP(5, 2, 3, share_params=True)
    with pytest.raises(TypeError, match="give one of centralised and centralized"):
        MultiAgentMLP(5, 2, 3, share_params=True, centralised=True, centralized=False)


@pytest.mark.parametrize("share_params", [False, True])
@pytest.mark.parametrize("centralised", [False, True])
def test_inputs_of_another_shape_are_named(centralised, share_params):
    net = mlp(centralised, share_params)
    with pytest.raises(SpecMismatch, match=r"\[4, 2, 5\]; expected 3 agents at axis -2"):
        net(torch.randn(4, 2, 5))
    with pytest.raises(SpecMismatch, match=r"\[4, 3, 6\]; expected size 5 for each agent at axis -1"):
        net(torch.randn(4, 3, 6))
    with pytest.raises(SpecMismatch, match=r"\[5\]; expected 3 agents"):
        net(torch.randn(5))
    images = conv(centralised, share_params)
    with pytest.raises(SpecMismatch, match="size 2 for each agent at axis -3"):
        images(torch.randn(4, 3, 6, 12, 12))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_cells": 8, "depth": None}, "give depth"),
        ({"num_cells": [8, 8], "depth": 3}, r"num_cells=\[8, 8\] has 2 entries for the 3 layers"),
    ],
)
def test_sizes_of_hidden_layers_that_contradict(options, message):
    with pytest.raises(ValueError, match=message):
        mlp(False, False, **options)


def test_sizes_are_asked_for():
    with pytest.raises(ValueError, match="n_agent_inputs=0 is not a positive integer"):
        MultiAgentMLP(0, 2, 3, centralised=False, share_params=True)
    with pytest.raises(ValueError, match="in_features=0 is not a positive integer"):
        MultiAgentConvNet(3, False, True, in_features=0)
    with pytest.raises(ValueError, match="n_agents='3' is not a positive integer"):
        MultiAgentMLP(5, 2, "3", centralised=False, share_params=True)
    assert MultiAgentMLP(5, np.int64(2), 3, centralised=False, share_params=True)(torch.zeros(3, 5)).shape == (3, 2)
    with pytest.raises(ValueError, match="n_agents=0"):
        MultiAgentMLP(5, 2, 0, centralised=False, share_params=True)
    with pytest.raises(TypeError, match="share_params is missing"):
        MultiAgentConvNet(3, False, in_features=2)
    with pytest.raises(ValueError, match=r"strides=\[1, 2\] has 2 entries for the 3 layers"):
        MultiAgentConvNet(3, False, True, in_features=2, strides=[1, 2])
    with pytest.raises(ValueError, match="at least one"):
        MultiAgentConvNet(3, False, True, in_features=2, num_cells=[])


def test_layers_with_sizes_of_their_own():
    options = {"kernel_sizes": [3, (2, 3)], "strides": [1, 2], "paddings": [(1, 0), 0]}
    net = MultiAgentConvNet(2, False, False, in_features=2, num_cells=[3, 4], **options)
    x = torch.randn(3, 2, 2, 9, 8)
    torch.testing.assert_close(net(x), one_by_one(net, x), rtol=1e-5, atol=1e-6)


# By torch.func.jacfwd; its kind depends on torch's release.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
@FLAGS
def test_derivatives_and_vmap_of_convolutions(centralised, share_params):
    net = MultiAgentConvNet(2, centralised, share_params, in_features=2, num_cells=[3], kernel_sizes=3).double()
    call, params = functionalize(net)
    x = torch.randn(3, 2, 2, 6, 6, dtype=torch.float64)

    def squares(params: object, x: torch.Tensor) -> torch.Tensor:
        return call(params, x).square().sum()

    torch.testing.assert_close(torch.vmap(net)(x), net(x))
    grads = torch.vmap(torch.func.grad(squares), (None, 0))(params, x)
    for index, row in enumerate(x):
        expected = torch.autograd.grad(squares(params, row), list(params.values()))
        torch.testing.assert_close([grad[index] for grad in grads.values()], list(expected))
    torch.testing.assert_close(torch.func.jacfwd(net)(x[0]), torch.autograd.functional.jacobian(net, x[0]))
    hessian = torch.func.hessian(squares, argnums=1)(params, x[0])
    torch.testing.assert_close(hessian, torch.autograd.functional.hessian(lambda row: squares(params, row), x[0]))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.parametrize("centralised", [True, False])
def test_images_come_out_contiguous(centralised, recording):
    modules = [nn.Sequential(nn.Conv2d(6 if centralised else 2, 4, 3), nn.ReLU()) for _ in range(3)]
    net = MultiAgentNet.from_modules(modules, centralised=centralised, agent_dim=-4)
    with torch.set_grad_enabled(recording):
        assert net(torch.randn(5, 3, 2, 8, 8)).is_contiguous()
