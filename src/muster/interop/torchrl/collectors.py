"""TorchRL's `Collector`: its rollouts and arguments, with policies that cannot be copied."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDictBase  # type: ignore[import-untyped]  # it ships no py.typed
from torchrl._comm.backends import _get_service_backend, normalize_service_backend
from torchrl.collectors import Collector as TheirCollector

from muster.arguments import as_whole
from muster.errors import ConfigError, WrongType
from muster.interop.torchrl.rollouts import Loop
from muster.nn.shared_copies import copied_as_twins

IN_PROCESSES: dict[bool, Any] = {}
"""The classes with collectors in processes, by ``sync``; `multi_collectors` enters them."""

_ELSEWHERE = ("ray", "rpc", "distributed", "submitit")


class _Dispatching(type(TheirCollector)):  # type: ignore[misc]  # TorchRL has no type information here
    """Takes the arguments of TorchRL's that choose where collectors run, and makes collectors of Muster's."""

    def __call__(
        cls,
        *args: Any,
        backend: str | None = None,
        backend_options: Mapping[str, Any] | None = None,
        num_collectors: int | None = None,
        sync: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        if cls is not Collector:
            if any(value is not None for value in (backend, backend_options, num_collectors, sync)):
                raise WrongType(
                    "backend, backend_options, num_collectors and sync are only supported when constructing Collector "
                    f"directly, not its subclass {cls.__name__}"
                )
            return type.__call__(cls, *args, **kwargs)
        if len(args) > 2:
            raise WrongType("Collector accepts at most create_env_fn and policy positionally")
        options = dict(backend_options or {})
        if reserved := sorted(cls._RESERVED_OPTIONS & options.keys()):
            raise ConfigError(f"backend_options contains reserved selector keys: {reserved}")
        if duplicates := sorted(options.keys() & {*kwargs, *("create_env_fn", "policy")[: len(args)]}):
            raise ConfigError(f"Backend options duplicate top-level collector arguments: {duplicates}")
        backend = _chosen(backend, num_collectors)
        if backend == "direct":
            if num_collectors not in (None, 1):
                raise ConfigError("backend='direct' supports at most one collector")
            if sync is not None or options:
                name = "sync is" if sync is not None else "backend_options are"
                raise ConfigError(f"{name} only valid for non-direct collectors")
            args, kwargs = cls._normalize_direct_env_fn(args, kwargs)
            return type.__call__(cls, *args, **kwargs)
        if not isinstance(sync, bool | None):
            raise WrongType(f"sync must be a boolean or None, got {sync!r}")
        args, kwargs, _ = cls._normalize_env_fns(args, {**kwargs, **options}, num_collectors)
        kind = IN_PROCESSES[bool(sync)]
        cls._drop_inapplicable_defaults(kind, kwargs)
        return kind(*args, **kwargs)


class Collector(TheirCollector, metaclass=_Dispatching):  # type: ignore[misc]  # TorchRL has no type information here
    """TorchRL's `Collector`, which takes policies that cannot be copied, for each ``policy_device``.

    Where TorchRL copies the policy to another device, that device gets a twin: see `muster.nn.shared_on_copy`.
    With ``num_collectors`` or ``backend="process"`` it makes a `MultiSyncCollector` (``sync=True``) or
    `MultiAsyncCollector` of this module; other backends raise ConfigError. All else is TorchRL's, arguments and
    batches, bit for bit; a faster loop than TorchRL's collects them where it can, see `loop_reason`.

    >>> from muster.interop.torchrl import Collector, GymEnv
    >>> collector = Collector(GymEnv("CartPole-v1"), frames_per_batch=16, total_frames=32)
    >>> [batch.shape for batch in collector]
    [torch.Size([16]), torch.Size([16])]
    >>> collector.shutdown()
    """

    def rollout(self) -> TensorDictBase | None:
        """The next rollout, as TorchRL's method returns it."""
        return self._loop.run()

    @property
    def loop_reason(self) -> str:
        """Why TorchRL's own loop collects; "" where Muster's does."""
        return self._loop.reason

    def stats(self) -> dict[str, int | float | bool]:
        """TorchRL's counters, and ``fast_loop``: whether Muster's loop collects; `loop_reason` says why not."""
        return {**super().stats(), "fast_loop": not self.loop_reason}

    @cached_property
    def _loop(self) -> Loop:
        return Loop(self)

    def _get_policy_and_device(self, policy: Any = None, *args: Any, **kwargs: Any) -> Any:
        with copied_as_twins(policy):
            return super()._get_policy_and_device(policy, *args, **kwargs)

    def _read_compile_kwargs(self, compile_policy: Any, cudagraph_policy: Any) -> None:
        require_cuda(cudagraph_policy)
        super()._read_compile_kwargs(compile_policy, cudagraph_policy)


SyncDataCollector = Collector


def require_cuda(cudagraph_policy: Any) -> None:
    """Raises ConfigError where a policy is to run as a CUDA graph without CUDA."""
    if cudagraph_policy not in (False, None) and not torch.cuda.is_available():
        raise ConfigError(
            "cudagraph_policy needs a CUDA device, and torch finds none: leave it out, or use compile_policy=True"
        )


def _chosen(backend: str | None, num_collectors: Any) -> str:
    """The backend: the argument, or that of TorchRL's context, or what `num_collectors` says."""
    if num_collectors is not None and (as_whole(num_collectors) or 0) < 1:
        kind = ConfigError if as_whole(num_collectors) is not None else WrongType
        raise kind(f"num_collectors must be a positive integer, got {num_collectors!r}")
    backend = _get_service_backend() if backend is None else normalize_service_backend(backend)
    if backend is None:
        return "direct" if num_collectors is None else "process"
    if backend in _ELSEWHERE:
        raise ConfigError(
            f"backend={backend!r} is not Muster's: this class's collectors run in processes of one machine "
            "(backend='process'). For several machines use muster.MultiCollector(..., cluster='ray'), or "
            "torchrl.collectors.Collector"
        )
    if backend not in ("direct", "process"):
        known = sorted(TheirCollector._BACKENDS)
        raise ConfigError(f"Collector does not support backend={backend!r}. Expected one of {known}")
    return backend
