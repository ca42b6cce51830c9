"""The slab: the shared block that holds a vector env's arrays, each at a fixed place.

One layout for all backends. In a memfd it is shared with worker processes (a container's small ``/dev/shm`` does not
matter, and nothing can be left behind); without one it is this process's own memory.

Who owns which bytes, in the slab and in the mail. Nobody reads what the other side may be writing.

1. An env's bytes: the rest of its record, that of its episodes, its rows of actions, observations, final observations
   and infos, its number in `action_mail_bytes`, and its two boxes in the mail. They are the worker's while
   ``requested`` and ``finished`` in the record differ, else the caller's. The caller hands them over by
   ``EnvRecord::request``, the worker by ``finish``, each as its last store (release); ``is_requested`` and
   ``is_finished`` take them over (acquire). An env that is to be reset or restarted (``Command::kReset``) stays
   untouched until the worker has read the message. Only the caller writes ``requested`` and ``restarts``, and
   ``finished`` of a worker that is dead.
2. A lent block of observation rows: the worker's as above, then that of the array which holds it, until the last
   view of the array is gone (a release that ``Lending::free_block`` acquires). The caller reads it once more where rows
   are asked for one by one. A fork copies it: parent and child each have their own. Block 0, and views of it
   (``copy=False``), belong to the env's bytes.
3. Layouts of infos in the mail: what lies before ``HostRecord::layouts_end`` never changes. The worker writes behind
   it, then moves the end (release, acquire).
4. Host and caller records: counters and states, atomic one by one, see `_core/records.hpp`. Errors and `stats()` read
   them at any time. So do the properties of `VectorEnv` with the records of envs that still step: each number is
   whole, several need not be of one moment.
5. A dead worker's bytes are the caller's once the process has ended: whoever hangs is killed first. Rows that nobody
   has collected are dropped with their mail (``Recovery::lose_host``), the rows of the last answer are put back from
   copies, and the layouts are forgotten. The replacement starts the layouts' box anew, before its first row.
6. Big arrays (`big_arrays.py`) are written before the workers start, and never again. A collector's block of batch
   memory is its replica's from the question to the answer, but for the flag that ends a batch early. A learner's
   weights have a lock. Messages are the kernel's.

Steps in the caller's own process (serial, thread, ``caller_steps``) follow the same rules; objects in infos are copies
there, too. tests/transport/handover.cpp runs rules 1, 3, 4 and 5 under ThreadSanitizer.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from muster._core import (
    CACHE_LINE,
    CALLER_BYTES,
    EPISODE_BYTES,
    HOST_BYTES,
    HOST_DOING_AT,
    HOST_OF_ENVS_AT,
    RECORD_BYTES,
    RECORD_FIELDS,
    InfoRow,
    SlabLayout,
    map_fd,
)
from muster.spaces.tree import Array, Rows, SpaceNode

# Bytes that the numbers of one env's info may fill before the rest goes through the mail. Untouched pages cost nothing.
# One cache line more than whole pages: rows that begin at the same place in a page push each other out of the caches.
_INFO_BYTES = 16384 + CACHE_LINE

# Leaves with batches of at least this size are returned without a copy while a spare block is free. Two blocks are
# enough for a loop that holds the last observations and the ones before.
_LENT_FROM_BYTES = 1 << 16
_SPARE_BLOCKS = 3

# Where the records of hosts begin: behind the caller's.
HOSTS_AT = -(-CALLER_BYTES // CACHE_LINE) * CACHE_LINE
# By which other processes read the records.
LAYOUT = [HOSTS_AT, HOST_BYTES, HOST_DOING_AT, HOST_OF_ENVS_AT, RECORD_BYTES]

# The dtype of EnvRecord in _core/records.hpp.
_NAMES, _FORMATS, _OFFSETS = zip(*RECORD_FIELDS, strict=True)
RECORD = np.dtype({"names": _NAMES, "formats": _FORMATS, "offsets": _OFFSETS, "itemsize": RECORD_BYTES})


@dataclass(frozen=True)
class SlabPlan:
    """The facts that determine the layout of the slab, equal in the caller and in every worker.

    first_envs: for each host (a worker, or the caller itself) its first env, and num_envs at the end.
    """

    obs: SpaceNode
    action: SpaceNode
    first_envs: tuple[int, ...]

    @property
    def num_envs(self) -> int:
        return self.first_envs[-1]

    @property
    def num_hosts(self) -> int:
        return len(self.first_envs) - 1

    @property
    def num_boxes(self) -> int:
        """Boxes of the mail: N for steps, N for actions, and one for each host's layouts of infos."""
        return 2 * self.num_envs + self.num_hosts


