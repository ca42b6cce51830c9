"""`make_vec`, `AsyncVectorEnv` and `SyncVectorEnv` on Muster's engine, called as those of Gymnasium 1.4 are."""

from __future__ import annotations

import inspect
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import gymnasium
import numpy as np
from gymnasium import VectorizeMode, logger
from gymnasium.envs.registration import EnvSpec
from gymnasium.envs.registration import make_vec as gymnasiums_make_vec
from gymnasium.vector import AutoresetMode
from gymnasium.vector import VectorEnv as GymnasiumsVectorEnv
from gymnasium.vector.async_vector_env import AsyncVectorEnv as GymnasiumsAsyncVectorEnv

from muster._core import verb
from muster.backends.base import Backend
from muster.errors import (
    ActionError,
    ClosedError,
    NotPendingError,
    PendingError,
    UsageError,
    WaitTimeout,
    WorkerError,
    WrongType,
)
from muster.hosts.env_facts import EnvFacts
from muster.hosts.failures import Failure
from muster.interop.agreed_spaces import (
    ASYNC_COMPLAINTS,
    SYNC_COMPLAINTS,
    ObservationMode,
    agreed_spaces,
    shareable_spaces,
)
from muster.interop.starting import in_this_process, limits_of, processes, recipes_of, ways_of
from muster.interop.vector_specs import read_vector_spec
from muster.pickling import UserCall
from muster.pool.environment import WorkerEnv
from muster.pool.limits import AT_ONCE, FOR_EVER, in_all
from muster.pool.set_up import WorkerInit
from muster.spaces.tree import Array, Casting
from muster.transport.infos import Infos
from muster.vector import checks
from muster.vector.action_writers import LenientWriter
from muster.vector.assemble import LENIENT, assemble, trees_of_spaces
from muster.vector.packing import Asked
from muster.vector.parts import BatchedSpaces, SteppingOptions
from muster.vector.raisers import Raiser, original_error, originals_raised, raise_original
from muster.vector.results import Batch, Floats, StepResult
from muster.vector.vector_env import VectorEnv

__all__ = ["AsyncVectorEnv", "SyncVectorEnv", "make_vec"]

ASYNC_VECTOR_ENV = UserCall(
    "AsyncVectorEnv", "env_fns", "AsyncVectorEnv(env_fns) without num_workers", "SyncVectorEnv", 'context="{method}"'
)
SYNC_VECTOR_ENV = UserCall("SyncVectorEnv", "env_fns", "AsyncVectorEnv(env_fns)")

_WORKER = 4  # the place of `worker` among the arguments of AsyncVectorEnv that follow `env_fns`
EnvFns = Iterable[Callable[[], gymnasium.Env[Any, Any]]]
Agree = Callable[[Sequence[EnvFacts]], BatchedSpaces]  # see `spaces` of `Parts`
_REWARD = "muster's reward of several numbers"  # the key of the infos that has one, until `_as_given` takes it


class TimedOut(WaitTimeout, multiprocessing.TimeoutError):
    """A call took longer than its ``timeout``, and stays pending. Derived from the class that Gymnasium raises, too."""


class _Writer(LenientWriter):
    """Raises TypeError for actions that are no batch at all, as Gymnasium does."""

    def write(self, actions: Any, ids: Array) -> bool:
        try:
            return super().write(actions, ids)
        except ActionError as error:
            if not isinstance(actions, Iterable):
                raise WrongType(str(error)) from error
            raise


class _DropIn(VectorEnv):
    """The base of both classes: the checks of spaces and arguments, and the choice of exceptions that are raised."""

    observation_mode: ObservationMode
    autoreset_mode: AutoresetMode
    _casting: Casting = "unsafe"  # of observations, as Gymnasium's class writes them
    _was_closed = False  # by a subclass's `close_extras`, which may leave the envs open

    def _set_up(self, observation_mode: ObservationMode, autoreset_mode: str | AutoresetMode) -> None:
        self.observation_mode = observation_mode
        self._composes = checks.is_replaced(self, "step_async", "step_wait")
        self.autoreset_mode = AutoresetMode(autoreset_mode)

    def _start(
        self,
        backend: Backend,
        agree: Agree,
        raiser: Raiser,
        reward_key: str | None = None,
        max_restarts: int | None = None,
    ) -> None:
        closed = partial(_raise_closed, type(self).__name__)
        parts = replace(LENIENT, trees=partial(trees_of_spaces, casting=self._casting), spaces=agree, writer=_Writer)
        parts = replace(parts, raiser=raiser, raise_closed=closed, reward_key=reward_key)
        options = SteppingOptions(self.autoreset_mode, self.copy, max_restarts=max_restarts)
        super().__init__(assemble(backend, parts, options))
        self.spec = None  # make_vec sets it; the first env's spec says nothing about the others

    def close(self, **kwargs: Any) -> None:  # type: ignore[override]  # a subclass's `close_extras` has its own keywords
        """Closes envs and workers by `close_extras`, which receives `kwargs`, unless that has been done."""
        if self._finalizer.alive and not self._was_closed:
            self.close_extras(**kwargs)
            self._was_closed = self._caller.closed = True


