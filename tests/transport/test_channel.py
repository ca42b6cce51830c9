"""Channels, and what they know of a message that something has cut short."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

from muster.transport.channel import Channel, frame


class Interrupted(socket.socket):
    """Its first calls of `send` end in a Ctrl-C before they begin."""

    left = 2

    def send(self, *arguments: Any) -> int:
        if self.left:
            self.left -= 1
            raise KeyboardInterrupt
        return super().send(*arguments)


def test_a_message_whose_first_byte_was_not_sent_may_be_sent_again() -> None:
    end, other = socket.socketpair()
    with other:
        channel = Channel(Interrupted(fileno=os.dup(end.fileno())), lambda _: None)
        end.close()
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                channel.send_frames(frame(b"a"))
            assert not channel.is_halfway
        channel.send_frames(frame(b"a"))
        channel.close()
        assert other.recv(100) == frame(b"a")
