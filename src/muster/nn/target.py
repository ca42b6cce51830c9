"""Target parameters for losses of policies that cannot be copied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from muster.errors import ConfigError, UsageError
from muster.nn.functional import functionalize, named_tensors


class TargetParams:
    """A copy of a module's parameters and buffers that follows them slowly; the module itself is not copied.

    ``target(*args)`` is ``module(*args)`` with the target's tensors: no gradient reaches them, while gradients still
    reach the arguments. ``update(tau)`` moves them towards the module (Lillicrap et al. 2015, arXiv:1509.02971),
    ``hard_update()`` makes them equal (Mnih et al. 2015, doi:10.1038/nature14236).

    params: the tensors by the names that they have in the module, one for all the names of a tied tensor.
    Raises what ``functionalize`` raises; like its calls, a target is not for two threads at a time, nor for gradients
    through blocks under ``torch.utils.checkpoint`` inside the module, which recompute with the module's own tensors.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.hard_update()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the module's output for these arguments, computed with the target's parameters and buffers."""
        return self._call(self.params, *args, **kwargs)

    @torch.no_grad()
    def update(self, tau: float) -> None:
        """Sets each parameter to ``(1 - tau) * target + tau * module``, and buffers to the module's.

        Buffers are no weights: averaged statistics of a batch norm would lag, and counters cannot be averaged.
        Raises ConfigError for a ``tau`` outside [0, 1], UsageError where the module changed its tensors' layout.
        """
        if not 0.0 <= tau <= 1.0:
            raise ConfigError(f"tau={tau} is not in [0, 1]; a usual value is 0.005")
        sources = named_tensors(self._module)
        self._require_same_layout(sources)
        for name, source in sources.items():
            if isinstance(source, nn.Parameter) and (source.is_floating_point() or source.is_complex()):
                self.params[name].lerp_(source, tau)
            else:
                self.params[name].copy_(source)

    def hard_update(self) -> None:
        """Makes the target equal to the module, on the module's device, with new tensors."""
        self._call, own = functionalize(self._module)  # again: layers and ties may have changed
        self.params: dict[str, Tensor] = {name: tensor.detach().clone() for name, tensor in own.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """The target's tensors by the module's names; ``module.load_state_dict`` takes them where none are tied."""
        return dict(self.params)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copies ``state`` into the target's tensors, from other devices and dtypes too.

        Raises UsageError, before anything is copied, where names or shapes differ or a tensor has no values.
        """
        self._require_same_layout(state, convert=True)
        for name, tensor in state.items():
            self.params[name].copy_(tensor)

    def _require_same_layout(self, other: Mapping[str, Tensor], *, convert: bool = False) -> None:
        if other.keys() != self.params.keys():
            names = sorted(other.keys() ^ self.params.keys())
            raise UsageError(f"the target and its source differ in {names[:8]}; hard_update() starts afresh")
        for name, tensor in other.items():
            mine = self.params[name]
            alike = (tensor.shape, tensor.layout, tensor.is_meta) == (mine.shape, mine.layout, mine.is_meta)
            if not alike or not (convert or (tensor.device, tensor.dtype) == (mine.device, mine.dtype)):
                raise UsageError(
                    f"{name!r} is {_layout(mine)} in the target, but {_layout(tensor)} in its source; hard_update() "
                    "starts afresh from the module"
                )


def _layout(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} on {tensor.device}, {tensor.dtype}, {tensor.layout}"
