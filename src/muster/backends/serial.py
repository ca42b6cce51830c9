"""The serial backend: all envs in the calling process, stepped by the same loop as in workers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from muster.backends.base import Backend, CallerOptions, attach_local_host, close_here, in_loop, make_caller
from muster.errors import ConfigError
from muster.hosts.env_facts import EnvFacts
from muster.hosts.env_host import EnvHost
from muster.hosts.failures import Failure, to_exception
from muster.hosts.questions import EnvQuestion
from muster.hosts.requests import HostOptions, Restart
from muster.pickling.main_module import Init
from muster.pool.deaths import NOUNS, Nouns
from muster.pool.limits import AT_ONCE, CloseLimits
from muster.pool.resources import Usage, usage_of
from muster.pool.unique_indices import UniqueIndices
from muster.pool.watch import Activity
from muster.recipes.recipe import Recipe
from muster.transport.mail import LocalMail, Mail
from muster.transport.slab import Slab, SlabPlan
from muster.worker_info import WorkerInfo


class SerialBackend(Backend):
    """Steps every env in the calling thread. Arguments are not copied; global random generators are not seeded.

    init: called once, before the first env is built.  activity: a worker's, see `Activity`.
    concurrent: whether only coroutine envs are asked for.
    """

    num_workers = 0

    def __init__(
        self,
        recipes: Sequence[Recipe],
        info: WorkerInfo | None = None,
        nouns: Nouns = NOUNS,
        *,
        init: Init | None = None,
        activity: Activity | None = None,
        concurrent: bool = False,
    ) -> None:
        self._concurrent = concurrent
        self._activity = activity
        self._init = init
        self.nouns = nouns
        self.recipes, self.user_call = recipes, recipes[0].call
        self.first_envs = (0, len(recipes))
        self._is_callers = info is None  # else a worker's: its caller says what it waits for
        info = info or WorkerInfo(env_index=None, worker_index=0, num_envs=len(recipes), num_workers=1, seed=None)
        self._env_host = EnvHost(recipes, info, 0, worker_noun=nouns.worker, activity=activity, awaits=in_loop)
        self.envs, self.numbers = self._env_host.envs, self._env_host.numbers
        self._mail = LocalMail()
        self._unique_indices = UniqueIndices()

    def start(self) -> list[EnvFacts]:
        if self._is_callers:
            indices = self._unique_indices.take(len(self._env_host.recipes))
            self._env_host.info = replace(self._env_host.info, unique_indices=indices)
        if failure := self._env_host.initialise(self._init) or self._env_host.build():
            raise to_exception(failure)
        facts = self._env_host.facts()
        if self._concurrent and not all(one.is_awaited for one in facts):
            self.close(AT_ONCE)
            expected = 'left out with backend="serial", which steps envs of ordinary methods one after the other'
            raise ConfigError("concurrent", expected, True)
        return facts

    def attach(self, plan: SlabPlan, options: HostOptions, caller: CallerOptions) -> None:
        self.slab = Slab(plan, host=None if self._activity is None else self._activity.memory)
        self.caller = make_caller(self.slab, caller)
        attach_local_host(self, self._env_host, 0, self._mail, options)
        self._usage_at_start = usage_of(os.getpid())

    def mail_of(self, host: int) -> Mail:
        return self._mail

    def ask(self, question: EnvQuestion) -> None:
        if not question.by_row:
            self._answers = []
            self._answers = self._env_host.answer(question)
            return
        env_ids = self.ids_of(question)
        with self._answering_here(self._env_host, env_ids):
            self.caller.request_resets(env_ids)
            self._env_host.answer(question)

    def answers(self, timeout_s: float | None) -> list[Any]:
        return self._answers

    def drop_answers(self) -> None:
        self._answers = []

    def restart(self, restart: Restart) -> bool:
        with self.whole():
            self._env_host.restart(restart)
        return False

    def watch(self, waited_s: float) -> None:
        """Does nothing: there are no workers that could die."""

    def processes(self) -> list[tuple[int | None, Usage]]:
        return [(os.getpid(), self._usage_at_start)]

    def close(self, limits: CloseLimits) -> list[Failure]:
        try:
            return close_here(self._env_host, limits if self._is_callers else AT_ONCE)
        finally:
            self._unique_indices.release()
