"""A pytest plugin (``-p swap_gymnasium``) that puts Muster's drop-ins in the place of Gymnasium's before collection."""

import sys
from types import FunctionType
from typing import Any

import gymnasium  # the modules that it loads hold the names, too
from gymnasium.vector.async_vector_env import AsyncVectorEnv as TheirAsync
from gymnasium.vector.sync_vector_env import SyncVectorEnv as TheirSync

from muster.interop.gymnasium import AsyncVectorEnv, SyncVectorEnv, make_vec


def rebind(replacements: dict[Any, Any], package: str) -> None:
    """Rebinds every module-level name in `package` that stands for a key of `replacements`."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == package:
            for attribute, value in list(vars(module).items()):
                if isinstance(value, type | FunctionType) and value in replacements:
                    setattr(module, attribute, replacements[value])


rebind({TheirAsync: AsyncVectorEnv, TheirSync: SyncVectorEnv, gymnasium.make_vec: make_vec}, "gymnasium")
