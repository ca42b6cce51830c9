"""Special methods of single objects: `copy` and `pickle` look for ``__deepcopy__`` and the like on the object first."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from muster.errors import UsageError


class OwnMethod:
    """A special method that one object has in the place of its class's: ``vars(owner)[name] = OwnMethod(...)``.

    method: the function that is called, with the owner and the arguments.

    The owner is referred to weakly: what holds hardware ends as early as without this method. A pickle holds None
    instead, so that the object that is made of it has its class's method again.
    """

    def __init__(self, owner: object, method: Callable[..., Any]) -> None:
        self._owner = weakref.ref(owner)
        self.method = method

    def __call__(self, *arguments: Any) -> Any:
        owner = self._owner()
        if owner is None:
            raise UsageError(
                "this is a shallow copy of an object that muster.nn.uncopyable or muster.nn.shared_on_copy was called "
                "with, and that has ended since; call the function with this one, too"
            )
        return self.method(owner, *arguments)

    def put_into(self, copied: object, name: str) -> None:
        """Gives ``copied``, a copy of the owner, the same method under ``name``."""
        vars(copied)[name] = OwnMethod(copied, self.method)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()
