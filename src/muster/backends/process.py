"""The process backend: worker processes step the envs, the caller waits for them, or steps a share itself."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import pickle
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from muster.backends.base import Backend, CallerOptions, local_share, make_caller
from muster.backends.deaths import describe_doing, explain_death, name_envs, seconds_since
from muster.backends.handle import Started, WorkerHandle, fork_worker_for, launch_worker, name_workers, python_stack
from muster.backends.launch import LauncherClient, LauncherLost, close_own, disown, own, readable
from muster.backends.memory_plan import Built, MemoryPlan
from muster.backends.share import EnvCall, EnvFacts, Failure, Share, ShareOptions, message_of, to_exception, type_name
from muster.backends.worker import StartOrder
from muster.errors import CannotTravel, ClosedError, EnvError, WaitTimeout, WorkerDied, WorkerError, WorkerTimeout
from muster.pickling import explain, find_culprits
from muster.recipe import Recipe, WorkerInfo, check_forkable, pack
from muster.spec import Array
from muster.transport.channel import ChannelClosed
from muster.transport.mail import LocalMail, Mail, SharedMail, dumps
from muster.transport.slab import Plan, Slab, memfd, split_evenly

CONTEXTS = ("auto", "fork", "forkserver", "spawn")
_PATIENT_S = 60.0
# How long a worker may take to finish the step it is in when the vector env closes.
_BUSY_GRACE_S = 1.0
_SLICE_S = 0.05


@dataclass(frozen=True)
class ProcessOptions:
    """How worker processes are started and watched. context: "fork", "forkserver" or "spawn"."""

    context: str
    num_workers: int
    caller_steps: bool
    start_timeout_s: float
    step_timeout_s: float | None
    threads_per_worker: int
    packs_carefully: bool = False  # the other workers build once the first has built two envs in one process
    memory_check: str = "error"  # one of memory_plan.MEMORY_CHECKS


class ProcessBackend(Backend):
    """Workers 0 to W-1 step the lines of the same number; with `caller_steps` line W is the caller's own share."""

    def __init__(self, recipes: Sequence[Recipe], options: ProcessOptions) -> None:
        self._recipes = recipes
        self._options = options
        self.first_envs = split_evenly(len(recipes), options.num_workers + options.caller_steps)
        self._workers: list[WorkerHandle] = []
        self._local: Share | None = None
        self._local_mail = LocalMail()
        self._launcher: LauncherClient | None = None
        self._fds: dict[str, int] = {}
        self._owner = os.getpid()
        self._closed = False
        self._warned = False
        self._number = 0  # of calls, so that an answer is told from that to an interrupted call
        self._calling: str | None = None

    @property
    def num_workers(self) -> int:
        return self._options.num_workers

    # ---- starting

    def start(self) -> list[EnvFacts]:
        if self._options.context == "fork":
            check_forkable(self._recipes)
        # Before anything is started: what cannot travel leaves nothing behind.
        self._orders = orders = [self._order(line) for line in range(self.num_workers)]
        deadline = time.monotonic() + self._options.start_timeout_s
        try:
            self._fds = {"slab": memfd("slab"), "mail": memfd("mail")}
            own(*self._fds.values())
            self._mail = SharedMail(self._fds["mail"], shares_main=self._options.context == "fork")
            if self._options.context != "fork" and orders:
                self._launcher = LauncherClient.acquire(self._options.context, self._options.threads_per_worker)
            for line in range(self.num_workers):
                self._workers.append(self._launch(line))
            for worker, order in zip(self._workers, orders, strict=True):
                _tell_order(worker, order)
                if order.tells_building:
                    self._await_first_envs(worker, deadline)
            facts = self._build_local()
            answers = [self._facts(worker, deadline) for worker in self._workers]
        except BaseException:
            self.close(0.0)
            raise
        for answer in answers:
            if isinstance(answer, Failure):
                self.close(0.0)
                raise to_exception(answer)
        return [(one or answer[0]) for answer in [*answers, facts] for one in answer]

    def _await_first_envs(self, worker: WorkerHandle, deadline: float) -> None:
        """Waits until the first worker has built enough to tell that the others may build, too."""
        plan = MemoryPlan(len(self._recipes), self.num_workers, self._options.memory_check)
        enough = not self._options.packs_carefully
        for count in range(1, min(2, worker.last - worker.first) + 1):
            built = self._answer(worker, deadline, f"building env {worker.first + count - 1}")
            if isinstance(built, Failure):
                raise to_exception(built)
            if enough and plan.fits(built):
                break
        else:
            plan.require(built)

    def _facts(self, worker: WorkerHandle, deadline: float) -> Any:
        """A worker's facts or its Failure, behind what it tells of single envs."""
        while isinstance(answer := self._answer(worker, deadline, "building its envs"), Built):
            pass
        return answer

    def _order(self, line: int) -> StartOrder:
        first, last = self.first_envs[line : line + 2]
        info = WorkerInfo(
            env_index=None,
            worker_index=line,
            num_envs=len(self._recipes),
            num_workers=self.num_workers,
            seed=int(np.random.SeedSequence().generate_state(1)[0]),
        )
        recipes = self._recipes[first:last]
        data = b"" if self._options.context == "fork" else pack(recipes, start_method=self._options.context)
        tells_building = line == 0 and len(self._recipes) > 1
        return StartOrder(data, info, first, sys.argv, self._options.threads_per_worker, tells_building)

    def _launch(self, line: int) -> WorkerHandle:
        envs = range(*self.first_envs[line : line + 2])
        recipes = self._recipes[envs.start : envs.stop]
        if self._launcher is None:
            return launch_worker(line, envs, self._fds, functools.partial(fork_worker_for, recipes), shares_main=True)
        return launch_worker(line, envs, self._fds, self._start_by_launcher, shares_main=False)

    def _start_by_launcher(self, fds: Mapping[str, int]) -> Started:
        assert self._launcher is not None
        try:
            return self._launcher.start(fds)
        except LauncherLost:
            self._launcher.release()
            self._launcher = LauncherClient.acquire(self._options.context, self._options.threads_per_worker)
            return self._launcher.start(fds)

    def _build_local(self) -> list[EnvFacts | None]:
        if not self._options.caller_steps:
            return []
        line, first = self.num_workers, self.first_envs[self.num_workers]
        info = WorkerInfo(None, line, len(self._recipes), self.num_workers, None)
        self._local = Share(self._recipes[first:], info, first)
        if failure := self._local.build():
            raise to_exception(failure)
        return self._local.facts()

    def attach(self, plan: Plan, shares: ShareOptions, caller: CallerOptions) -> None:
        self.slab = Slab(plan, self._fds["slab"])
        self.caller = make_caller(self.slab, caller)
        self._share_options = shares
        deadline = time.monotonic() + self._options.start_timeout_s
        self._attach(self._workers, deadline)
        if self._local is not None:
            local_share(self, self._local, self.num_workers, self._local_mail, shares)

    # ---- commands

    def mail_of(self, line: int) -> Mail:
        return self._mail if line < self.num_workers else self._local_mail

    def reset(self, env_ids: Array, seeds: Sequence[int | None], options: dict[str, Any] | None) -> None:
        orders = []
        for first, last in itertools.pairwise(self.first_envs):
            mine = [(env, seed) for env, seed in zip(env_ids.tolist(), seeds, strict=True) if first <= env < last]
            orders.append(([env for env, _ in mine], [seed for _, seed in mine], options))
        remote = orders[: self.num_workers]
        # Before anything is asked for: what cannot travel leaves the vector env as it was.
        messages = [self._packed(("reset", *order), "options", options) if order[0] else None for order in remote]
        self.caller.request_resets(env_ids)
        with self._whole():
            for line, message in enumerate(messages):
                if message is not None:
                    self._tell(line, message)
        if self._local is not None:
            self._local.reset(*orders[self.num_workers])

    def restart(self, env: int, seed: int | None, *, resets_now: bool, rebuilds: bool) -> None:
        with self._whole():
            message = self._packed(("restart", env, seed, resets_now, rebuilds), "seed", seed)
            self._tell(self.caller.line_of(env), message)

    def call_async(self, name: str | EnvCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._number += 1
        message = self._packed(("call", self._number, name, args, kwargs), "arguments", [name, args, kwargs])
        self._call([message] * self.num_workers, f"call({name!r})" if isinstance(name, str) else "call()")
        if self._local is not None:
            self._results[self.num_workers] = self._local.call(name, args, kwargs)

    def set_attr(self, name: str, values: Sequence[Any]) -> list[Failure | None]:
        self._number += 1
        parts = [list(values[first:last]) for first, last in itertools.pairwise(self.first_envs)]
        remote = parts[: self.num_workers]
        messages = [self._packed(("set_attr", self._number, name, part), "values", part) for part in remote]
        self._call(messages, f"set_attr({name!r})")
        if self._local is not None:
            self._results[self.num_workers] = self._local.set_attr(name, parts[self.num_workers])
        return self.call_wait(None)

    def _call(self, messages: Sequence[bytes], calling: str) -> None:
        self._results: dict[int, list[Any]] = {}
        self._calling, self._called_at = calling, time.monotonic()
        with self._whole():
            for line, message in enumerate(messages):
                try:
                    self._send(self._workers[line], message)
                except ChannelClosed:
                    self._lose_call(self._workers[line])

    def call_wait(self, timeout_s: float | None) -> list[Any]:
        deadline = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
        while owed := [worker for worker in self._workers if worker.index not in self._results]:
            left_s = max(0.0, deadline - time.monotonic())
            ready = readable([worker.channel for worker in owed], min(_SLICE_S, left_s))
            with self._whole():
                for worker in owed:
                    self._take_results(worker, worker.channel in ready)
            if left_s == 0.0 and not ready:
                raise WaitTimeout(
                    f"call_wait(timeout={timeout_s}): {name_workers(owed)} not answered; the call stays pending"
                )
            self._warn_once(time.monotonic() - self._called_at)
        self._calling = None
        return [result for line in sorted(self._results) for result in self._results[line]]

    def _take_results(self, worker: WorkerHandle, is_ready: bool) -> None:
        try:
            if is_ready:
                number, answer = worker.channel.recv()
                if number == self._number:  # else it answers a call that was interrupted
                    self._results[worker.index] = [_unpacked(worker, i, one) for i, one in enumerate(answer)]
            elif worker.process.has_ended():
                self._lose_call(worker)
            elif limit_s := self._options.step_timeout_s:
                elapsed_s = time.monotonic() - self._called_at
                if elapsed_s > limit_s * (worker.last - worker.first):
                    limit = f"step_timeout={limit_s} for each env"
                    self._lose_call(worker, self._timeout(worker, limit, elapsed_s))
        except ChannelClosed:
            self._lose_call(worker)

    def _lose_call(self, worker: WorkerHandle, error: WorkerError | None = None) -> None:
        """A worker died over a call: that is the call's result, where the worker can be replaced."""
        error = error or self._death(worker)
        self._replace_or_lose(worker, error)
        index = worker.index
        self._results[index] = [Failure(worker.first, index, None, type(error).__name__, str(error), "", error)]

    def process_ids(self) -> list[int | None]:
        own = [os.getpid()] if self._local is not None else []
        return [None if worker.process.has_ended() else worker.process.pid for worker in self._workers] + own

    # ---- watching

    def watch(self, waited_s: float) -> None:
        if self._closed:
            raise ClosedError("this vector env was closed by another thread while this one waited for it")
        with self._whole():
            for worker in list(self._workers):
                if worker.process.has_ended():
                    self._replace_or_lose(worker, self._death(worker))
            self._watch_step_time()
        self._warn_once(waited_s)

    def _warn_once(self, waited_s: float) -> None:
        if waited_s > _PATIENT_S and not self._warned:
            self._warned = True
            doing = "; ".join(f"worker {worker.index}: {self._doing(worker)}" for worker in self._workers)
            warnings.warn(
                f"waiting for {_PATIENT_S:.0f} s ({doing}). Set step_timeout= to end waits for envs that hang.",
                RuntimeWarning,
                stacklevel=4,
            )

    def _watch_step_time(self) -> None:
        limit_s = self._options.step_timeout_s
        if limit_s is None:
            return
        for worker in list(self._workers):
            state = self.slab.line(worker.index)
            # A worker that is stopped between steps says that it does nothing, yet owes an answer: then what counts is
            # how long nothing has changed.
            records = self.slab.records[worker.first : worker.last]
            seen = (state["since"], records["requested"].sum(), records["finished"].sum())
            if seen != worker.seen:
                worker.seen, worker.seen_at = seen, time.monotonic()
            elapsed_s = seconds_since(state["since"]) if state["doing"] else time.monotonic() - worker.seen_at
            if elapsed_s > limit_s and self._busy(worker):
                self._replace_or_lose(worker, self._timeout(worker, f"step_timeout={limit_s}", elapsed_s))

    def _busy(self, worker: WorkerHandle) -> list[int]:
        return [
            env
            for env in range(worker.first, worker.last)
            if self.caller.is_pending(env) and not self.caller.finished(env)
        ]

    def _death(self, worker: WorkerHandle) -> WorkerDied:
        worker.process.wait(1.0)
        exit_code = worker.process.exit_code
        envs = range(worker.first, worker.last)
        message = explain_death(worker.index, envs, exit_code, self._doing(worker), worker.process.tail())
        return WorkerDied(message, worker_index=worker.index, env_indices=tuple(envs), exit_code=exit_code)

    def _timeout(self, worker: WorkerHandle, limit: str, elapsed_s: float) -> WorkerTimeout:
        doing, envs = self._doing(worker), range(worker.first, worker.last)  # the signal for the stack may change it
        stack = python_stack(worker.process)
        return WorkerTimeout(
            f"worker {worker.index} ({name_envs(envs)}) did not answer for {elapsed_s:.1f} s ({limit}) and was killed; "
            f"it was {doing}.\nIts Python stack:\n{stack}",
            worker_index=worker.index,
            env_indices=tuple(envs),
        )

    def _doing(self, worker: WorkerHandle) -> str:
        if self._calling is not None and worker.index not in self._results:
            return f"answering {self._calling}"
        slab = getattr(self, "slab", None)
        return describe_doing(slab, worker.index, self._busy(worker) if slab is not None else [])

    def _replace_or_lose(self, worker: WorkerHandle, error: WorkerError) -> None:
        if self.on_worker_died is None:
            self._lose(error)
        line, reason = worker.index, str(error)
        while True:
            # Killed before its envs are written off: one that only hung could still write.
            self._retire(self._workers[line])
            # Told before the replacement starts: it may find that there have been too many.
            self.on_worker_died(line, range(worker.first, worker.last), reason)
            try:
                return self._start_replacement(line)
            except (WorkerError, EnvError) as again:
                reason = f"{again} (while worker {line} was replaced, after: {reason})"

    def _start_replacement(self, line: int) -> None:
        deadline = time.monotonic() + self._options.start_timeout_s
        replacement = self._workers[line] = self._launch(line)
        _tell_order(replacement, dataclasses.replace(self._orders[line], tells_building=False))
        answer = self._answer(replacement, deadline, "building its envs")
        if isinstance(answer, Failure):
            raise to_exception(answer)
        self._attach([replacement], deadline)

    def _retire(self, worker: WorkerHandle) -> None:
        worker.process.kill()
        worker.process.wait(5.0)
        if (fd := worker.channel.fileno()) >= 0:
            disown(fd)
            worker.channel.close()
        worker.process.release()

    def _lose(self, error: BaseException) -> NoReturn:
        """The vector env is beyond use: closes it and raises."""
        if hasattr(self, "caller"):
            self.caller.closed = True
        self.close(0.0)
        raise error

    # ---- messages

    def _packed(self, message: tuple[Any, ...], name: str, value: Any) -> bytes:
        """The message as bytes. name, value: the part of it that is the user's. Raises CannotTravel."""
        try:
            return dumps(message, shares_main=self._options.context == "fork")
        except Exception as error:
            raise CannotTravel(
                explain(find_culprits(value, name), start_method=self._options.context) or f"{name}: {error}"
            ) from error

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """Closes the vector env where what is done here ends halfway, by Ctrl-C say: workers would be out of step."""
        try:
            yield
        except BaseException as error:
            if self._closed:
                raise
            self._lose(error)

    def _tell(self, line: int, message: bytes) -> None:
        """Sends a message about pending envs: if their worker is dead, its replacement answers for them."""
        try:
            self._send(self._workers[line], message)
        except ChannelClosed:
            self._replace_or_lose(self._workers[line], self._death(self._workers[line]))

    def _send(self, worker: WorkerHandle, message: bytes) -> None:
        """Sends a message to a worker that may be asleep in the core. Raises ChannelClosed."""
        self.caller.announce_message(worker.index)
        worker.channel.send_bytes(message)

    def _attach(self, workers: Sequence[WorkerHandle], deadline: float) -> None:
        for worker in workers:
            with contextlib.suppress(ChannelClosed):  # the wait for its answer says so
                worker.channel.send(("attach", self.slab.plan, worker.index, self._share_options))
        for worker in workers:
            self._answer(worker, deadline, "mapping the slab")

    def _answer(self, worker: WorkerHandle, deadline: float, doing: str) -> Any:
        """What a worker says while it starts. Raises WorkerDied, WorkerTimeout."""
        try:
            return worker.channel.recv(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            limit_s = self._options.start_timeout_s
            raise self._timeout(worker, f"start_timeout={limit_s}, {doing}", limit_s) from None
        except ChannelClosed:
            raise self._death(worker) from None

    # ---- closing

    def close(self, timeout_s: float) -> list[Failure]:
        # A forked child of the caller has copies of everything, and must not touch the caller's workers.
        if self._closed or self._owner != os.getpid():
            return []
        self._closed = True
        failures: list[Failure] = []
        try:
            if self._local is not None:
                failures += self._local.close()
            asked = self._ask_to_close(timeout_s) if timeout_s > 0 else []
            deadline = time.monotonic() + timeout_s
            for worker in asked:
                try:
                    failures += self._last_results(worker, deadline)
                    worker.process.wait(max(0.0, deadline - time.monotonic()))
                except (TimeoutError, ChannelClosed):
                    pass  # dead, or too slow: killed below
        finally:  # also where Ctrl-C ends the wait
            for worker in self._workers:
                if not worker.process.has_ended():
                    worker.process.kill()
            for worker in self._workers:
                self._retire(worker)
            if self._launcher is not None:
                self._launcher.release()
            close_own(*self._fds.values())
        return failures

    def _last_results(self, worker: WorkerHandle, deadline: float) -> list[Failure]:
        """What ``env.close()`` raised. An answer that nobody waited for may come before it."""
        while True:
            number, answer = worker.channel.recv(max(0.0, deadline - time.monotonic()))
            if number == self._number:
                return [pickle.loads(one) for one in answer]

    def _ask_to_close(self, timeout_s: float) -> list[WorkerHandle]:
        """Tells the workers that can listen to close; those that hang in a step are not waited for."""
        grace_end = time.monotonic() + min(_BUSY_GRACE_S, timeout_s)
        if hasattr(self, "caller"):
            while any(self._busy(worker) for worker in self._workers) and time.monotonic() < grace_end:
                if not any(self._busy(worker) and not worker.process.has_ended() for worker in self._workers):
                    break
                time.sleep(0.002)
        asked = []
        self._number += 1
        closing = dumps(("close", self._number))
        for worker in self._workers:
            if worker.process.has_ended() or not hasattr(self, "caller") or self._busy(worker):
                continue
            try:
                self._send(worker, closing)
                asked.append(worker)
            except ChannelClosed:
                pass
        return asked


def _unpacked(worker: WorkerHandle, i: int, data: bytes) -> Any:
    """The result of the worker's i-th env, or the Failure to rebuild it here."""
    try:
        return pickle.loads(data)
    except Exception as error:
        what = f"the result could be pickled in the worker, but not rebuilt in the caller: {message_of(error)}"
        refusal = CannotTravel(f"{what}. Ask for something plainer, such as an attribute of it")
        return Failure(worker.first + i, worker.index, None, type_name(refusal), str(refusal), "", refusal)


def _tell_order(worker: WorkerHandle, order: StartOrder) -> None:
    with contextlib.suppress(ChannelClosed):  # it has died already; the wait for its answer says so
        worker.channel.send(order)
