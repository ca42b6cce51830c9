"""What a vector env asks of the hosts of its envs, in a process or a thread; `EnvResident` answers.

Nobody compares or changes a request, see `muster.pool.messages`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from muster.hosts.failures import not_rebuilt_here
from muster.hosts.recipe_plans import Recipes
from muster.pickling import UserCall, is_plain, not_rebuilt
from muster.pickling import dumps as dumps_carefully
from muster.pickling.travel import Unpickler
from muster.pool.messages import Message
from muster.recipes.recipe import Recipe
from muster.transport.mail import Mail, dumps
from muster.transport.slab import Slab, SlabPlan

# A function that `EnvHost.call` takes in place of a method's name: called with each env, its index and the arguments.
EnvCall = Callable[..., Any]
T = TypeVar("T")


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


@dataclass(eq=False)
class Packed:
    """A user's value on its way to another process, pickled apart from its message and once for all workers.

    Unpickling gives the value itself. Where the value cannot be rebuilt it gives a CannotTravel, so that the worker can
    still read the message and answer it.
    """

    data: bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self.data,)


def packed(value: Any, parts: dict[str, Any], call: UserCall, *, forked: bool) -> Packed:
    """Packs a user's value. parts: see `dumps_carefully`.  forked: whether it goes to forks of this process.

    Raises CannotTravel, in under 5 s.
    """
    if is_plain(value):
        return Packed(dumps(value))
    return Packed(dumps_carefully(value, parts, start_method=None, forks=forked, call=call))


def opened(result: bytes) -> Any:
    """The result of a call of an env, as it has come from a worker. Raises CannotTravel."""
    try:
        return pickle.loads(result)
    except Exception as error:
        raise not_rebuilt_here(error) from None


def _rebuilt(data: bytes) -> Any:
    try:
        return Unpickler(io.BytesIO(data)).load()
    except Exception as error:
        send = "Send what it is made of instead, and make it there: envs.call(function) calls function(env, env_index)"
        refusal = not_rebuilt("what was sent to the worker", error, send)
        refusal.__cause__ = error
        return refusal


@dataclass(eq=False)
class Attach(Message):
    """Makes a host ready to step into the slab. A worker process receives the slab's plan, and opens slab and mail."""

    slab: Slab | SlabPlan
    options: HostOptions
    mail: Mail | None = None


@dataclass(eq=False)
class EnvPlan(Message):
    """What a host is built from.

    recipes: those of its envs.  first_env: index of the first.
    together: the recipes of all hosts in this process; None where there is no other.
    attach: given to a host that takes another's place: it is ready once it can step.
    """

    recipes: Recipes
    first_env: int
    together: Sequence[Recipe] | None = None
    attach: Attach | None = None


@dataclass(eq=False)
class ResetArguments(Message):
    """The arguments of a reset. passes_options: whether the keyword `options` is passed to ``env.reset`` at all."""

    seeds: Sequence[int | None]
    options: Any
    passes_options: bool = True


@dataclass(eq=False)
class Reset(Message):
    """Resets some envs. There is no reply: each env's record in the slab shows when the reset is done."""

    env_ids: Sequence[int]
    arguments: ResetArguments


@dataclass(eq=False)
class Restart(Message):
    """Makes a failed env answer again.

    rebuilds: the env is built again first; in a new worker it is new already.
    resets_now: the answer is a reset; else the env answers without one and the caller fills in the row.
    seed: for the env's first reset.  options: for the reset that is the answer.
    attributes: to be set on the env that is built again, by name.
    elsewhere: it is built again in another process, since it has once failed again where it was built again.
    """

    env: int
    seed: int | None
    options: Any
    resets_now: bool
    rebuilds: bool
    elsewhere: bool
    attributes: Mapping[str, Any]


@dataclass(eq=False)
class SetAgain(Message):
    """Sets attributes of the envs of a new worker, by env and name. There is no reply, see `EnvHost.set_again`."""

    attributes: Mapping[int, Mapping[str, Any]]


class KeptAttributes(list[dict[str, Any]]):
    """By env, what `set_attr` has set last, for envs that are built again. kept: see `Backend.kept`."""

    def __init__(self, num_envs: int, kept: Callable[[Any, str], Any]) -> None:
        super().__init__({} for _ in range(num_envs))
        self._kept = kept

    def set(self, name: str, values: Mapping[int, Any], act: Callable[[], Mapping[int, T]]) -> Mapping[int, T]:
        """Keeps values, by env, then sets them: a worker may die meanwhile.

        act: sets them; returns by env what is wrong where one has refused its value. These keep what they had.
        """
        of_value: dict[int, Any] = {}  # by identity: one value may be big, and that of all envs
        for env, value in values.items():
            if id(value) not in of_value:
                of_value[id(value)] = self._kept(value, f"values[{env}]")
        before = [*self]
        for env, value in values.items():  # the last, as it was set last: setters may touch others
            others = {other: one for other, one in before[env].items() if other != name}
            self[env] = {**others, name: of_value[id(value)]}
        refused = act()
        for env in refused:
            self[env] = before[env]
        return refused


@dataclass(eq=False)
class Call(Message):
    """Calls a method, or reads an attribute, of every env. arguments: those of `EnvHost.call`."""

    arguments: Any


@dataclass(eq=False)
class SetAttr(Message):
    """Sets an attribute of every env. arguments: those of `EnvHost.set_attr`."""

    arguments: Any
