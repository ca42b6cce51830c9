"""Networks, functional calls, targets and algorithms: arguments, inputs and weights that do not fit."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import torch
from agent_envs import Script
from gymnasium import spaces
from torch import nn

import muster
from muster.algorithms import PPO, PPOConfig
from muster.nn import MultiAgentConvNet, MultiAgentMLP, MultiAgentNet, TargetParams, functionalize
from situations.acting_envs import Counter, Observing
from situations.building import BOX
from situations.recording import raised, situation, situations

SIZES = {"n_agent_inputs": 4, "n_agent_outputs": 2, "n_agents": 3, "share_params": False, "centralised": False}


def mlp(**options: Any) -> Any:
    return MultiAgentMLP(**{**SIZES, "depth": 1, "num_cells": 8, **options})


def conv_net(**options: Any) -> Any:
    given = {"n_agents": 2, "centralised": False, "share_params": False, "in_features": 3, **options}
    return MultiAgentConvNet(**given)


situations(
    "network",
    {
        "a negative size": lambda: mlp(n_agent_inputs=-1),
        "a size of 0": lambda: mlp(n_agents=0),
        "two spellings": lambda: mlp(centralized=True),
        "num_cells without depth": lambda: mlp(depth=None),
        "another depth than num_cells": lambda: mlp(depth=3, num_cells=[8, 8]),
        "share_params left out": lambda: conv_net(share_params=None),
        "no layers": lambda: conv_net(num_cells=()),
        "kernels of the wrong number": lambda: conv_net(kernel_sizes=[3, 3]),
        "a module in the place of a function": lambda: MultiAgentNet(nn.Linear(4, 2), 3),
        "an agent_dim from the front": lambda: MultiAgentNet(lambda: nn.Linear(4, 2), 1, agent_dim=1),
        "inputs that agents cannot give": lambda: MultiAgentNet(
            lambda: nn.Linear(5, 2), 2, centralised=True, share_params=True
        ),
        "an unknown agent": lambda: mlp().agent(7),
        "another number of agents": lambda: mlp()(torch.zeros(5, 2, 4)),
        "another size of inputs": lambda: mlp()(torch.zeros(5, 3, 7)),
        "an agent's input of too few axes": lambda: conv_net().agent(0)(torch.zeros(4)),
    },
)


class Counting(nn.Module):
    """A module that replaces a buffer in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.count = self.count + 1
        return x


@situation("functionalize: what it does not take")
def _() -> Iterator[Any]:
    yield raised(functionalize, len)
    yield raised(functionalize, nn.LazyLinear(3))
    call, params = functionalize(nn.Linear(2, 1))
    yield raised(call, {**params, "wieght": params["weight"]}, torch.zeros(2))
    yield raised(call, {"nothing": params["weight"]}, torch.zeros(2))
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    call, params = functionalize(tied)
    yield raised(call, {**params, "1.weight": torch.zeros(2, 2)}, torch.zeros(2))
    call, params = functionalize(Counting())
    yield raised(call, MappingProxyType(params), torch.zeros(2))


@situation("functionalize: a call in another thread")
def _() -> Iterator[Any]:
    entered, leaves = threading.Event(), threading.Event()

    class Waiting(nn.Linear):
        def forward(self, x: Any) -> Any:
            entered.set()
            leaves.wait(30.0)
            return super().forward(x)

    call, params = functionalize(Waiting(2, 1))
    other = threading.Thread(target=call, args=(params, torch.zeros(2)))
    other.start()
    entered.wait(30.0)
    yield raised(call, params, torch.zeros(2))
    leaves.set()
    other.join(30.0)


@situation("TargetParams: what it does not take")
def _() -> Iterator[Any]:
    net = nn.Linear(2, 1)
    target = TargetParams(net)
    yield raised(target.update, 2.0)
    yield raised(target.load_state_dict, {"weight": torch.zeros(1, 2)})
    yield raised(target.load_state_dict, {"weight": torch.zeros(1, 5), "bias": torch.zeros(1)})
    net.bias = None
    yield raised(target.update, 0.5)


# ---- algorithms


def ppo(env: Any = Counter, *, num_envs: int = 2, **config: Any) -> Callable[[], Any]:
    def make() -> None:
        with muster.make_vec(env, 2, backend="serial", autoreset_mode="same_step") as envs:
            PPO(envs, PPOConfig(num_envs=num_envs, num_steps=32, **config))

    return make


situations(
    "PPO",
    {
        "total_steps of 0": lambda: PPOConfig(total_steps=0),
        "a negative seed": lambda: PPOConfig(seed=-1),
        "gamma beyond 1": lambda: PPOConfig(gamma=2.0),
        "too many minibatches": lambda: PPOConfig(num_envs=1, num_steps=4, num_minibatches=4),
        "several agents": ppo(Script),
        "another number of envs": ppo(num_envs=3),
        "normalised images": ppo(
            functools.partial(Observing, spaces.Box(0, 255, (36, 36, 3), "uint8")), normalize_observations=True
        ),
        "observations that it has no network for": ppo(functools.partial(Observing, spaces.Text(5))),
        "a part of observations without a shape": ppo(functools.partial(Observing, spaces.Dict(x=spaces.Text(5)))),
        "actions that it has no distribution for": ppo(functools.partial(Observing, BOX, spaces.Dict({"x": BOX}))),
        "continuous actions of integers": ppo(functools.partial(Observing, BOX, spaces.Box(0, 9, (1,), "int32"))),
    },
)
