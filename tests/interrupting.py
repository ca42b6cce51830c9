"""Interrupts at a chosen place, wherever CPython may run the handler of a signal."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch


class Interrupt(BaseException):
    """What a handler of a signal raises."""


def interrupted_at(place: int, act: Callable[[], Any]) -> bool:
    """Calls `act`, and raises at the place of that number where CPython may run a handler; whether there was one.

    These are: where a function begins, after a call, and after a jump back.
    """
    left = place
    before: dict[FrameType, int] = {}

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        frame.f_trace_opcodes = True
        last, code = before.get(frame), frame.f_code.co_code
        before[frame] = frame.f_lasti
        name = "" if last is None else dis.opname[code[last]]
        if event == "call" or (event == "opcode" and name.startswith(("CALL", "JUMP_BACKWARD"))):
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise Interrupt
        return trace

    grad = torch.is_grad_enabled()
    sys.settrace(trace)
    try:
        act()
    except Interrupt:  # others' code may have swallowed it
        pass
    finally:
        sys.settrace(None)
        torch.set_grad_enabled(grad)  # whose context the interrupt may have kept from ending
    return left < 0
