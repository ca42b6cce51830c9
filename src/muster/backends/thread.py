"""The thread backend: threads of the calling process step envs that release the GIL or share objects."""

from __future__ import annotations

from collections.abc import Sequence

from muster.backends.pooled import PooledBackend
from muster.hosts.env_facts import EnvFacts
from muster.hosts.env_host import EnvHost
from muster.hosts.env_resident import EnvResident
from muster.hosts.failures import Failure, to_exception
from muster.hosts.requests import Attach, HostOptions
from muster.pickling.interrupts import Uninterrupted
from muster.pickling.main_module import Init
from muster.pool.deaths import NOUNS
from muster.pool.limits import CloseLimits, Limits
from muster.pool.place import Plan
from muster.pool.thread_pool import ThreadPool
from muster.pool.worker_process import close_own, open_eventfd
from muster.recipes.recipe import Recipe
from muster.transport.mail import LocalMail, Mail
from muster.transport.slab import Slab, SlabPlan
from muster.worker_info import WorkerInfo


class ThreadBackend(PooledBackend):
    """Steps envs in threads. Hosts 0 to W-1 are the workers. Arguments are not copied.

    init: called once, in the calling thread, before the first env is built.
    concurrent: whether each thread steps all its envs at the same time.
    """

    pool: ThreadPool

    def __init__(
        self,
        recipes: Sequence[Recipe],
        num_workers: int,
        limits: Limits,
        init: Init | None = None,
        *,
        concurrent: bool = False,
    ) -> None:
        super().__init__(recipes, num_workers, num_workers, NOUNS, limits, concurrent)
        self._init = init
        self._mail, self._files = LocalMail(), dict[str, int]()
        self.pool = ThreadPool(EnvResident, [self._plan(i) for i in self._hosts], self, limits)
        self._round = self.pool.round()

    def _plan(self, host: int) -> Plan:
        envs = self.envs_of(host)
        info = WorkerInfo(None, host, len(self.recipes), self.num_workers, seed=None)
        content = self._content(self.recipes[envs.start : envs.stop], envs.start, self.recipes)
        return Plan(content, info, envs, self._parts(host))

    def _start(self) -> list[EnvFacts]:
        info = WorkerInfo(None, 0, len(self.recipes), self.num_workers, seed=None)
        if failure := EnvHost(self.recipes, info, 0).initialise(self._init):
            raise to_exception(failure)
        return [one for of_host in self.pool.start() for one in of_host]

    def _made_slab(self, plan: SlabPlan) -> Slab:
        with Uninterrupted():
            self.notify_fd = open_eventfd(self._files, "notify")
        return Slab(plan, notify_fd=self.notify_fd)

    def _attach_message(self, options: HostOptions) -> Attach:
        return Attach(self.slab, options, self._mail)

    def mail_of(self, host: int) -> Mail:
        return self._mail

    def close(self, limits: CloseLimits) -> list[Failure]:
        self._end_steps()
        failures = [one for _, said in self.pool.close(limits) for one in said]
        with Uninterrupted():
            files, self._files = self._files, {}
            close_own(*files.values())
        return sorted(failures, key=lambda failure: failure.env_index)
