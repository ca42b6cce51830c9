"""`VectorEnv`: N envs behind Gymnasium's vector API, whatever backend steps them; and the verbs of all vector envs."""

from __future__ import annotations

import contextlib
import copyreg
import math
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Generic, NoReturn, Self, TypeVar, cast

import gymnasium
import numpy as np
import numpy.typing as npt

from muster._core import SLICE_NS, Status, Unusual, end_threads, verb
from muster.errors import CannotTravel, EnvError, NotPendingError, PendingError, WaitTimeout
from muster.hosts.failures import Failure, failures_of
from muster.hosts.questions import Call, EnvCall, EnvQuestion, Reset, SetAttr
from muster.pool.closing import close_abandoned
from muster.pool.limits import CloseLimits
from muster.spaces.compare import handed_out
from muster.spaces.tree import Array
from muster.transport.infos import InfoReader, Infos
from muster.vector import checks, results
from muster.vector.action_writers import sample_actions
from muster.vector.parts import Assembled
from muster.vector.raisers import raise_env_error
from muster.vector.replaying import EnvsWithStates
from muster.vector.results import AgentBatch, AgentsStepResult, Batch, Floats, Rows, StepResult

_WATCH_S = 0.05
StepT = TypeVar("StepT", StepResult, AgentsStepResult)
BatchT = TypeVar("BatchT", Batch, AgentBatch)
_INFOS, _NOT_OK, _FINALS = Unusual.INFOS, Unusual.NOT_OK, Unusual.FINALS


