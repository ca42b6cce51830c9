"""Layers called without ``nn.Module.__call__``: nothing that hangs on a layer may be left out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrizations, prune, weight_norm

from muster.nn import MultiAgentConvNet, MultiAgentMLP, MultiAgentNet, stacked

SHARED = pytest.mark.parametrize("share_params", [True, False])


def build(share_params: bool) -> MultiAgentMLP:
    return MultiAgentMLP(5, 2, 3, centralised=False, share_params=share_params, depth=2, num_cells=8)


def plainly(net: MultiAgentMLP, x: Tensor) -> Tensor:
    """The output of a shared net for x, [B, A, 5], by the calls of its layers."""
    for layer in net.net:
        x = layer(x)
    return x


@SHARED
@pytest.mark.parametrize("index", [0, 1])
def test_hooks_of_layers_are_called(share_params, index):
    net, seen = build(share_params), []
    layer = net.net[index]
    layer.register_forward_pre_hook(lambda *_: seen.append("before"))
    layer.register_forward_hook(lambda *_: seen.append("after"))
    layer.register_full_backward_pre_hook(lambda *_: seen.append("backward"))
    layer.register_full_backward_hook(lambda *_: seen.append("done"))
    net(torch.randn(4, 3, 5, requires_grad=True)).sum().backward()
    assert seen == ["before", "after", "backward", "done"]


def test_hooks_of_the_sequence_and_of_all_modules_are_called():
    net, seen = build(share_params=True), []
    own = net.net.register_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    net(torch.randn(4, 3, 5))
    assert seen == ["Sequential"]
    own.remove()
    handle = torch_module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    try:
        net(torch.randn(4, 3, 5))
    finally:
        handle.remove()
    assert seen[1:] == ["Linear", "Tanh", "Linear", "Tanh", "Linear", "Sequential", "MultiAgentMLP"]


def test_layers_with_calls_of_their_own_are_called_so():
    class Doubled(nn.Tanh):
        def __call__(self, x: Tensor) -> Tensor:
            return 2 * super().__call__(x)

    net = build(share_params=True)
    net.net[1] = Doubled()
    net.net[0].forward = lambda x: x[..., :1].expand(-1, 8)
    x = torch.randn(4, 3, 5)
    h = 2 * torch.tanh(x[..., :1].expand(-1, -1, 8))
    torch.testing.assert_close(net(x), net.net[4](net.net[3](net.net[2](h))))


def test_parametrised_pruned_and_replaced_weights_count():
    net = build(share_params=True)
    parametrizations.spectral_norm(net.net[0])
    prune.l1_unstructured(net.net[2], "weight", 0.5)
    bias = torch.full((2,), 7.0)
    del net.net[4].bias
    net.net[4].bias = bias
    net.eval()
    x = torch.randn(4, 3, 5)
    torch.testing.assert_close(net(x), plainly(net, x))


def patched(layer: nn.Module) -> None:
    forward = layer.forward
    layer.forward = lambda x: forward(x) * 2


def pruned(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", 0.5)
    with torch.no_grad():
        layer.weight_orig.add_(1)  # as an optimizer does; only a hook makes the weight of it


def normalized(layer: nn.Module) -> None:
    weight_norm(layer, "weight", dim=0)
    with torch.no_grad():
        layer.weight_g.mul_(2)


CHANGES = {
    "hook": lambda layer: layer.register_forward_hook(lambda module, args, output: output * 2),
    "pre-hook": lambda layer: layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "patched": patched,
    "pruned": pruned,
    "weight norm": normalized,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_was_put_on_stacked_layers_counts_at_any_size_and_in_views(change, images, monkeypatch):
    if images:
        net = MultiAgentConvNet(3, False, False, in_features=2, num_cells=[4], kernel_sizes=3)
    else:
        net = build(share_params=False)
    x = torch.randn(4, 3, 2, 8, 8) if images else torch.randn(4, 3, 5)
    before = net(x)
    change(net.net[0])
    # Layers together come last: they would leave behind what their hooks make of the parameters.
    views = torch.stack([net.agent(index)(x[:, index]) for index in range(3)], 1)
    with monkeypatch.context() as patch:
        patch.setattr(stacked, "LOOP_ABOVE_HIDDEN", -1)
        patch.setattr(stacked, "LOOP_ABOVE_PIXELS", -1)
        looped = net(x)
    together = net(x)
    torch.testing.assert_close(looped, together)
    torch.testing.assert_close(views, together)
    assert not torch.allclose(together, before)


def test_hooks_of_all_modules_are_called_at_any_size_and_in_views(monkeypatch):
    net, seen = build(share_params=False), []
    layers = ["StackedLinear", "Tanh", "StackedLinear", "Tanh", "StackedLinear", "StackedSequential"]
    monkeypatch.setattr(stacked, "LOOP_ABOVE_HIDDEN", -1)
    handle = torch_module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    try:
        net(torch.randn(4, 3, 5))
        net.agent(1)(torch.randn(4, 5))
    finally:
        handle.remove()
    assert seen == [*layers, "MultiAgentMLP", *layers]


def test_backward_hooks_of_all_modules_are_called_for_networks_of_any_layers():
    net, seen = MultiAgentNet.from_modules([nn.LayerNorm(4) for _ in range(3)]), []
    handle = torch_module.register_module_full_backward_hook(lambda module, *_: seen.append(type(module).__name__))
    try:
        net(torch.randn(5, 3, 4, requires_grad=True)).sum().backward()
    finally:
        handle.remove()
    assert seen.count("LayerNorm") == 3


@SHARED
def test_autocast_and_tracing(share_params):
    net, x = build(share_params), torch.randn(2, 3, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert net(x).dtype == torch.bfloat16
    torch.testing.assert_close(torch.export.export(net, (x,)).module()(x), net(x))
