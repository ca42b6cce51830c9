"""One collector in its worker process: the resident of a pool, which collects batches and answers TorchRL's messages.

Batches of tensors lie in memory that the caller maps, so that nothing of them is pickled: the layout is sent once, and
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

import numpy as np
import torch
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

from muster._core import Doing, map_fd
from muster.arguments import with_ints
from muster.errors import UnknownMessage
from muster.hosts.failures import Failure, not_sent_there
from muster.hosts.recipe_plans import RecipeResident, Recipes
from muster.interop.torchrl.collectors import Collector
from muster.interop.torchrl.columns import Columns, EnvRows, has_stacks, visit
from muster.interop.torchrl.env_worker import without_locks
from muster.introspection import type_name
from muster.pool.resources import own_memory_bytes
from muster.pool.set_up import about_script
from muster.pool.worker import Here
from muster.rollout.replicas.shared_weights import SharedWeights
from muster.rollout.weights import named_weights

_RELEASE_TIMEOUT_S = 2.0

FLAG_BYTES = 4096
"""Size of the file with the flags that end the workers' free runs, one byte each."""


class Way(IntEnum):
    """The ways to collect: by the policy, by random actions, or by the policy until the worker's flag is set."""

    ACTING = 0
    RANDOMLY = 1
    FREELY = 2


@dataclass(frozen=True)
class CollectBy:
    """Asks for a batch."""

    way: Way


@dataclass(frozen=True)
class Ask:
    """One of TorchRL's messages, by its name. The answer is what TorchRL's worker sends back, with a name."""

    name: str
    data: Any


class Put(IntEnum):
    """The place of a batch: that of the last one, in new memory, in the answer, or in the replay buffer."""

    LAST = 0
    NEW = 1
    HERE = 2
    BUFFER = 3


@dataclass(frozen=True)
class Placed:
    """The answer to `CollectBy`. content: the layout of new memory, or the batch."""

    put: Put
    content: EnvRows | TensorDictBase | None = None


@dataclass(frozen=True)
class CollectorPlan:
    """The plan of a worker. recipes: the collector's.

    weights_path, flags_path: files of the caller.
    """

    recipes: Recipes
    weights_path: str
    flags_path: str


@dataclass(frozen=True)
class Facts:
    """The facts of a worker that the caller needs. weights: names, and tensors without values.

    loop_reason: why TorchRL's own loop collects there; "" where Muster's does.
    """

    weights: dict[str, Tensor]
    uses_buffers: bool
    loop_reason: str


