"""Infos with a part that the envs are asked for only when somebody looks at it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Infos = dict[str, Any]

# The envs' states, and which envs have one.
STATE_KEYS = ("state", "_state")


class AskedInfos(dict[str, Any]):
    """A dict of what a step told, and of the envs' states, which ``ask()`` returns: once, when they are looked at.

    Whoever reads all entries looks at the states, too. ``ask()`` returns {} if it is too late for the question.
    """

    __slots__ = ("_ask",)

    def __init__(self, told: Infos, ask: Callable[[], Infos]) -> None:
        super().__init__(told)
        self._ask: Callable[[], Infos] | None = ask

    def _fill(self) -> None:
        ask, self._ask = self._ask, None
        if ask is not None:
            self.update(ask())

    def __missing__(self, key: str) -> Any:
        self._fill_for(key)
        if super().__contains__(key):
            return super().__getitem__(key)
        if key not in STATE_KEYS:
            raise KeyError(key)
        raise KeyError(
            f"{key}: the envs were not asked for their states and have moved on. Look at infos[{key!r}] before the "
            "next step, while no env owes an answer, after which every step tells it; or pass state=True to make_vec"
        )

    def _fill_for(self, key: object) -> None:
        if key in STATE_KEYS:
            self._fill()

    def __contains__(self, key: object) -> bool:
        self._fill_for(key)
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._fill_for(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self._fill_for(key)
        return super().pop(key, *default)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)


def _reading_all(name: str) -> Callable[..., Any]:
    read = getattr(dict, name)

    def reading(self: AskedInfos, *args: Any) -> Any:
        self._fill()
        return read(self, *args)

    reading.__name__ = name
    return reading


for _name in (
    "__iter__",
    "__len__",
    "__repr__",
    "__eq__",
    "__ne__",
    "__or__",
    "__ror__",
    "copy",
    "items",
    "keys",
    "values",
):
    setattr(AskedInfos, _name, _reading_all(_name))
