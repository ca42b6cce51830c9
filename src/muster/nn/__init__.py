"""Multi-agent networks, functional calls that never copy a module, and target parameters (extra "torch")."""

from __future__ import annotations

from muster.extras import imports_for

with imports_for("muster.nn needs", "muster-rl[torch]", "torch", "tensordict"):
    from muster.nn.functional import TargetParams, functionalize
    from muster.nn.marks import UncopyableMark, is_uncopyable, uncopyable, uncopyable_mark
    from muster.nn.multi_agent_net import AgentView, MultiAgentNet
    from muster.nn.networks import MultiAgentConvNet, MultiAgentMLP
    from muster.nn.shared_copies import shared_on_copy

__all__ = [
    "AgentView",
    "MultiAgentConvNet",
    "MultiAgentMLP",
    "MultiAgentNet",
    "TargetParams",
    "UncopyableMark",
    "functionalize",
    "is_uncopyable",
    "shared_on_copy",
    "uncopyable",
    "uncopyable_mark",
]
