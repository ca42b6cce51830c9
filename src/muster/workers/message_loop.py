"""The life of a worker once its envs stand: it answers messages and, between them, steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from muster.errors import CannotTravel, UnknownMessage
from muster.transport.mail import Mail
from muster.transport.slab import Slab
from muster.workers.env_host import Share
from muster.workers.messages import Answer, Attach, Attached, Call, Close, Closed, Message, Reset, Restart, SetAttr


@dataclass(frozen=True)
class MessageLoop:
    """Answers the messages to one host, in a process and in a thread alike.

    reply: sends a reply to the caller.  open_slab: the slab, for what `Attach` holds of it.
    """

    host: Share
    mail: Mail
    reply: Callable[[Message], None]
    open_slab: Callable[[Any], Slab]

    def run(self, receive: Callable[[], object]) -> None:
        """Returns once the envs are closed. Raises UnknownMessage."""
        # The core returns from stepping when a message has come.
        while self._answer(receive()):
            self.host.stepper.run()

    def _answer(self, message: object) -> bool:
        """False once the worker is to end."""
        host = self.host
        match message:
            case Attach(slab, options):
                host.attach(self.open_slab(slab), host.info.worker_index, self.mail, options)
                self.reply(Attached())
            case Reset(env_ids, arguments) if isinstance(arguments.options, CannotTravel):
                host.refuse(env_ids, arguments.options)
            case Reset(env_ids, arguments):
                host.reset(env_ids, arguments)
            case Restart(env, _, CannotTravel() as refusal):
                host.refuse([env], refusal)
            case Restart():
                host.restart(message)
            case Call(number, CannotTravel() as refusal) | SetAttr(number, CannotTravel() as refusal):
                self.reply(Answer(number, [host.failure(i, refusal) for i in range(len(host.envs))]))
            case Call(number, arguments):
                self.reply(Answer(number, host.call(*arguments)))
            case SetAttr(number, arguments):
                self.reply(Answer(number, host.set_attr(*arguments)))
            case Close():
                self.reply(Closed(host.close()))
            case _:  # the two ends do not agree on what is asked for: to go on could only do something else
                raise UnknownMessage(f"worker {host.info.worker_index} knows no such message: {message!r:.200}")
        return not isinstance(message, Close)
