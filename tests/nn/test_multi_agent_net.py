"""MultiAgentNet: from modules and back, views, initialisation, clipping."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from muster.errors import CannotTravel, ConfigError, SpecMismatch, UsageError
from muster.nn import MultiAgentMLP, MultiAgentNet


class GRUPolicy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 6, batch_first=True)
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.gru(x.unsqueeze(1))[0][:, -1])


class RunningMean(nn.Module):
    """Replaces its buffer instead of writing to it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + x.mean(0)
        return self.linear(x - self.mean)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def twice() -> nn.Sequential:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, 2))


NETWORKS = {
    "linear": lambda: nn.Linear(4, 2),
    "known layers": lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2, bias=False)),
    "layer norm": lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2)),
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 2)),
    "softmax": lambda: nn.Sequential(nn.Linear(4, 2), nn.Softmax(dim=1)),
    "replaced buffer": RunningMean,
    "tied": Tied,
    "a layer twice": twice,
}


def loop(modules: list[nn.Module], x: Tensor, centralised: bool = False) -> Tensor:
    inputs = [x.flatten(1, 2)] * len(modules) if centralised else x.unbind(1)
    return torch.stack([module(one) for module, one in zip(modules, inputs, strict=True)], 1)


@pytest.mark.parametrize("use_vmap", [True, False])
@pytest.mark.parametrize("build", NETWORKS.values(), ids=NETWORKS)
def test_networks_of_any_layers_equal_a_loop_with_their_buffers(build, use_vmap):
    modules = [build() for _ in range(3)]
    net = MultiAgentNet.from_modules(modules, use_vmap=use_vmap)
    twins = copy.deepcopy(modules)
    x = torch.randn(5, 3, 4)
    for training in (True, True, False):
        net.train(training)
        for twin in twins:
            twin.train(training)
        torch.testing.assert_close(net(x), loop(twins, x), rtol=1e-5, atol=1e-5)
    for module, twin in zip(net.to_modules(), twins, strict=True):
        assert not module.training
        torch.testing.assert_close(module.state_dict(), twin.state_dict(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "tail",
    [
        [],
        [nn.Flatten()],
        [nn.Flatten(), nn.Tanh(), nn.LazyLinear(3)],
        [nn.MaxPool2d(2), nn.Flatten()],
        [nn.Conv2d(4, 4, 3, groups=2)],
        [nn.Conv2d(4, 4, 3, padding="same", padding_mode="circular")],
    ],
    ids=["images out", "flatten", "head", "pool", "groups", "padding mode"],
)
@pytest.mark.parametrize("centralised", [False, True])
def test_networks_on_images(tail, centralised):
    channels = 6 if centralised else 2
    modules = [nn.Sequential(nn.Conv2d(channels, 4, 3), nn.ReLU(), *copy.deepcopy(tail)) for _ in range(3)]
    for module in modules:
        module(torch.zeros(1, channels, 8, 8))
    x = torch.randn(5, 3, 2, 8, 8)
    net = MultiAgentNet.from_modules(modules, centralised=centralised, agent_dim=-4)
    torch.testing.assert_close(net(x), loop(modules, x, centralised), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(net(x[0]), net(x[:1])[0], rtol=1e-5, atol=1e-5)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen, self.done = nn.Linear(4, 8), nn.Linear(2, 8)

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        return (self.seen(obs) * torch.tanh(self.done(action))).sum(-1, keepdim=True)


@pytest.mark.parametrize("use_vmap", [True, False])
def test_networks_that_take_several_inputs_are_called_with_them(use_vmap):
    modules = [Critic() for _ in range(3)]
    net = MultiAgentNet.from_modules(modules, use_vmap=use_vmap)
    obs, action = torch.randn(2, 5, 3, 4), torch.randn(2, 5, 3, 2)
    expected = torch.stack([module(obs[:, :, i], action[:, :, i]) for i, module in enumerate(modules)], 2)
    torch.testing.assert_close(net(obs, action), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(net.agent(1)(obs[:, :, 1], action[:, :, 1]), expected[:, :, 1], rtol=1e-5, atol=1e-6)
    shared = MultiAgentNet(lambda: modules[0], 3, share_params=True)
    torch.testing.assert_close(shared(obs, action), modules[0](obs, action))
    with pytest.raises(SpecMismatch, match=r"\[2, 5, 2, 2\]; expected 3 agents"):
        net(obs, action[:, :, :2])


def test_centralised_networks_that_take_several_inputs():
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen, self.done = nn.Linear(12, 8), nn.Linear(6, 8)

        def forward(self, *inputs: Tensor) -> Tensor:
            return self.seen(inputs[0]) + self.done(inputs[1])

    modules = [Joined() for _ in range(3)]
    obs, action = torch.randn(5, 3, 4), torch.randn(5, 3, 2)
    expected = torch.stack([module(obs.flatten(1), action.flatten(1)) for module in modules], 1)
    net = MultiAgentNet.from_modules(modules, centralised=True)
    torch.testing.assert_close(net(obs, action), expected, rtol=1e-5, atol=1e-6)
    shared = MultiAgentNet(lambda: modules[0], 3, centralised=True, share_params=True)
    torch.testing.assert_close(shared(obs, action)[:, 2], expected[:, 0], rtol=1e-5, atol=1e-6)


def test_recurrent_networks_run_one_after_the_other():
    modules = [GRUPolicy() for _ in range(3)]
    x = torch.randn(5, 3, 4)
    net = MultiAgentNet.from_modules(modules, use_vmap=False)
    torch.testing.assert_close(net(x), loop(modules, x), rtol=1e-5, atol=1e-6)
    copy.deepcopy(net)
    with pytest.raises(RuntimeError) as caught:
        MultiAgentNet.from_modules(modules)(x)
    assert "use_vmap=False" in caught.value.__notes__[0]


@pytest.mark.parametrize("build", NETWORKS.values(), ids=NETWORKS)
def test_modules_round_trip_without_drawing_random_numbers(build):
    modules = [build() for _ in range(3)]
    state = torch.get_rng_state()
    back = MultiAgentNet.from_modules(modules).to_modules()
    assert torch.equal(torch.get_rng_state(), state)
    for module, original in zip(back, modules, strict=True):
        assert str(module) == str(original)
        torch.testing.assert_close(module.state_dict(), original.state_dict())
        assert not {id(p) for p in module.parameters()} & {id(p) for p in original.parameters()}


def test_tied_parameters_stay_tied_through_the_round_trip():
    net = MultiAgentNet.from_modules([Tied() for _ in range(2)])
    assert net.net.a.weight is net.net.b.weight
    single = net.to_modules()[1]
    assert single.a.weight is single.b.weight


def test_frozen_parameters_stay_frozen():
    modules = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)) for _ in range(2)]
    for module in modules:
        module[0].requires_grad_(False)
    net = MultiAgentNet.from_modules(modules)
    assert [p.requires_grad for p in net.parameters()] == [False, False, True, True]
    assert [p.requires_grad for p in net.to_modules()[0].parameters()] == [False, False, True, True]