class SyncVectorEnv(_DropIn):
    """Steps all envs in the calling thread, one by one. Arguments and attributes are those of Gymnasium's class, and:

    worker_init: as for `AsyncVectorEnv`; a function is called here, once.

    >>> import gymnasium
    >>> from muster.interop.gymnasium import SyncVectorEnv
    >>> with SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2) as envs:
    ...     obs, infos = envs.reset(seed=0)
    ...     obs, rewards, terminated, truncated, infos = envs.step([0, 1])
    >>> obs.shape, rewards
    ((2, 4), array([1., 1.]))
    """

    _casting = "same_kind"
    _methods = _DropIn

    def __init__(
        self,
        env_fns: EnvFns,
        copy: bool = True,
        observation_mode: ObservationMode = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        *,
        worker_init: WorkerInit = None,
    ) -> None:
        self.env_fns = tuple(env_fns)
        self.copy = copy
        self._set_up(observation_mode, autoreset_mode)
        backend = in_this_process(recipes_of(self.env_fns, SYNC_VECTOR_ENV, may_reuse=True), worker_init)
        agree = partial(agreed_spaces, observation_mode, SYNC_COMPLAINTS)
        with originals_raised():
            self._start(backend, agree, raise_original)
        self.envs = backend.envs

    def step(self, actions: Any, **private: Any) -> StepResult:
        """Steps every env by `actions`. Raises an env's own exception, once the others have been stepped, too."""
        if self.autoreset_mode is AutoresetMode.DISABLED and (needs_reset := self.needs_reset).any():
            ended = np.flatnonzero(needs_reset).tolist()
            raise AssertionError(
                f"envs {ended} have ended their episodes and autoreset_mode is disabled; call "
                "reset(options={'reset_mask': terminated | truncated}) before stepping them"
            )
        return super().step(actions, **private)

    def render(self) -> tuple[Any, ...]:
        """Every env's ``render()``; a subclass's `call` has no part in it, as in Gymnasium."""
        return VectorEnv.call(self, "render")


