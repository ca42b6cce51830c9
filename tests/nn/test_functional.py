"""functionalize: calls with other parameters, the module untouched."""

from __future__ import annotations

import copy
import pickle
import threading
import types
from collections import UserDict

import pytest
import torch
import torchrl.modules
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictParams
from torch import Tensor, nn

from muster.errors import UsageError
from muster.nn import functionalize


def small_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def snapshot(module: nn.Module) -> dict[str, tuple[int, Tensor]]:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: (id(tensor), tensor.detach().clone()) for name, tensor in tensors.items()}


def assert_untouched(module: nn.Module, before: dict[str, tuple[int, Tensor]]) -> None:
    after = snapshot(module)
    assert after.keys() == before.keys()
    for name, (identity, value) in before.items():
        assert after[name][0] == identity
        torch.testing.assert_close(after[name][1], value, rtol=0, atol=0)


def test_params_are_the_modules_own_and_gradients_reach_it():
    net = small_net()
    call, params = functionalize(net)
    assert {name: id(p) for name, p in params.items()} == {name: id(p) for name, p in net.named_parameters()}
    call(params, torch.ones(5, 3)).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_other_params_give_the_output_of_a_module_with_them():
    net, other = small_net(), small_net()
    call, _ = functionalize(net)
    before = snapshot(net)
    x = torch.randn(5, 3)
    torch.testing.assert_close(call(dict(other.named_parameters()), x), other(x))
    assert_untouched(net, before)


def test_restored_when_the_module_raises():
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise ZeroDivisionError("in the module")

    net = Fails(3, 2)
    before = snapshot(net)
    call, params = functionalize(net)
    with pytest.raises(ZeroDivisionError, match="in the module"):
        call({name: p * 2 for name, p in params.items()}, torch.ones(3))
    assert_untouched(net, before)
    with pytest.raises(ZeroDivisionError):  # and it can be called again
        call(params, torch.ones(3))


def test_a_misspelt_name_is_refused_and_a_missing_one_is_the_modules_own():
    net = small_net()
    call, params = functionalize(net)
    with pytest.raises(UsageError, match=r"no tensor named '0\.weights'; did you mean '0\.weight'"):
        call({"0.weights": params["0.weight"]}, torch.ones(3))
    torch.testing.assert_close(call({}, torch.ones(3)), net(torch.ones(3)))


def test_tied_parameters_stay_tied():
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3, bias=False))
    net[2].weight = net[0].weight
    call, params = functionalize(net)
    assert list(params) == ["0.weight"]
    doubled = {"0.weight": params["0.weight"].detach() * 2}
    x = torch.randn(4, 3)
    expected = torch.tanh(x @ doubled["0.weight"].t()) @ doubled["0.weight"].t()
    torch.testing.assert_close(call(doubled, x), expected)
    assert net[2].weight is net[0].weight


class Twice(nn.Module):
    """One encoder that two heads use."""

    def __init__(self) -> None:
        super().__init__()
        encoder = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.actor = nn.Sequential(encoder, nn.Linear(4, 2))
        self.critic = nn.Sequential(encoder, nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.actor(x), self.critic(x)], -1)


def test_a_module_with_two_paths_gets_its_tensors_back():
    net = Twice()
    call, params = functionalize(net)
    before = snapshot(net)
    copies = {name: p.detach().clone() for name, p in params.items()}
    x = torch.randn(5, 3)
    y = call(copies, x)
    assert_untouched(net, before)
    assert copies["actor.0.1.num_batches_tracked"] == 2
    torch.testing.assert_close(y, net(x))
    no_weight = {"critic.0.0.weight": torch.zeros(4, 3)}  # by its other name
    torch.testing.assert_close(call(no_weight, x), call(no_weight, -x))
    net(x).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_a_module_with_two_paths_under_vmap_grad_and_compile():
    torch.compiler.reset()
    net = Twice().eval()
    call, params = functionalize(net)
    x = torch.randn(5, 3)
    stacked = {name: torch.stack([p.detach(), p.detach() * 2]) for name, p in params.items()}
    outputs = torch.vmap(call, (0, None))(stacked, x)
    torch.testing.assert_close(outputs[1], call({name: p[1] for name, p in stacked.items()}, x))
    trainable = {name: p for name, p in params.items() if p.requires_grad}
    grads = torch.func.grad(lambda p: call(p, x).square().sum())(trainable)
    net(x).square().sum().backward()
    torch.testing.assert_close(grads, {name: p.grad for name, p in trainable.items()})
    compiled = torch.compile(lambda p, x: call(p, x), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(stacked | params, x), net(x))


