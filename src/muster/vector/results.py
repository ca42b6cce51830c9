"""The results of stepping, and the statistics of a vector env: its counts, and what its processes do and hold."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from muster.backends.base import Backend
from muster.errors import CannotTravel
from muster.pool.resources import figures
from muster.pool.watch import seconds
from muster.spaces.tree import Array
from muster.transport.infos import InfoReader, Infos, spread
from muster.transport.slab import Slab
from muster.view.looks import look_before, look_inside
from muster.view.verdict import verdict

if TYPE_CHECKING:
    from muster.vector.leases import Lease

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
StepResult = tuple[Any, Floats, Bools, Bools, Infos]
# The six fields of a Batch or an AgentBatch, and the bits of `Unusual` that apply to it.
Rows = tuple[npt.NDArray[np.int64], Any, Any, Bools, Bools, Infos, int]
ByGroup = dict[str, Any]
Rewards = dict[str, npt.NDArray[np.float32]]
AgentsStepResult = tuple[ByGroup, Rewards, Bools, Bools, Infos]


class Batch(NamedTuple):
    """The result of `VectorEnv.recv` for the n envs that were ready, in the order of their ids.

    env_ids: int64 ``[n]``.  obs: ``[n, ...]``.  rewards: float64 ``[n]``.  terminated, truncated: bool ``[n]``.
    infos: as from `step`, with n rows.
    """

    env_ids: npt.NDArray[np.int64]
    obs: Any
    rewards: Floats
    terminated: Bools
    truncated: Bools
    infos: Infos


class AgentBatch(NamedTuple):
    """The result of `MultiAgentVectorEnv.recv` for the n envs that were ready, in the order of their ids.

    env_ids: int64 ``[n]``.  The rest as from `step`, with n rows.
    """

    env_ids: npt.NDArray[np.int64]
    obs: ByGroup
    rewards: Rewards
    terminated: Bools
    truncated: Bools
    infos: Infos


class Statistics:
    """The counts of a vector env, what its processes do and hold, and what keeps it."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._before = look_before(backend.slab.plan.num_hosts)

    def now(self) -> dict[str, Any]:
        """The dict that `VectorEnv.stats` describes. Reads a few files of /proc for each worker."""
        backend, hosts, seen = self._backend, [], []
        for host, process in enumerate(backend.processes()):
            state, envs = backend.slab.host(host), range(*backend.first_envs[host : host + 2])
            spent = [state[f"ticks_{what}"] for what in ("in_env", "waiting", "copying")]  # the shares add up to 1
            shares = [ticks / max(1, sum(spent)) for ticks in spent]
            own = {"index": host, "envs": [backend.numbers[env] for env in envs]}
            own |= zip(("stepping", "waiting", "copying"), shares, strict=True)
            if backend.steps_at_once(envs.start):
                own["in_step"] = state["ticks_of_envs"] / max(1, sum(spent))
                own |= {"blocked_s": seconds(state["ticks_blocked"]), "left_behind": state["left_behind"]}
            hosts.append(own | {key: state[key] for key in ("env_steps", "resets")} | figures(*process))
            seen.append((envs, state, process[0]))
        before, self._before = self._before, look_inside(seen)
        env_steps, _, restarts = self.counts()
        said = {"env_steps": env_steps, "restarts": restarts, "recycled": backend.recycled}
        said["processes"] = len({pid for _, _, pid in seen} - {None})
        return {**said, "verdict": verdict(before, self._before).sentence, "workers": hosts}

    def counts(self) -> tuple[int, int, int]:
        """Env steps, resets and restarts so far, of all envs."""
        slab = self._backend.slab
        hosts = [slab.host(index) for index in range(slab.plan.num_hosts)]
        restarts = int(slab.records["restarts"].sum())
        return sum(host["env_steps"] for host in hosts), sum(host["resets"] for host in hosts), restarts


def add_finals(envs: Any, infos: Infos, ids: Array, objects: Sequence[Any], reader: InfoReader) -> None:
    """A vector env's method: adds the rows of steps that have ended an episode to the infos of a step of envs `ids`."""
    slab: Slab = envs._backend.slab
    for row in np.flatnonzero(slab.records["has_final"][ids]).tolist():
        env = int(ids[row])
        ints = (bool(int(slab.records["final_ints"][env]) >> leaf & 1) for leaf in itertools.count())
        final_obs = slab.plan.obs.single(slab.final_obs, env, objects[row], ints=ints)
        reader.add_final(infos, final_obs, reader.final(env, objects[row]), row, len(ids))


def all_after_reset(envs: Any, ids: Array, infos: Infos, copies: bool) -> tuple[Any, Infos]:
    """A vector env's method: all observations and infos after a reset of the envs `ids`, which the infos are of."""
    infos = {key: spread(column, ids, envs.num_envs) for key, column in infos.items()}
    return envs._backend.obs_again(np.arange(envs.num_envs), copies=copies), infos


def lease(envs: Any) -> Lease:
    """An env for a task of asyncio: ``async with envs.lease() as env``. Waits for a free one; any number at once.

    ``await env.reset(seed=3)`` and ``await env.step(action)`` are the env's own, with its own info. The vector env has
    ``autoreset_mode="disabled"``, and nobody else steps it meanwhile. What an env raises is raised in its own await;
    with ``on_failure="restart"`` its episode ends truncated. Raises UsageError, ClosedError.
    """
    from muster.vector import leases  # with asyncio, which takes a while to import

    return leases.lease(envs)


def cannot_travel(envs: Any) -> NoReturn:
    """Why a vector env cannot be pickled."""
    raise CannotTravel(
        "a vector env cannot be pickled or copied: it holds workers and the memory that it shares with them. "
        f"Where another is needed, call {envs._backend.user_call.name} with the same arguments"
    )


def described(envs: Any) -> str:
    """A vector env in one line, for `repr`: its class, its envs' id if they have one, their number, and agents."""
    spec, agents = getattr(envs, "spec", None), sum(map(len, getattr(envs, "groups", {}).values()))
    parts = [*([spec.id] if spec else []), f"num_envs={envs.num_envs}", *[f"agents={agents}"] * bool(agents)]
    return f"{type(envs).__name__}({', '.join([*parts, *['closed'] * envs.closed])})"
