"""The resident that holds envs: it answers a vector env's requests and, between them, steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from muster.errors import CannotTravel
from muster.hosts.env_facts import EnvFacts
from muster.hosts.env_host import EnvHost
from muster.hosts.failures import Failure, HostFailed, not_sent_there
from muster.hosts.recipe_plans import RecipeResident
from muster.hosts.requests import Attach, Call, EnvPlan, Reset, Restart, SetAgain, SetAttr
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
        around: dict[str, Any] = {"dumps": here.dumps, "together": plan.together, "activity": here.activity}
        self.host = EnvHost(plan.recipes, here.info, plan.first_env, **around)
        if failure := self.host.build(here.report if here.is_judged else None):
            raise HostFailed(failure)
        if plan.attach is not None:
            self._attach(plan.attach)

    def facts(self) -> list[EnvFacts]:
        return self.host.facts() if self._is_new else []

    def answer(self, question: Any) -> Any:
        host = self.host
        match question:
            case Attach():
                return self._attach(question)
            case Call(CannotTravel() as refusal) | SetAttr(CannotTravel() as refusal):
                return self._packed([host.failure(i, refusal) for i in range(len(host.envs))])
            case Call(arguments):
                return self._packed(host.call(*arguments))
            case SetAttr(arguments):
                return self._packed(host.set_attr(*arguments))
        return super().answer(question)

    def take(self, message: Any) -> None:
        match message:
            case Reset(env_ids, arguments) if isinstance(arguments.options, CannotTravel):
                self.host.refuse(env_ids, arguments.options)
            case Reset(env_ids, arguments):
                self.host.reset(env_ids, arguments)
            case Restart(env, _, CannotTravel() as refusal):
                self.host.refuse([env], refusal)
            case Restart():
                self.host.restart(message)
            case SetAgain(attributes):
                self.host.set_again(attributes)
            case _:
                super().take(message)

    def between(self) -> None:
        if self._steps:
            self.host.stepper.run()  # returns when a message has come

    def close(self, closes: Callable[[int], None]) -> list[Failure]:
        return self.host.close(closes)

    def _attach(self, attach: Attach) -> None:
        here, slab, mail = self._here, attach.slab, attach.mail
        if isinstance(slab, SlabPlan):
            mail = SharedMail(here.files["mail"], slab.num_boxes, shares_main=here.forked)
            slab = Slab(slab, here.files["slab"])
        assert mail is not None
        self.host.attach(slab, here.info.worker_index, mail, attach.options)
        self._steps = True

    def _packed(self, results: list[Any]) -> list[Any]:
        """The results, pickled one by one where they leave this process: one that cannot travel costs no other."""
        return results if self._here.dumps is None else [self._pickle(i, one) for i, one in enumerate(results)]

    def _pickle(self, i: int, result: Any) -> bytes:
        assert self._here.dumps is not None
        try:
            return self._here.dumps(result)
        except Exception as error:
            return self._here.dumps(self.host.failure(i, not_sent_there(result, error, self.host.recipes[0].call)))
