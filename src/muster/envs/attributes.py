"""Attributes of envs of other libraries, looked up through the wrappers around the envs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Where the wrappers of PettingZoo, Melting Pot and dm_env keep what they wrap.
_INNER = ("env", "aec_env", "_env", "_environment")
_MAX_DEPTH = 64


def chain(env: Any) -> Iterator[Any]:
    """The env and what it wraps, from the outermost to the innermost."""
    for _ in range(_MAX_DEPTH):
        yield env
        held = vars(env) if hasattr(env, "__dict__") else {}
        inner = next((held[name] for name in _INNER if held.get(name) is not None), None)
        if inner is None:
            return
        env = inner


def get_through(adapter: Any, env: Any, name: str) -> Any:
    """The attribute of the first object in the env's chain that has it, else the adapter's. Raises AttributeError."""
    for one in (*chain(env), adapter):
        try:
            return getattr(one, name)
        except AttributeError:
            continue
    raise AttributeError(f"neither {type(env).__name__} nor what it wraps has an attribute {name!r}")


def set_through(env: Any, name: str, value: Any) -> None:
    """Sets the attribute on the first object in the env's chain that has it, else on the innermost one."""
    owner = env
    for owner in chain(env):
        if name in getattr(owner, "__dict__", {}) or hasattr(type(owner), name):
            break
    setattr(owner, name, value)


class Adapting:
    """The part of an adapter that passes on to the env what needs no adapting."""

    env: Any

    def close(self) -> None:
        self.env.close()

    def get_wrapper_attr(self, name: str) -> Any:
        """The env's attribute, looked up through its wrappers."""
        return get_through(self, self.env, name)

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Sets the attribute where it is found, or on the innermost env."""
        set_through(self.env, name, value)
        return True


def get_attribute(env: Any, name: str) -> Any:
    """The attribute `name` of an env, looked up through the env's wrappers, if any, as Gymnasium does."""
    return env.get_wrapper_attr(name) if hasattr(env, "get_wrapper_attr") else getattr(env, name)


def set_attribute(env: Any, name: str, value: Any) -> None:
    """Sets the attribute `name` of an env, through the env's wrappers, if any, as Gymnasium does."""
    if hasattr(env, "set_wrapper_attr"):
        env.set_wrapper_attr(name, value)
    else:
        setattr(env, name, value)
