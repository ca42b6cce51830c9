"""The messages of a vector env to the hosts of its envs that are no questions to envs; `EnvResident` answers them.

Nobody compares or changes a request, see `muster.pool.messages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from muster.hosts.env_states import EnvState
from muster.hosts.questions import EnvQuestion
from muster.hosts.recipe_plans import Recipes
from muster.pool.messages import Message
from muster.recipes.recipe import Recipe
from muster.transport.mail import Mail
from muster.transport.slab import Slab, SlabPlan


class WaitBudget(NamedTuple):
    """The time to wait awake before sleeping, see `WaitBudget` in _core/doorbell.hpp."""

    pauses: int
    yields: int
    spreads: bool


@dataclass(frozen=True)
class HostOptions:
    """Options of stepping, equal for all hosts of a vector env."""

    autoreset_mode: int  # of _core.Autoreset
    check_finite: bool
    lenient: bool  # whether rewards and flags may be what other libraries convert
    reward_key: str | None  # of the infos, for a reward of several numbers; None where it is an error
    wait_budget: WaitBudget
    seeds_episodes: bool = False  # whether each reset has the seed of its episode, see `EnvState`


@dataclass(eq=False)
class Attach(Message):
    """Makes a host ready to step into the slab. A worker process receives the slab's plan, and opens slab and mail."""

    slab: Slab | SlabPlan
    options: HostOptions
    mail: Mail | None = None


@dataclass(eq=False)
class EnvPlan(Message):
    """The plan of a host.

    recipes: those of its envs.  first_env: index of the first.
    together: the recipes of all hosts in this process; None where there is no other.
    attach: given to a host that takes another's place: it is ready once it can step.
    concurrent: whether it steps all its envs at the same time.  step_timeout, start_timeout: for each env of those.
    """

    recipes: Recipes
    first_env: int
    together: Sequence[Recipe] | None = None
    attach: Attach | None = None
    concurrent: bool = False
    step_timeout: float | None = None
    start_timeout: float = 300.0


@dataclass(eq=False)
class Restart(Message):
    """Makes a failed env answer again.

    rebuilds: the env is built again first; in a new worker it is new already.
    resets_now: the answer is a reset; else the env answers without one and the caller fills in the row.
    seed: for the env's first reset.  options: for the reset that is the answer.
    again: what the env that is built again is asked first.
    elsewhere: it is built again in another process, since it has once failed again where it was built again.
    replay, action: the state that it is set to, and the bytes of the action whose row is the answer; None without.
    """

    env: int
    seed: int | None
    options: Any
    resets_now: bool
    rebuilds: bool
    elsewhere: bool
    again: Sequence[EnvQuestion]
    replay: EnvState | None = None
    action: bytes = b""
