"""The loop of a worker whose envs are built: it answers messages and, between them, steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from muster.errors import CannotTravel, UnknownMessage
from muster.hosts.env_host import EnvHost
from muster.pool.messages import (
    Answer,
    Attach,
    Attached,
    Call,
    Close,
    Closed,
    ClosingEnv,
    Message,
    Reset,
    Restart,
    SetAgain,
    SetAttr,
)
from muster.transport.channel import ChannelClosed
from muster.transport.mail import Mail
from muster.transport.slab import Slab


@dataclass(frozen=True)
class MessageLoop:
    """Answers the messages to one host, in a process and in a thread alike.

    reply: sends a reply to the caller.  open_slab: makes the slab from the field `slab` of `Attach`.
    """

    env_host: EnvHost
    mail: Mail
    reply: Callable[[Message], None]
    open_slab: Callable[[Any], Slab]

    def run(self, receive: Callable[[], object]) -> None:
        """Answers messages until the envs are closed. receive: waits for the next one. Raises UnknownMessage."""
        # The core returns from stepping when a message has come.
        while self._answer(receive()):
            self.env_host.stepper.run()

    def _answer(self, message: object) -> bool:
        """Answers one message; False if the worker has to end."""
        env_host = self.env_host
        match message:
            case Attach(slab, options):
                env_host.attach(self.open_slab(slab), env_host.info.worker_index, self.mail, options)
                self.reply(Attached())
            case Reset(env_ids, arguments) if isinstance(arguments.options, CannotTravel):
                env_host.refuse(env_ids, arguments.options)
            case Reset(env_ids, arguments):
                env_host.reset(env_ids, arguments)
            case Restart(env, _, CannotTravel() as refusal):
                env_host.refuse([env], refusal)
            case Restart():
                env_host.restart(message)
            case SetAgain(attributes):
                env_host.set_again(attributes)
            case Call(number, CannotTravel() as refusal) | SetAttr(number, CannotTravel() as refusal):
                self.reply(Answer(number, [env_host.failure(i, refusal) for i in range(len(env_host.envs))]))
            case Call(number, arguments):
                self.reply(Answer(number, env_host.call(*arguments)))
            case SetAttr(number, arguments):
                self.reply(Answer(number, env_host.set_attr(*arguments)))
            case Close():
                self.reply(Closed(env_host.close(self._report_closing)))
            case _:  # the two ends do not agree on the protocol: whatever came next would be wrong
                raise UnknownMessage(f"worker {env_host.info.worker_index} knows no such message: {message!r:.200}")
        return not isinstance(message, Close)

    def _report_closing(self, i: int) -> None:
        with contextlib.suppress(ChannelClosed):  # an env has closed this process's fds: the others are still closed
            self.reply(ClosingEnv(i))
