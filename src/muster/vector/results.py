"""The types of the results that stepping returns."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from muster.transport.infos import Infos

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
