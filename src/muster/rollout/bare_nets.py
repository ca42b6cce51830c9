"""Multi-agent networks as policies without TensorDict keys, and the code that gives them keys where they need those."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gymnasium import spaces
from torch import nn

from muster.errors import SpecMismatch
from muster.introspection import class_name, module_name
from muster.rollout.env_side import EnvSide
from muster.rollout.fields import Field

# Muster's base class of such networks, and TorchRL's: topmost module and name.
_CLASSES = (("muster", "MultiAgentNet"), ("torchrl", "MultiAgentNetBase"))


def called_by_group(policy: Callable[..., Any], envs: EnvSide) -> Callable[..., Any]:
    """The policy as a function from observations by group to actions by group.

    A multi-agent network maps the observation of the only group to its action, as a network of one agent does without
    groups. Raises SpecMismatch with the code to write where that is not clear. Others are returned as they are.
    """
    if not (envs.has_agents and _is_multi_agent_net(policy)):
        return policy
    groups = _groups(envs)
    seen = [field.key for field in _of_group(envs.observation_fields, groups[0], "observation")]
    acts = [field.key for field in _of_group(envs.action_fields, groups[0], "action")]
    if len(groups) > 1:
        reason = f"{len(groups)} groups of agents: {', '.join(map(repr, groups))}"
    elif seen != [(groups[0], "observation")]:
        reason = f"observations of {len(seen)} parts: {', '.join(map(repr, seen))}"
    elif acts != [(groups[0], "action")]:
        reason = f"actions of {len(acts)} parts: {', '.join(map(repr, acts))}"
    elif not isinstance(envs.action_spaces[0], spaces.Box):
        reason = f"actions {envs.action_spaces[0]}, which have to be drawn from what it gives"
    else:
        return lambda observations, *state: {groups[0]: policy(observations[groups[0]], *state)}
    raise SpecMismatch(
        f"the policy is a {class_name(type(policy))}, which maps one tensor to one tensor, and the envs have {reason}. "
        f"{_with_keys(envs)}"
    )


def explain_failure(error: Exception, policy: Callable[..., Any], envs: EnvSide) -> None:
    """Adds to the first call's error how to call a module that takes tensors, if it may be one."""
    if envs.has_agents and isinstance(policy, nn.Module) and isinstance(error, (TypeError, AttributeError)):
        error.add_note(
            "The policy was called with a dict of observations by group, and must return a dict of actions by group. "
            f"Does it take tensors? {_with_keys(envs)}"
        )


def _is_multi_agent_net(policy: object) -> bool:
    """Whether the policy is called as the networks of those classes are, by their `forward`."""
    owner = next((base for base in type(policy).__mro__ if "forward" in vars(base)), None)
    if owner is None or "forward" in vars(policy):
        return False
    return (module_name(owner).partition(".")[0], owner.__name__) in _CLASSES


def _groups(envs: EnvSide) -> list[str]:
    return list(dict.fromkeys(field.key[0] for field in envs.action_fields))


def _of_group(fields: Sequence[Field], group: str, name: str) -> list[Field]:
    return [field for field in fields if field.key[:2] == (group, name)]


def _with_keys(envs: EnvSide) -> str:
    """The sentence and the code for a policy of networks with keys, one for each action."""
    one = len(envs.action_fields) == 1
    parts = []
    for i, field in enumerate(envs.action_fields):
        seen = [seen.key for seen in _of_group(envs.observation_fields, field.key[0], "observation")]
        net = "net" if one else f"nets[{i}]"
        parts += _modules(envs, i, f"{net}, in_keys={seen!r}")
    names = sorted({part.split("(")[0] for part in parts} | ({"TensorDictSequential"} if len(parts) > 1 else set()))
    lines = ["import torch"] if any("torch." in part for part in parts) else []
    lines.append(f"from tensordict.nn import {', '.join(names)}")
    if "ProbabilisticTensorDictModule" in names:
        lines.append("from torch.distributions import Categorical")
    if len(parts) == 1:
        lines.append(f"policy = {parts[0]}")
    else:
        lines += ["policy = TensorDictSequential(", *(f"    {part}," for part in parts), ")"]
    nets = (
        "the network, here net, its keys" if one else "each network its keys, nets being a list of one for each action"
    )
    return f"Give {nets}:\n" + "\n".join(f"    {line}" for line in lines)


def _modules(envs: EnvSide, i: int, call: str) -> list[str]:
    """The modules that lead to one action: a network, and for a choice of n a distribution with its n outputs."""
    key, space = envs.action_fields[i].key, envs.action_spaces[i]
    if not (isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1):  # one choice for each agent
        return [f"TensorDictModule({call}, out_keys=[{key!r}])"]
    logits = (key[0], "logits", *key[2:])
    modules = [f"TensorDictModule({call}, out_keys=[{logits!r}])"]
    if (mask := envs.masks[i]) is not None:
        allowed = envs.observation_fields[mask].key
        modules.append(
            "TensorDictModule(lambda logits, mask: logits.masked_fill(~mask, -1e9), "
            f"in_keys=[{logits!r}, {allowed!r}], out_keys=[{logits!r}])"
        )
    modules.append(
        f"ProbabilisticTensorDictModule({{'logits': {logits!r}}}, [{key!r}], distribution_class=Categorical)"
    )
    if space.start.any():
        first = f"torch.tensor({space.start.tolist()})"
        modules.append(f"TensorDictModule(lambda action: action + {first}, in_keys=[{key!r}], out_keys=[{key!r}])")
    return modules
