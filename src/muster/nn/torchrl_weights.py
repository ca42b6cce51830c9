"""State dicts of TorchRL's multi-agent networks, as Muster's have them."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from torch import nn

from muster.nn.stacked import StackedLinear

# Where TorchRL keeps them: with use_td_params=True, where `_empty_net` has only what is not used, and with False.
_PLACES = ("params.", "_empty_net.")


def rename_torchrls(state: MutableMapping[str, Any], prefix: str, net: nn.Module) -> None:
    """Renames the keys of TorchRL's network behind ``prefix`` to those of ``net``, in place: ``net.0.weight``.

    Weights [A, out, in] of linear layers become [A, in, out] where ``net`` has them so.
    """
    place = next((place for place in _PLACES if any(key.startswith(prefix + place) for key in state)), None)
    if place is None:
        return
    for key in [key for key in state if key.startswith(tuple(prefix + one for one in _PLACES))]:
        tensor = state.pop(key)
        path, _, name = key.removeprefix(prefix + place).rpartition(".")
        if key.startswith(prefix + place) and not name.startswith("__"):  # the shape and device of TorchRL's TensorDict
            if name == "weight" and isinstance(dict(net.named_modules()).get(path), StackedLinear):
                tensor = tensor.transpose(-1, -2)
            state[f"{prefix}net.{path}.{name}"] = tensor
