"""Every argument of TorchRL's MultiAgentMLP and MultiAgentConvNet, and their state dicts, against the originals."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import muster.nn
from muster.errors import ConfigError, SpecMismatch
from muster.nn import MultiAgentConvNet, MultiAgentMLP

modules = pytest.importorskip("torchrl.modules")

FLAGS = pytest.mark.parametrize(("centralised", "share_params"), [(False, False), (True, False), (True, True)])
SHARED = pytest.mark.parametrize("share_params", [False, True])
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torchrl")

MLPS: dict[str, dict[str, Any]] = {
    "a norm": {"depth": 2, "num_cells": 8, "norm_class": nn.LayerNorm, "norm_kwargs": {"normalized_shape": 8}},
    "a norm for each layer": {
        "num_cells": [8, 6],
        "norm_class": nn.LayerNorm,
        "norm_kwargs": [{"normalized_shape": 8}, {"normalized_shape": 6}],
        "activation_class": nn.LeakyReLU,
        "activation_kwargs": [{"negative_slope": 0.3}, {"negative_slope": 0.1}],
    },
    "dropout": {"depth": 1, "dropout": 0.5},
    "no last bias": {"depth": 1, "bias_last_layer": False},
    "a single last bias": {"depth": 1, "single_bias_last_layer": True},
    "layers without bias": {"depth": 1, "layer_kwargs": {"bias": False}},
    "layers of their own": {"depth": 1, "layer_kwargs": [{"bias": False}, {}]},
    "an activated end": {"depth": 1, "activate_last_layer": True, "activation_class": nn.ReLU},
    "outputs of a shape": {"depth": 1, "n_agent_outputs": (2, 3)},
    "a function": {"depth": 1, "activation_class": lambda: torch.tanh},
    "noisy layers": {"depth": 1, "layer_class": modules.NoisyLinear},
    "no TensorDict": {"depth": 1, "use_td_params": False},
}
GROUPS, POOLED = [{"num_groups": 2, "num_channels": 4}] * 2, {"output_size": 2}
CONVS: dict[str, dict[str, Any]] = {
    "numbers and depth": {"num_cells": 4, "depth": 2, "kernel_sizes": 3},
    "kernels give the depth": {"num_cells": 4, "kernel_sizes": [3, 3], "strides": 1, "paddings": [1, 0]},
    "a norm": {"num_cells": [4, 4], "kernel_sizes": 3, "norm_class": nn.GroupNorm, "norm_kwargs": GROUPS},
    "no aggregator": {"num_cells": [4], "kernel_sizes": 3, "aggregator_class": None},
    "another aggregator": {
        "num_cells": [4],
        "kernel_sizes": 3,
        "aggregator_class": nn.AdaptiveAvgPool2d,
        "aggregator_kwargs": POOLED,
    },
    "one pixel": {"num_cells": [4], "kernel_sizes": 9, "aggregator_class": None, "squeeze_output": True},
    "no TensorDict": {"num_cells": [4], "kernel_sizes": 3, "use_td_params": False},
}


def mlps(options: dict[str, Any], centralised: bool, share_params: bool, n_inputs: int | None = 5) -> list[Any]:
    options = {"n_agent_outputs": 2, "n_agents": 3, "centralized": centralised, "share_params": share_params, **options}
    return made([MultiAgentMLP, modules.MultiAgentMLP], {"n_agent_inputs": n_inputs, **options})


def convs(options: dict[str, Any], centralised: bool, share_params: bool, n_inputs: int | None = 2) -> list[Any]:
    options = {"n_agents": 3, "centralized": centralised, "share_params": share_params, **options}
    return made([MultiAgentConvNet, modules.MultiAgentConvNet], {"in_features": n_inputs, **options})


def made(classes: list[Any], options: dict[str, Any]) -> list[Any]:
    nets = []
    for cls in classes:
        torch.manual_seed(0)
        nets.append(cls(**options).eval())
    return nets


CASES = [(mlps, MLPS, name) for name in MLPS] + [(convs, CONVS, name) for name in CONVS]
EACH = pytest.mark.parametrize(
    ("nets", "options"), [(make, all_of[name]) for make, all_of, name in CASES], ids=[name for _, _, name in CASES]
)


def inputs(nets: Any) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 3, 5) if nets is mlps else torch.randn(4, 3, 2, 9, 9)


@EACH
@SHARED
def test_outputs_equal_torchrls_from_the_same_seed(nets: Any, options: dict[str, Any], share_params: bool):
    ours, theirs = nets(options, not share_params, share_params)
    x = inputs(nets)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-6)


@EACH
@SHARED
def test_weights_of_torchrls_can_be_loaded(nets: Any, options: dict[str, Any], share_params: bool):
    ours, theirs = nets(options, False, share_params)
    x = inputs(nets)
    with torch.no_grad():
        for tensor in theirs.state_dict().values():
            tensor.add_(0.1)
    whole = nn.Sequential(ours)
    whole.load_state_dict({f"0.{name}": tensor for name, tensor in theirs.state_dict().items()})
    torch.testing.assert_close(whole(x), theirs(x), rtol=1e-5, atol=1e-6)
    ours.load_state_dict(ours.state_dict())


LAZY = [
    (mlps, {"depth": 1}),
    (mlps, MLPS["a norm"]),
    (mlps, MLPS["noisy layers"]),
    (mlps, {}),
    (convs, {"num_cells": [4, 4], "kernel_sizes": 3}),
]


@pytest.mark.parametrize(("nets", "options"), LAZY)
@FLAGS
def test_the_first_input_gives_the_size(nets: Any, options: dict[str, Any], centralised: bool, share_params: bool):
    lazy, _ = nets(options, centralised, share_params, None)
    known, theirs = nets(options, centralised, share_params)
    x = inputs(nets)
    parameters = dict(lazy.named_parameters())
    others = [copy.deepcopy(lazy), pickle.loads(pickle.dumps(lazy)), copy.deepcopy(lazy), copy.deepcopy(lazy).double()]
    for net in [lazy, *others[:2]]:
        assert net(x).shape == known(x).shape
        assert {name: t.shape for name, t in net.state_dict().items()} == {
            n: t.shape for n, t in known.state_dict().items()
        }
        assert repr(net) == repr(known)
        assert net(x).equal(net(x))
    assert all(dict(lazy.named_parameters())[name] is one for name, one in parameters.items())
    with pytest.raises(SpecMismatch, match="got an input of shape"):
        lazy(torch.cat([x, x], -1 if nets is mlps else -3))
    others[2].load_state_dict(theirs.state_dict())
    torch.testing.assert_close(others[2](x), theirs(x), rtol=1e-5, atol=1e-6)
    assert others[3](x.double()).dtype == torch.float64
    with torch.no_grad():
        assert all(parameter.abs().max() < 9 for parameter in lazy.parameters())


def test_a_lazy_network_trains_in_an_optimizer_that_already_has_it():
    lazy, _ = mlps({"depth": 1}, False, False, None)
    optimizer = torch.optim.SGD(lazy.parameters(), 0.1)
    x = inputs(mlps)
    before = lazy(x).detach()
    lazy(x).square().sum().backward()
    optimizer.step()
    assert not lazy(x).equal(before)
    assert lazy(x[..., :2], x[..., 2:]).equal(lazy(x))


@SHARED
def test_dropout_of_agents_is_drawn_as_asked(share_params: bool):
    options = {"depth": 1, "num_cells": 64, "dropout": 0.5, "vmap_randomness": "same"}
    net = MultiAgentMLP(5, 2, 3, centralised=True, share_params=share_params, **options)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(0.1)
    x = torch.ones(2, 3, 5)
    y = net(x)
    assert y[:, 0].equal(y[:, 1])
    if not share_params:
        refusing = MultiAgentMLP(
            5, 2, 3, centralised=True, share_params=False, **{**options, "vmap_randomness": "error"}
        )
        with pytest.raises(RuntimeError, match="randomness"):
            refusing(x)


@pytest.mark.parametrize("name", ["MultiAgentMLP", "MultiAgentConvNet"])
def test_all_arguments_of_torchrls_are_taken(name: str):
    ours, theirs = getattr(muster.nn, name), getattr(modules, name)
    inner = {"MultiAgentMLP": modules.MLP, "MultiAgentConvNet": modules.ConvNet}[name]
    wanted = {"vmap_randomness", "centralised"} | {
        parameter
        for cls in (theirs, inner)
        for parameter, its in inspect.signature(cls).parameters.items()
        if its.kind is not its.VAR_KEYWORD and not (cls is inner and parameter in ("in_features", "out_features"))
    }
    assert wanted <= inspect.signature(ours).parameters.keys()


def test_options_that_do_not_fit_are_named():
    with pytest.raises(ConfigError, match="norm_kwargs has 2 entries for 1 layers"):
        MultiAgentMLP(
            5, 2, 3, centralised=False, share_params=True, depth=1, norm_class=nn.LayerNorm, norm_kwargs=[{}, {}]
        )
    with pytest.raises(ConfigError, match='expected "different", "same" or "error"'):
        MultiAgentMLP(5, 2, 3, centralised=False, share_params=True, vmap_randomness="often")
    with pytest.raises(ConfigError, match="give depth, their number, too"):
        MultiAgentConvNet(3, False, True, in_features=2, num_cells=4)
    with pytest.raises(ConfigError, match="n_agent_outputs=0 is not a positive integer"):
        MultiAgentMLP(5, (2, 0), 3, centralised=False, share_params=True)
    net, _ = convs({**CONVS["one pixel"], "kernel_sizes": 3}, False, True)
    with pytest.raises(SpecMismatch, match="needs images of one pixel"):
        net(torch.zeros(1, 3, 2, 9, 9))
