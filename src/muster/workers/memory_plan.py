"""Whether the envs asked for will fit into memory, judged by the first ones: before the machine is filled with them."""

from __future__ import annotations

import warnings

from muster.errors import NotEnoughMemory
from muster.introspection import caller_stacklevel
from muster.workers.messages import BuildProgress
from muster.workers.resources import memory_left

MEMORY_CHECKS = ("error", "warn", "off")


class MemoryPlan:
    """What `num_envs` envs in `num_workers` workers will need. check: one of `MEMORY_CHECKS`."""

    def __init__(self, num_envs: int, num_workers: int, check: str) -> None:
        self._num_envs = num_envs
        self._num_workers = num_workers
        self._check = check

    def fits(self, built: BuildProgress) -> bool:
        """Whether there is no doubt about it. After one env that may be too strict: it counts libraries, too."""
        if self._check == "off":
            return True
        left_bytes, _ = memory_left()
        return self._needed(self._num_envs, self._num_workers, *_costs(built), built.count) <= left_bytes

    def require(self, built: BuildProgress) -> None:
        """Raises NotEnoughMemory, or warns, if it does not fit."""
        if self.fits(built):
            return
        left_bytes, limit = memory_left()
        worker_bytes, env_bytes = _costs(built)
        needed = self._needed(self._num_envs, self._num_workers, worker_bytes, env_bytes, built.count)
        most = built.count
        while (
            self._needed(most + 1, min(self._num_workers, most + 1), worker_bytes, env_bytes, built.count) <= left_bytes
        ):
            most += 1
        message = (
            f"num_envs={self._num_envs} on num_workers={self._num_workers} will not fit into memory: beside the first "
            f"{built.count} it needs about {_size(needed)} ({_size(env_bytes)} for an env, {_size(worker_bytes)} for a "
            f"worker, measured in the first one), and {_size(left_bytes)} are left ({limit}). About num_envs={most} "
            "would fit."
        )
        if self._check == "error":
            raise NotEnoughMemory(f'{message} To try all the same: memory_check="warn".')
        warnings.warn(message, ResourceWarning, stacklevel=caller_stacklevel())

    def _needed(self, num_envs: int, num_workers: int, worker_bytes: int, env_bytes: int, built: int) -> int:
        return (num_workers - 1) * worker_bytes + (num_envs - built) * env_bytes


def _costs(built: BuildProgress) -> tuple[int, int]:
    """Bytes of one worker without envs, and of one env. What the first env costs more than the second is libraries."""
    first = max(0, built.first_bytes - built.before_bytes)
    if built.second_bytes is None:
        return built.before_bytes, first
    second = max(0, built.second_bytes - built.first_bytes)
    return built.before_bytes + max(0, first - second), second


def _size(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"
