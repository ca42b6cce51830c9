"""The process backend: worker processes step the envs; the caller waits for them, or steps some envs itself."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from muster._core import Doing
from muster.backends.base import (
    CallerOptions,
    Questions,
    attach_local_host,
    close_here,
    in_loop,
    raise_local_interrupt,
)
from muster.backends.pooled import STUCK_S, PooledBackend
from muster.envs.package_finder import no_banner_meanwhile
from muster.hosts.env_facts import EnvFacts
from muster.hosts.env_host import EnvHost
from muster.hosts.failures import Failure, to_exception
from muster.hosts.questions import Again, EnvQuestion, packer
from muster.hosts.recipe_plans import about_of, plans_of
from muster.hosts.requests import Attach, EnvPlan, HostOptions, Restart
from muster.pickling import UserCall
from muster.pickling.interrupts import Uninterrupted
from muster.pool.deaths import NOUNS, Nouns
from muster.pool.launcher_client import standard_fds
from muster.pool.limits import AT_ONCE, CloseLimits, Limits
from muster.pool.pool import Pool
from muster.pool.resources import MAY_SHARE, MemoryPlan, Usage, usage_of
from muster.pool.set_up import Processes
from muster.pool.unique_indices import UniqueIndices
from muster.pool.verbs import Successor
from muster.pool.worker_process import close_own, open_eventfd, open_files
from muster.recipes.known_envs import advise_apart
from muster.recipes.recipe import Recipe
from muster.transport.channel import watched_s
from muster.transport.mail import LocalMail, Mail, SharedMail
from muster.transport.slab import Slab, SlabPlan
from muster.worker_info import WorkerInfo

__all__ = ["ProcessBackend", "ProcessOptions"]

# How long a Ctrl-C in an env that the caller steps is held back: if the workers answer in time, the whole step ends.
_INTERRUPT_GRACE_S = 0.5
# The code of envs that was left behind in a worker that goes on.
_MOST_LEFT = 16
# Gymnasium's envs that need no other library: imported by the launcher they take 2 ms, once, but 3 ms in each worker,
# which has to copy every page of memory that it writes to.
ENV_PRELOADS = ("muster.hosts.env_resident", "gymnasium.envs.classic_control", "gymnasium.envs.toy_text")


@dataclasses.dataclass(frozen=True)
class ProcessOptions:
    """Options of worker processes that step envs.

    one_env_per_process: an env that has raised is built again in a new process.  memory_check: one of MEMORY_CHECKS.
    """

    processes: Processes
    limits: Limits
    num_workers: int
    caller_steps: bool = False
    one_env_per_process: bool = False
    memory_check: str = "error"


def with_hints(nouns: Nouns, call: UserCall, num_envs: int, num_workers: int, here: str = "") -> Nouns:
    """The nouns of a pool whose workers build envs, with the words about their start.

    here: those about this process, where it builds envs, too.
    """
    kind = "" if nouns.worker == NOUNS.worker else f"{nouns.worker} "
    return dataclasses.replace(
        nouns,
        starting=(
            f"starting {num_envs} env{'s' * (num_envs > 1)} in {num_workers} {kind}process{'es' * (num_workers > 1)}"
            f"{here}"
        ),
        rebuilding=call.hanging(),
    )


class ProcessBackend(PooledBackend):
    """Steps envs in worker processes. Hosts 0 to W-1 are the workers; with `caller_steps` host W is the caller."""

    packs = True
    pool: Pool

    def __init__(self, recipes: Sequence[Recipe], options: ProcessOptions) -> None:
        num_hosts = options.num_workers + options.caller_steps
        around = options.limits.nouns, options.limits, options.processes.concurrent
        super().__init__(recipes, options.num_workers, num_hosts, *around)
        self._options = options
        self._context = options.processes.context
        self.pack = packer(self.user_call, forked=self._context == "fork")
        self._owner = os.getpid()
        self._has_pool = self._closed = False
        self._closer: int | None = None
        self._local: EnvHost | None = None
        self._mail: SharedMail | None = None
        self._local_mail, self._local_indices = LocalMail(), UniqueIndices()
        self._files: dict[str, int] = {}
        self._answers_here: list[Any] = []  # of the envs that the caller steps
        self._seen: dict[int, tuple[Any, float]] = {}  # each worker's state after its last change, and when that was

    # ---- starting

    def _start(self) -> list[EnvFacts]:
        options, processes = self._options, self._options.processes
        plans = plans_of(
            self.recipes,
            self.first_envs[: self.num_workers + 1],
            processes,
            lambda recipes, envs: self._content(recipes, envs.start),
        )
        for host, plan in enumerate(plans):
            plan.parts = self._parts(host)
        with Uninterrupted(), standard_fds():
            open_files(self._files, "slab", "mail")
            self.notify_fd = open_eventfd(self._files, "notify")
        waiting = ["muster.hosts.waiting"] if self._at_once else []  # with asyncio: once, and not in each worker
        processes = dataclasses.replace(processes, preloads=(*ENV_PRELOADS, *waiting, *processes.preloads))
        self.pool = Pool(
            *("muster.hosts.env_resident:EnvResident", plans, processes, self, self._limits),
            files=self._files,
            nouns=self._nouns(),
            about=about_of(self.recipes, self.first_envs),
        )
        self._has_pool, self._round = True, self.pool.round()
        local: list[EnvFacts] = []
        found = self.pool.start(self._memory_plan(), lambda: local.extend(self._build_local()))
        self.log_flag = self.pool.log_flag
        facts = [*(one for of_host in found for one in of_host), *local]
        declared = any(one.metadata.get("one_per_process") for one in facts)
        self._one_per_process = declared or options.one_env_per_process
        return facts

    def _nouns(self) -> Nouns:
        """The nouns of the pool, with the hints of its errors."""
        here = " and in this one" if self._options.caller_steps else ""
        dying = [advise_apart(self.recipes[envs.start : envs.stop]) for envs in map(self.envs_of, self._hosts)]
        nouns = with_hints(self.nouns, self.user_call, len(self.recipes), self.num_workers, here)
        return dataclasses.replace(nouns, dying=tuple(dying), limited=self._limits.step_timeout is not None)

    def _memory_plan(self) -> MemoryPlan | None:
        count, options = len(self.recipes), self._options
        if count == 1 or not self.num_workers or options.memory_check == "off":
            return None
        one_each = options.num_workers + options.caller_steps == count and not options.one_env_per_process
        return MemoryPlan(count, options.num_workers, options.memory_check, MAY_SHARE if one_each else "")

    def _build_local(self) -> list[EnvFacts]:
        if not self._options.caller_steps:
            return []
        host, first = self.num_workers, self.first_envs[self.num_workers]
        indices = self._local_indices.take(len(self.recipes) - first)
        info = WorkerInfo(None, host, len(self.recipes), self.num_workers, None, unique_indices=indices)
        self._local = EnvHost(self.recipes[first:], info, first, awaits=in_loop)
        with no_banner_meanwhile():  # none from the workers, so none from here
            failure = self._local.initialise(self._options.processes.init.function) or self._local.build()
        if failure:
            raise to_exception(failure)
        return self._local.facts()

    def attach(self, plan: SlabPlan, options: HostOptions, caller: CallerOptions) -> None:
        super().attach(plan, options, caller)
        if self._local is not None:
            attach_local_host(self, self._local, self.num_workers, self._local_mail, options)
            self._own_usage_at_start = usage_of(os.getpid())

    def _made_slab(self, plan: SlabPlan) -> Slab:
        self._mail = SharedMail(self._files["mail"], plan.num_boxes, shares_main=self._context == "fork")
        return Slab(plan, self._files["slab"], notify_fd=self.notify_fd)

    def _attach_message(self, options: HostOptions) -> Attach:
        return Attach(self.slab.plan, options)

    # ---- commands

    def mail_of(self, host: int) -> Mail:
        if host == self.num_workers:
            return self._local_mail
        assert self._mail is not None
        return self._mail

    def _ask_by_row(self, question: EnvQuestion, parts: Mapping[int, EnvQuestion]) -> None:
        with self._answering_here(self._local, self.ids_of(question)):
            super()._ask_by_row(question, parts)
            if self._local is not None:
                self._local.answer(question)

    def _ask(self, question: EnvQuestion, parts: Mapping[int, EnvQuestion]) -> None:
        self._answers_here = []
        super()._ask(question, parts)
        self._answers_here = [] if self._local is None else self._local.answer(question)

    def answers(self, timeout_s: float | None) -> list[Any]:
        return super().answers(timeout_s) + self._answers_here

    def drop_answers(self) -> None:
        super().drop_answers()
        self._answers_here = []

    def restart(self, restart: Restart) -> bool:
        host = self.caller.host_of(restart.env)
        replaces = restart.rebuilds and (self._one_per_process or restart.elsewhere)
        with self.whole():
            if replaces:
                reason = f"{self.nouns.env(host, restart.env)} raised"
                successor = self._successor(host, {self.numbers[restart.env]: restart.again})
                self.pool.replace(host, reason, successor, self.close_limits)
            options = self.pack(restart.options, {"options": restart.options})
            rebuilds = restart.rebuilds and not replaces
            self._post(host, dataclasses.replace(restart, options=options, rebuilds=rebuilds))
        return replaces

    def recycle(self, host: int, reason: str, questions: Questions) -> None:
        with self.whole():
            self.pool.replace(host, reason, self._successor(host, questions), self.close_limits)
        self.recycled += 1

    def ready_at(self, host: int) -> float | None:
        return self.pool.ready_at(host)

    def has_own_worker(self, env: int) -> bool:
        host = self.caller.host_of(env)
        return host < self.num_workers and len(self.envs_of(host)) == 1

    def processes(self) -> list[tuple[int | None, Usage]]:
        here = [(os.getpid(), self._own_usage_at_start)] if self._local is not None else []
        return [*super().processes(), *here]

    # ---- watching and replacing

    def watch(self, waited_s: float) -> None:
        super().watch(waited_s)
        if (limit_s := self._limits.step_timeout) is not None:
            with self._fate():
                self._watch_step_time(limit_s)
        if self._local is not None and waited_s > _INTERRUPT_GRACE_S:
            raise_local_interrupt(self, self.num_workers)

    def _watch_step_time(self, limit_s: float) -> None:
        for host in self._hosts:
            if (ready_at := self.pool.ready_at(host)) is None:
                continue
            state = self.slab.host(host)
            if host in self._at_once:
                self._watch_loop(host, limit_s, ready_at, state)
                continue
            # The time counts for which state and records have not changed. A worker that has been stopped (SIGSTOP)
            # between two steps shows NOTHING as its state, although it owes an answer.
            envs = self.envs_of(host)
            records = self.slab.records[envs.start : envs.stop]
            seen = (state["since"], records["requested"].sum(), records["finished"].sum())
            if self._seen.get(host, (None, 0.0))[0] != seen:
                self._seen[host] = seen, watched_s()
            elapsed_s = watched_s() - max(self._seen[host][1], ready_at)
            if elapsed_s > limit_s and self._busy(host):
                self.pool.lose(host, f"{self.nouns.step_timeout}={limit_s}", elapsed_s)

    def _watch_loop(self, host: int, limit_s: float, ready_at: float, state: Mapping[str, Any]) -> None:
        """Looks at a worker that ends late envs itself, while its loop goes on."""
        words = f"{self.nouns.step_timeout}={limit_s}"
        if state["doing"] == Doing.BUILDING:
            limit_s = max(limit_s, self._limits.start_timeout)
        if state["left_behind"] >= _MOST_LEFT:
            self.pool.lose(host, f"{words}, and code of {state['left_behind']} envs could not be ended", limit_s)
        elif self._seen.get(host, (None, 0.0))[0] != state["beats"]:
            self._seen[host] = state["beats"], watched_s()
        elif (elapsed_s := watched_s() - max(self._seen[host][1], ready_at)) > limit_s + STUCK_S:
            self.pool.lose(host, f"{words} and {STUCK_S:g} s more", elapsed_s)

    def on_lost(self, place: int, reason: str) -> Successor | None:
        if self._worker_lost is None:
            return None
        # Called before the successor starts: it may raise because there have been too many restarts.
        return self._successor(place, self._worker_lost(place, self.envs_of(place), reason))

    def _successor(self, host: int, questions: Questions) -> Successor:
        plan: EnvPlan = self.pool.plans[host].content
        content = dataclasses.replace(plan, attach=self._attach)
        return Successor(content, [Again(questions)])

    # ---- closing

    def close(self, limits: CloseLimits) -> list[Failure]:
        # A forked child of the caller has copies of all this, and must not touch the caller's workers.
        here = threading.get_ident()
        if self._closed or self._owner != os.getpid() or self._closer not in (None, here):
            return []
        self._closer = here
        failures: list[Failure] = []

        def close_local() -> bool:
            if self._local is not None:
                failures.extend(close_here(self._local, limits))
            return not any(isinstance(one.exception, KeyboardInterrupt) for one in failures)

        try:
            if self._has_pool:
                at_once = limits if self._attached else AT_ONCE
                for _, said in self.pool.close(at_once, close_local):
                    failures += said
            if self._local is not None and self._local.envs:
                close_local()
        finally:  # also when Ctrl-C ends the wait
            if self._mail is not None:
                self._mail.close()
            self._local_indices.release()
            with Uninterrupted():
                files, self._files = self._files, {}
                close_own(*files.values())
        self._closed = True
        return sorted(failures, key=lambda failure: failure.env_index)
