"""The losses of TorchRL's that copy a module, with small networks and a batch, and three updates of each."""

from __future__ import annotations

import ctypes
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import (
    NormalParamExtractor,
    TensorDictModule,
)
from torch import Tensor, nn
from torchrl import modules, objectives
from torchrl.data import Bounded
from torchrl.modules.models.multiagent import QMixer
from torchrl.objectives import ValueEstimators

B, T, OBS, ACT, AGENTS = 4, 3, 3, 2, 2


class Plain(nn.Module):
    """A small network, [*B, in] to [*B, out], with a bound method of a part of it among its attributes."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(n_in, 8), nn.Linear(8, n_out)
        self.register_buffer("scale", torch.ones(()))
        self.head = self.last.forward

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(torch.cat(inputs, -1)))) * self.scale


class Uncopyable(Plain):
    """The same with what cannot be copied, which every call uses."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__(n_in, n_out)
        self.lock = threading.Lock()
        self.sockets = socket.socketpair()
        self.handle = ctypes.pointer(ctypes.c_int(7))

    def __deepcopy__(self, memo: object) -> Uncopyable:
        raise RuntimeError("the robot cannot be copied")

    def forward(self, *inputs: Tensor) -> Tensor:
        with self.lock:
            assert self.handle.contents.value == 7
            assert self.sockets[0].fileno() > 0
            return super().forward(*inputs)


Net = type[Plain]


def actor(net: Net) -> nn.Module:
    return modules.Actor(net(OBS, ACT), in_keys=["observation"], spec=Bounded(-1, 1, (ACT,)))


