"""The methods of a drop-in that are no longer its own: a subclass, or who set an attribute, has replaced them."""

from __future__ import annotations

from typing import Any, TypeVar

_OF_STEP = ("step_async", "step_wait")
AnyClass = TypeVar("AnyClass", bound=type)


class Overridable:
    """A drop-in with a `step` that calls `step_async` and `step_wait`, as the original's, where one is replaced."""

    own_methods: dict[str, Any]
    _composes: bool  # asked once, as the drop-in is made, so that a step does not ask what its class has

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A new instance, which knows whether its `step` is composed."""
        self = super().__new__(cls)
        self._composes = is_replaced(self, *_OF_STEP)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in _OF_STEP:
            self._composes = True


def with_own_methods(cls: AnyClass) -> AnyClass:
    """A decorator for a drop-in's class: notes its methods, from which `is_replaced` tells those of others."""
    cls.own_methods = {name: getattr(cls, name) for name in dir(cls)}  # type: ignore[attr-defined]  # of Overridable
    return cls


def is_replaced(envs: Any, *names: str) -> bool:
    """Whether one of the methods `names` of a drop-in is not Muster's own; False for what is no drop-in."""
    own = getattr(envs, "own_methods", {})
    return any(name in vars(envs) or getattr(type(envs), name) is not own[name] for name in names if name in own)
