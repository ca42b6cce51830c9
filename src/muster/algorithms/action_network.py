"""Networks that have learnt, as modules for other programs: observations in, actions out, without Muster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from muster.algorithms.actor_critic import Categoricals, Gaussian, Network, as_seen
from muster.algorithms.encoder import as_observation
from muster.algorithms.teams import Networks
from muster.errors import UsageError
from muster.introspection import type_name
from muster.spaces.masks import MASK


class ActionNetwork(nn.Module):
    """The likeliest actions for observations, as `torch.jit.trace`, `torch.export` and `torch.onnx.export` take them.

    networks: those that act, and see observations by the same statistics.  places: the agents of each, in a group of A
    agents; none for an env with one agent.

    memory_size: H, the numbers of the memory; 0 for none.

    Raises UsageError for a network with a head that gives actions by code of its own, which nothing exports.
    """

    def __init__(self, networks: Sequence[Network], places: Sequence[slice] = ()) -> None:
        super().__init__()
        self.policies = nn.ModuleList(network.policy for network in networks)
        self.statistics, self.places = networks[0].statistics, list(places)
        for head in (network.policy.head for network in networks):
            if type(head).to_env not in (Categoricals.to_env, Gaussian.to_env):
                raise UsageError(
                    f"{type_name(head)} makes actions by a function of its own, to_env, which cannot be "
                    "exported; a head of muster.algorithms.head_of can"
                )
        self.memory_size: int = getattr(self.policies[0], "memory_size", 0)
        self.training = False  # as those of a trained policy; exporters warn of another

    @torch.no_grad()
    def forward(self, obs: Any, memory: Tensor | None = None, masks: Tensor | None = None) -> Any:
        """Actions [B, *shape] of the action space, for observations [B, *obs_shape] of the observation space.

        obs: a tensor; of a Dict or a Tuple a dict or a tuple of them.  masks: bool [B, n], the choices that are
        allowed; without them "action_mask" of a Dict counts, if it has one.
        memory: of a policy with memory float32 [B, H], zeros where an episode begins, as without it. That after the
        step is then returned, too.
        Of a group of agents all are [B, A, ...].
        """
        if masks is None and isinstance(obs, Mapping):
            masks = obs.get(MASK)
        of_group = bool(self.places)
        seen = as_seen(as_observation(obs, 1 + of_group), self.statistics)
        if memory is None and self.memory_size:
            memory = torch.zeros(*seen.shape[: 1 + of_group], self.memory_size, device=next(self.parameters()).device)
        given = (seen, masks, memory)
        if len(self.policies) == 1:
            acted = [self._act(self.policies[0], *given)]
        else:
            each = [[one if one is None else one[:, at] for one in given] for at in self.places]
            acted = [self._act(policy, *own) for policy, own in zip(self.policies, each, strict=True)]
        actions, after = ([part for part in parts if part is not None] for parts in zip(*acted, strict=True))
        return _joined(actions) if not after else (_joined(actions), _joined(after))

    def _act(self, policy: Any, seen: Any, masks: Tensor | None, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if masks is not None:  # a part that allows nothing allows everything, as wherever there are masks
            parts = torch.split(masks.bool(), policy.head.choices.nvec, -1)
            masks = torch.cat([one | ~one.any(-1, keepdim=True) for one in parts], -1)
        params, after = policy.decide(seen, masks, memory)
        return policy.head.to_elements(policy.head.mode(params)), after


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def action_networks(networks: Network | Networks) -> ActionNetwork | dict[str, ActionNetwork]:
    """The network that acts; of agents one for each group, by its name. Raises as `ActionNetwork`."""
    if isinstance(networks, Network):
        return ActionNetwork([networks])
    of_group: dict[str, tuple[list[Network], list[slice]]] = {}
    for team, network in zip(networks.teams, networks.networks, strict=True):
        found = of_group.setdefault(team.group, ([], []))
        found[0].append(network)
        found[1].append(team.agents)
    return {group: ActionNetwork(*of_one) for group, of_one in of_group.items()}
