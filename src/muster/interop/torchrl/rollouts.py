"""The loop of a TorchRL `Collector` by leaves: what its own `rollout` returns, without a tensordict at each step.

TorchRL's loop makes, merges and copies tensordicts for each frame, and stacks them; that takes ten times as long as a
step of CartPole. Here the carrier is a flat dict of leaves between the first step and the last.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any

import torch
from tensordict import TensorDictBase  # type: ignore[import-untyped]  # it ships no py.typed
from torch import Tensor
from torchrl.collectors import Collector
from torchrl.envs.utils import set_exploration_type

from muster.errors import SpecMismatch
from muster.interop.torchrl.columns import has_stacks
from muster.interop.torchrl.leaves import Leaves, Nesting, Path
from muster.interop.torchrl.roads import Road, env_state, road_of
from muster.rollout.fields import describe
from muster.rollout.plain_modules import PlainModules, as_key, leaves_of

_TRAJ_IDS = ("collector", "traj_ids")


class Loop:
    """The rollouts of `collector`, with the keys, values and state of TorchRL's loop, bit for bit.

    reason: why TorchRL's own loop runs since the collector, its env or its policy has changed; "" while this one does.
    """

    def __init__(self, collector: Collector) -> None:
        self._collector = weakref.ref(collector)
        self.reason = ""
        self._decide(collector)

    @torch.no_grad()
    def run(self) -> TensorDictBase | None:
        """The next rollout. Raises SpecMismatch, and what env and policy raise."""
        collector = self._collector()
        assert collector is not None
        if not _same(self._state, _state_of(collector)):
            self._decide(collector)
        if self.reason:
            return Collector.rollout(collector)
        if collector.pre_collect_hook is not None:
            collector.pre_collect_hook()
        if collector.reset_at_each_iter:
            collector._carrier.update(collector.env.reset())
            collector._start_new_trajectories()
        if collector._use_buffers and collector.track_traj_ids:
            collector._final_rollout.fill_(_TRAJ_IDS, -1)
        rows = _Rows(collector)
        self._root = leaves_of(collector._carrier)
        try:
            with set_exploration_type(collector.exploration_type):
                self._collect(collector, rows)
        finally:
            collector._carrier = self._carrier()
        return collector._maybe_set_truncated(rows.stacked(self._nesting))

    def _decide(self, collector: Collector) -> None:
        """Finds out whether the loop can serve the collector as it is now, and how."""
        self._state = _state_of(collector)
        self.reason = obstacle(collector)
        if self.reason:
            return
        device = None if collector._carrier_has_no_device else collector.env.device
        self._nesting = Nesting(collector._carrier, device)
        self._road: Road = road_of(collector.env, self._nesting)
        self._policy = collector._wrapped_policy
        self._plain = PlainModules(self._policy, collector.env.batch_size)
        self._done_keys = [as_key(key) for key in collector.env.done_keys]

    def _collect(self, collector: Collector, rows: _Rows) -> None:
        if not self._plain.is_like(again := PlainModules(self._policy, collector.env.batch_size)):
            self._plain = again
        random = collector.init_random_frames > 0
        interruptor, tracks = collector.interruptor, collector.track_traj_ids
        for _ in range(collector.frames_per_batch):
            self._act(collector, random and collector._should_use_random_frames())
            root, arrived, following, ended = self._road.step(self._root)
            rows.add(root, arrived)
            if tracks:
                ids = root[_TRAJ_IDS]
                following[_TRAJ_IDS] = self._next_ids(collector, ids, arrived) if ended else ids
            self._root = following
            if interruptor is not None and interruptor.collection_stopped():
                break

    def _act(self, collector: Collector, random: bool) -> None:
        """Adds the policy's outputs to the root, or random actions."""
        if not random and self._plain.call(self._root):
            return
        carrier = self._nesting.tensordict(self._root, self._nesting.device)
        if random:
            collector.env.rand_action(carrier)
        else:
            # A policy on a device of its own sees tensordicts of that device, where the env's have none.
            casts = collector._cast_to_policy_device and collector.policy_device is not None
            output = self._policy(self._nesting.tensordict(self._root, collector.policy_device) if casts else carrier)
            if output is not carrier:
                carrier.update(output, keys_to_update=collector._policy_output_keys)
        self._root = leaves_of(carrier)

    def _next_ids(self, collector: Collector, ids: Tensor, arrived: Leaves) -> Tensor:
        """The trajectories' ids after a step in which some have ended."""
        ended: Any = False
        for path in self._done_keys:
            if (flag := arrived.get(path)) is not None:
                ended = ended | (flag.flatten(ids.ndim).any(-1) if flag.ndim > ids.ndim else flag)
        new = collector._traj_pool.get_traj_and_increment(ended.sum(), device=ids.device)
        return ids.masked_scatter(ended, new).reshape(ids.shape)

    def _carrier(self) -> TensorDictBase:
        """The collector's state between two rollouts; TorchRL writes into its leaves."""
        leaves = {path: leaf.clone() for path, leaf in self._root.items()}
        return self._nesting.tensordict(leaves, self._nesting.device)


