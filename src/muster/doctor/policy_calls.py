"""Whether a policy can be copied, and what it does with an env's own observations. Needs PyTorch."""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from muster.doctor.diagnosis import Finding, PolicyVerdict, size
from muster.doctor.measure import make_envs
from muster.errors import SpecMismatch, WrongType
from muster.hosts.trial import Reporter
from muster.introspection import type_name
from muster.nn.turns import generators_kept
from muster.recipes.recipe import Recipe
from muster.rollout.collector import Collector
from muster.rollout.env_side import EnvSide
from muster.rollout.fields import describe
from muster.rollout.multi_agent_side import MultiAgentEnvs
from muster.rollout.policies import PlainActor, TensorDictActor, is_tensordict_policy
from muster.rollout.processes.policy_travel import obstacle_to
from muster.rollout.single_agent_side import SingleAgentEnvs
from muster.rollout.storage import Storage
from muster.rollout.weights import copies_into, copy_all, module_of, named_weights, place, weights_for
from muster.worker_info import WorkerInfo, worker_info_context

_ROWS = 8
# What a policy needs of a vector env, for its observations and in addition to them.
_FACTS = ("single_observation_space", "single_action_space", "groups", "mask_shapes", "state_space")
BUILDS = 2

Weights = dict[str, Tensor]
Layout = dict[str, str]
"""By a parameter's or buffer's name, in quotes, its shape and its dtype."""


def judge_policy(policy: Any) -> tuple[Finding, PolicyVerdict]:
    """The decision of `MultiCollector` about `policy`, made before any process starts, as a finding and a verdict."""
    weights = named_weights(policy)
    weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    obstacle = obstacle_to(policy)
    if obstacle is None:
        text = f"it can be copied to collector processes, once; {len(weights)} weights ({size(weight_bytes)}) follow"
        return Finding("good", "policy", text), PolicyVerdict(True, weight_bytes)
    ways = obstacle.ways_out()
    verdict = PolicyVerdict(False, weight_bytes, obstacle.path, obstacle.type_name, obstacle.reason, ways)
    if obstacle.marked:
        text = f"it stays in the calling process, as it asks: {obstacle}. There it acts for the envs of all workers"
        return Finding("note", "policy", text), verdict
    text = f"it cannot be copied to collector processes, because of {obstacle}. MultiCollector lets it act here for all"
    return Finding("warns", "policy", text, "\n".join(f"# {way}" for way in ways)), verdict


def observe(recipe: Recipe, reporter: Reporter) -> None:
    """The trial that steps one env by random actions, and reports what it observes, pickled, as if of N envs."""
    reporter.stage("building the env for the policy")
    with make_envs(recipe, 1, backend="serial", autoreset_mode="same_step", state=True) as envs:
        reporter.stage("stepping the env for the policy")
        storage = Collector(envs, None, frames_per_batch=_ROWS, seed=0, compact=True).collect_storage()
        rows = [np.array(rows[:_ROWS, 0]) for rows in storage.observations]
        facts = {name: getattr(envs, name, None) for name in _FACTS}
        facts |= {"num_envs": _ROWS, "metadata": {"autoreset_mode": envs.metadata["autoreset_mode"]}}
        # A script's own classes of spaces have come by value, and go on in the same way.
        reporter.result("observed", cloudpickle.dumps((rows, facts)))
        reporter.stage("closing the env of the policy")


def build_and_call(reporter: Reporter, factory: bytes, observed: bytes | None, weights: Weights | None) -> None:
    """The trial that builds a policy `BUILDS` times, and calls each on what `observe` has reported, if that is known.

    All get the weights; without any, those of the first. Reports ``build_s`` of the first, and by number the layouts
    and the outputs.
    """
    build: Callable[[], Any] = pickle.loads(factory)
    for number in range(BUILDS):
        reporter.stage("building the policy" + " again" * (number > 0))
        started = time.perf_counter()
        with worker_info_context(WorkerInfo(None, 0, 1, 1, seed=0)):
            policy = build()
        if number == 0:
            reporter.result("build_s", time.perf_counter() - started)
        if not callable(policy):
            raise WrongType(f"policy_factory returned an object of type {type_name(policy)}, which cannot be called")
        reporter.result(f"layout {number}", layout_of(policy))
        if observed is not None:
            reporter.stage("calling the policy on the env's observations")
            _outputs_of(policy, observed)  # gives lazy modules their shapes
            reporter.result(f"layout {number}", layout_of(policy))
            weights = weights or weights_of(policy)
            if own := named_weights(policy):
                with contextlib.suppress(SpecMismatch):  # its layout says how it differs
                    copy_all(copies_into(policy, weights_for(policy, weights, own)))
            reporter.result(f"outputs {number}", _outputs_of(policy, observed))


def weights_of(policy: Any) -> Weights:
    """Copies of the policy's weights, on the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in named_weights(policy).items()}


def outputs_of_original(policy: Any, observed: bytes) -> dict[str, Tensor]:
    """The outputs of a policy in use on what `observe` has reported. Its buffers are left as they were."""
    module = module_of(policy)
    buffers = [] if module is None else [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        return _outputs_of(policy, observed)
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _outputs_of(policy: Any, observed: bytes) -> dict[str, Tensor]:
    """The policy's outputs ``[N, ...]`` by key, on the CPU, from one seed. torch's generators are left as they were."""
    fields, facts = pickle.loads(observed)
    envs: Any = SimpleNamespace(**facts)  # which cannot be stepped
    side: EnvSide = SingleAgentEnvs(envs) if envs.groups is None else MultiAgentEnvs(envs)
    if isinstance(side, SingleAgentEnvs) and len(fields) > len(side.observation_fields):
        side.have_masks(len(fields) - 1)
    storage = Storage(1, envs.num_envs, side.observation_fields, side.reward_fields, compact=True)
    for array, rows in zip(storage.observations, fields, strict=True):
        array[0] = rows
    kind = TensorDictActor if is_tensordict_policy(policy) else PlainActor
    device = place(policy, None)
    with generators_kept(device), torch.no_grad():
        torch.manual_seed(0)
        actor = kind(policy, side, slice(0, envs.num_envs), device, {})
        actor.begin(storage)
        actor.act(0)
    return {describe(key): rows[0] for key, rows in storage.outputs.items()}


def layout_of(policy: Any) -> Layout:
    """The shapes and dtypes of the policy's parameters and buffers; "not known yet" for the shapes of lazy ones."""
    weights = named_weights(policy)
    return {repr(name): described(None if is_lazy(one) else one.shape, one) for name, one in weights.items()}


def described(shape: torch.Size | None, tensor: Tensor) -> str:
    """The shape and the tensor's dtype in words, as ``[3, 4] float32``. shape: None where it is not known yet."""
    return f"{'not known yet' if shape is None else list(shape)} {str(tensor.dtype).removeprefix('torch.')}"
