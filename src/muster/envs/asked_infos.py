"""Infos whose states the envs are asked for when somebody looks at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from muster.transport.infos import Infos

# The envs' states, and which envs have one.
STATE_KEYS = ("state", "_state")


class AskedInfos(dict[str, Any]):
    """Infos without the envs' states, until somebody looks at ``infos["state"]``: then ``ask()`` returns them.

    Only that key asks, in ``infos["state"]``, ``infos.get("state")`` and ``"state" in infos``; reading all entries does
    not. ``ask()`` returns {} where nobody can be asked now.
    """

    def __init__(self, told: Any = (), ask: Callable[[], Infos] | None = None) -> None:
        super().__init__(told)
        self._ask = ask

    def _fill_for(self, key: object) -> None:
        if key in STATE_KEYS and self._ask is not None and not super().__contains__(key):
            for name, value in self._ask().items():
                self.setdefault(name, value)

    def __missing__(self, key: str) -> Any:
        self._fill_for(key)
        if super().__contains__(key):
            return super().__getitem__(key)
        if key not in STATE_KEYS or self._ask is None:
            raise KeyError(key)
        raise KeyError(
            f"{key}: nobody had asked for the states when these envs were stepped, and now they have moved on, owe an "
            "answer or are closed. From the next step on it is told. Look at it after reset, or pass state=True to "
            "make_vec, to have it from the start"
        )

    def __contains__(self, key: object) -> bool:
        self._fill_for(key)
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._fill_for(key)
        return super().get(key, default)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)