def stochastic(net: Net) -> nn.Module:
    layers = nn.Sequential(net(OBS, 2 * ACT), NormalParamExtractor())
    return modules.ProbabilisticActor(
        TensorDictModule(layers, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=modules.TanhNormal,
        return_log_prob=True,
        spec=Bounded(-1, 1, (ACT,)),
    )


def critic(net: Net) -> nn.Module:
    return modules.ValueOperator(net(OBS, 1), in_keys=["observation"])


def action_critic(net: Net) -> nn.Module:
    return modules.ValueOperator(net(OBS + ACT, 1), in_keys=["observation", "action"])


def q_actor(net: Net) -> nn.Module:
    return modules.QValueActor(net(OBS, ACT), in_keys=["observation"], action_space="one-hot")


def agents_q(net: Net) -> nn.Module:
    values = TensorDictModule(net(OBS, ACT), [("agents", "observation")], [("agents", "action_value")])
    keys = [("agents", name) for name in ("action", "action_value", "chosen_action_value")]
    chosen = modules.QValueModule(action_value_key=keys[1], out_keys=keys, action_space="categorical")
    return modules.SafeSequential(values, chosen)


def mixer(net: Net) -> nn.Module:
    made = QMixer(state_shape=(OBS,), mixing_embed_dim=4, n_agents=AGENTS, device="cpu")
    return TensorDictModule(made, [("agents", "chosen_action_value"), "state"], ["chosen_action_value"])


@dataclass
class Case:
    """A loss of TorchRL's.  networks: build what its constructor takes first.  stateful: the network to take out."""

    name: str
    networks: tuple[Callable[[Net], nn.Module], ...]
    options: dict[str, Any] = field(default_factory=dict)
    estimator: ValueEstimators | None = None
    target: str = ""
    stateful: str = ""


TD, GAE, VTRACE = ValueEstimators.TD0, ValueEstimators.GAE, ValueEstimators.VTrace
# The places in which TorchRL copies a module.
COPYING = {
    "DDPG": Case("DDPGLoss", (actor, action_critic), {"delay_actor": True}, TD, "SoftUpdate"),
    "QMixer": Case("QMixerLoss", (agents_q, mixer), {"action_space": "categorical"}, TD, "SoftUpdate"),
    "DiscreteCQL": Case("DiscreteCQLLoss", (q_actor,), {"action_space": "one-hot"}, TD, "HardUpdate"),
    "VTrace in PPO": Case("PPOLoss", (stochastic, critic), {}, VTRACE),
    "VTrace in A2C": Case("A2CLoss", (stochastic, critic), {}, VTRACE),
    "VTrace in Reinforce": Case("ReinforceLoss", (stochastic, critic), {}, VTRACE),
    "get_stateful_net": Case("ClipPPOLoss", (stochastic, critic), {}, GAE, stateful="actor_network"),
    "get_stateful_net of an ensemble": Case(
        "SACLoss", (stochastic, action_critic), {"target_entropy": -2.0}, TD, "SoftUpdate", stateful="qvalue_network"
    ),
    "DiscreteCQL's own estimator": Case("DiscreteCQLLoss", (q_actor,), {"action_space": "one-hot"}, None, "SoftUpdate"),
}


UPDATERS: dict[str, Callable[[Any], Any]] = {
    "SoftUpdate": lambda loss: objectives.SoftUpdate(loss, eps=0.9),
    "HardUpdate": lambda loss: objectives.HardUpdate(loss, value_network_update_interval=2),
}


def networks_of(case: Case, net: Net) -> list[Any]:
    torch.manual_seed(0)
    return [build(net) for build in case.networks]


def built(losses: Any, case: Case, networks: list[Any]) -> Any:
    loss = getattr(losses, case.name)(*networks, **case.options)
    if case.estimator is not None:
        loss.make_value_estimator(case.estimator, gamma=0.9)
    return loss


def batch_of(case: Case) -> TensorDict:
    """A batch [B, T] with all that some loss reads."""
    torch.manual_seed(1)
    one_hot = nn.functional.one_hot(torch.randint(ACT, (B, T)), ACT)
    agents = {"observation": torch.randn(B, T, AGENTS, OBS), "action": torch.randint(ACT, (B, T, AGENTS))}
    return TensorDict(
        {
            "observation": torch.randn(B, T, OBS),
            "action": one_hot if case.name == "DiscreteCQLLoss" else torch.rand(B, T, ACT) * 1.6 - 0.8,
            "state": torch.randn(B, T, OBS),
            "next": {
                "observation": torch.randn(B, T, OBS),
                "state": torch.randn(B, T, OBS),
                "reward": torch.randn(B, T, 1),
                "done": torch.zeros(B, T, 1, dtype=torch.bool),
                "terminated": torch.zeros(B, T, 1, dtype=torch.bool),
                "agents": TensorDict({"observation": torch.randn(B, T, AGENTS, OBS)}, [B, T, AGENTS]),
            },
            "action_log_prob": -torch.rand(B, T),
            "loc": torch.randn(B, T, ACT),
            "scale": torch.rand(B, T, ACT) + 0.5,
            "agents": TensorDict(agents, [B, T, AGENTS]),
        },
        [B, T],
    )


def trained(losses: Any, case: Case, networks: list[Any]) -> tuple[Any, list[Tensor]]:
    """The loss after three updates, and all that it computed and holds."""
    torch.manual_seed(2)
    loss = built(losses, case, networks)
    updater = UPDATERS[case.target](loss) if case.target else None
    batch, seen = batch_of(case), []
    optimizer = torch.optim.SGD(loss.parameters(), 0.1)
    for _ in range(3):
        out = loss(batch.clone())
        sum(value.mean() for key, value in out.items() if key.startswith("loss")).backward()
        optimizer.step()
        optimizer.zero_grad()
        if updater is not None:
            updater.step()
        seen += [value for _, value in sorted(out.items())]
    if case.stateful:
        net = loss.get_stateful_net(case.stateful)
        for parameter in net.parameters():
            nn.init.uniform_(parameter)
        loss.from_stateful_net(case.stateful, net)
        seen += [*net.state_dict().values(), *loss(batch.clone()).values()]
    return loss, [*seen, *loss.state_dict().values()]
