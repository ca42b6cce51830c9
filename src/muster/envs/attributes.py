"""Attributes of foreign envs, looked up through whatever wraps them."""

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
    """The attribute of the outermost of the env's chain that has it, else the adapter's own. Raises AttributeError."""
    for one in (*chain(env), adapter):
        try:
            return getattr(one, name)
        except AttributeError:
            continue
    raise AttributeError(f"neither {type(env).__name__} nor what it wraps has an attribute {name!r}")


def set_through(env: Any, name: str, value: Any) -> None:
    """Sets the attribute on the object of the chain that owns it, else on the innermost."""
    owner = env
    for owner in chain(env):
        if name in getattr(owner, "__dict__", {}) or hasattr(type(owner), name):
            break
    setattr(owner, name, value)


def get_attribute(env: Any, name: str) -> Any:
    """Through wrappers, as Gymnasium does, where the env has wrappers."""
    return env.get_wrapper_attr(name) if hasattr(env, "get_wrapper_attr") else getattr(env, name)


def set_attribute(env: Any, name: str, value: Any) -> None:
    """Through wrappers, as Gymnasium does, where the env has wrappers."""
    if hasattr(env, "set_wrapper_attr"):
        env.set_wrapper_attr(name, value)
    else:
        setattr(env, name, value)