class SteppedEnvs(EnvsWithStates, Generic[StepT, BatchT]):
    """The verbs of a vector env, whatever its envs are.

    Keywords with an underscore are for code that uses somebody else's vector env in its own way: `_copies`, True for
    copies of observations and False for views, whatever `copy` says; `_reader`, which reads the infos.
    """

    _batch: type[BatchT]
    _methods: Any = None  # `reset` and `call` call the `reset_async` and such of this class; None: the own one
    __repr__, _add_finals, _all_after_reset = results.described, results.add_finals, results.all_after_reset
    __reduce__ = results.cannot_travel

    def __init__(self, assembled: Assembled) -> None:
        self._backend = backend = assembled.backend
        self._caller, self._log_flag = backend.caller, backend.log_flag
        self._records, self._obs = backend.slab.records, backend.slab.plan.obs
        self.num_envs, self.render_mode = backend.slab.plan.num_envs, assembled.facts.render_mode
        self.metadata = {**assembled.facts.metadata, "autoreset_mode": assembled.options.autoreset_mode}
        self.copy, self.info_reader, self._writer = assembled.options.copy, assembled.info_reader, assembled.writer
        self._recovery, self._statistics = assembled.recovery, results.Statistics(backend)
        self._replaying = assembled.replaying
        self._raise, self._raise_closed = assembled.parts.raiser, assembled.parts.raise_closed
        self._all, self._drops_pending, self._watch_at = np.arange(self.num_envs), False, 0.0
        self._leases: Any = None
        self._finalizer: weakref.finalize[..., Any] = weakref.finalize(self, close_abandoned, backend.close)

    # ---- stepping

    @verb
    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, Infos]:
        """Resets all envs, or those in ``options["reset_mask"]`` (bool ``[N]``); returns obs ``[N, ...]`` and infos.

        seed: env i gets ``seed + i``, or the list's i-th. Other options are passed to every env. The rows of envs that
        are not reset repeat their last observations; of objects, and of big ones where envs reset themselves, with what
        the caller has changed in them since. After a Ctrl-C in another call, or a handler that raised there, a reset of
        all envs drops the answers that they owe. Raises EnvError, UsageError.
        """
        if self.interrupted and "reset_mask" not in (options or ()):
            self.drop_pending()
        methods = self._methods or type(self)
        methods.reset_async(self, seed=seed, options=options)
        return methods.reset_wait(self)

    @verb
    def reset_async(
        self, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        """Starts `reset`; `reset_wait` or `recv` takes the result."""
        self.require_idle("reset")
        seeds, ids = checks.seeds_of(seed, self._all), self._all
        checks.require_options(options)
        if options is not None and "reset_mask" in options:
            options = dict(options)
            ids = np.flatnonzero(checks.reset_mask_of(options.pop("reset_mask"), self.num_envs))
        self.reset_some(ids, [seeds[i] for i in ids.tolist()], options)

    @verb
    def send_reset(
        self,
        env_ids: Sequence[int] | npt.NDArray[np.integer[Any]] | None = None,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Starts to reset envs `env_ids`, or all, with `options`; `recv` takes the rows. The others go on.

        seed: env i gets ``seed + i``, or ``env_ids[k]`` the list's k-th. Raises PendingError, UsageError.
        """
        if self._caller.calling:
            self.require_idle("send_reset")
        ids = self._all if env_ids is None else checks.env_ids_of(env_ids, self.num_envs)
        checks.require_options(options)
        if late := [env for env in ids.tolist() if self._caller.is_pending(env)]:
            raise PendingError(f"env {late[0]} still owes an answer to an earlier call; take it with recv()")
        self.reset_some(ids, checks.seeds_of(seed, ids), options)

    @verb
    def reset_some(self, ids: Array, seeds: Sequence[int | None], options: Any, passes_options: bool = True) -> None:
        """Starts resetting the envs `ids`, which owe no answer, with `seeds` and, if `passes_options`, `options`."""
        if self._replaying is not None:
            self._replaying.begins(ids, seeds, options)
        if self._recovery is not None:
            seeds = self._recovery.seeds_for_reset(ids, seeds, options)
        numbers = [self._backend.numbers[env] for env in ids.tolist()]
        self._backend.ask(Reset(dict(zip(numbers, seeds, strict=True)), options, passes_options))

    @verb
    def reset_wait(
        self, timeout: float | None = None, *, _copies: bool | None = None, _reader: InfoReader | None = None
    ) -> tuple[Any, Infos]:
        """The result of `reset_async`. Raises WaitTimeout after `timeout` seconds; the reset then stays pending."""
        copies = self.copy if _copies is None else _copies
        ids, obs, *_, infos, _ = self._take_all("reset", timeout, copies, _reader)
        return (obs, infos) if len(ids) == self.num_envs else self._all_after_reset(ids, infos, copies)

    @verb
    def step(self, actions: Any, *, _copies: bool | None = None, _reader: InfoReader | None = None) -> StepT:
        """Steps every env: obs ``[N, ...]``, rewards float64 ``[N]``, terminated and truncated bool ``[N]``, infos.

        actions: ``[N, ...]``, of `action_space`. Raises ActionError before anything is sent, EnvError, WorkerDied.
        """
        copies = self.copy if _copies is None else _copies
        self._send(actions, None, True, copies)
        self._wait(self.num_envs, None, "step")
        return self._read(copies, _reader)[1:6]

    @verb
    def step_async(self, actions: Any) -> None:
        """Sends `actions`, as `step` takes them; `step_wait` or `recv` takes the results."""
        self.require_idle("step")
        self._send(actions, None, True, self.copy)

    @verb
    def step_wait(
        self, timeout: float | None = None, *, _copies: bool | None = None, _reader: InfoReader | None = None
    ) -> StepT:
        """The result of `step_async`. Raises WaitTimeout after `timeout` seconds; the step then stays pending."""
        return self._take_all("step", timeout, self.copy if _copies is None else _copies, _reader)[1:6]

    @verb
    def send(self, actions: Any, env_ids: Sequence[int] | npt.NDArray[np.integer[Any]] | None = None) -> None:
        """Sends `actions` ``[n, ...]`` to envs `env_ids`, or to all; none of them may owe an answer to an earlier call.

        Raises ActionError, PendingError, UsageError, each before anything is sent.
        """
        if env_ids is None:
            if self._caller.num_pending:
                self.require_idle("step")
            return self._send(actions, None, False, self.copy)
        if self._caller.calling:
            self.require_idle("send")
        return self._send(actions, checks.env_ids_of(env_ids, self.num_envs), False, self.copy)

    @verb
    def recv(self, min_envs: int | None = None, timeout: float | None = None, *, _copies: bool | None = None) -> BatchT:
        """The results of the envs that are ready, once at least `min_envs` are (None: all that are pending).

        Raises WaitTimeout after `timeout` seconds, and all stay pending; NotPendingError where fewer than that are.
        """
        checks.require_count(min_envs)
        pending = self._caller.num_pending
        wanted = pending if min_envs is None else min_envs
        if not 1 <= wanted <= pending:
            remedy = f"wait for 1 to {pending} of the envs sent to" if pending else "send() actions first"
            raise NotPendingError(f"recv(min_envs={min_envs}): {pending} envs are pending; {remedy}")
        # Where some envs are always ready, nothing else would notice that others are dead.
        if (now := time.monotonic()) > self._watch_at:
            self._backend.watch(0.0)
            self._watch_at = now + _WATCH_S
        self._wait(wanted, timeout, "recv")
        return self._batch._make(self._read(self.copy if _copies is None else _copies, None)[:6])

    @verb
    def call(self, name: str | EnvCall, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The results of ``env.name(*args, **kwargs)``, or of ``name(env, env_index, *args, **kwargs)`` for a function.

        An attribute that is not callable is returned itself.
        """
        methods = self._methods or type(self)
        methods.call_async(self, name, *args, **kwargs)
        return methods.call_wait(self)

    @verb
    def call_async(self, name: str | EnvCall, /, *args: Any, **kwargs: Any) -> None:
        """Starts `call`; `call_wait` takes the results."""
        self.require_idle("call")
        checks.require_callable(name)
        try:
            self._caller.calling = True
            self._backend.ask(Call.of(name, args, kwargs))
        except BaseException:
            self._caller.calling = False
            raise

    @verb
    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """The results of `call_async`. Raises WaitTimeout after `timeout` seconds; the call then stays pending."""
        self.require_open()
        if not self._caller.calling:
            raise NotPendingError("call_wait() without call_async() before it", "call")
        results: list[Any] = self._backend.answers(checks.timeout_of(timeout))
        self._caller.calling = False
        self._backend.drop_answers()
        if failures := [*failures_of(results).values()]:
            self._raise_all(failures, None)
        return tuple(results)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """The attribute `name` of every env, looked up through wrappers."""
        return self.call(name)

    @verb
    def set_attr(self, name: str, values: Any) -> None:
        """Sets the attribute `name` of every env, to ``values[i]`` where `values` is a list or tuple."""
        self.require_idle("set_attr")
        self.ask(SetAttr(name, checks.values_of(name, values, self._backend.numbers)))

    def ask(self, question: EnvQuestion) -> Any:
        """The joined answers of all envs to a `question` that is answered by messages."""
        answers: list[Any] = self.answers_to(question)
        if failures := [*failures_of(answers).values()]:
            self._raise(failures, None)
        return question.joined(answers)

    @verb
    def answers_to(self, question: EnvQuestion) -> list[Any]:
        """The answers of all envs to a `question`, among them the failures of those that have raised."""
        self.require_idle("ask")
        try:
            self._caller.calling = True
            return (self._recovery or self._replaying or self._backend).answers_to(question)
        finally:
            self._caller.calling = False

    def render(self) -> tuple[Any, ...]:
        """Every env's ``render()``."""
        return self.call("render")

    def stats(self) -> dict[str, Any]:
        """``env_steps``, ``restarts``, ``recycled``, ``processes``, the ``verdict`` since the last call, ``workers``.

        The verdict says what keeps the envs. Each worker has its ``index`` and ``envs``, the shares of its time
        ``stepping``, ``waiting`` and ``copying``, its ``env_steps`` and ``resets``, and of its process the ``pid``,
        ``memory_bytes`` (private, its children's included), ``handles`` (open fds, or ``fds``), ``children`` (theirs
        included), and what was added since its envs were built: ``memory_growth_bytes`` (of memory that belongs to no
        file), ``handles_growth``, ``children_growth``; None where it has ended. Where the caller steps envs, they are
        its process's, without children's memory. With `concurrent`: ``in_step``, ``blocked_s``, ``left_behind``.
        """
        self.require_open()
        return self._statistics.now()

    def counts(self) -> tuple[int, int, int]:
        """Env steps, resets and restarts so far, of all envs."""
        return self._statistics.counts()

    @property
    def episode_returns(self) -> Floats:
        """float64 ``[N]``: each env's summed rewards since its last reset; of the whole episode where it has ended."""
        return cast(Floats, self._records["episode_return"].copy())

    @property
    def episode_lengths(self) -> npt.NDArray[np.int64]:
        """int64 ``[N]``: env steps behind `episode_returns`."""
        return cast("npt.NDArray[np.int64]", self._records["episode_length"].copy())

    @property
    def closed(self) -> bool:
        """True if the vector env is closed for good: by `close`, or after an error that says so."""
        return self._caller.closed

    def close(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Closes envs and workers, see `close_extras`, unless that has been done."""
        if self._finalizer.alive:
            self.close_extras(timeout=timeout, terminate=terminate)

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Closes envs and workers, and waits for each env's own ``close()`` as long as make_vec's `close_timeout` says.

        timeout: seconds for all envs, in the place of that.  terminate: does not wait for ``env.close()``.
        A worker in a step, a reset or a call has 5 s to begin. Garbage collection and the interpreter's exit, where
        nobody calls this, wait 5 s in all. Raises EnvError if an ``env.close()`` raised, after everything is closed.
        """
        self.close_within(self._backend.close_limits.of_call(checks.timeout_of(timeout), terminate=terminate))

    def close_within(self, limits: CloseLimits) -> None:
        """Closes as `close` does, within `limits`, of a front end that has others."""
        if self._raise_closed is not None:
            self._caller.raise_when_closed(self._raise_closed)
        self._caller.closed = True
        if self._leases is not None:
            self._leases.end()
        failures = self._backend.close(limits.hurried(self._caller.hurries))
        self._finalizer.detach()  # last: where a Ctrl-C leaves something open, the finalizer or another call closes it
        if failures:
            self._raise(failures, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except EnvError as failure:
            if error is None:
                raise
            error.add_note(f"Then an env failed to close: {failure}")  # a note alone: `error` may be a Ctrl-C

    # ---- inside

    @property
    def needs_reset(self) -> npt.NDArray[np.bool_]:
        """bool ``[N]``: True where an env's last row ended an episode that no reset has followed yet."""
        return cast("npt.NDArray[np.bool_]", self._records["needs_reset"].copy())

    @property
    def interrupted(self) -> bool:
        """True if Ctrl-C or a handler has ended a call since anything was sent; `reset` then drops what envs owe."""
        leases = self._leases
        return self._caller.interrupted or (leases is not None and not leases.is_used and bool(leases.answers))

    @property
    def num_pending(self) -> int:
        """The number of envs that owe an answer to a step, send or reset."""
        return self._caller.num_pending

    def require_open(self) -> None:
        """Raises ClosedError where the vector env is closed, or belongs to the process that this one is a fork of."""
        self._caller.require_open()

    def require_idle(self, doing: str) -> None:
        """Raises PendingError while an answer is pending, and ClosedError. `doing` names what is to begin."""
        self.require_open()
        if self._caller.calling:
            raise PendingError(f"{doing}: a call is pending; take it with call_wait()", "call")
        if pending := self._caller.num_pending:
            raise PendingError(
                f"{doing}: {pending} envs still owe an answer to an earlier call; take it with step_wait(), "
                "reset_wait() or recv()"
            )

    @verb
    def drop_pending(self, timeout: float | None = None) -> None:
        """Drops every answer that envs still owe, once it is there. Raises WaitTimeout after `timeout` seconds."""
        ends = math.inf if timeout is None else time.monotonic() + timeout
        try:
            self._drops_pending = True
            while self._caller.calling or self.num_pending:  # takes the answers, or the error, of at least one env
                left_s = None if timeout is None else ends - time.monotonic()
                with contextlib.suppress(EnvError, CannotTravel):
                    SteppedEnvs.call_wait(self, left_s) if self._caller.calling else SteppedEnvs.recv(
                        self, None, left_s
                    )
        finally:
            self._drops_pending = False

    def _raise_all(self, failures: Sequence[Failure], batch: Batch | None) -> NoReturn:
        """Raises what envs have failed with; as an EnvError where it is dropped, which no handler's exception is."""
        (raise_env_error if self._drops_pending else self._raise)(failures, batch)

    def _send(self, actions: Any, ids: Array | None, as_whole: bool, copies: bool) -> None:
        """Sends to the envs `ids`, or to all. as_whole: all of these are waited for at once, for `copies` or views."""
        caller, recovery = self._caller, self._recovery
        objects = not caller.write(actions, ids) and self._writer.write(actions, self._all if ids is None else ids)
        if recovery is None or not (recovery.lost or recovery.recycling):
            return caller.send(ids, objects, as_whole, copies)
        alive, lost = recovery.split(self._all if ids is None else ids)
        if len(alive):
            caller.send(alive if len(lost) else ids, objects, as_whole, copies)
        return recovery.answer_for(lost)

    def _take_all(self, doing: str, timeout: float | None, copies: bool, reader: InfoReader | None) -> Rows:
        if not (pending := self._caller.num_pending):
            self.require_open()
            raise NotPendingError(f"{doing}_wait() without {doing}_async() before it", doing)
        self._wait(pending, timeout, doing)
        return self._read(copies, reader)

    def _wait(self, min_envs: int, timeout: float | None, doing: str) -> None:
        """Waits in slices until `min_envs` pending envs are ready, and checks the workers between two slices."""
        if timeout is None and self._recovery is None and self._caller.wait(min_envs, SLICE_NS):
            return
        ends, slice_ns = math.inf, SLICE_NS
        if timeout is not None:
            timeout = checks.timeout_of(timeout) or 0.0
            ends, slice_ns = time.monotonic() + timeout, min(SLICE_NS, int(timeout * 1e9))
        began: float | None = None
        while not self._caller.wait(min_envs, slice_ns) or (
            self._recovery is not None and self._recovery.retry_failed()
        ):
            now = time.monotonic()
            began = now if began is None else began
            self._backend.watch(now - began)
            if now >= ends:
                raise WaitTimeout(
                    f"{doing}{'_wait' * (doing != 'recv')}(timeout={timeout}): fewer than {min_envs} envs were ready; "
                    "they stay pending, so the same call may be made again"
                )
            slice_ns = int(min(SLICE_NS, (ends - now) * 1e9))

    def _read(self, copies: bool, reader: InfoReader | None) -> Rows:
        """The rows of the envs that are ready, as the core has read them; the rest is read here."""
        reader = reader or self.info_reader
        if self._log_flag[0]:
            self._backend.deliver_logs()
        rows = self._caller.collect(copies, reader.in_core)
        ids, obs, rewards, terminated, truncated, infos, unusual = rows
        if not unusual and obs is not None and self._recovery is None:
            return rows
        restarts: dict[int, Infos] = {}
        if self._recovery is not None:
            restarts = self._recovery.finish_rows(ids, rewards, terminated, truncated)
        if infos is None and unusual == _INFOS and not self._obs.has_objects:
            infos = reader.read_plain(ids)
        if self._obs.has_objects or restarts or infos is None:
            return self._read_by_row(rows, restarts, copies, reader)
        obs = self._backend.slab.obs_batch(ids, [], copies) if obs is None else obs
        return ids, obs, rewards, terminated, truncated, infos, unusual

    def _read_by_row(self, rows: Rows, restarts: Mapping[int, Infos], copies: bool, reader: InfoReader) -> Rows:
        """The rows, completed with objects, final observations and what is said of restarts. Raises if envs failed."""
        ids, obs, rewards, terminated, truncated, _, unusual = rows
        failures = self._backend.failures(ids) if unusual & _NOT_OK else []
        if failures:
            keep = self._records["status"][ids] != Status.RAISED
            ids, rewards, terminated, truncated = ids[keep], rewards[keep], terminated[keep], truncated[keep]
        mail = self._backend.take_mail(ids)
        step_objects = [step for step, _ in mail]
        if obs is None:
            obs = self._backend.slab.obs_batch(ids, step_objects, copies)
        infos: Infos = {}
        if unusual & _FINALS or restarts:  # a restart may have ended an episode
            self._add_finals(infos, ids, [final for _, final in mail], reader)
        if unusual & _INFOS:
            infos = {**infos, **reader.read(ids, step_objects)}
        if failures:
            self._raise_all(failures, Batch(ids, obs, rewards, terminated, truncated, infos))
        for row, said in restarts.items():
            reader.add(infos, said, row, len(ids))
        return ids, obs, rewards, terminated, truncated, infos, unusual


copyreg.pickle(type(SteppedEnvs.step), lambda step: step.__qualname__)  # by its name, as a function; a copy is itself
weakref.finalize(SteppedEnvs, end_threads)  # runs after the vector envs' finalizers, which are made later


class VectorEnv(  # type: ignore[misc,override]  # `close` names its options, and only it sets `closed`
    SteppedEnvs[StepResult, Batch], gymnasium.vector.VectorEnv[Any, Any, Any]
):
    """Many envs, stepped by a backend. Made by `muster.make_vec`.

    `step` and `reset` are Gymnasium's. `send` and `recv` step some envs while others are still busy. Observations are
    the caller's own (`copy` is True), or views of the slab that stay valid until that env's next send.

    >>> import muster
    >>> with muster.make_vec("CartPole-v1", num_envs=4) as envs:
    ...     obs, infos = envs.reset(seed=0)
    ...     envs.send([0, 1], env_ids=[1, 3])
    ...     envs.recv(min_envs=2).env_ids
    array([1, 3])
    """

    _batch, lease = Batch, results.lease

    def __init__(self, assembled: Assembled) -> None:
        super().__init__(assembled)
        spaces = assembled.spaces
        self.single_observation_space = handed_out(spaces.single_observation)
        self.single_action_space = handed_out(spaces.single_action)
        self.observation_space, self.action_space, self.spec = spaces.observation, spaces.action, assembled.facts.spec

    @verb
    def sample_actions(self) -> Any:
        """Random actions ``[N, ...]`` that the envs allow, of `action_space`. Its ``seed`` seeds them.

        Those of the ``"action_mask"`` in an env's last observation or infos; SpecMismatch for one that fits none.
        """
        return sample_actions(self, self._backend, self.info_reader.columns)

    np_random_seed: Any = property(lambda self: self.get_attr("np_random_seed"), doc="Each env's seed.")
    np_random: Any = property(lambda self: self.get_attr("np_random"), doc="Each env's random generator, or a copy.")
