"""The number of processes that step the envs: one for each env, or fewer that share them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import combinations
from typing import Literal

from muster.arguments import whole
from muster.errors import CannotTravel, ConfigError
from muster.hosts.trial import Trials, pack_for_trials
from muster.pool.environment import first_changes
from muster.pool.notices import say_once
from muster.pool.resources import MAY_SHARE
from muster.pool.set_up import Processes
from muster.recipes.recipe import Recipe, shared_by
from muster.recipes.recipe_kinds import kinds_of
from muster.vector.side_by_side import try_side_by_side

Asked = int | Literal["auto"] | None
AUTO = "auto"

_MANY_PER_CORE = 8
# The trial grows with the square of this.
_MOST_KINDS = 3


def check_workers(name: str, asked: Asked) -> Asked:
    """`asked`, if it is None, "auto" or a number of workers. Raises ConfigError."""
    if asked is None or (isinstance(asked, str) and asked == AUTO):
        return asked
    if isinstance(asked, str):
        raise ConfigError(name, 'a number of workers, "auto" or None', asked)
    return whole(name, asked, 1)


def one_each(asked: Asked, recipes: Sequence[Recipe]) -> int:
    """One worker for each env, which "auto" allows. Raises ConfigError where the user has asked for another number."""
    if asked not in (None, AUTO, len(recipes)):
        raise ConfigError("num_workers", f"{len(recipes)}, for each env to have its own process", asked)
    return len(recipes)


def at_most(asked: int, recipes: Sequence[Recipe], caller_steps: bool = False) -> int:
    """`asked`, if there are envs for so many workers. Raises ConfigError."""
    most = len(recipes) - caller_steps
    if asked > most:
        reason = "the calling process steps one env itself" if caller_steps else "a worker needs an env"
        raise ConfigError("num_workers", f"at most {most} for {len(recipes)} envs, as {reason}", asked)
    return asked


def count_processes(
    recipes: Sequence[Recipe],
    asked: Literal["auto"] | None,
    cores: int,
    processes: Processes,
    timeout_s: float,
    *,
    packs: bool,
) -> int:
    """The number of processes for envs where the user has named no number of workers.

    asked: "auto" packs the envs where a trial shows that two side by side are what each is alone, and says what it has
    chosen.  packs: whether the envs are known to share nothing, and are packed without a trial, unless they have
    windows.  processes: how they start; the trial's process starts so as well, with the first worker's environment.
    timeout_s: seconds for each stage of the trial.
    """
    count, fewest = len(recipes), min(cores, len(recipes))
    if count == 1:
        return 1
    has_windows = any(one.opens_window for one in recipes)
    if asked == AUTO:
        why = "they open windows" if has_windows else _why_apart(recipes, processes, timeout_s)
        chosen, reason = (fewest, "two of it side by side are what each is alone") if why is None else (count, why)
        names = list(dict.fromkeys(recipe.name for recipe in recipes))
        shown = ", ".join(names[:_MOST_KINDS]) + ", ..." * (len(names) > _MOST_KINDS)
        say_once(f'"auto": {count} envs of {shown} in {chosen} processes: {reason}')
        return chosen
    if packs and not has_windows:
        return fewest
    if count > _MANY_PER_CORE * cores:
        where = "1 core" if cores == 1 else f"{cores} cores"
        say_once(f"{count} processes start on {where}, one for each env. {MAY_SHARE}")
    return count


def _why_apart(recipes: Sequence[Recipe], processes: Processes, timeout_s: float) -> str | None:
    """The reason why each env needs a process of its own; None where two of each kind, and of any two, may share one.

    Envs of one kind differ in numbers and strings alone, see `kinds_of`. No trial is made with objects that the caller
    uses, too: it would leave its items in the caller's queues, and locks held where it is ended.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they come once more, when workers start
        if shared := shared_by(recipes, processes.init.function, by_fork=processes.context == "fork"):
            return f"the envs share {shared} with this process: not tried"
    kinds = kinds_of(recipes, _MOST_KINDS)
    if kinds is None:
        return f"they are of more than {_MOST_KINDS} kinds, too many to try each with each"
    pairs = [kind[:2] for kind in kinds if len(kind) > 1]
    pairs += [[one[0], other[0]] for one, other in combinations(kinds, 2)]
    reasons = (_why_two_apart(pair, processes, timeout_s) for pair in pairs)
    return next((reason for reason in reasons if reason is not None), None)


def _why_two_apart(pair: Sequence[Recipe], processes: Processes, timeout_s: float) -> str | None:
    init = processes.init
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they come once more, when workers start
            packed: bytes | Sequence[Recipe] = pack_for_trials(pair, processes.context, init.function)
    except CannotTravel as error:
        if processes.context != "fork":
            return f"they cannot be tried: {error.headline}"
        packed = pair
    tried = try_side_by_side(Trials(packed, timeout_s, first_changes(processes.worker_env), init), gives_up=True)
    return tried.unknown or tried.disturbed