class Shared(dict[str, Any]):
    """Objects that processes share by way of multiprocessing or torch, pickled as for a process that starts."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (bytes(ForkingPickler.dumps(dict(self))),)


def share_storage(replay_buffer: Any) -> None:
    """Moves what a replay buffer holds into memory that forks share; a pickle for other processes would do that."""
    held = getattr(getattr(replay_buffer, "_storage", None), "_storage", None)
    if isinstance(held, TensorDictBase) and not held.is_memmap():
        visit(held, Tensor.share_memory_)


def built_collector(
    *,
    create_env_fn: Any,
    init_fn: Callable[[], Any] | None,
    collector_class: Any,
    num_threads: int,
    policy: Any,
    policy_factory: Callable[[], Any] | None,
    shared: Shared,
    trajs_per_batch: int | None,
    options: Mapping[str, Any],
    **arguments: Any,
) -> Any:
    """The collector of this process.

    policy: packed, where it was sent.  shared: replay buffer, pool of trajectories and interruptor.
    options, arguments: others of the collector's.
    """
    torch.set_num_threads(num_threads)
    if init_fn is not None:
        init_fn()
    buffer = shared["replay_buffer"]
    if isinstance(policy, bytes):
        policy = pickle.loads(policy)
    made = Collector if collector_class is None else collector_class
    # As in TorchRL's workers: the buffer is filled here, or by the collector, which puts trajectories together.
    made._ignore_rb = options["extend_buffer"] if trajs_per_batch is None else False
    return made(
        create_env_fn,
        policy=_with_derived_keys(policy),
        policy_factory=None if policy_factory is None else lambda: _with_derived_keys(policy_factory()),
        total_frames=-1,
        split_trajs=False,
        return_same_td=buffer is None or bool(made._ignore_rb),
        trajs_per_batch=trajs_per_batch,
        **shared,
        **options,
        **arguments,
    )


def _with_derived_keys(policy: Any) -> Any:
    _ensure_derived_policy_output_keys(policy)
    return policy


class CollectorResident(RecipeResident):
    """A collector of TorchRL's in a place of a pool. An exception of its env or policy is an answer: a `Failure`."""

    def __init__(self, plan: CollectorPlan, here: Here) -> None:
        assert not isinstance(plan.recipes, bytes)
        assert here.dumps is not None
        [recipe] = plan.recipes
        self._activity = here.activity
        self._dumps, self._index, self._call = here.dumps, here.info.worker_index, recipe.call
        before_bytes = own_memory_bytes() if here.is_judged else 0
        self._built = recipe.build()
        if here.is_judged:
            here.report((before_bytes, own_memory_bytes()))
        self._inner = inner = self._built.env
        self._to_fill = inner.replay_buffer if inner._ignore_rb else None
        with open(plan.flags_path, "r+b", buffering=0) as file:
            self._flag = map_fd(fd=file.fileno(), size=FLAG_BYTES)[self._index :]
        self._weights_file = open(plan.weights_path, "r+b", buffering=0)  # noqa: SIM115  # closed by `close`
        own = named_weights(getattr(inner, "policy", None))
        self._weights = SharedWeights(own, self._weights_file.fileno())
        self._version, self._updates = self._weights.write(own, b"0"), 0
        self._batches: Iterator[Any] = iter(inner)
        self._num_batches = 0
        self._columns: Columns | None = None

    def facts(self) -> Facts:
        own = named_weights(getattr(self._inner, "policy", None)).items()
        weights = {name: one.detach().to("meta") for name, one in own}
        reason = getattr(self._inner, "loop_reason", f"the collector is a {type_name(self._inner)}")
        return Facts(weights, bool(getattr(self._inner, "_use_buffers", False)), reason)

    def answer(self, question: Any) -> Any:
        match question:
            case CollectBy(way):
                return self._outcome(self._collected, way)
            case Ask(name, data):
                with self._activity.of(Doing.TALKING, self._index):
                    return self._outcome(self._told, name, data)
        return super().answer(question)

    def close(self, closes: Callable[[int], None]) -> Failure | None:
        """Closes the envs, and ends a profiler that TorchRL's `enable_profile` has set; returns the failure."""
        closes(0)
        try:
            stop = getattr(getattr(self._inner, "_post_collect_hook", None), "stop", None)
            if callable(stop):
                stop()
            self._weights_file.close()
            self._inner.shutdown()
        except BaseException as error:
            return self._failure(error)
        finally:
            self._built.release(_RELEASE_TIMEOUT_S)
        return None

    def _outcome(self, act: Callable[..., Any], *arguments: Any) -> bytes:
        """The pickled result of `act`, or its failure."""
        try:
            result = act(*arguments)
        except BaseException as error:
            result = self._failure(error)
        try:
            return self._dumps(result)
        except Exception as error:
            return self._dumps(self._failure(not_sent_there(result, error, self._call)))

    def _failure(self, error: BaseException) -> Failure:
        hint = about_script(error, begins=not self._num_batches)
        return Failure.of(error, self._index, self._index, self._num_batches, self._dumps, hint=hint)

    def _told(self, name: str, data: Any) -> tuple[Any, str]:
        if name not in _MESSAGES:
            raise UnknownMessage(f"collectors know no message {name!r}; they know {sorted(_MESSAGES)}")
        self._take_weights()
        act, answer = _MESSAGES[name]
        return act(self, data), answer

    def _collected(self, way: Way) -> Placed:
        if way == Way.FREELY:
            try:
                while not self._flag[0]:
                    self._collect()
            except Exception:
                traceback.print_exc()  # in a free run nobody waits for an answer
                raise
            return Placed(Put.BUFFER)
        self._inner.init_random_frames = float("inf") if way == Way.RANDOMLY else -1
        batch = self._collect()
        return Placed(Put.BUFFER) if self._inner.replay_buffer is not None else self._placed(batch)

    def _collect(self) -> Any:
        self._take_weights()
        batch = next(self._batches)
        self._num_batches += 1
        if self._to_fill is not None and batch is not None:
            batch.names = None
            self._to_fill.extend(_maybe_normalize_replay_buffer_tensordict_device(batch, self._to_fill))
        return batch

    def _take_weights(self) -> None:
        if self._weights.version == self._version:
            return
        self._version, beside = self._weights.read_into(named_weights(self._inner.policy), self._version)
        for _ in range(int(beside) - self._updates):
            self._inner.increment_version()
        self._updates = int(beside)

    def _placed(self, batch: TensorDictBase) -> Placed:
        """Puts a batch where the caller finds it."""
        if self._columns is not None and batch is self._columns.tree:
            return Placed(Put.LAST)
        if not _is_plain(batch):
            return Placed(Put.HERE, batch)
        if self._columns is not None and _layout(self._columns.tree) == (layout := _layout(batch)) and layout:
            for column, value in zip(_leaves(self._columns.tree), _leaves(batch), strict=True):
                column.copy_(value)
            return Placed(Put.LAST)
        self._columns = Columns(batch)
        if batch is getattr(self._inner, "_final_rollout", None):
            self._inner._final_rollout = self._columns.tree  # the next rollouts are written there
        return Placed(Put.NEW, self._columns.rows(self._columns.tree))

    def _seed(self, seed: int, static_seed: bool) -> int:
        new_seed: int = self._inner.set_seed(with_ints(seed), static_seed=static_seed)
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002  # as TorchRL's workers
        return new_seed


# What is done for each of TorchRL's messages, with its data, and the name of the answer.
_MESSAGES: dict[str, tuple[Callable[[CollectorResident, Any], Any], str]] = {
    "seed": (lambda one, data: one._seed(*data), "seeded"),
    "reset": (lambda one, _: one._inner.reset(), "reset"),
    "state_dict": (lambda one, _: without_locks(one._inner.state_dict()), "state_dict"),
    "load_state_dict": (lambda one, data: one._inner.load_state_dict(data), "loaded"),
    "getattr_policy": (lambda one, name: getattr(one._inner.policy, name), "getattr_policy"),
    "getattr_env": (lambda one, name: getattr(one._inner.env, name), "getattr_env"),
    "cascade_execute": (lambda one, data: one._inner.cascade_execute(data[0], *data[1], **data[2]), "cascade_execute"),
    "get_distant_attr": (lambda one, name: one._inner.get_distant_attr(name), "get_distant_attr"),
    "setattr": (lambda one, data: setattr(one._inner, *data), "setattr"),
}


def _is_plain(batch: TensorDictBase) -> bool:
    """True if all that a batch holds are dense tensors in this machine's memory."""
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
