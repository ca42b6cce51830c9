"""TorchRL's `EnvBase`s in the doctor's trials, which step them as collectors do."""

from __future__ import annotations

from typing import Any

from muster.envs.adapt import is_torchrl


def stepped(env: Any) -> Any:
    """A wrapper for recipes: an env of TorchRL as collectors step it; any other as it is."""
    if not is_torchrl(env):
        return env
    from muster.interop.torchrl.env_bases import adapted

    return adapted(env)


def check_env_base(env: Any) -> None:
    """Has TorchRL check the specs of an env that `stepped` has made. Raises what TorchRL raises."""
    from torchrl.envs.utils import check_env_specs

    check_env_specs(env.env)
