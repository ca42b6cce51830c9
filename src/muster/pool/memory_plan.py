"""Estimates from the first envs whether all will fit into memory, before they fill the machine."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence

from muster.errors import NotEnoughMemory
from muster.introspection import caller_stacklevel
from muster.pool.resources import memory_left

MEMORY_CHECKS = ("error", "warn", "off")
MAY_SHARE = "Envs that share nothing, as `muster doctor` finds out, may share processes."


class MemoryPlan:
    """The memory that `num_envs` envs in `num_workers` workers will need.

    check: one of `MEMORY_CHECKS`.  fewer_workers: so many could share the envs, if these allow it; None where the user
    has chosen the number.
    """

    def __init__(self, num_envs: int, num_workers: int, check: str, fewer_workers: int | None) -> None:
        self._num_envs = num_envs
        self._num_workers = num_workers
        self._check = check
        self._fewer_workers = fewer_workers

    def accepts(self, built: Sequence[int]) -> bool:
        """Whether the others may be built, too, after one more env of the first worker's.

        built: bytes of memory that its process held before the first env, and after each env so far. After one env this
        is too strict, since libraries are counted: if there is a second one, that decides. Raises NotEnoughMemory, or
        warns, if the envs do not fit.
        """
        if not self.fits(built):
            if len(built) <= min(2, self._num_envs // self._num_workers):
                return False
            self.require(built)
        return True

    def fits(self, built: Sequence[int]) -> bool:
        """Whether all envs certainly fit. After one env this may be too strict, since libraries are counted."""
        return self._check == "off" or self._needed(self._num_envs, built) <= memory_left()[0]

    def require(self, built: Sequence[int]) -> None:
        """Raises NotEnoughMemory, or warns, if the envs do not fit."""
        if self.fits(built):
            return
        left_bytes, limit = memory_left()
        worker_bytes, env_bytes = _costs(built)
        needed, count = self._needed(self._num_envs, built), len(built) - 1
        most = count
        while self._needed(most + 1, built) <= left_bytes:
            most += 1
        processes = f"{self._num_workers} process{'es' * (self._num_workers > 1)}"
        message = (
            f"{self._num_envs} envs in {processes} will not fit into memory: beside the first {count} it "
            f"needs about {_size(needed)} ({_size(env_bytes)} for an env, {_size(worker_bytes)} for a worker, measured "
            f"in the first one), and {_size(left_bytes)} are left ({limit}). About {most} envs would fit."
        )
        if self._fewer_workers is not None and self._needed(self._num_envs, built, self._fewer_workers) <= left_bytes:
            message += f" {MAY_SHARE}"
        if self._check == "error":
            raise NotEnoughMemory(f'{message} To try all the same: memory_check="warn".')
        warnings.warn(message, ResourceWarning, stacklevel=caller_stacklevel())

    def _needed(self, num_envs: int, built: Sequence[int], num_workers: int | None = None) -> int:
        """Bytes for `num_envs` envs and their workers, without those that are built already.

        Too many for envs that share workers, if only one is built and it has loaded big libraries.
        num_workers: None for those of the plan.
        """
        worker_bytes, env_bytes = _costs(built)
        workers = min(num_workers or self._num_workers, num_envs)
        return (workers - 1) * worker_bytes + (num_envs - len(built) + 1) * env_bytes


def _costs(built: Sequence[int]) -> tuple[int, int]:
    """Bytes of one worker without envs, and of one env. Libraries make the first env cost more than the second."""
    before_bytes, *_ = built
    first, *second = (max(0, after - before) for before, after in itertools.pairwise(built))
    return (before_bytes + max(0, first - second[0]), second[0]) if second else (before_bytes, first)


def _size(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"
