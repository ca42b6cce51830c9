"""TorchRL's losses for policies that cannot be copied: each is TorchRL's own class, and a drop-in for it.

Where TorchRL copies a module, the copy is a twin, which shares with it what cannot be copied: see
`muster.nn.shared_copies`. All other names of ``torchrl.objectives`` are handed on, so that an import line needs no
second one.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torchrl import objectives

from muster.nn.shared_copies import copied_as_twins

if TYPE_CHECKING:
    from torchrl.objectives import *  # noqa: F403  # the names that the last line makes, for type checkers and editors

__all__ = list(objectives.__all__)

# Looked for in the class itself, by Python and by TensorDictModuleBase, which turns lists of keys into properties.
_OF_THE_CLASS_ITSELF = ("__doc__", "__new__", "in_keys", "out_keys")


class _CopiesAsTwins:
    """The work of TorchRL's losses, with twins of the user's modules where TorchRL makes copies."""

    @functools.wraps(objectives.LossModule.make_value_estimator)
    def make_value_estimator(self, *args: Any, **kwargs: Any) -> Any:
        with copied_as_twins(vars(self), args, kwargs):
            return super().make_value_estimator(*args, **kwargs)  # type: ignore[misc]  # a mixin of losses

    @functools.wraps(objectives.LossModule.get_stateful_net)
    def get_stateful_net(self, *args: Any, **kwargs: Any) -> Any:
        with copied_as_twins(vars(self), args, kwargs):
            return super().get_stateful_net(*args, **kwargs)  # type: ignore[misc]  # a mixin of losses


def _made_from(original: Any) -> Any:
    """The class of ours, of the same name, signature and documentation."""

    @functools.wraps(original.__init__)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        with copied_as_twins(args, kwargs):
            original.__init__(self, *args, **kwargs)

    namespace = {name: vars(original)[name] for name in _OF_THE_CLASS_ITSELF if name in vars(original)}
    namespace |= {"__init__": init, "__module__": __name__, "__qualname__": original.__qualname__}
    made = type(original)(original.__name__, (_CopiesAsTwins, original), namespace)
    del made.forward  # which the metaclass wraps in each class, the original's own already
    return made


def _made_from_all() -> dict[str, Any]:
    named, kind = (getattr(objectives, name) for name in __all__), type(objectives.LossModule)
    ours = {original: _made_from(original) for original in named if isinstance(original, kind)}
    for original, made in ours.items():
        for base in original.__mro__[1:]:
            if base in ours:
                ours[base].register(made)  # ClipPPOLoss is a PPOLoss, here too
    return {made.__name__: made for made in ours.values()}


globals().update({name: getattr(objectives, name) for name in __all__} | _made_from_all())
