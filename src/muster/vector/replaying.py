"""States of envs, where ``replayable=True``: what a vector env notes for them, how it gives and how it sets them.

Each reset has the seed of its episode, which the worker makes from the two numbers in `Slab.episodes`: the caller
writes the seed, the worker counts the episodes. The caller keeps each env's actions since its episode began, in the
core. So a worker that dies takes nothing with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode

from muster._core import Caller, Status, verb
from muster.backends.base import Backend
from muster.backends.recovery import Recovery
from muster.errors import ConfigError, PendingError, ReplayDiffers, UsageError, WrongType
from muster.hosts.env_facts import EnvFacts
from muster.hosts.env_states import NONE, EnvState, digests_of
from muster.hosts.questions import EnvQuestion, Kept, Replay, WhyNotSet
from muster.introspection import callable_name
from muster.pickling import is_plain
from muster.recipes.recipe import Recipe
from muster.spaces.tree import Array, SpaceNode
from muster.transport.infos import Infos
from muster.vector import checks


class Replaying:
    """The part of a vector env that makes states of its envs. kept: what envs that are built anew are asked again."""

    def __init__(self, backend: Backend, facts: EnvFacts, mode: AutoresetMode, kept: Kept) -> None:
        self._backend, self._mode, self.kept = backend, mode, kept
        slab, num_envs = backend.slab, backend.slab.plan.num_envs
        self._records, self._episodes = slab.records, slab.episodes
        self._row_bytes = sum(leaf.row_bytes for leaf in slab.plan.action.leaves)
        self._recipes = [_about(recipe, facts, slab.plan.obs, slab.plan.action) for recipe in backend.recipes]
        self._options = [(-1, NONE)] * num_envs  # of the last reset, and its episode
        self._episodes[:, 0] = np.random.SeedSequence().generate_state(num_envs, np.uint64) >> np.uint64(1)
        backend.caller.keep_actions(slab.actions.arrays)

    def answers_to(self, question: EnvQuestion) -> list[Any]:
        """As `Backend.answers_to`; envs that are built anew are asked again."""
        return self.kept.while_asking(question, lambda: self._backend.answers_to(question))

    def begins(self, ids: Array, seeds: Sequence[int | None], options: Any) -> None:
        """Notes that envs are about to be reset. Raises UsageError for options that a state could not hold."""
        text = _as_json(options)
        for env, seed in zip(ids.tolist(), seeds, strict=True):
            if seed is not None:
                self._episodes[env] = seed % 2**63, 0
            self._options[env] = int(self._episodes[env, 1]), text

    def state(self, env: int) -> EnvState:
        """The state of an env that owes no answer. Raises UsageError where it has none."""
        record, (seed, begun) = self._records[env], self._episodes[env].tolist()
        if self._backend.caller.is_pending(env):
            raise PendingError(f"get_states: env {env} still owes an answer to an earlier call; take it with recv()")
        if not begun:
            raise UsageError(f"get_states: env {env} has not been reset; call reset() first")
        begins = bool(record["episode_over"] and not record["needs_reset"])  # same_step: within the last step
        steps, total = (0, 0.0) if begins else (int(record["episode_length"]), float(record["episode_return"]))
        actions = self._backend.caller.actions_of(env)
        if record["status"] != Status.OK or len(actions) != steps * self._row_bytes:
            raise UsageError(f"get_states: the last row of env {env} is of a failure, not of a step; step it once more")
        at, options = self._options[env]
        return EnvState(
            self._recipes[env],
            *(seed, begun - 1, options if at == begun - 1 else NONE, steps, actions, bool(record["needs_reset"])),
            *(total, digests_of(self._backend.slab.obs.arrays, env)),
        )

    def to_set(self, states: Any, ids: Array) -> dict[int, EnvState]:
        """The states that envs are to be set to, by env. Raises WrongType, ConfigError, UsageError."""
        if not isinstance(states, (list, tuple)) or not all(isinstance(one, EnvState) for one in states):
            raise WrongType(f"set_states: expected a list of EnvState, as get_states() returns, got {states!r:.200}")
        if len(states) != len(ids):
            raise ConfigError(f"set_states: expected {len(ids)} states, one for each env, got {len(states)}")
        for k, (env, state) in enumerate(zip(ids.tolist(), states, strict=True)):
            if state.recipe != self._recipes[env]:
                raise UsageError(
                    f"set_states: states[{k}] is of the env {state.recipe}, and env {env} is {self._recipes[env]}: its "
                    "arguments or its spaces are others, or this is another env"
                )
            if len(state.actions) != state.steps * self._row_bytes:
                raise UsageError(
                    f"set_states: states[{k}] has {len(state.actions)} bytes of actions, expected {state.steps} times "
                    f"{self._row_bytes}"
                )
            if len(state.digests) != len(self._backend.slab.plan.obs.leaves):
                raise UsageError(f"set_states: states[{k}] has digests of {len(state.digests)} arrays, not of all")
        return dict(zip(ids.tolist(), map(self._with_row, states), strict=True))

    def _with_row(self, state: EnvState) -> EnvState:
        """The state itself; in same_step, where the end of an episode has no row of its own, the start of the next."""
        if not (state.is_over and self._mode is AutoresetMode.SAME_STEP):
            return state
        return EnvState(state.recipe, state.seed, state.episode + 1, NONE, 0, b"", False, 0.0, ())

    def begin_setting(self, states: dict[int, EnvState]) -> None:
        """Sends envs their states; they are pending then."""
        numbers = {env: self._backend.numbers[env] for env in states}
        for env, state in states.items():
            self._options[env] = state.episode, state.options
        self._backend.ask(Replay({numbers[env]: one for env, one in states.items()}, self.kept.of(numbers.values())))

    def not_set(self, states: dict[int, EnvState]) -> list[int]:
        """The envs that have not come to their states. Notes the actions behind the states of the others."""
        missed = []
        for env, state in states.items():
            came = self._episodes[env].tolist() == [state.seed, state.episode + 1]
            if came and self._records["episode_length"][env] == state.steps:
                self._backend.caller.set_actions(env, state.actions)
            else:
                missed.append(env)
        return missed

    def why(self, env: int, state: EnvState, answer: ReplayDiffers | None) -> ReplayDiffers:
        """The error for an env that has not come to a state. answer: its own; None from a worker that is new."""
        replaced = "its worker", "one that goes on", "replaced meanwhile"
        return answer or ReplayDiffers(self._backend.numbers[env], state.episode, state.steps, *replaced)


class EnvsWithStates:
    """The verbs of a vector env that give and set the states of its envs."""

    num_envs: int
    _replaying: Replaying | None
    _recovery: Recovery | None
    _caller: Caller
    _all: Array
    require_idle: Callable[[str], None]
    reset_wait: Callable[[], tuple[Any, Infos]]
    answers_to: Callable[[EnvQuestion], list[Any]]

    @property
    def replayable(self) -> bool:
        """True if the envs have states, see `get_states`."""
        return self._replaying is not None

    @verb
    def get_states(self, env_ids: Sequence[int] | npt.NDArray[np.integer[Any]] | None = None) -> list[EnvState]:
        """The states of envs `env_ids`, or of all, for `set_states`. Needs ``replayable=True``.

        Envs that owe an answer have none: PendingError. Raises UsageError for one that was not reset, or has failed.
        """
        replaying = self._states_of("get_states")
        if self._caller.calling:
            self.require_idle("get_states")
        ids = self._all if env_ids is None else checks.env_ids_of(env_ids, self.num_envs)
        self._caller.bring_home()
        return [replaying.state(env) for env in ids.tolist()]

    @verb
    def set_states(
        self, states: Sequence[EnvState], env_ids: Sequence[int] | npt.NDArray[np.integer[Any]] | None = None
    ) -> tuple[Any, Infos]:
        """Sets envs `env_ids`, or all, to `states`; returns obs ``[N, ...]`` and infos as `reset` does.

        Each env is reset by its state's seed and stepped through its actions, in parallel; its last observation, its
        return and its length are compared. One that differs is built anew and tried once more. Its next episodes have
        the seeds that the env has whose state it is. Raises ReplayDiffers where an env does not come to its state: such
        envs have begun new episodes. Raises UsageError, ConfigError, WrongType before anything is sent.
        """
        replaying = self._states_of("set_states")
        self.require_idle("set_states")
        ids = self._all if env_ids is None else checks.env_ids_of(env_ids, self.num_envs)
        by_env = replaying.to_set(states, ids)
        if self._recovery is not None:
            self._recovery.seeds_for_reset(ids, [None] * len(ids), None)
        for is_last in (False, True):  # for a worker that has died, and is noticed now
            replaying.begin_setting(by_env)
            result = self.reset_wait()
            if not (missed := replaying.not_set(by_env)):
                return result
            answers = self.answers_to(WhyNotSet())
            if is_last or any(answers):
                break
        errors = [replaying.why(env, by_env[env], answers[env]) for env in missed]
        errors[0].was_reset, errors[0].result = tuple(one.env_index for one in errors), result
        raise errors[0]

    def _states_of(self, verb: str) -> Replaying:
        self._caller.require_open()
        if self._replaying is None:
            raise UsageError(
                f"{verb} needs a vector env that keeps what envs are given: make_vec(..., replayable=True)"
            )
        return self._replaying


def require_replayable(facts: Sequence[EnvFacts], actions: SpaceNode) -> None:
    """Raises ConfigError for coroutine envs, and UsageError for actions that have no fixed size."""
    if any(one.is_awaited for one in facts):
        raise ConfigError("replayable", "left out for coroutine envs, whose steps take turns as they happen to", True)
    if actions.has_objects:
        raise UsageError(
            f"replayable=True: actions of {actions.space} have parts of no fixed size, such as texts, which are not "
            "kept; leave it out"
        )


def _about(recipe: Recipe, facts: EnvFacts, obs: SpaceNode, actions: SpaceNode) -> str:
    """A name for the env that a recipe builds: equal for envs that states can be exchanged between."""
    kwargs = {**getattr(facts.spec, "kwargs", {}), **recipe.kwargs}
    plain = sorted((name, repr(kwargs[name])) for name in {*kwargs} - {"render_mode"} if is_plain(kwargs[name]))
    limit = getattr(facts.spec, "max_episode_steps", None)
    parts = plain, limit, [*map(callable_name, recipe.wrappers)], _layout(obs), _layout(actions)
    text = re.sub(" at 0x[0-9a-f]+", "", repr(parts))  # of a function, in the space of MiniGrid's missions
    return f"{recipe.name} ({hashlib.blake2b(text.encode(), digest_size=6).hexdigest()})"


def _layout(node: SpaceNode) -> list[str]:
    return [repr(node.space), *(f"{leaf.path} {leaf.dtype} {leaf.shape}" for leaf in node.leaves)]


def _as_json(options: Any) -> str:
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        if json.loads(text := json.dumps(options)) == options:
            return text
    raise UsageError(
        f"with replayable=True the options of a reset are kept in states, so they have to be what JSON has: dicts by "
        f"str, lists, numbers, str, bool and None; got {options!r:.200}"
    )
