"""Every loss of TorchRL's with small networks and a batch, and three updates of it."""

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
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
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


class Joined(nn.Sequential):
    """Layers that take several inputs, joined along the last axis."""

    def forward(self, *inputs: Tensor) -> Tensor:
        return super().forward(torch.cat(inputs, -1))


Net = type[Plain]


def actor(net: Net, keys: tuple[str, ...] = ("observation",)) -> nn.Module:
    return modules.Actor(net(OBS, ACT), in_keys=list(keys), spec=Bounded(-1, 1, (ACT,)))


def stochastic(net: Net, distribution: Any = modules.TanhNormal) -> nn.Module:
    layers = nn.Sequential(net(OBS, 2 * ACT), NormalParamExtractor())
    return modules.ProbabilisticActor(
        TensorDictModule(layers, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=distribution,
        return_log_prob=True,
        spec=Bounded(-1, 1, (ACT,)),
    )


def discrete(net: Net) -> nn.Module:
    return modules.ProbabilisticActor(
        TensorDictModule(net(OBS, ACT), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=modules.OneHotCategorical,
        return_log_prob=True,
    )


def critic(net: Net) -> nn.Module:
    return modules.ValueOperator(net(OBS, 1), in_keys=["observation"])


def action_critic(net: Net, n_out: int = 1) -> nn.Module:
    return modules.ValueOperator(net(OBS + ACT, n_out), in_keys=["observation", "action"])


def action_values(net: Net) -> nn.Module:
    return TensorDictModule(net(OBS, ACT), ["observation"], ["action_value"])


def state_action_values(net: Net) -> nn.Module:
    return TensorDictModule(net(OBS, ACT), ["observation"], ["state_action_value"])


def q_actor(net: Net) -> nn.Module:
    return modules.QValueActor(net(OBS, ACT), in_keys=["observation"], action_space="one-hot")


def distributional(net: Net) -> nn.Module:
    layers = nn.Sequential(net(OBS, 5 * ACT), nn.Unflatten(-1, (5, ACT)), nn.LogSoftmax(-2))
    return modules.DistributionalQValueActor(
        layers, in_keys=["observation"], support=torch.arange(5.0), action_space="one-hot"
    )


def agents_actor(net: Net) -> nn.Module:
    layers = nn.Sequential(net(OBS, 2 * ACT), NormalParamExtractor())
    return modules.ProbabilisticActor(
        TensorDictModule(layers, [("agents", "observation")], [("agents", "loc"), ("agents", "scale")]),
        in_keys=[("agents", "loc"), ("agents", "scale")],
        out_keys=[("agents", "action")],
        distribution_class=modules.TanhNormal,
        return_log_prob=True,
        log_prob_key=("agents", "action_log_prob"),
    )


def agents_critic(net: Net) -> nn.Module:
    return TensorDictModule(net(OBS, 1), [("agents", "observation")], [("agents", "state_value")])


def agents_q(net: Net) -> nn.Module:
    values = TensorDictModule(net(OBS, ACT), [("agents", "observation")], [("agents", "action_value")])
    keys = [("agents", name) for name in ("action", "action_value", "chosen_action_value")]
    chosen = modules.QValueModule(action_value_key=keys[1], out_keys=keys, action_space="categorical")
    return modules.SafeSequential(values, chosen)


def mixer(net: Net) -> nn.Module:
    made = QMixer(state_shape=(OBS,), mixing_embed_dim=4, n_agents=AGENTS, device="cpu")
    return TensorDictModule(made, [("agents", "chosen_action_value"), "state"], ["chosen_action_value"])


def latent_critic(net: Net) -> nn.Module:
    return TensorDictModule(net(OBS + ACT, 1), ["state", "belief"], ["state_value"])


def latent_actor(net: Net) -> nn.Module:
    return ProbabilisticTensorDictSequential(
        TensorDictModule(
            Joined(net(OBS + ACT, 2 * ACT), NormalParamExtractor()), ["state", "belief"], ["loc", "scale"]
        ),
        ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=modules.TanhNormal),
    )


class Imagination(nn.Module):
    """What Dreamer's losses use of a model-based env: from states [B, 3] and beliefs [B, 2] to steps [B, T]."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.step = net(OBS + 2 * ACT, OBS + ACT + 1)

    def reset(self, tensordict: TensorDict) -> TensorDict:
        return tensordict

    def rollout(self, max_steps: int, policy: nn.Module, tensordict: TensorDict, **_: Any) -> TensorDict:
        steps = []
        for _step in range(max_steps):
            now = policy(tensordict)
            state, belief, reward = self.step(now["state"], now["belief"], now["action"]).split([OBS, ACT, 1], -1)
            following = TensorDict({"state": state, "belief": belief, "reward": reward}, now.batch_size)
            steps.append(now.clone(False).set("next", following))
            tensordict = following.select("state", "belief")
        return torch.stack(steps, 1)


def world_model(net: Net) -> nn.Module:
    """In Dreamer's form: encoder, prior, posterior and decoder, then rewards."""
    names = [("next", name) for name in ("prior_mean", "prior_std", "posterior_mean", "posterior_std")]
    deviations = nn.Sequential(net(OBS, 8), nn.Softplus(), nn.Unflatten(-1, (4, 2)))
    latents = TensorDictModule(lambda x: deviations(x).unbind(-2), ["observation"], names)
    latents.deviations = deviations
    decoder = TensorDictModule(
        nn.Sequential(net(OBS, 4), nn.Unflatten(-1, (1, 2, 2))), ["observation"], [("next", "reco_pixels")]
    )
    return TensorDictSequential(
        TensorDictSequential(latents, decoder), TensorDictModule(net(OBS, 1), ["observation"], [("next", "reward")])
    )


def latent_world(net: Net) -> nn.Module:
    parts = (
        TensorDictModule(net(OBS, 4), ["observation"], ["latent"]),
        TensorDictModule(net(4 + ACT, 4), ["latent", "action"], [("next", "latent")]),
        TensorDictModule(net(4, 1), [("next", "latent")], [("next", "reward")]),
    )
    return TensorDictSequential(*parts)


def discriminator(net: Net) -> nn.Module:
    layers = Joined(net(OBS + ACT, 1), nn.Sigmoid())
    return TensorDictModule(layers, ["observation", "action"], ["d_logits"])


def act_model(net: Net) -> nn.Module:
    inner, split = net(OBS + T * ACT, T * ACT + 4), [T * ACT, 2, 2]

    def parts(observation: Tensor, chunk: Tensor) -> tuple[Tensor, ...]:
        flat, mean, log_var = inner(observation, chunk.flatten(-2)).split(split, -1)
        return flat.unflatten(-1, (T, ACT)), mean, log_var

    made = TensorDictModule(parts, ["observation", "action_chunk"], ["action_pred", "mu", "log_var"])
    made.inner = inner
    return made


def decision_actor(net: Net) -> nn.Module:
    return modules.ProbabilisticActor(
        TensorDictModule(net(OBS, ACT), ["observation"], ["param"]),
        in_keys=["param"],
        distribution_class=modules.TanhDelta,
    )


def diffusion(net: Net) -> nn.Module:
    return modules.DiffusionActor(action_dim=ACT, obs_dim=OBS, score_network=net(OBS + ACT + 1, ACT), num_steps=10)


def linear(net: Net) -> nn.Module:
    return net(OBS, 4)


def imagination(net: Net) -> nn.Module:
    return Imagination(net)


@dataclass
class Case:
    """A loss of TorchRL's.  networks: build what its constructor takes first.  stateful: the network to take out."""

    name: str
    networks: tuple[Callable[[Net], nn.Module], ...]
    options: dict[str, Any] = field(default_factory=dict)
    estimator: ValueEstimators | None = None
    target: str = ""
    keys: dict[str, Any] = field(default_factory=dict)
    stateful: str = ""


TD, GAE, VTRACE = ValueEstimators.TD0, ValueEstimators.GAE, ValueEstimators.VTrace
AGENTS_KEYS = {name: ("agents", name) for name in ("action", "reward", "done", "terminated")} | {
    "value": ("agents", "state_value"),
    "sample_log_prob": ("agents", "action_log_prob"),
}
SAC = {"target_entropy": -2.0}
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
USUAL = {
    "PPO": Case("PPOLoss", (stochastic, critic), {}, GAE),
    "ClipPPO": Case("ClipPPOLoss", (stochastic, critic), {}, GAE),
    "KLPENPPO": Case("KLPENPPOLoss", (lambda net: stochastic(net, modules.IndependentNormal), critic), {}, GAE),
    "A2C": Case("A2CLoss", (stochastic, critic), {}, GAE),
    "Reinforce": Case("ReinforceLoss", (stochastic, critic), {}, GAE),
    "DQN": Case("DQNLoss", (q_actor,), {"action_space": "one-hot", "delay_value": True}, TD, "HardUpdate"),
    "SAC": Case("SACLoss", (stochastic, action_critic), SAC, TD, "SoftUpdate"),
    "SAC with values": Case("SACLoss", (stochastic, action_critic, critic), SAC, TD, "SoftUpdate"),
    "SAC with two critics": Case(
        "SACLoss", (stochastic, lambda net: [action_critic(net), action_critic(net)]), SAC, TD, "SoftUpdate"
    ),
    "DiscreteSAC": Case(
        "DiscreteSACLoss", (discrete, action_values), {"action_space": "one-hot", "num_actions": ACT}, TD, "SoftUpdate"
    ),
    "TD3": Case("TD3Loss", (actor, action_critic), {"bounds": (-1.0, 1.0)}, TD, "SoftUpdate"),
    "REDQ": Case("REDQLoss", (stochastic, action_critic), {**SAC, "num_qvalue_nets": 3}, TD, "SoftUpdate"),
    "IQL": Case("IQLLoss", (stochastic, action_critic, critic), {}, TD, "SoftUpdate"),
    "CQL": Case("CQLLoss", (stochastic, action_critic), SAC, TD, "SoftUpdate"),
    "CrossQ": Case("CrossQLoss", (stochastic, action_critic), SAC, TD),
    "MAPPO": Case("MAPPOLoss", (agents_actor, agents_critic), {}, GAE, keys=AGENTS_KEYS),
}
OTHERS = {
    "ACT": Case("ACTLoss", (act_model,)),
    "BC": Case("BCLoss", (actor,)),
    "DiffusionBC": Case("DiffusionBCLoss", (diffusion,)),
    "DT": Case("DTLoss", (decision_actor,)),
    "OnlineDT": Case("OnlineDTLoss", (stochastic,), SAC),
    "DistributionalDQN": Case("DistributionalDQNLoss", (distributional,), {"gamma": 0.9}, None, "SoftUpdate"),
    "DreamerActor": Case("DreamerActorLoss", (latent_actor, latent_critic, imagination), {"imagination_horizon": 3}),
    "DreamerModel": Case("DreamerModelLoss", (world_model,)),
    "DreamerValue": Case("DreamerValueLoss", (latent_critic,)),
    "GAIL": Case("GAILLoss", (discriminator,), {"use_grad_penalty": True}),
    "DiscreteIQL": Case(
        "DiscreteIQLLoss", (discrete, state_action_values, critic), {"action_space": "one-hot"}, TD, "SoftUpdate"
    ),
    "IPPO": Case("IPPOLoss", (agents_actor, agents_critic), {}, GAE, keys=AGENTS_KEYS),
    "RND": Case("RNDLoss", (linear, linear)),
    "TD3BC": Case("TD3BCLoss", (actor, action_critic), {"bounds": (-1.0, 1.0)}, TD, "SoftUpdate"),
    "TQC": Case(
        "TQCLoss", (stochastic, lambda net: action_critic(net, 6)), {**SAC, "num_qvalue_nets": 2}, TD, "SoftUpdate"
    ),
    "WorldModel": Case("WorldModelLoss", (latent_world,), {"losses": ["reward"]}),
    "ExponentialQuadraticCost": Case("ExponentialQuadraticCost", (), keys={"loc": "loc", "scale": "scale"}),
}
ALL = COPYING | USUAL | OTHERS
# Built and stepped by the examples in their own documentation.
BY_EXAMPLE = ("DreamerV3ActorLoss", "DreamerV3Loss", "DreamerV3ModelLoss", "DreamerV3ValueLoss")


UPDATERS: dict[str, Callable[[Any], Any]] = {
    "SoftUpdate": lambda loss: objectives.SoftUpdate(loss, eps=0.9),
    "HardUpdate": lambda loss: objectives.HardUpdate(loss, value_network_update_interval=2),
}


def networks_of(case: Case, net: Net) -> list[Any]:
    torch.manual_seed(0)
    return [build(net) for build in case.networks]


def built(losses: Any, case: Case, networks: list[Any]) -> Any:
    loss = getattr(losses, case.name)(*networks, **case.options)
    if case.keys:
        loss.set_keys(**case.keys)
    if case.estimator is not None:
        loss.make_value_estimator(case.estimator, gamma=0.9)
    return loss


def batch_of(case: Case) -> TensorDict:
    """A batch [B, T] with all that some loss reads."""
    torch.manual_seed(1)
    one_hot = nn.functional.one_hot(torch.randint(ACT, (B, T)), ACT)
    discrete_ones = ("DQNLoss", "DiscreteCQLLoss", "DiscreteSACLoss", "DiscreteIQLLoss", "DistributionalDQNLoss")
    batch = TensorDict(
        {
            "observation": torch.randn(B, T, OBS),
            "action": one_hot if case.name in discrete_ones else torch.rand(B, T, ACT) * 1.6 - 0.8,
            "state": torch.randn(B, T, OBS),
            "belief": torch.randn(B, T, ACT),
            "next": {
                "observation": torch.randn(B, T, OBS),
                "state": torch.randn(B, T, OBS),
                "reward": torch.randn(B, T, 1),
                "done": torch.zeros(B, T, 1, dtype=torch.bool),
                "terminated": torch.zeros(B, T, 1, dtype=torch.bool),
                "pixels": torch.randn(B, T, 1, 2, 2),
            },
            "lambda_target": torch.randn(B, T, 1),
            "collector_observation": torch.randn(B, T, OBS),
            "collector_action": torch.rand(B, T, ACT),
            "action_log_prob": -torch.rand(B, T),
            "loc": torch.randn(B, T, ACT),
            "scale": torch.rand(B, T, ACT) + 0.5,
            ("vla_action", "chunk"): torch.randn(B, T, T, ACT),
        },
        [B, T],
    )
    if case.name == "ExponentialQuadraticCost":
        batch.update({"loc": nn.Parameter(batch["loc"]), "scale": torch.diag_embed(batch["scale"])})
    if case.name in ("QMixerLoss", "MAPPOLoss", "IPPOLoss"):
        batch["agents"] = TensorDict({"observation": torch.randn(B, T, AGENTS, OBS)}, [B, T, AGENTS])
        batch["next", "agents"] = TensorDict({"observation": torch.randn(B, T, AGENTS, OBS)}, [B, T, AGENTS])
        if case.name == "QMixerLoss":
            batch["agents", "action"] = torch.randint(ACT, (B, T, AGENTS))
        else:
            batch["agents", "action"] = torch.rand(B, T, AGENTS, ACT) * 1.6 - 0.8
            batch["agents", "action_log_prob"] = -torch.rand(B, T, AGENTS)
            for key in ("reward", "done", "terminated"):
                batch["next", "agents", key] = batch["next", key].unsqueeze(-2).expand(B, T, AGENTS, 1).clone()
    return batch.reshape(-1) if case.name == "DistributionalDQNLoss" else batch


def trained(losses: Any, case: Case, networks: list[Any]) -> tuple[Any, list[Tensor]]:
    """The loss after three updates, and all that it computed and holds."""
    torch.manual_seed(2)
    loss = built(losses, case, networks)
    updater = UPDATERS[case.target](loss) if case.target else None
    batch, seen = batch_of(case), []
    parameters = list(loss.parameters())
    optimizer = torch.optim.SGD(parameters, 0.1) if parameters else None
    for _ in range(3):
        out = loss(batch.clone())
        out = out[0] if isinstance(out, tuple) else out
        sum(value.mean() for key, value in out.items() if key.startswith("loss")).backward()
        if optimizer is not None:
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
