"""One collector in its worker process: an env to the engine, whose step collects one batch.

Batches of tensors lie in memory that the caller maps, so that nothing of them is pickled: the layout is told once, and
again where it changes. Objects travel as pickles.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from multiprocessing.reduction import ForkingPickler
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict import (  # type: ignore[import-untyped]  # it ships no py.typed
    LazyStackedTensorDict,
    TensorDictBase,
    is_non_tensor,
)
from torch import Tensor
from torchrl.collectors.utils import (
    _ensure_derived_policy_output_keys,
    _maybe_normalize_replay_buffer_tensordict_device,
)

from muster._core import map_fd
from muster.arguments import with_ints
from muster.interop.torchrl.collectors import Collector
from muster.interop.torchrl.columns import Columns, has_stacks, visit
from muster.interop.torchrl.env_worker import without_locks
from muster.introspection import type_name
from muster.rollout.processes.shared_weights import SharedWeights
from muster.rollout.weights import named_weights
from muster.worker_info import get_worker_info

FLAG_BYTES = 4096
"""Size of the file with the flags that end the workers' free runs, one byte each."""


class Command(IntEnum):
    """What a worker is to do. FREELY: collect into the replay buffer until its flag is set."""

    COLLECT = 0
    COLLECT_RANDOMLY = 1
    FREELY = 2


class Told(IntEnum):
    """What a worker has done: the batch is where the last one was, its layout or itself is told, or it is stored."""

    IN_PLACE = 0
    LAID_OUT = 1
    MAILED = 2
    STORED = 3


@dataclass(frozen=True)
class Facts:
    """What the caller has to know of a worker. weights: names, and tensors without values.

    loop_reason: why TorchRL's own loop collects there; "" where Muster's does.
    """

    weights: dict[str, Tensor]
    uses_buffers: bool
    loop_reason: str


class Shared:
    """Objects that processes share by way of multiprocessing or torch, pickled as for a process that starts."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def __reduce__(self) -> tuple[Any, ...]:
        return _shared_again, (bytes(ForkingPickler.dumps(self.values)),)


def _shared_again(data: bytes) -> Shared:
    return Shared(**pickle.loads(data))


def share_storage(replay_buffer: Any) -> None:
    """Moves what a replay buffer holds into memory that forks share; a pickle for other processes would do that."""
    held = getattr(getattr(replay_buffer, "_storage", None), "_storage", None)
    if isinstance(held, TensorDictBase) and not held.is_memmap():
        visit(held, Tensor.share_memory_)


def hosted_collector(
    *,
    create_env_fn: Any,
    init_fn: Callable[[], Any] | None,
    collector_class: Any,
    num_threads: int,
    policy: Any,
    packed_policy: bytes | None,
    policy_factory: Callable[[], Any] | None,
    weights_path: str,
    flags_path: str,
    shared: Shared,
    trajs_per_batch: int | None,
    options: Mapping[str, Any],
    **arguments: Any,
) -> HostedCollector:
    """The collector of this process, for the engine.

    shared: replay buffer, pool of trajectories and interruptor.  options, arguments: others of the collector's.
    """
    torch.set_num_threads(num_threads)
    if init_fn is not None:
        init_fn()
    buffer = shared.values["replay_buffer"]
    if packed_policy is not None:
        policy = pickle.loads(packed_policy)
    made = Collector if collector_class is None else collector_class
    # As in TorchRL's workers: the buffer is filled here, or by the collector, which puts trajectories together.
    made._ignore_rb = options["extend_buffer"] if trajs_per_batch is None else False
    inner = made(
        create_env_fn,
        policy=_with_derived_keys(policy),
        policy_factory=None if policy_factory is None else lambda: _with_derived_keys(policy_factory()),
        total_frames=-1,
        split_trajs=False,
        return_same_td=buffer is None or bool(made._ignore_rb),
        trajs_per_batch=trajs_per_batch,
        **shared.values,
        **options,
        **arguments,
    )
    return HostedCollector(inner, buffer if made._ignore_rb else None, buffer is not None, weights_path, flags_path)


def _with_derived_keys(policy: Any) -> Any:
    _ensure_derived_policy_output_keys(policy)
    return policy


class HostedCollector(gymnasium.Env[Any, Any]):
    """A collector of TorchRL's as the engine steps it. The action is the `Command`, the observation what it has `Told`.

    to_fill: the replay buffer that this worker writes batches to.  stores: whether there is a replay buffer at all.
    """

    observation_space = spaces.Box(0, 255, (1,), np.uint8)
    action_space = spaces.Box(0, 255, (1,), np.uint8)

    def __init__(self, inner: Any, to_fill: Any, stores: bool, weights_path: str, flags_path: str) -> None:
        self._inner, self._buffer, self._stores = inner, to_fill, stores
        info = get_worker_info()
        self._index = info.env_index if info is not None and info.env_index is not None else 0
        with open(flags_path, "r+b", buffering=0) as file:
            self._flag = map_fd(fd=file.fileno(), size=FLAG_BYTES)[self._index :]
        self._weights_file = open(weights_path, "r+b", buffering=0)  # noqa: SIM115  # closed by `close`
        own = named_weights(getattr(inner, "policy", None))
        self._weights = SharedWeights(own, self._weights_file.fileno())
        self._version, self._updates = self._weights.write(own, b"0"), 0
        self._batches: Iterator[Any] = iter(inner)
        self._columns: Columns | None = None

    def facts(self) -> Facts:
        """What the caller has to know."""
        own = named_weights(getattr(self._inner, "policy", None)).items()
        weights = {name: one.detach().to("meta") for name, one in own}
        reason = getattr(self._inner, "loop_reason", f"the collector is a {type_name(self._inner)}")
        return Facts(weights, bool(getattr(self._inner, "_use_buffers", False)), reason)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        command = Command(int(action[0]))
        infos: dict[str, Any] = {}
        told = Told.STORED
        if command == Command.FREELY:
            try:
                while not self._flag[0]:
                    self._collect()
            except Exception:
                traceback.print_exc()  # in a free run nobody waits for an answer
                raise
        else:
            self._inner.init_random_frames = float("inf") if command == Command.COLLECT_RANDOMLY else -1
            batch = self._collect()
            if not self._stores:
                told, infos = self._placed(batch)
        return np.array([told], np.uint8), 0.0, False, False, infos

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Nothing: collectors are reset by a message."""
        return np.zeros(1, np.uint8), {}

    def perform(self, pickled: Mapping[int, bytes]) -> Any:
        """Carries out the message for this collector, if there is one: its data and its name. Returns the answer."""
        if self._index not in pickled:
            return None
        data, name = pickle.loads(pickled[self._index])
        self._take_weights()
        act, answer = _MESSAGES[name]
        return act(self, data), answer

    def close(self) -> None:
        """Closes the envs, and ends a profiler that TorchRL's `enable_profile` has set."""
        stop = getattr(getattr(self._inner, "_post_collect_hook", None), "stop", None)
        if callable(stop):
            stop()
        self._weights_file.close()
        self._inner.shutdown()

    def _collect(self) -> Any:
        self._take_weights()
        batch = next(self._batches)
        if self._buffer is not None and batch is not None:
            batch.names = None
            self._buffer.extend(_maybe_normalize_replay_buffer_tensordict_device(batch, self._buffer))
        return batch

    def _take_weights(self) -> None:
        if self._weights.version == self._version:
            return
        self._version, beside = self._weights.read_into(named_weights(self._inner.policy), self._version)
        for _ in range(int(beside) - self._updates):
            self._inner.increment_version()
        self._updates = int(beside)

    def _placed(self, batch: TensorDictBase) -> tuple[Told, dict[str, Any]]:
        """Puts a batch where the caller finds it: what to tell, and infos."""
        if self._columns is not None and batch is self._columns.tree:
            return Told.IN_PLACE, {}
        if not _is_plain(batch):
            return Told.MAILED, {"batch": _Mailed(batch)}
        if self._columns is not None and _layout(self._columns.tree) == (layout := _layout(batch)) and layout:
            for column, value in zip(_leaves(self._columns.tree), _leaves(batch), strict=True):
                column.copy_(value)
            return Told.IN_PLACE, {}
        self._columns = Columns(batch)
        if batch is getattr(self._inner, "_final_rollout", None):
            self._inner._final_rollout = self._columns.tree  # the next rollouts are written there
        return Told.LAID_OUT, {"batch": _Mailed(self._columns.rows(self._columns.tree))}

    def _seed(self, seed: int, static_seed: bool) -> int:
        new_seed: int = self._inner.set_seed(with_ints(seed), static_seed=static_seed)
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002  # as TorchRL's workers
        return new_seed


