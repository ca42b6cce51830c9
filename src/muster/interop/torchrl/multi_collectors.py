"""TorchRL's `MultiSyncCollector` and `MultiAsyncCollector` on Muster's worker processes.

What batches look like, how they are joined and counted, and which messages workers get, is TorchRL's own code.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torchrl.collectors import AsyncCollector as TheirAsyncCollector
from torchrl.collectors import MultiAsyncCollector as TheirMultiAsyncCollector
from torchrl.collectors import MultiCollector as TheirMultiCollector
from torchrl.collectors import MultiSyncCollector as TheirMultiSyncCollector
from torchrl.collectors.utils import _TrajectoryPool
from torchrl.data import ListStorage
from torchrl.weight_update import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme

from muster.arguments import as_whole
from muster.errors import UNCOPYABLE_PAGE, CannotTravel, ConfigError, UsageError
from muster.interop.torchrl.collector_channels import CollectorPool, Files, ForeignProcess, Pipe, Queue, Refused
from muster.interop.torchrl.collector_worker import Shared, built_collector, share_storage
from muster.interop.torchrl.collectors import IN_PROCESSES, require_cuda
from muster.interop.torchrl.given_envs import sharing
from muster.pickling import UserCall
from muster.recipes.recipe import Recipe
from muster.rollout.replicas.policy_travel import obstacle_to, pack_policy
from muster.rollout.weights import copies_into, named_weights, require_shapes, weights_by_name

_TIMEOUT_S = 10.0
# Schemes that only say how TorchRL moves weights between the processes of one machine.
_LOCAL_SCHEMES = (SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme)
_DEVICES = ("policy_device", "storing_device", "env_device")
# Arguments that all workers' collectors get as they are.
_OPTIONS = (
    *("max_frames_per_traj", "reset_at_each_iter", "exploration_type", "reset_when_done", "set_truncated"),
    *("extend_buffer", "trust_policy", "no_cuda_sync", "init_random_frames", "trajs_per_write", "compact_obs"),
)
_NO_USE = (
    "has no use here: leave it out, and call update_policy_weights_(), or update_policy_weights_(weights) after "
    "policy_factory, which need none"
)

MULTI_COLLECTOR = UserCall(
    name="MultiSyncCollector",
    factory="create_env_fn",
    kwargs="create_env_kwargs",
    context='torch.multiprocessing.set_start_method("{method}")',
    in_process="Collector(create_env_fn, policy, ...)",
    one_each="one env in each of create_env_fn",
)


class _CollectorsInWorkers:
    """The differences of both collectors from TorchRL's: the start of workers, and the way of weights."""

    _pool: CollectorPool | None = None

    def _read_compile_kwargs(self, compile_policy: Any, cudagraph_policy: Any) -> None:
        require_cuda(cudagraph_policy)
        super()._read_compile_kwargs(compile_policy, cudagraph_policy)  # type: ignore[misc]  # a mixin

    def _setup_multi_weight_sync(self, weight_updater: Any, weight_sync_schemes: Any) -> None:
        if weight_updater is not None:
            raise ConfigError(f"weight_updater {_NO_USE}")
        for name, scheme in (weight_sync_schemes or {}).items():
            if name != "policy" or type(scheme) not in _LOCAL_SCHEMES:
                raise ConfigError(f"weight_sync_schemes[{name!r}] is a {type(scheme).__name__}, which {_NO_USE}")
        super()._setup_multi_weight_sync(None, weight_sync_schemes)  # type: ignore[misc]  # a mixin

    def register_scheme_receiver(self, weight_recv_schemes: Any, **options: Any) -> None:
        """Raises ConfigError, whatever the `options`: no scheme brings weights here."""
        raise ConfigError(f"weight_recv_schemes {_NO_USE}")

    @property
    def loop_reason(self) -> str:
        """Why TorchRL's own loop collects in the workers; "" where Muster's does."""
        return "the collector is closed" if self._pool is None else self._pool.loop_reason

    def stats(self, workers: Any = "aggregate") -> dict[str, int | float | bool]:
        """TorchRL's counters, and ``fast_loop``: whether Muster's loop collects; `loop_reason` says why not."""
        if self._pool is not None:
            self._pool.look()
        return {**super().stats(workers), "fast_loop": not self.loop_reason}  # type: ignore[misc]  # a mixin

    # ---- the pool

    def _run_processes(self: Any) -> None:
        if self.num_threads is None:
            self.num_threads = max(1, torch.get_num_threads() - self._total_workers_from_env(self.create_env_fn))
        torch.set_num_threads(self.num_threads)
        context = "fork" if multiprocessing.get_start_method(allow_none=True) == "fork" else "forkserver"
        self._traj_pool = _TrajectoryPool(ctx=multiprocessing.get_context(context), lock=True)
        if context == "fork" and self.replay_buffer is not None:
            share_storage(self.replay_buffer)
        elif isinstance(getattr(self.replay_buffer, "storage", None), ListStorage):
            raise Refused(
                "replay_buffer: Cannot share a storage of type ListStorage between processes; use a LazyTensorStorage, "
                "a LazyMemmapStorage or a TensorStorage"
            )
        files = Files(self.num_workers)
        recipes = self._recipes(context)
        self._pool = pool = CollectorPool(recipes, files, context=context, num_threads=self.num_sub_threads)
        # With a factory the policy only says where weights come from: it has to be sent.
        self._seen = {} if any(self.policy_factory) else _copied(self._own_weights())
        self._follow(0)
        self.pipes = [Pipe(pool, worker, self._follow) for worker in range(self.num_workers)]
        self.procs = [ForeignProcess(lambda: not pool.closed, context)] * self.num_workers
        self.queue_out = Queue(pool)
        self.closed = False

    def _recipes(self: Any, context: str) -> list[Recipe]:
        policy = None if any(self.policy_factory) else self.policy
        if policy is not None and context != "fork":
            policy = _packed(policy)
        for_all = {
            "init_fn": self._worker_init_fn,
            "collector_class": self.collector_class,
            "num_threads": self.num_sub_threads or 1,
            "policy": policy,
            "shared": Shared(replay_buffer=self.replay_buffer, traj_pool=self._traj_pool, interruptor=self.interruptor),
            "trajs_per_batch": self._worker_trajs_per_batch,
            "postproc": None if self.replay_buffer is None else self.postproc,
            "pre_collect_hook": self._worker_pre_collect_hook,
            "post_collect_hook": self._worker_post_collect_hook,
            "options": {
                **{name: getattr(self, name) for name in _OPTIONS},
                "use_buffers": self._use_buffers,
                "compile_policy": self.compiled_policy_kwargs if self.compiled_policy else False,
                "cudagraph_policy": self.cudagraphed_policy_kwargs if self.cudagraphed_policy else False,
                "auto_register_policy_transforms": self._auto_register_policy_transforms,
                "track_policy_version": self.policy_version_tracker is not None,
            },
        }
        recipes = []
        for worker in range(self.num_workers):
            own = {
                "create_env_fn": sharing(self.create_env_fn[worker]),
                "create_env_kwargs": dict(self.create_env_kwargs[worker]),
                "policy_factory": self.policy_factory[worker],
                "frames_per_batch": self.frames_per_batch_worker(worker_idx=worker),
                **{name: getattr(self, name)[worker] for name in _DEVICES},
                "worker_idx": worker,
            }
            recipe = Recipe(worker, "of create_env_fn", built_collector, {**own, **for_all}, (), ("create_env_fn", ""))
            recipes.append(replace(recipe, call=MULTI_COLLECTOR))
        return recipes

    def _shutdown_main(self, timeout: float | None = None) -> None:
        super()._shutdown_main(timeout)  # type: ignore[misc]  # a mixin
        pool, self._pool = self._pool, None
        if pool is not None:
            try:
                pool.look()
            except Exception as error:  # nobody has heard of it, since nobody asked a worker that ran free
                warnings.warn(f"a collector that ran free had failed: {error}", RuntimeWarning, stacklevel=2)
            pool.close(_TIMEOUT_S if timeout is None else timeout)

    # ---- weights

    def _weight_update_impl(
        self: Any,
        policy_or_weights: Any = None,
        *,
        worker_ids: Any = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if weights_dict is not None:
            if model_id is not None or policy_or_weights is not None:
                raise ConfigError("weights_dict cannot be combined with model_id, or with other weights")
            for name, weights in weights_dict.items():
                self._weight_update_impl(weights, worker_ids=worker_ids, model_id=name)
            return
        if model_id not in (None, "policy"):
            raise KeyError(f"Model {model_id!r} not found: the workers' collectors have the model 'policy' alone")
        if self._pool is None:
            raise UsageError("the collector is shut down; there is nobody to send weights to")
        if type(policy_or_weights) is dict and all(as_whole(key) is not None for key in policy_or_weights):
            self._pool.publish({worker: weights_by_name(weights) for worker, weights in policy_or_weights.items()})
            return
        own = self._own_weights()
        weights = own if policy_or_weights is None else weights_by_name(policy_or_weights)
        if policy_or_weights is None and not isinstance(self._own_policy, nn.Module):
            raise UsageError(
                "there are no weights to send: the collector has no policy that is a module. After policy_factory call "
                "update_policy_weights_(weights)"
            )
        if worker_ids is not None:
            listed = worker_ids if isinstance(worker_ids, Iterable) else [worker_ids]
            self._pool.publish(dict.fromkeys(listed, weights))
            return
        copies = copies_into(self._own_policy, {name: weights[name] for name in own.keys() & weights.keys()})
        self._pool.publish(dict.fromkeys(range(self.num_workers), weights), copies)
        self._seen = _copied(own)

    @property
    def _own_policy(self: Any) -> Any:
        """The policy that was handed over, also with a factory."""
        beside: Any = self.__dict__.get("_fallback_policy")
        return self.policy if beside is None else beside

    def _own_weights(self) -> dict[str, Tensor]:
        return named_weights(self._own_policy)

    def _follow(self: Any, worker: int) -> None:
        """Publishes weights that have changed in place. TorchRL's workers share their memory with the policy."""
        if worker > 0 and isinstance(self, TheirMultiSyncCollector):
            return  # the first worker's batch has just begun
        own, seen = self._own_weights(), self._seen
        if all(name in seen and (not one.is_cpu or torch.equal(one, seen[name])) for name, one in own.items()):
            return
        self._pool.publish(dict.fromkeys(range(self.num_workers), own), counts=False)
        self._seen = _copied(own)

    def state_dict(self: Any) -> Any:
        """The state of each worker's collector, and the counters."""
        self._follow(0)
        return super().state_dict()  # type: ignore[misc]  # a mixin

    def iterator(self: Any) -> Any:
        """Collects, and yields batches as TorchRL's method does."""
        self._pool.hand_anew()
        yield from super().iterator()  # type: ignore[misc]  # a mixin


class MultiSyncCollector(_CollectorsInWorkers, TheirMultiSyncCollector):  # type: ignore[misc]  # TorchRL has no types here
    """TorchRL's `MultiSyncCollector` on Muster's processes: batches in shared memory, one process per env function.

    Arguments, batches and methods are TorchRL's. ``update_policy_weights_(weights)`` works after `policy_factory`, too.

    use_buffers, no_cuda_sync, trust_policy: as TorchRL's workers take them.
    weight_sync_schemes: TorchRL's own for one machine are taken and have no effect; others raise ConfigError, as do
        weight_updater and weight_recv_schemes.

    Processes start as ``torch.multiprocessing.set_start_method`` says, else without a fork of the caller.

    >>> from muster.interop.torchrl import GymEnv, MultiSyncCollector
    >>> make_env = lambda: GymEnv("CartPole-v1")
    >>> collector = MultiSyncCollector([make_env] * 2, frames_per_batch=16, total_frames=32)
    >>> sum(batch.numel() for batch in collector)
    32
    >>> collector.shutdown()
    """


class MultiAsyncCollector(_CollectorsInWorkers, TheirMultiAsyncCollector):  # type: ignore[misc]  # TorchRL has no types here
    """TorchRL's `MultiAsyncCollector` on Muster's processes; see `MultiSyncCollector`.

    Arguments and batches are TorchRL's. Each batch comes from one collector, whichever is ready first.

    >>> from muster.interop.torchrl import GymEnv, MultiAsyncCollector
    >>> make_env = lambda: GymEnv("CartPole-v1")
    >>> collector = MultiAsyncCollector([make_env] * 2, frames_per_batch=16, total_frames=32)
    >>> sum(batch.numel() for batch in collector)
    32
    >>> collector.shutdown()
    """


class AsyncCollector(_CollectorsInWorkers, TheirAsyncCollector):  # type: ignore[misc]  # TorchRL has no types here
    """TorchRL's `AsyncCollector` on one of Muster's processes; see `MultiSyncCollector`.

    Arguments and batches are TorchRL's.

    >>> from muster.interop.torchrl import AsyncCollector, GymEnv
    >>> collector = AsyncCollector(lambda: GymEnv("CartPole-v1"), frames_per_batch=16, total_frames=32)
    >>> sum(batch.numel() for batch in collector)
    32
    >>> collector.shutdown()
    """


class _BySync(type(TheirMultiCollector)):  # type: ignore[misc]  # TorchRL has no types here
    def __call__(cls, *args: Any, sync: bool, **options: Any) -> Any:
        return IN_PROCESSES[bool(sync)](*args, **options)


class MultiCollector(TheirMultiCollector, metaclass=_BySync):  # type: ignore[misc]  # TorchRL has no types here
    """A `MultiSyncCollector` where it is called with ``sync=True``, a `MultiAsyncCollector` with ``sync=False``.

    Other arguments are those of TorchRL's class.

    >>> from muster.interop.torchrl import GymEnv, MultiCollector
    >>> make_env = lambda: GymEnv("CartPole-v1")
    >>> collector = MultiCollector([make_env] * 2, sync=True, frames_per_batch=16, total_frames=16)
    >>> type(collector).__name__, next(iter(collector)).numel()
    ('MultiSyncCollector', 16)
    >>> collector.shutdown()
    """


IN_PROCESSES.update({True: MultiSyncCollector, False: MultiAsyncCollector})
MultiSyncDataCollector = MultiSyncCollector
MultiaSyncDataCollector = MultiAsyncCollector


def _packed(policy: Any) -> bytes:
    require_shapes(policy)
    obstacle = obstacle_to(policy)
    if obstacle is None:
        return pack_policy(policy)
    ways_out = "; or\n  ".join(
        (
            "pass policy_factory=, which builds the policy in each worker",
            *obstacle.ways_out()[1:-1],
            "use muster.interop.torchrl.Collector: its policy stays here, and with ParallelEnv its envs run in workers",
        )
    )
    raise CannotTravel(
        f"the policy cannot be copied to the collectors' processes, because of {obstacle}. Ways out:\n  {ways_out}.",
        UNCOPYABLE_PAGE,
    )


def _copied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in weights.items()}