def test_load_modules_keeps_the_parameter_objects():
    net = MultiAgentMLP(4, 2, 3, centralised=False, share_params=False, depth=1)
    modules = MultiAgentMLP(4, 2, 3, centralised=False, share_params=False, depth=1).to_modules()
    before = [id(p) for p in net.parameters()]
    net.load_modules(modules)
    x = torch.randn(5, 3, 4)
    torch.testing.assert_close(net(x), loop(modules, x), rtol=1e-5, atol=1e-6)
    assert [id(p) for p in net.parameters()] == before


@pytest.mark.parametrize("share_params", [False, True])
@pytest.mark.parametrize("centralised", [False, True])
def test_agent_views_equal_the_rows_of_the_whole(centralised, share_params):
    net = MultiAgentMLP(4, 2, 3, centralised=centralised, share_params=share_params, depth=1)
    x = torch.randn(5, 3, 4)
    y = net(x)
    for index in range(3):
        own = x.flatten(1) if centralised else x[:, index]
        torch.testing.assert_close(net.agent(index)(own), y[:, index], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(net.agent(index)(own[0]), y[0, index], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(net.agent(-1)(own), net.agent(2)(own))


@pytest.mark.parametrize("build", NETWORKS.values(), ids=NETWORKS)
def test_agent_views_reach_only_their_own_rows(build):
    net = MultiAgentNet.from_modules([build() for _ in range(3)]).eval()
    net.agent(1)(torch.randn(5, 4)).square().sum().backward()
    for parameter in net.parameters():
        assert parameter.grad[[0, 2]].abs().sum() == 0
    with torch.no_grad():
        for parameter in net.agent(2).parameters().values():
            parameter.zero_()
    assert all(parameter[2].abs().sum() == 0 for parameter in net.parameters())


def test_agents_that_do_not_exist_and_inputs_with_too_few_axes():
    net = MultiAgentMLP(4, 2, 3, centralised=False, share_params=False)
    with pytest.raises(IndexError, match="agent 3 of 3"):
        net.agent(3)
    with pytest.raises(SpecMismatch, match="agent 0 got an input"):
        net.agent(0)(torch.tensor(1.0))


def test_each_agent_is_initialised_by_itself():
    net = MultiAgentMLP(4, 2, 3, centralised=False, share_params=False, depth=1)

    def init(agent: int, module: nn.Module) -> None:
        nn.init.constant_(module[0].weight, float(agent))
        nn.init.orthogonal_(module[2].weight)

    net.init_agents(init)
    assert net.net[0].weight.mean(dim=(1, 2)).tolist() == [0.0, 1.0, 2.0]
    rows = net.net[2].weight[1].t()
    torch.testing.assert_close(rows @ rows.t(), torch.eye(2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("share_params", [False, True])
def test_reset_draws_all_parameters_anew(share_params):
    net = MultiAgentMLP(4, 2, 3, centralised=False, share_params=share_params, depth=1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(7.0)
    net.reset_parameters()
    for parameter in net.parameters():
        assert parameter.abs().max() <= 0.5  # 1 / sqrt(4), the bound of the narrowest layer
        assert share_params or not torch.equal(parameter[0], parameter[1])


def test_gradients_are_clipped_for_each_agent_by_itself():
    net = MultiAgentMLP(2, 1, 2, centralised=False, share_params=False)
    net.net[0].weight.grad = torch.tensor([[[3.0], [0.0]], [[0.3], [0.0]]])
    net.net[0].bias.grad = torch.tensor([[4.0], [0.4]])
    norms = net.clip_grad_norm_(1.0)
    torch.testing.assert_close(norms, torch.tensor([5.0, 0.5]))
    torch.testing.assert_close(net.net[0].weight.grad.flatten(), torch.tensor([0.6, 0.0, 0.3, 0.0]))
    torch.testing.assert_close(net.net[0].bias.grad.flatten(), torch.tensor([0.8, 0.4]))


def test_a_shared_network_is_clipped_as_torch_does():
    net = MultiAgentMLP(4, 2, 3, centralised=False, share_params=True, depth=1)
    assert net.clip_grad_norm_(1.0).tolist() == [0.0]
    twin = copy.deepcopy(net)
    x = torch.randn(5, 3, 4)
    for each in (net, twin):
        each(x).square().sum().mul(100).backward()
    norm = nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    torch.testing.assert_close(net.clip_grad_norm_(1.0), norm.reshape(1))
    for mine, other in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("build", NETWORKS.values(), ids=NETWORKS)
def test_a_function_builds_networks_that_are_alike_and_independent(build):
    torch.manual_seed(3)
    net = MultiAgentNet(build, 3).eval()
    torch.manual_seed(3)
    twins = [build().eval() for _ in range(3)]
    x = torch.randn(5, 3, 4)
    torch.testing.assert_close(net(x), loop(twins, x), rtol=1e-5, atol=1e-5)
    before = [module.state_dict() for module in net.to_modules()]
    assert not torch.equal(*[next(iter(state.values())) for state in before[:2]])
    net(torch.randn(5, 3, 4))[:, 2].square().sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    after = [module.state_dict() for module in net.to_modules()]
    for name, _ in net.net.named_parameters():
        assert [torch.equal(a[name], b[name]) for a, b in zip(after, before, strict=True)] == [True, True, False]


def test_modules_that_share_tensors_are_refused():
    one = nn.Linear(4, 2)
    with pytest.raises(UsageError, match="modules 0 and 1 share the tensor 'weight'"):
        MultiAgentNet.from_modules([one, one])
    with pytest.raises(UsageError, match=r"modules 0 and 1 share the tensor '1\.weight'.*make a new one at each call"):
        MultiAgentNet(lambda: nn.Sequential(nn.Linear(4, 4), one), 2)
    shared = MultiAgentNet(lambda: one, 2, share_params=True)
    assert shared.net is one
    x = torch.randn(5, 2, 4)
    torch.testing.assert_close(shared(x), one(x))


def test_what_builds_no_network_is_refused():
    with pytest.raises(TypeError, match=r"make_net is a Linear; .*from_modules takes networks that exist"):
        MultiAgentNet(nn.Linear(4, 2), 3)
    with pytest.raises(TypeError, match="make_net is a list; expected a function"):
        MultiAgentNet([nn.Linear(4, 2)], 3, share_params=True)
    with pytest.raises(TypeError, match=r"got a NoneType; does make_net return one\?"):
        MultiAgentNet(lambda: None, 3)
    with pytest.raises(UsageError, match="belongs to a lazy module"):
        MultiAgentNet(lambda: nn.LazyLinear(2), 3)


def test_wrong_numbers_of_modules_and_a_wrong_axis():
    with pytest.raises(ConfigError, match="n_agents='3' is not a positive integer"):
        MultiAgentNet(lambda: nn.Linear(2, 2), "3")
    with pytest.raises(ValueError, match="n_agents=0 is not a positive integer"):
        MultiAgentNet.from_modules([])
    with pytest.raises(ValueError, match="got 2 modules; expected 3, as many as to_modules returns"):
        MultiAgentNet(lambda: nn.Linear(4, 2), 3).load_modules([nn.Linear(4, 2), nn.Linear(4, 2)])
    with pytest.raises(ValueError, match="agent_dim=1"):
        MultiAgentNet.from_modules([nn.Linear(4, 2)], agent_dim=1)
    with pytest.raises(SpecMismatch, match="not a multiple"):
        MultiAgentNet.from_modules([nn.Linear(5, 2), nn.Linear(5, 2)], centralised=True)


def test_networks_that_cannot_be_copied_are_named():
    class Arm(nn.Linear):
        def __deepcopy__(self, memo: dict) -> Arm:
            raise RuntimeError("drives the arm")

    with pytest.raises(CannotTravel, match=r"Arm cannot be copied \(RuntimeError: drives the arm\)"):
        MultiAgentNet.from_modules([Arm(4, 2), Arm(4, 2)])


def test_dropout_differs_between_agents():
    modules = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Dropout(0.5)) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    y = MultiAgentNet.from_modules(modules)(torch.ones(1, 2, 64))
    assert not torch.equal(y[:, 0] == 0, y[:, 1] == 0)