def test_two_tensors_for_one_are_refused():
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    net.append(net[0])
    call, params = functionalize(net)
    call({"0.weight": params["0.weight"], "2.weight": params["0.weight"]}, torch.ones(3))
    with pytest.raises(UsageError, match=r"\['0\.weight', '2\.weight'\] are names of one tensor of Sequential"):
        call({"0.weight": torch.ones(3, 3), "2.weight": torch.zeros(3, 3)}, torch.ones(3))


@pytest.mark.parametrize("through", [copy.deepcopy, lambda call: pickle.loads(pickle.dumps(call))])
def test_a_copied_call_has_a_module_of_its_own(through):
    net = small_net()
    call, params = functionalize(net)
    x = torch.randn(5, 3)
    expected = net(x).detach()
    other = through(call)
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    torch.testing.assert_close(other({}, x), expected)
    assert other(params, x).abs().sum() == 0


class Counts(nn.Module):
    def __init__(self, *other_names: str) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        for name in other_names:
            self.register_buffer(name, self.calls)

    def forward(self, x: Tensor) -> Tensor:
        name = list(self._buffers)[-1]
        setattr(self, name, getattr(self, name) + 1)
        return x


@pytest.mark.parametrize("other_names", [(), ("a", "b")])
@pytest.mark.parametrize("mapping", [dict, UserDict])
def test_a_buffer_that_the_module_replaces_ends_up_in_params(mapping, other_names):
    net = Counts(*other_names)
    call, params = functionalize(net)
    mine = mapping(params)
    call(mine, torch.ones(1))
    call(mine, torch.ones(1))
    assert mine["calls"] == 2
    assert net.calls == 0


def test_a_mapping_that_cannot_take_a_replaced_buffer_is_refused():
    call, params = functionalize(Counts())
    with pytest.raises(UsageError, match=r"Counts replaced its buffers \['calls'\], and a mappingproxy cannot take"):
        call(types.MappingProxyType(params), torch.ones(1))
    net = small_net()
    call, params = functionalize(net)
    torch.testing.assert_close(call(types.MappingProxyType(params), torch.ones(3)), net(torch.ones(3)))


def test_recurrent_layers_see_the_given_weights_and_get_theirs_back():
    net, other = nn.GRU(3, 4), nn.GRU(3, 4)
    call, _ = functionalize(net)
    x = torch.randn(2, 5, 3)
    expected = net(x)[0].detach()
    torch.testing.assert_close(call(dict(other.named_parameters()), x)[0], other(x)[0])
    torch.testing.assert_close(net(x)[0], expected)


def test_tensordict_modules_and_keyword_arguments():
    policy = TensorDictModule(nn.Linear(3, 2), in_keys=["observation"], out_keys=["action"])
    call, params = functionalize(policy)
    zeros = {name: torch.zeros_like(p) for name, p in params.items()}
    out = call(zeros, TensorDict({"observation": torch.ones(4, 3)}, [4]))
    assert out["action"].abs().sum() == 0
    call, params = functionalize(nn.Linear(3, 2))
    assert call(params, input=torch.ones(3)).shape == (2,)


