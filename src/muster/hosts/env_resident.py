"""The resident that holds envs: it answers a vector env's requests and, between them, steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from muster.errors import CannotTravel
from muster.hosts.env_facts import EnvFacts, is_awaited_class
from muster.hosts.env_host import EnvHost
from muster.hosts.failures import Failure, HostFailed
from muster.hosts.questions import Again, EnvQuestion, InTurn, sent
from muster.hosts.recipe_plans import RecipeResident
from muster.hosts.requests import Attach, EnvPlan, Restart
from muster.pool.worker import Here
from muster.transport.mail import SharedMail
from muster.transport.slab import Slab, SlabPlan


class EnvResident(RecipeResident):
    """The envs of one worker, which is a process or a thread."""

    def __init__(self, plan: EnvPlan, here: Here) -> None:
        assert not isinstance(plan.recipes, bytes)
        self._here = here
        self._steps = False
        self._is_new = plan.attach is None

        def waits() -> InTurn:
            from muster.hosts.waiting import Waiting  # with asyncio, which takes a while to import

            way = Waiting(plan.step_timeout, plan.start_timeout, has_threads=plan.concurrent)
            way.closes_together = at_once
            return way

        at_once = plan.concurrent or any(is_awaited_class(recipe.factory) for recipe in plan.recipes)
        around: dict[str, Any] = {"dumps": here.dumps, "together": plan.together, "activity": here.activity}
        around |= {"way": waits() if at_once else None, "awaits": waits}
        self.host = EnvHost(plan.recipes, here.info, plan.first_env, **around)
        if failure := self.host.build(here.report if here.is_judged else None):
            raise HostFailed(failure)
        if plan.attach is not None:
            self._attach(plan.attach)

    def facts(self) -> list[EnvFacts]:
        return self.host.facts() if self._is_new else []

    def answer(self, question: Any) -> Any:
        match question:
            case Attach():
                return self._attach(question)
            case EnvQuestion():
                return self._sent(self.host.answer(question))
        return super().answer(question)

    def take(self, message: Any) -> None:
        match message:
            case EnvQuestion():
                self.host.answer(message)
            case Restart(env, _, CannotTravel() as refusal):
                self.host.refuse([env], refusal)
            case Restart():
                self.host.restart(message)
            case Again(questions):
                self.host.again(questions)
            case _:
                super().take(message)

    def between(self) -> None:
        if self._steps:
            self.host.way.until_message(self.host)

    def close(self, closes: Callable[[int], None]) -> list[Failure]:
        return self.host.close(closes)

    def _attach(self, attach: Attach) -> None:
        here, slab, mail = self._here, attach.slab, attach.mail
        if isinstance(slab, SlabPlan):
            mail = SharedMail(here.files["mail"], slab.num_boxes, shares_main=here.forked)
            slab = Slab(slab, here.files["slab"], notify_fd=here.files["notify"])
        assert mail is not None
        self.host.attach(slab, here.info.worker_index, mail, attach.options)
        self._steps = True

    def _sent(self, answers: list[Any]) -> list[Any]:
        dumps, host = self._here.dumps, self.host
        return answers if dumps is None else sent(answers, dumps, host.recipes[0].call, host.failure)
