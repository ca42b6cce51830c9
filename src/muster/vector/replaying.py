"""States of envs, where ``replayable=True``: what a vector env notes for them, how it gives and how it sets them.

Each reset has the seed of its episode, which the worker makes from the two numbers in `Slab.episodes`: the caller
writes the seed, the worker counts the episodes. The caller keeps each env's actions since its episode began, in the
core. So a worker that dies takes nothing with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode

from muster._core import Caller, Status, verb
from muster.backends.base import Backend
from muster.backends.recovery import Recovery
from muster.errors import ConfigError, MusterError, PendingError, ReplayDiffers, UsageError, WrongType
from muster.hosts.env_facts import EnvFacts
from muster.hosts.env_states import MOST_ACTIONS, MOST_OPTIONS, NONE, EnvState, digests_of
from muster.hosts.questions import EnvQuestion, HowReplayed, Kept, Replay
from muster.recipes.likeness import likeness, space_text
from muster.spaces.tree import Array, SpaceNode
from muster.transport.infos import Infos
from muster.vector import checks

_TRIAL_S, _TRIAL_STEPS = 2.0, 50


class Replaying:
    """The part of a vector env that makes states of its envs. kept: what envs that are built anew are asked again."""

    def __init__(self, backend: Backend, mode: AutoresetMode, kept: Kept) -> None:
        self._backend, self._mode, self.kept = backend, mode, kept
        self._slab, self._caller = slab, caller = backend.slab, backend.caller
        self._row_bytes = sum(leaf.row_bytes for leaf in slab.plan.action.leaves)
        spaces = [*_layout(slab.plan.obs), *_layout(slab.plan.action)]
        self._recipes = [f"{one.name} ({_digest([likeness(one), *spaces])})" for one in backend.recipes]
        self._options = [(-1, NONE)] * slab.plan.num_envs  # of the last reset, and its episode
        slab.episodes[:, 0] = np.random.SeedSequence().generate_state(slab.plan.num_envs, np.uint64)
        caller.keep_actions(slab.actions.arrays)

    def answers_to(self, question: EnvQuestion) -> list[Any]:
        """As `Backend.answers_to`; envs that are built anew are asked again."""
        return self.kept.while_asking(question, lambda: self._backend.answers_to(question))

    def begins(self, ids: Array, seeds: Sequence[int | None], options: Any) -> None:
        """Notes that envs are about to be reset. Raises UsageError for options that a state could not hold."""
        text = _as_json(options)
        for env, seed in zip(ids.tolist(), seeds, strict=True):
            if seed is not None:
                self._slab.episodes[env] = seed % 2**64, 0
            self._options[env] = int(self._slab.episodes[env, 1]), text

    def resets_again(self, env: int) -> None:
        """Notes that an env is about to be reset with the options of its last reset."""
        self._options[env] = int(self._slab.episodes[env, 1]), self._options[env][1]

    def state(self, env: int) -> EnvState:
        """The state of an env. Raises PendingError where it owes an answer, UsageError where it has none."""
        if self._caller.is_pending(env):
            raise PendingError(f"get_states: env {env} still owes an answer to an earlier call; take it with recv()")
        if not self._slab.episodes[env, 1]:
            raise UsageError(f"get_states: env {env} has not been reset; call reset() first")
        if len(actions := self._caller.actions_of(env)) > MOST_ACTIONS:
            raise UsageError(
                f"get_states: the episode of env {env} has {len(actions)} bytes of actions, and states have at most "
                f"{MOST_ACTIONS}"
            )
        if (state := self.state_of(env, actions)) is None:
            raise UsageError(
                f"get_states: env {env} has raised or was replaced in this episode, which cannot be played again; it "
                "has a state once it is reset"
            )
        return state

    def state_of(self, env: int, actions: bytes) -> EnvState | None:
        """The state of an env's last row, behind these actions; None where they do not lead to it."""
        record, (seed, begun) = self._slab.records[env], self._slab.episodes[env].tolist()
        begins = bool(record["episode_over"] and not record["needs_reset"])  # same_step: within the last step
        steps = 0 if begins else int(record["episode_length"])
        is_over = bool(record["needs_reset"])
        if record["status"] != Status.OK or len(actions) != steps * self._row_bytes or (is_over and not steps):
            return None
        at, options = self._options[env]
        return EnvState(
            recipe=self._recipes[env],
            seed=seed,
            episode=begun - 1,
            options=options if at == begun - 1 else NONE,
            steps=steps,
            actions=actions,
            is_over=is_over,
            episode_return=0.0 if begins else float(record["episode_return"]),
            digests=digests_of(self._slab.obs.arrays, env),
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
            arrays = len(self._slab.plan.obs.leaves)
            if len(state.actions) != state.steps * self._row_bytes or len(state.digests) != arrays:
                raise UsageError(
                    f"set_states: states[{k}] has {len(state.actions)} bytes of actions and digests of "
                    f"{len(state.digests)} arrays, expected {state.steps} times {self._row_bytes} bytes, and {arrays}"
                )
            with _readable(f"set_states: the options of states[{k}]"):
                json.loads(state.options)
        return dict(zip(ids.tolist(), states, strict=True))

    def set_all(self, states: dict[int, EnvState]) -> None:
        """Sends envs their states; they are pending then."""
        numbers = {env: self._backend.numbers[env] for env in states}
        for env, state in states.items():
            self._options[env] = state.episode, state.options
        self._backend.ask(Replay({numbers[env]: one for env, one in states.items()}, self.kept.of(numbers.values())))

    def note(self, env: int, state: EnvState) -> None:
        """Notes that an env has come to a state."""
        if not (state.is_over and self._mode is AutoresetMode.SAME_STEP):  # it has begun the next episode
            self._caller.set_actions(env, state.actions)


class EnvsWithStates:
    """The verbs of a vector env that give and set the states of its envs."""

    num_envs: int
    _replaying: Replaying | None
    _recovery: Recovery | None
    _backend: Backend
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
        for is_last in (False, True):  # for a worker that has died, and is noticed now
            if self._recovery is not None:
                self._recovery.seeds_for_reset(ids, [None] * len(ids), None)
            replaying.set_all(by_env)
            result = self.reset_wait()
            errors = self._not_set(replaying, by_env)
            if not errors:
                return result
            if is_last or any(one.expected is not None for one in errors):
                break
        errors[0].was_reset, errors[0].result = tuple(one.env_index for one in errors), result
        raise errors[0]

    def _not_set(self, replaying: Replaying, states: dict[int, EnvState]) -> list[ReplayDiffers]:
        """The errors of envs that have not come to their states."""
        errors, answers = [], self.answers_to(HowReplayed())
        for env, state in states.items():
            if answers[env] is True:
                replaying.note(env, state)
            else:
                number, died = self._backend.numbers[env], "its worker ended meanwhile, and was replaced"
                unknown = ReplayDiffers(number, state.episode, state.steps, False, died)
                errors.append(answers[env] if isinstance(answers[env], ReplayDiffers) else unknown)
        return errors

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


def replay_problem(envs: Any) -> str:
    """The reason why envs cannot be played again, for people; empty where they can. They are new, and not "disabled".

    They are tried in their second episode at least, and within 2 s.
    """
    ends = time.monotonic() + _TRIAL_S
    try:
        for _ in range(2):
            envs.reset()
            for _ in range(_TRIAL_STEPS):
                envs.step(envs.sample_actions())
                if time.monotonic() > ends:
                    return f"{_TRIAL_STEPS} of its steps take more than {_TRIAL_S / 2:g} s"
        envs.set_states(envs.get_states())
    except ReplayDiffers as differs:
        return differs.summary
    except MusterError as error:
        return error.headline
    return ""


def _layout(node: SpaceNode) -> list[str]:
    return [space_text(node.space), *(f"{leaf.path} {leaf.dtype} {leaf.shape}" for leaf in node.leaves)]


def _digest(parts: Sequence[str]) -> str:
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=6).hexdigest()


def _as_json(options: Any) -> str:
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        if json.loads(text := json.dumps(options)) == options and len(text) <= MOST_OPTIONS:
            return text
    raise UsageError(
        f"with replayable=True the options of a reset are kept in states, so they have to be what JSON has, in at most "
        f"{MOST_OPTIONS} characters: dicts by str, lists, numbers, str, bool and None; got {options!r:.200}"
    )


@contextlib.contextmanager
def _readable(what: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{what} are no JSON: {error}") from error
