"""Plans with recipes: how an owner packs these for the places of its pool, and how residents unpack them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from muster.envs.light_melting_pot import import_without_bots
from muster.envs.package_finder import print_no_banner
from muster.pickling.main_module import Init
from muster.pool.place import Plan
from muster.pool.set_up import Processes
from muster.pool.worker import Here, Resident
from muster.recipes.recipe import Recipe, pack, unpack
from muster.transport.slab import LAYOUT
from muster.worker_info import WorkerInfo

Recipes = Sequence[Recipe] | bytes
"""The recipes of a plan: packed, unless the resident inherits them or is in their process."""


def plans_of(
    recipes: Sequence[Recipe], first_envs: Sequence[int], processes: Processes, content: Callable[[Recipes, range], Any]
) -> list[Plan]:
    """The plans of worker processes, between which the envs are split at `first_envs`.

    content: what a resident is built from, a dataclass with a field `recipes`; called with these and their envs.
    Raises CannotTravel.
    """
    forks, init = processes.context == "fork", processes.init.function
    plans = []
    for worker, envs in enumerate(itertools.starmap(range, itertools.pairwise(first_envs))):
        info = WorkerInfo(None, worker, len(recipes), len(first_envs) - 1, seed=None)
        plan, own = Plan(None, info, envs), recipes[envs.start : envs.stop]
        fds = None if recipes[0].call.far else plan.fds
        plan.content = content(
            own if forks else pack(own, start_method=processes.context, big=plan.big, fds=fds, init=init), envs
        )
        plans.append(plan)
    return plans


def about_of(recipes: Sequence[Recipe], first_envs: Sequence[int], *, own_indices: bool = False) -> dict[str, Any]:
    """The facts about a pool's envs for its about file. first_envs: of each host, and their number at the end.

    own_indices: whether each host counts its envs from 0.
    """
    kind = recipes[0].call.name.removeprefix("muster.")
    own = {"kind": kind, "env": recipes[0].name.removeprefix("of "), "layout": LAYOUT}
    return {**own, "first_envs": list(first_envs), "own_indices": own_indices}


class RecipeResident(Resident):
    """A resident that is built from such a plan."""

    @classmethod
    def prepare(cls) -> None:
        import_without_bots()
        print_no_banner()

    @classmethod
    def unpack(cls, data: bytes, here: Here, initialise: Callable[[Init], None]) -> Any:
        plan = super().unpack(data, here, initialise)
        return dataclasses.replace(plan, recipes=unpack(plan.recipes, here.big_arrays, here.fds, initialise))
