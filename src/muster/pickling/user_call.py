"""The user's call for envs, in the words that errors and warnings use for its arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class UserCall:
    """How to write, in one kind of call, what a message advises. Each front end has one; all parts but `name` are code.

    name: what is called.
    factory, kwargs: the arguments for what builds an env, and for its keyword arguments. Where the second is empty, the
    first is a list of functions.
    one_each: a process for each env.  in_process: what hands over the very objects, since it steps the envs in the
    calling process; empty where this call does.
    context: the argument that chooses the start method `{method}`; empty where nothing is started.
    far: whether what is sent goes to other machines.
    """

    name: str
    factory: str
    one_each: str
    in_process: str = ""
    context: str = ""
    kwargs: str = ""
    far: bool = False

    def sent(self) -> str:
        """The parts that workers receive, in words."""
        factory = f"the {self.factory}" if self.factory == "factory" else self.factory
        return f"{factory}, the wrappers and the values of {self.kwargs}" if self.kwargs else factory

    def argument(self, name: str, value: str) -> tuple[str, str]:
        """The two sides of the assignment that gives every env the argument `name`, with the code of its value."""
        if self.kwargs:
            return f'{self.kwargs}["{name}"]', value
        return self.factory, f"[functools.partial(fn, {name}={value}) for fn in {self.factory}]"

    def lazily(self) -> str:
        """An example of an argument that is built in the worker."""
        place, value = self.argument("name", "muster.lazy(MyClass)")
        return f"{place} = {value}   # before {self.name}"

    def hanging(self) -> str:
        """The sentence about a worker that hangs before it has rebuilt what it receives."""
        return (
            f"\nIt has not come further than to rebuild {self.sent()} that were sent to it, or to import what these "
            "need; the first line of the stack shows which.\nAn object that hangs is built in the worker instead:"
            f"\n    {self.lazily()}"
        )


MAKE_VEC = UserCall(
    "muster.make_vec", "factory", "one_env_per_process=True", 'backend="serial"', 'context="{method}"', "env_kwargs"
)

_current: ContextVar[UserCall] = ContextVar("muster_user_call", default=MAKE_VEC)


def current_call() -> UserCall:
    """The user's call that ``make_vec`` works for: its own, unless another front end calls it."""
    return _current.get()


@contextmanager
def called_as(call: UserCall) -> Iterator[None]:
    """Has ``make_vec`` speak in the words of `call`, within the context."""
    token = _current.set(call)
    try:
        yield
    finally:
        _current.reset(token)