class Slab:
    """The shared block, and NumPy views of its parts.

    host: the memory of the record of the one host, where that is not in the block.
    notify_fd: an eventfd, written to by who answers where the caller asks for that; -1 for none.
    memory: uint8, the block itself.
    records: `RECORD` ``[N]``.  episodes: uint64 ``[N, 2]``, the fields of EpisodeRecord in _core/records.hpp.
    obs, final_obs, actions: one array ``[N, *shape]`` for each leaf.
    info_bytes: uint8 ``[N, InfoRow, ...]``, the step's info and the final one.
    action_mail_bytes ``[N]``: bytes in the mail, see mail.py.
    layout: the places of all these parts, for the core.
    """

    def __init__(self, plan: SlabPlan, fd: int | None = None, host: Array | None = None, notify_fd: int = -1) -> None:
        self.plan = plan
        n = plan.num_envs
        self._end = 0
        caller = self._reserve(CALLER_BYTES)
        hosts = self._reserve(plan.num_hosts * HOST_BYTES)  # at HOSTS_AT
        records = self._reserve(n * RECORD_BYTES)
        episodes = self._reserve(n * EPISODE_BYTES)
        actions = [self._reserve(n * leaf.row_bytes) for leaf in plan.action.leaves]
        leaves = plan.obs.leaves
        lent = [not plan.obs.has_objects and n * leaf.row_bytes >= _LENT_FROM_BYTES for leaf in leaves]
        unit = mmap.PAGESIZE if any(lent) else CACHE_LINE  # a fork copies pages that are lent
        start = self._align(unit)
        places = {i: self._reserve(n * leaves[i].row_bytes) for i, one in enumerate(lent) if one}
        lent_bytes = self._align(unit) - start
        places |= {i: self._reserve(n * leaves[i].row_bytes) for i, one in enumerate(lent) if not one}
        block_bytes = self._align(unit) - start
        obs = [places[i] for i in range(len(leaves))]
        spares = _SPARE_BLOCKS if any(lent) else 0
        self._reserve(spares * block_bytes)
        final = [self._reserve(n * leaf.row_bytes) for leaf in leaves]
        lengths = self._reserve(n * 4)
        infos = self._reserve(n * InfoRow.COUNT * _INFO_BYTES)

        if fd is not None and os.fstat(fd).st_size < self._end:
            os.ftruncate(fd, self._end)
            # Whoever has mapped what an env's code cut off would die of a read.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.memory: npt.NDArray[np.uint8] = map_fd(fd=-1 if fd is None else fd, size=self._end)
        self.layout = SlabLayout(
            address=self.memory.ctypes.data,
            is_shared=fd is not None,
            num_envs=n,
            num_hosts=plan.num_hosts,
            caller_offset=caller,
            hosts_offset=hosts if host is None else (host.ctypes.data - self.memory.ctypes.data) % 2**64,
            records_offset=records,
            episodes_offset=episodes,
            info_offset=infos,
            info_bytes=_INFO_BYTES,
            obs_offset=start,
            obs_block_bytes=block_bytes,
            obs_lent_bytes=lent_bytes,
            num_obs_blocks=1 + spares,
            notify_fd=notify_fd,
        )
        self.records = self.array(records, (n,), RECORD)
        self.episodes = self.array(episodes, (n, 2), np.dtype(np.uint64))
        self.action_mail_bytes = self.array(lengths, (n,), np.dtype(np.uint32))
        self.info_bytes = self.array(infos, (n, InfoRow.COUNT, _INFO_BYTES), np.dtype(np.uint8))
        self.actions = self._rows(plan.action, actions)
        self.obs = self._rows(plan.obs, obs, lent)
        self.final_obs = self._rows(plan.obs, final)

    def obs_batch(self, ids: Array, objects: Sequence[Any], copies: bool) -> Any:
        """The observations of the envs `ids`, which have mailed `objects`: copies, or views where `ids` adjoin."""
        if len(ids) == 0:
            return self.plan.obs.batch(self.obs, lambda array: array[:0].copy(), [])
        part = contiguous(ids)
        if part is not None and copies:
            return self.plan.obs.batch(self.obs, lambda array: array[part].copy(), objects)
        return self.plan.obs.batch(self.obs, lambda array: array[ids if part is None else part], objects)

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """A view of the block, at `offset` in bytes."""
        return np.ndarray(shape, dtype, self.memory.data, offset)

    def host(self, index: int) -> dict[str, int]:
        """The state and the counts of host `index`, see HostRecord in _core/records.hpp."""
        return self.layout.host_state(index)

    def _reserve(self, size: int) -> int:
        offset = self._end
        self._end += size
        self._align(CACHE_LINE)
        return offset

    def _align(self, unit: int) -> int:
        self._end = -(-self._end // unit) * unit
        return self._end

    def _rows(self, node: SpaceNode, offsets: list[int], lent: list[bool] | None = None) -> Rows:
        n = self.plan.num_envs
        leaves = zip(node.leaves, offsets, strict=True)
        arrays = [self.array(offset, (n, *leaf.shape), leaf.dtype) for leaf, offset in leaves]
        return Rows(arrays, offsets, lent)


def split_evenly(num_envs: int, num_parts: int) -> tuple[int, ...]:
    """The first env of each part, and num_envs at the end. Parts differ by one env at most.

    >>> split_evenly(8, 3)
    (0, 3, 6, 8)
    """
    base, extra = divmod(num_envs, num_parts)
    return tuple(part * base + min(part, extra) for part in range(num_parts + 1))


def contiguous(ids: Sequence[int] | npt.NDArray[np.int64]) -> slice | None:
    """The slice that selects exactly `ids`; None where they are not consecutive."""
    first, last = int(ids[0]), int(ids[-1])
    return slice(first, last + 1) if last - first == len(ids) - 1 else None