class AsyncVectorEnv(_DropIn):
    """Steps the envs in worker processes. Has the arguments and attributes of Gymnasium's class of that name, and:

    num_workers: None for one process per env, as in Gymnasium; a number for so many processes that share the envs,
        which is for envs that share nothing; "auto" for one per usable core where a trial has shown that, as
        `muster.make_vec`.
    worker_env: environment variables of the workers, as for `muster.make_vec`.
    worker_init: a function that each worker calls before its first env, or "script", as for `muster.make_vec`. None is
        "script" where the script has a main guard and its top level assigns into modules that it imports, since
        Gymnasium's workers, forks of the caller, have that. With another `context` Gymnasium's run the script, and
        calls there count, too.
    on_failure, max_restarts, step_timeout: as for `muster.make_vec`: what raised, died or hung is an error, or with
        "restart" is replaced, and its episode ends truncated.
    max_concurrent_starts: how many workers build their envs at the same time, as for `muster.make_vec`.

    No env is built in the calling process. `shared_memory` and `daemon` make no difference: observations are always
    shared, and workers never outlive the caller. `context`: None starts fresh processes instead of forking the caller.
    `max_concurrency` limits how many envs execute at once. A custom `worker` is written for the pipes of Gymnasium's
    own class: with one, the call returns an instance of that class.

    >>> import gymnasium
    >>> from muster.interop.gymnasium import AsyncVectorEnv
    >>> with AsyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2) as envs:
    ...     obs, infos = envs.reset(seed=0)
    ...     obs, rewards, terminated, truncated, infos = envs.step([0, 1])
    >>> obs.shape, rewards
    ((2, 4), array([1., 1.]))
    """

    def __new__(cls, env_fns: EnvFns, *args: Any, **kwargs: Any) -> Any:
        """A new instance of this class; of Gymnasium's own class where `worker` is set."""
        if kwargs.get("worker", args[_WORKER] if len(args) > _WORKER else None) is None:
            return super().__new__(cls)
        if cls is not AsyncVectorEnv:
            raise WrongType(f"to use worker=, derive {cls.__name__} from gymnasium.vector.AsyncVectorEnv")
        restarts = ("on_failure", "max_restarts", "max_concurrent_starts", "step_timeout")
        for name in ("num_workers", "worker_env", "worker_init", *restarts):
            if kwargs.pop(name, None) is not None:
                raise WrongType(f"a custom worker= runs on Gymnasium's own AsyncVectorEnv, which has no {name}")
        return GymnasiumsAsyncVectorEnv(tuple(env_fns), *args, **kwargs)

    def __init__(
        self,
        env_fns: EnvFns,
        shared_memory: bool = True,
        copy: bool = True,
        context: str | None = None,
        daemon: bool = True,
        worker: Callable[..., None] | None = None,
        observation_mode: ObservationMode = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        max_concurrency: int | None = None,
        *,
        num_workers: Asked = None,
        worker_env: WorkerEnv | None = None,
        worker_init: WorkerInit = None,
        on_failure: str = "raise",
        max_restarts: int = 10,
        max_concurrent_starts: int | None = None,
        step_timeout: float | None = None,
    ) -> None:
        self.env_fns = tuple(env_fns)
        self.shared_memory, self.copy, self.context, self.daemon, self.worker = (
            shared_memory, copy, context, daemon, worker
        )  # fmt: skip
        self._set_up(observation_mode, autoreset_mode)
        permits = None
        if max_concurrency is not None:
            if not isinstance(max_concurrency, (int, np.integer)):
                raise ValueError(f"`max_concurrency` must be an integer or None, got {type(max_concurrency)}.")
            if max_concurrency < 1:
                raise ValueError(f"`max_concurrency` must be a positive or None, got {max_concurrency}.")
            permits = multiprocessing.get_context(context or "forkserver").BoundedSemaphore(max_concurrency)
        self.max_concurrency = max_concurrency
        self._doing = "step"  # what envs that owe an answer were asked for last
        agree = partial(shareable_spaces if shared_memory else agreed_spaces, observation_mode, ASYNC_COMPLAINTS)
        with originals_raised():
            recipes = [replace(one, permits=permits) for one in recipes_of(self.env_fns, ASYNC_VECTOR_ENV)]
            ways = ways_of(context, 1, worker_env, worker_init, original_forks=context is None)
            limits = limits_of(on_failure, max_restarts, step_timeout, max_concurrent_starts)
            backend = processes(recipes, ways, limits, num_workers)
            self._start(backend, agree, _raise_last, _REWARD, limits.restarts)

    # ---- the calls, each refused while another is pending

    @verb
    def reset_wait(self, timeout: float | None = None, **private: Any) -> tuple[Any, dict[str, Any]]:
        """The result of `reset_async`. Raises multiprocessing.TimeoutError after `timeout`; the reset stays pending."""
        with self._waiting("reset", timeout):
            return super().reset_wait(timeout, **private)

    def step(self, actions: Any, **private: Any) -> StepResult:
        """Steps every env by `actions`. Raises an env's own exception; where several raise, that of the last env.

        Rewards of several numbers are ``[N, ...]``; ValueError where they are not so in all envs, as in Gymnasium.
        """
        if self._composes:
            self.step_async(actions)
            return self.step_wait()
        try:
            obs, rewards, terminated, truncated, infos = VectorEnv.step(self, actions, **private)
            return obs, _as_given(rewards, infos) if infos else rewards, terminated, truncated, infos
        except PendingError:
            self.require_idle("step")
            raise

    @verb
    def step_wait(self, timeout: float | None = None, **private: Any) -> StepResult:
        """The result of `step_async`. Raises multiprocessing.TimeoutError after `timeout`; the step stays pending."""
        with self._waiting("step", timeout):
            obs, rewards, terminated, truncated, infos = super().step_wait(timeout, **private)
            return obs, _as_given(rewards, infos), terminated, truncated, infos

    @verb
    def recv(self, min_envs: int | None = None, timeout: float | None = None, **private: Any) -> Batch:
        """The results of the envs that are ready, at least `min_envs`, as of `muster.VectorEnv`, within `timeout`."""
        batch = super().recv(min_envs, timeout, **private)
        return batch._replace(rewards=_as_given(batch.rewards, batch.infos))

    @verb
    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """The results of `call_async`. Raises multiprocessing.TimeoutError after `timeout`; the call stays pending."""
        with self._waiting("call", timeout):
            return super().call_wait(timeout)

    def require_idle(self, doing: str) -> None:
        """Raises Gymnasium's AlreadyPendingCallError while a call is pending. `doing` is the call that begins."""
        self.require_open()
        if (pending := self._pending()) != "default":
            method = doing if doing == "set_attr" else f"{doing}_async"
            raise PendingError(
                f"Calling `{method}` while waiting for a pending call to `{pending}` to complete.", pending
            )
        self._doing = doing

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Closes envs and workers, once a pending call has ended; ``env.close()`` may take as long as it likes.

        timeout: seconds for the pending call, as in Gymnasium; None waits as long as it takes. After that all workers
        are killed, with a RuntimeWarning that holds their stacks.  terminate: kills them without closing the envs.
        """
        if (pending := self._pending()) != "default" and not self.closed:
            logger.warn(f"Calling `close` while waiting for a pending call to `{pending}` to complete.")
            if checks.is_replaced(self, f"{pending}_wait"):
                with suppress(multiprocessing.TimeoutError):
                    getattr(self, f"{pending}_wait")(0 if terminate else timeout)
        limit_s = checks.timeout_of(timeout)
        limits = AT_ONCE if terminate else FOR_EVER
        if limit_s is not None and not terminate:
            try:
                self.drop_pending(limit_s)
            except WaitTimeout:
                limits = in_all(0.0, f"timeout={limit_s:g}")
            except (UsageError, WorkerError):  # another thread is within a call or has closed this, or a worker's death
                limits = in_all(limit_s, f"timeout={limit_s:g}")
        self.close_within(limits)

    # ---- inside

    def _pending(self) -> str:
        if self._caller.calling:
            return "call"
        return self._doing if self.num_pending else "default"

    @contextmanager
    def _waiting(self, kind: str, timeout: float | None) -> Iterator[None]:
        """Raises Gymnasium's exceptions where no call of this kind is pending, and where it takes longer."""
        self.require_open()
        if self._pending() != kind:
            raise NotPendingError(f"Calling `{kind}_wait` without any prior call to `{kind}_async`.", kind)
        try:
            yield
        except WaitTimeout as error:
            raise TimedOut(f"The call to `{kind}_wait` has timed out after {timeout} second(s).") from error