class Blocks(nn.Linear):
    """Waits inside forward until the test lets it go on."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.entered, self.go_on = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.entered.set()
        assert self.go_on.wait(30)
        return super().forward(x)


def test_a_second_thread_gets_an_error_until_the_first_call_ends():
    net = Blocks()
    whole = nn.Sequential(net)
    call, params = functionalize(net)
    call_whole, params_whole = functionalize(whole)  # shares the module that is swapped
    results: list[Tensor] = []
    thread = threading.Thread(target=lambda: results.append(call(params, torch.ones(3))))
    thread.start()
    try:
        assert net.entered.wait(30)
        with pytest.raises(UsageError, match="one thread at a time"):
            call(params, torch.ones(3))
        with pytest.raises(UsageError, match="one thread at a time"):
            call_whole(params_whole, torch.ones(3))
    finally:
        net.go_on.set()
        thread.join(30)
    torch.testing.assert_close(call(params, torch.ones(3)), results[0])


def test_the_same_thread_may_call_within_a_call():
    inner = nn.Linear(3, 3)
    call, params = functionalize(inner)
    zeros = {name: torch.zeros_like(p) for name, p in params.items()}
    x = torch.randn(3)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return call(zeros, x), self.inner(x)

    outer_call, outer_params = functionalize(Outer())
    twos = {name: torch.full_like(p, 2.0) for name, p in outer_params.items()}
    with_zeros, with_twos = outer_call(twos, x)
    assert with_zeros.abs().sum() == 0
    torch.testing.assert_close(with_twos, x.sum() * 2 + torch.full((3,), 2.0))


def test_what_is_not_a_module_and_lazy_modules_are_refused():
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got function"):
        functionalize(lambda x: x)
    with pytest.raises(UsageError, match="lazy"):
        functionalize(nn.LazyLinear(2))


@pytest.mark.parametrize("use_td_params", [True, False])
@pytest.mark.parametrize("share_params", [True, False])
def test_modules_that_keep_their_parameters_in_a_tensordict(use_td_params, share_params):
    flags = {"centralised": False, "share_params": share_params, "use_td_params": use_td_params}
    net, other = (torchrl.modules.MultiAgentMLP(5, 2, 3, depth=1, **flags) for _ in range(2))
    call, params = functionalize(net)
    before, held = snapshot(net), net.params
    x = torch.randn(4, 3, 5)
    given = {name: p.detach().clone().requires_grad_() for name, p in functionalize(other)[1].items()}
    y = call(given, x)
    torch.testing.assert_close(y, other(x))
    y.sum().backward()
    assert all(p.grad is not None for p in given.values())
    assert all(p.grad is None for p in net.parameters())
    call(params, x).sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    assert net.params is held
    assert_untouched(net, before)
    with pytest.raises(RuntimeError):
        call(given, torch.randn(4, 3, 6))
    assert net.params is held
    assert_untouched(net, before)


class Loss(nn.Module):
    """Holds an actor and, as TorchRL's losses do, the actor's parameters in a TensorDict."""

    def __init__(self, params: type[TensorDict] | type[TensorDictParams], actor_first: bool) -> None:
        super().__init__()
        actor = nn.Linear(2, 2)
        held = TensorDict.from_module(actor)
        if params is TensorDictParams:
            held = TensorDictParams(held, no_convert=True)
        for name, part in [("actor", actor), ("held", held)][:: 1 if actor_first else -1]:
            setattr(self, name, part)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(x), x @ self.held["weight"].t() + self.held["bias"]


@pytest.mark.parametrize("actor_first", [True, False])
@pytest.mark.parametrize("params", [TensorDict, TensorDictParams])
def test_parameters_that_a_layer_and_a_tensordict_share(params, actor_first):
    loss = Loss(params, actor_first)
    call, own = functionalize(loss)
    before, x = snapshot(loss), torch.ones(1, 2)
    for given in (
        {name: torch.full_like(p, 3.0) for name, p in own.items()},
        {name: torch.full_like(p, 3.0) for name, p in loss.actor.named_parameters(prefix="actor")},
    ):
        assert [y.tolist() for y in call(given, x)] == [[[9.0, 9.0]]] * 2
    assert_untouched(loss, before)
    torch.testing.assert_close(*loss(x))
