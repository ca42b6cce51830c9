"""The call by which a user asked for envs, in the words that errors and warnings use for its arguments."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class UserCall:
    """How to write, in one kind of call, what a message advises. Each front end has one; all parts are code.

    name: what is called.  lazily: the argument `{name}` of the env, built in the worker by `{value}`.
    fork: workers forked from the caller.  in_process: what hands over the very objects, since it steps the envs in the
    calling process.  one_each: a process for each env.  packed: `{count}` processes that share the envs; empty where
    the call starts none.
    """

    name: str
    lazily: str
    fork: str
    in_process: str
    one_each: str
    packed: str

    def advise_packing(self, count: int) -> str:
        """The sentence that says how `count` processes may share the envs."""
        packed = self.packed.format(count=count)
        return f"Envs that share nothing, as `muster doctor` finds out, may share processes: {packed}."


MAKE_VEC = UserCall(
    name="muster.make_vec",
    lazily='muster.make_vec(..., env_kwargs={{"{name}": {value}}})',
    fork='context="fork"',
    in_process='backend="serial"',
    one_each="one_env_per_process=True",
    packed="num_workers={count}",
)
