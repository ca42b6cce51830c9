"""The call by which a user asked for envs, in the words that errors and warnings use for its arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class UserCall:
    """How to write, in one kind of call, what a message advises. Each front end has one; all parts but `name` are code.

    name: what is called.  factory, kwargs: the arguments for what builds an env, and for its keyword arguments; empty
    where the call has none.  wrappers: the argument for wrappers, in which paths begin.
    context: the argument that chooses the start method `{method}`; empty where nothing is started.
    in_process: what hands over the very objects, since it steps the envs in the calling process; empty where this call
    does.  in_process_of_others: the same for envs of other libraries than the front end's, where these need another.
    one_each: a process for each env.  packed: `{count}` processes that share the envs; empty where the call
    starts none.  num_envs: the argument that asks for `{count}` envs.  processes: the argument that has processes step
    the envs, for a call that may also do without.  step_timeout: the argument that limits a step's time; empty where
    there is none.
    apart: a sentence, how to give each env a process of its own.  by_function: the call with the function ``make_env``.
    worker_init: the argument that has workers run the caller's script.
    env_bases: a function ``module:name`` that makes an env of one of TorchRL's, imported where such an env was built;
    empty where the call takes none.
    """

    name: str
    factory: str
    kwargs: str
    wrappers: str
    context: str
    in_process: str
    one_each: str
    packed: str
    num_envs: str
    apart: str
    by_function: str
    processes: str = ""
    step_timeout: str = ""
    in_process_of_others: str = ""
    worker_init: str = 'worker_init="script"'
    env_bases: str = ""

    def in_caller(self, **words: str) -> UserCall:
        """The words of a like call that steps the envs in the calling process. words: other fields that differ."""
        return replace(self, context="", in_process="", in_process_of_others="", packed="", **words)

    def stepping_here(self) -> str:
        """What steps the envs in the calling process."""
        others = self.in_process_of_others
        return self.in_process + (f", or {others} for an env of another library" if others else "")

    def handing_over(self) -> str:
        """The sentence about what hands over the very objects."""
        sentence = f"{self.in_process} hands over this very object"
        if not self.in_process_of_others:
            return f"{sentence}."
        return f"{sentence}; {self.in_process_of_others} does where {self.factory} returns an env of another library."

    def sent(self) -> str:
        """What workers receive, in words."""
        parts = [f"the {self.factory}" if self.factory == "factory" else self.factory, self.wrappers, self.kwargs]
        named = [f"the {part}" if part == "wrappers" else part for part in parts if part]
        if self.kwargs:
            named[-1] = f"the values of {self.kwargs}"
        return named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"

    def argument(self, name: str, value: str) -> tuple[str, str]:
        """The two sides of the assignment that gives every env the argument `name`, with the code of its value."""
        if self.kwargs:
            return f'{self.kwargs}["{name}"]', value
        return self.factory, f"[functools.partial(fn, {name}={value}) for fn in {self.factory}]"

    def lazily(self) -> str:
        """An example of an argument that is built in the worker."""
        place, value = self.argument("name", "muster.lazy(MyClass)")
        return f"{place} = {value}   # before {self.name}"

    def advise_packing(self, count: int) -> str:
        """The sentence that says how `count` processes may share the envs."""
        packed = self.packed.format(count=count)
        return f"Envs that share nothing, as `muster doctor` finds out, may share processes: {packed}."


MAKE_VEC = UserCall(
    name="muster.make_vec",
    factory="factory",
    kwargs="env_kwargs",
    wrappers="wrappers",
    context='context="{method}"',
    in_process='backend="serial"',
    one_each="one_env_per_process=True",
    packed="num_workers={count}",
    num_envs="num_envs={count}",
    apart='Use backend="process" and leave num_workers and caller_steps out',
    by_function="envs = muster.make_vec(make_env, num_envs=...)",
    processes='backend="process"',
    step_timeout="step_timeout",
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
