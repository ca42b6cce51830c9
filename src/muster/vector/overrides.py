"""The methods of a vector env that are no longer Muster's, since a subclass has replaced them."""

from __future__ import annotations

from typing import Any


def is_replaced(envs: Any, *names: str) -> bool:
    """Whether one of the methods `names` of a vector env, of a class derived from one of Muster's, is not Muster's."""
    sources = (getattr(getattr(type(envs), name), "__globals__", {}) for name in names)
    return any(not source.get("__name__", "").startswith("muster.") for source in sources)
