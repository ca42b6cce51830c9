"""TorchRL's losses on policies that hold a socket, equal to those on the same policies without one."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import zmq
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import Tensor, nn

from muster.errors import CannotTravel
from muster.nn import shared_on_copy, uncopyable

modules = pytest.importorskip("torchrl.modules")
objectives = pytest.importorskip("torchrl.objectives")

B, OBS, ACT = 16, 3, 2


class Plain(nn.Module):
    """A small network, [*B, in] to [*B, out]."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(n_in, 8), nn.Tanh(), nn.Linear(8, n_out))

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.layers(torch.cat(inputs, -1))


@uncopyable("is connected to the simulator")
class Connected(Plain):
    """The same with a connection, which it asks in each call whether it is still there."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__(n_in, n_out)
        self.socket = zmq.Context.instance().socket(zmq.PAIR)

    def forward(self, *inputs: Tensor) -> Tensor:
        assert not self.socket.closed
        return super().forward(*inputs)


def stochastic_actor(net: type[Plain]) -> nn.Module:
    layers = nn.Sequential(net(OBS, 2 * ACT), NormalParamExtractor())
    return modules.ProbabilisticActor(
        TensorDictModule(layers, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=modules.TanhNormal,
        return_log_prob=True,
    )


def actor(net: type[Plain]) -> nn.Module:
    return modules.Actor(net(OBS, ACT))


def critic(net: type[Plain]) -> nn.Module:
    return modules.ValueOperator(net(OBS, 1), in_keys=["observation"])


def action_critic(net: type[Plain]) -> nn.Module:
    return modules.ValueOperator(net(OBS + ACT, 1), in_keys=["observation", "action"])


LOSSES: dict[str, tuple[list[Callable[[type[Plain]], nn.Module]], Callable[..., Any]]] = {
    "ClipPPO": ([stochastic_actor, critic], lambda *nets: objectives.ClipPPOLoss(*nets)),
    "SAC": (
        [stochastic_actor, action_critic],
        lambda *nets: objectives.SACLoss(*nets, delay_qvalue=True, target_entropy=-2.0),
    ),
    "DDPG": ([actor, action_critic], lambda *nets: objectives.DDPGLoss(*nets, delay_actor=True)),
}


@pytest.fixture(params=LOSSES)
def loss_name(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param
    zmq.Context.instance().destroy(0)


def nets_of(name: str, net: type[Plain]) -> list[nn.Module]:
    torch.manual_seed(0)
    return [build(net) for build in LOSSES[name][0]]


def a_batch() -> TensorDict:
    torch.manual_seed(1)
    action = torch.rand(B, ACT) * 2 - 1
    done = torch.zeros(B, 1, dtype=torch.bool)
    after = {"observation": torch.randn(B, OBS), "reward": torch.randn(B, 1), "done": done, "terminated": done}
    values: dict[str, Any] = {"observation": torch.randn(B, OBS), "action": action, "next": after}
    return TensorDict({**values, "action_log_prob": torch.randn(B)}, [B])


def trained(name: str, nets: list[nn.Module]) -> tuple[Any, list[float]]:
    """The loss module after two steps of an optimizer, and the losses of these steps."""
    torch.manual_seed(2)
    loss = LOSSES[name][1](*nets)
    optimizer = torch.optim.Adam(loss.parameters(), 0.01)
    updater = objectives.SoftUpdate(loss, eps=0.5) if name != "ClipPPO" else None
    totals = []
    for seed in range(2):
        torch.manual_seed(seed)
        values = loss(a_batch())
        total = sum(value for key, value in values.items() if key.startswith("loss"))
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        if updater is not None:
            updater.step()
        totals.append(total.item())
    return loss, totals


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torchrl")
def test_a_loss_trains_it_as_it_does_a_policy_that_can_be_copied(loss_name: str):
    plain, connected = nets_of(loss_name, Plain), nets_of(loss_name, Connected)
    sockets = [part.socket for net in connected for part in net.modules() if isinstance(part, Connected)]
    expected_loss, expected = trained(loss_name, plain)
    loss, totals = trained(loss_name, [shared_on_copy(net) for net in connected])
    assert totals == expected
    assert totals[0] != totals[1]
    for (name, mine), (its_name, its) in zip(
        loss.state_dict().items(), expected_loss.state_dict().items(), strict=True
    ):
        assert name == its_name
        if isinstance(its, Tensor):
            assert mine.equal(its), name
    # The policy itself has learnt, and is connected as before.
    for net, like in zip(connected, plain, strict=True):
        for mine, its in zip(net.parameters(), like.parameters(), strict=True):
            assert mine.equal(its)
    assert not any(socket.closed for socket in sockets)


def test_ddpg_of_torchrl_cannot_copy_it_otherwise():
    nets = nets_of("DDPG", Connected)
    with pytest.raises(CannotTravel, match="is connected to the simulator"):
        objectives.DDPGLoss(*nets)
    with pytest.raises(CannotTravel, match=r"muster\.nn\.shared_on_copy\(policy\)"):
        pickle.dumps(nets)
    zmq.Context.instance().destroy(0)