# What is done for each of TorchRL's messages, with its data, and the name of the answer.
_MESSAGES: dict[str, tuple[Callable[[HostedCollector, Any], Any], str]] = {
    "seed": (lambda hosted, data: hosted._seed(*data), "seeded"),
    "reset": (lambda hosted, _: hosted._inner.reset(), "reset"),
    "state_dict": (lambda hosted, _: without_locks(hosted._inner.state_dict()), "state_dict"),
    "load_state_dict": (lambda hosted, data: hosted._inner.load_state_dict(data), "loaded"),
    "getattr_policy": (lambda hosted, name: getattr(hosted._inner.policy, name), "getattr_policy"),
    "getattr_env": (lambda hosted, name: getattr(hosted._inner.env, name), "getattr_env"),
    "cascade_execute": (
        lambda hosted, data: hosted._inner.cascade_execute(data[0], *data[1], **data[2]),
        "cascade_execute",
    ),
    "get_distant_attr": (lambda hosted, name: hosted._inner.get_distant_attr(name), "get_distant_attr"),
    "setattr": (lambda hosted, data: setattr(hosted._inner, *data), "setattr"),
}


@dataclass(frozen=True)
class _Mailed:
    """What travels beside a batch: its layout, or the batch itself."""

    content: Any


def _is_plain(batch: TensorDictBase) -> bool:
    """Whether all that a batch holds are dense tensors in this machine's memory."""
    leaves = _leaves(batch)
    dense = all(leaf.device.type == "cpu" and leaf.layout == torch.strided and not leaf.is_nested for leaf in leaves)
    return dense and not _has_objects(batch)


def _has_objects(batch: TensorDictBase) -> bool:
    parts = batch.tensordicts if isinstance(batch, LazyStackedTensorDict) else batch.values()
    nested = (part for part in parts if not isinstance(part, Tensor))
    return any(is_non_tensor(part) or not isinstance(part, TensorDictBase) or _has_objects(part) for part in nested)


def _layout(batch: TensorDictBase) -> list[Any]:
    """The keys, shapes and dtypes of a batch; empty where it is not as simple as that."""
    if has_stacks(batch):
        return []
    leaves = [(key, value.shape, value.dtype) for key, value in batch.items(True, True)]
    return [batch.device, batch.shape, batch.names, *leaves]


def _leaves(batch: TensorDictBase) -> list[Tensor]:
    found: list[Tensor] = []
    visit(batch, found.append)
    return found
