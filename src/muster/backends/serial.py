"""The serial backend: all envs in the calling process, on the same stepping loop as everywhere."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from muster.backends.base import Backend, CallerOptions, local_share, make_caller
from muster.recipes.recipe import Recipe, WorkerInfo
from muster.spaces.tree import Array
from muster.transport.mail import LocalMail, Mail
from muster.transport.slab import Plan, Slab
from muster.workers.deaths import NOUNS, Nouns
from muster.workers.env_facts import EnvFacts
from muster.workers.env_host import Share
from muster.workers.failures import Failure, to_exception
from muster.workers.messages import ResetArguments, Restart
from muster.workers.options import EnvCall, ShareOptions


class SerialBackend(Backend):
    """Steps every env itself. Arguments reach the envs as they are, and the caller's generators are left alone."""

    def __init__(self, recipes: Sequence[Recipe], info: WorkerInfo | None = None, nouns: Nouns = NOUNS) -> None:
        self.nouns = nouns
        self.first_envs = (0, len(recipes))
        info = info or WorkerInfo(env_index=None, worker_index=0, num_envs=len(recipes), num_workers=1, seed=None)
        self._share = Share(recipes, info, 0, worker=nouns.worker)
        self._mail = LocalMail()

    @property
    def num_workers(self) -> int:
        return 0

    @property
    def envs(self) -> list[Any]:
        """The envs themselves."""
        return self._share.envs

    def start(self) -> list[EnvFacts]:
        if failure := self._share.build():
            raise to_exception(failure)
        return self._share.facts()

    def attach(self, plan: Plan, shares: ShareOptions, caller: CallerOptions) -> None:
        self.slab = Slab(plan)
        self.caller = make_caller(self.slab, caller)
        local_share(self, self._share, 0, self._mail, shares)

    def mail_of(self, line: int) -> Mail:
        return self._mail

    def reset(self, env_ids: Array, arguments: ResetArguments) -> None:
        with self.whole():
            self.caller.request_resets(env_ids)
            self._share.reset(env_ids.tolist(), arguments)

    def call_async(self, name: str | EnvCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._results = self._share.call(name, args, kwargs)

    def call_wait(self, timeout_s: float | None) -> list[Any]:
        return self._results

    def set_attr(self, name: str, values: Sequence[Any]) -> list[Failure | None]:
        return self._share.set_attr(name, values)

    def restart(self, restart: Restart) -> bool:
        with self.whole():
            self._share.restart(restart)
        return False

    def watch(self, waited_s: float) -> None:
        """There is no worker to lose."""

    def process_ids(self) -> list[int | None]:
        return [os.getpid()]

    def close(self, timeout_s: float) -> list[Failure]:
        return self._share.close()
