"""The life of a worker once its envs stand: it answers messages and, between them, steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from muster.errors import CannotTravel, UnknownMessage
from muster.transport.mail import Mail
from muster.transport.slab import Slab
from muster.workers.env_host import Share
from muster.workers.messages import (
    Answer,
    Attach,
    Attached,
    Call,
    Close,
    Closed,
    Reply,
    Reset,
    Restart,
    SetAttr,
)


@dataclass(frozen=True)
class MessageLoop:
    """Answers the messages to one host, in a process and in a thread alike.

    open_slab: the slab for what `Attach` holds.  rebuild: what the user handed over, for what a message holds of it,
    or a CannotTravel.
    """

    host: Share
    mail: Mail
    receive: Callable[[], object]
    reply: Callable[[Reply], None]
    open_slab: Callable[[Any], Slab]
    rebuild: Callable[[Any], Any]

    def run(self) -> None:
        """Returns once the envs are closed. Raises UnknownMessage."""
        # The core returns from stepping when a message has come.
        while self._answer(self.receive()):
            self.host.stepper.run()

    def _answer(self, message: object) -> bool:
        """False once the worker is to end."""
        host = self.host
        match message:
            case Attach():
                host.attach(self.open_slab(message.slab), host.info.worker_index, self.mail, message.options)
                self.reply(Attached())
            case Reset(env_ids, arguments):
                options = self.rebuild(arguments.options)
                if isinstance(options, CannotTravel):
                    host.refuse(env_ids, options)
                else:
                    host.reset(env_ids, dataclasses.replace(arguments, options=options))
            case Restart():
                options = self.rebuild(message.options)
                if isinstance(options, CannotTravel):
                    host.refuse([message.env], options)
                else:
                    host.restart(dataclasses.replace(message, options=options))
            case Call():
                self.reply(Answer(message.number, self._results(host.call, message.arguments)))
            case SetAttr():
                self.reply(Answer(message.number, self._results(host.set_attr, message.arguments)))
            case Close():
                self.reply(Closed(host.close()))
            case _:  # the two ends do not agree on what is asked for: going on could only do something else
                raise UnknownMessage(f"worker {host.info.worker_index} knows no such message: {message!r:.200}")
        return not isinstance(message, Close)

    def _results(self, act: Callable[..., list[Any]], handed_over: Any) -> list[Any]:
        """What `act` returns for each env; Failures where its arguments cannot be rebuilt."""
        arguments = self.rebuild(handed_over)
        if isinstance(arguments, CannotTravel):
            return [self.host.failure(i, arguments) for i in range(len(self.host.envs))]
        return act(*arguments)
