"""Whether a policy can go to collector processes, and what keeps it where it is. Needs PyTorch."""

from __future__ import annotations

from typing import Any

from muster.doctor.diagnosis import Finding, PolicyVerdict, size
from muster.rollout.processes.policy_travel import obstacle_to
from muster.rollout.weights import named_weights


def judge_policy(policy: Any) -> tuple[Finding, PolicyVerdict]:
    """The decision of `MultiCollector` about `policy`, made before any process starts, as a finding and a verdict."""
    weights = named_weights(policy)
    weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    obstacle = obstacle_to(policy)
    if obstacle is None:
        text = f"it can be copied to collector processes, once; {len(weights)} weights ({size(weight_bytes)}) follow"
        return Finding("good", "policy", text), PolicyVerdict(True, weight_bytes)
    remedy = "\n".join(f"# {way}" for way in obstacle.ways_out())
    verdict = PolicyVerdict(
        False, weight_bytes, obstacle.path, obstacle.type_name, obstacle.reason, obstacle.ways_out()
    )
    if obstacle.marked:
        text = f"it stays in the calling process, as it asks: {obstacle}. There it acts for the envs of all workers"
        return Finding("note", "policy", text), verdict
    text = f"it cannot be copied to collector processes, because of {obstacle}. MultiCollector lets it act here for all"
    return Finding("warns", "policy", text, remedy), verdict
