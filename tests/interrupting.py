"""Signals at chosen moments: all at which CPython may run a signal handler, counted."""

from __future__ import annotations

import dis
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch

from muster.vector.vector_env import SteppedEnvs

# After these CPython looks for signals, where what was called is no function of Python's own; that looks as it begins.
_CALLS = frozenset(dis.opmap[name] for name in ("CALL", "CALL_FUNCTION_EX", "CALL_KW") if name in dis.opmap)
_LOOKS = _CALLS | {dis.opmap["JUMP_BACKWARD"]}
_PYTHON_CALLED = -1
# Methods that a function in C calls, after which CPython looks.
_VERBS = {one.__code__ for kind in SteppedEnvs.__mro__ for one in vars(kind).values() if type(one).__name__ == "Verb"}
# These look for signals while they wait, and end without having done anything.
_WAITS = frozenset({"poll", "recvmsg", "send", "sendmsg", "sendall", "read", "write", "acquire", "get", "sleep"})


class Interruption:
    """Runs a handler of SIGINT that raises, at one moment of a call in this thread.

    at: which moment, from 0 on; those in the function itself do not count: they are the program's.  kind: what it
    raises.

    num_moments: how many there were.  where: the place of the chosen one.  ended: whether the call ended by it.
    """

    def __init__(self, at: int, kind: type[BaseException] = KeyboardInterrupt) -> None:
        self._at, self._kind, self._owner = at, kind, os.getpid()
        self.num_moments, self.comes, self.ended, self.where = 0, False, False, ""
        self._before: dict[Any, int] = {}  # the last opcode of each frame within the call

    def run(self, call: Callable[..., object], *arguments: Any) -> bool:
        """Calls a program's function; returns whether the moment came: then the handler may have ended that."""
        outer = sys.gettrace(), sys.getprofile()
        has_gradients = torch.is_grad_enabled()
        handler = signal.signal(signal.SIGINT, self._raise)
        self._outside = {self.run.__code__, getattr(call, "__code__", None)}
        sys.setprofile(self._profile)
        sys.settrace(self._trace)
        try:
            call(*arguments)
        except self._kind:
            if not self.comes:
                raise
            self.ended = True
        finally:
            sys.settrace(outer[0])
            sys.setprofile(outer[1])
            self._before.clear()
            signal.signal(signal.SIGINT, handler)
        assert torch.is_grad_enabled() == has_gradients, f"gradients are off after an interrupt at {self.where}"
        return self.comes

    def _raise(self, *_: object) -> None:
        raise self._kind

    def _moment(self, frame: Any) -> None:
        self.num_moments += 1
        if self.num_moments == self._at + 1 and os.getpid() == self._owner:
            self.comes = True
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
            handler = signal.getsignal(signal.SIGINT)
            assert callable(handler)
            sys.settrace(None)
            sys.setprofile(None)
            handler(signal.SIGINT, frame)

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        if frame.f_code in self._outside:
            return None
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            if frame.f_back in self._before and frame.f_code not in _VERBS:
                self._before[frame.f_back] = _PYTHON_CALLED
            self._before[frame] = _PYTHON_CALLED
            self._moment(frame)
        elif event == "opcode":
            before = self._before.get(frame, _PYTHON_CALLED)
            self._before[frame] = frame.f_code.co_code[frame.f_lasti]
            if before in _LOOKS:
                self._moment(frame)
        elif event == "return":
            self._before.pop(frame, None)
        return self._trace

    def _profile(self, frame: Any, event: str, called: Any) -> None:
        if frame not in self._before:
            return
        if event == "c_call" and getattr(called, "__name__", "") in _WAITS:
            self._moment(frame)
        elif event == "c_return":  # also where it has called functions of Python's own
            self._before[frame] = next(iter(_CALLS))
