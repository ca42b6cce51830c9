"""The swap of a peer's names for Muster's, for plugins that run the peer's own tests."""

import sys
from types import FunctionType
from typing import Any


def rebind(replacements: dict[Any, Any], package: str) -> None:
    """Rebinds every module-level name in `package` that stands for a key of `replacements`."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == package:
            for attribute, value in list(vars(module).items()):
                if isinstance(value, type | FunctionType) and value in replacements:
                    setattr(module, attribute, replacements[value])