class _Rows:
    """The leaves of each step of a rollout, which are stacked along its last dimension."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._left_out = {tuple(key[1:]) for key in collector._compact_next_keys}
        self._root: dict[Path, list[Tensor]] = defaultdict(list)
        self._next: dict[Path, list[Tensor]] = defaultdict(list)
        self._steps = 0

    def add(self, root: Leaves, arrived: Leaves) -> None:
        """Adds a step."""
        self._steps += 1
        for columns, leaves in ((self._root, root), (self._next, arrived)):
            for path, leaf in leaves.items():
                columns[path].append(leaf)

    def stacked(self, nesting: Nesting) -> TensorDictBase:
        """The rollout: in TorchRL's buffers if the collector has those, else a new tensordict."""
        collector, dim = self._collector, len(self._collector.env.batch_size)
        columns = self._root | {
            ("next", *path): leaves for path, leaves in self._next.items() if path not in self._left_out
        }
        whole = self._steps == collector.frames_per_batch
        if collector._use_buffers:
            for path, buffer in leaves_of(collector._final_rollout).items():
                if path in columns:
                    self._stack(path, columns[path], dim, buffer if whole else buffer.narrow(dim, 0, self._steps))
            return collector._final_rollout
        stacks = {path: self._stack(path, leaves, dim) for path, leaves in columns.items()}
        result = nesting.stretched(dim, self._steps).tensordict(stacks, collector.storing_device or nesting.device)
        if whole and (collector.replay_buffer is None or collector._ignore_rb):
            result.refine_names(..., "time")
        return result

    def _stack(self, path: Path, leaves: list[Tensor], dim: int, out: Tensor | None = None) -> Tensor:
        try:
            if len(leaves) == self._steps:
                return torch.stack(leaves, dim, out=out)
            what = f"is there in {len(leaves)} of {self._steps} steps"
        except RuntimeError as error:
            first = leaves[0] if out is None else out.select(dim, 0)
            odd = next((leaf for leaf in leaves if leaf.shape != first.shape), None)
            if odd is None:
                raise
            what = f"has shape {list(odd.shape)}, expected {list(first.shape)} ({error})"
        raise SpecMismatch(
            f"the rollout's {describe(path)} {what}; check_env_specs(env) of torchrl.envs.utils shows all that differs"
        )


def obstacle(collector: Collector) -> str:
    """Why TorchRL's own loop has to run for `collector` as it is now; "" where it has not."""
    env = collector.env
    devices = (collector.policy_device, collector.env_device, collector.storing_device, env.device)
    if collector.compiled_policy or collector.cudagraphed_policy:
        return "the policy is compiled"
    if any(device is not None and device.type != "cpu" for device in devices):
        return f"not all devices are the CPU: {', '.join(str(device) for device in devices)}"
    if collector.replay_buffer is not None and not collector._ignore_rb and not collector.extend_buffer:
        return "extend_buffer=False writes each frame into the replay buffer"
    if env._has_dynamic_specs:
        return "the env has shapes that change"
    policy = collector._wrapped_policy
    if isinstance(policy, torch.nn.Module) and any(one.is_meta for one in policy.parameters()):
        return "the policy has no weights yet"
    try:
        trees = [collector._carrier, collector._final_rollout if collector._use_buffers else env.fake_tensordict()]
    except Exception as error:
        return f"env.fake_tensordict() raises {type(error).__name__}"
    for tree in trees:
        if has_stacks(tree):
            return "tensordicts are stacked lazily"
        for path, leaf in leaves_of(tree).items():
            if not isinstance(leaf, Tensor):
                return f"{path[-1]!r} is a {type(leaf).__name__}"
    return ""


def _state_of(collector: Collector) -> list[Any]:
    """The objects that the decision depends on: it holds while these are the same ones."""
    return [
        *env_state(collector.env),
        collector._wrapped_policy,
        *(collector.replay_buffer, collector.extend_buffer, collector.storing_device, collector._use_buffers),
    ]


def _same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