# The one that help() and IPython show.
AsyncVectorEnv.__new__.__signature__ = inspect.signature(AsyncVectorEnv.__init__)  # type: ignore[attr-defined]  # read by inspect


def make_vec(
    id: str | EnvSpec,
    num_envs: int = 1,
    vectorization_mode: VectorizeMode | str | None = None,
    vector_kwargs: dict[str, Any] | None = None,
    wrappers: Sequence[Callable[[Any], Any]] | None = None,
    **kwargs: Any,
) -> GymnasiumsVectorEnv[Any, Any, Any]:
    """The vector env that Gymnasium's ``make_vec`` makes, with Muster's `SyncVectorEnv` and `AsyncVectorEnv`.

    id, num_envs: a registered id or an EnvSpec, and how many envs.
    vectorization_mode: "sync", "async" or "vector_entry_point", which is the spec's own vector env; None for the
        spec's own where it has one, and else for "sync".
    vector_kwargs: arguments of the vector env, as `num_workers` of `AsyncVectorEnv`.
    wrappers, kwargs: for each env, built where it runs; values of kwargs may be `muster.lazy`.

    Raises what Gymnasium's function raises.

    >>> from muster.interop.gymnasium import make_vec
    >>> with make_vec("CartPole-v1", num_envs=2, vectorization_mode="async") as envs:
    ...     obs, infos = envs.reset(seed=0)
    >>> obs.shape
    (2, 4)
    """
    described = read_vector_spec(id, num_envs, vectorization_mode, vector_kwargs, wrappers, kwargs)
    if described is None:
        return gymnasiums_make_vec(id, num_envs, vectorization_mode, vector_kwargs, wrappers, **kwargs)
    mode, env_fns, own_kwargs, spec = described
    kind = SyncVectorEnv if mode is VectorizeMode.SYNC else AsyncVectorEnv
    envs: GymnasiumsVectorEnv[Any, Any, Any] = kind(env_fns, **own_kwargs)
    envs.spec = spec
    return envs


def _as_given(rewards: Floats, infos: Infos) -> Floats:
    """The rewards, with those of several numbers, which it takes out of the infos. Raises ValueError as Gymnasium."""
    final = infos.get("final_info")
    told = [one for one in (infos, final) if isinstance(one, dict) and _REWARD in one]
    if not told:
        return rewards
    given: list[Any] = list(rewards)
    for one in told:
        several, whose = one.pop(_REWARD), one.pop(f"_{_REWARD}")
        for i in np.flatnonzero(whose).tolist():
            given[i] = several[i]
    return np.array(given, np.float64)


def _raise_last(failures: Sequence[Failure], batch: Batch | None) -> NoReturn:
    for failure in failures:
        logger.error(f"Received the following error from Worker-{failure.env_index} - Shutting it down")
        logger.error("%s", failure.worker_traceback)  # a text of the env's: it may hold a %
    logger.error("Raising the last exception back to the main process.")
    raise original_error(failures, -1)


def _raise_closed(name: str) -> NoReturn:
    raise ClosedError(f"Trying to operate on `{name}`, after a call to `close()`.")
