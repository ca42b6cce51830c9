"""Steps of an `EnvBase` of any class without the tensordicts that TorchRL makes around the class's own ``_step``.

Only for what gives the same rows bit for bit: envs whose class leaves `EnvBase`'s steps as they are, transforms inside
included. Around a `_step` of 10 us, TorchRL's takes 50.
"""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase  # type: ignore[import-untyped]  # it ships no py.typed
from torch import Tensor
from torchrl.envs import EnvBase

from muster.errors import SpecMismatch
from muster.interop.torchrl.columns import has_stacks
from muster.interop.torchrl.leaves import leaves_of
from muster.interop.torchrl.own_verbs import has_own_verbs
from muster.interop.torchrl.writer import Writer, path_of


class BareEnv:
    """An env, stepped from the columns `root` into those of ``next``, and on to `root`; made by `bare_env`."""

    def __init__(self, env: Any, root: TensorDictBase, arrived: TensorDictBase, write: Writer) -> None:
        self._env, self._root, self._write = env, root, write
        self._flags = [arrived.get(key).numpy() for key in env.done_keys]
        moved = env._step_mdp(root.copy().set("next", arrived))
        places = {leaf.data_ptr(): leaf for leaf in arrived.values(True, True) if leaf.numel()}
        self._moves: list[tuple[Tensor, Tensor]] = []
        self._columns = leaves_of(root)
        for key, column in root.items(True, True):
            leaf = moved.get(key, None)
            if leaf is not None and leaf.numel() and (source := places.get(leaf.data_ptr())) is not None:
                self._moves.append((column, source))

    @property
    def applies(self) -> bool:
        """Whether TorchRL's steps are still the env's: its users may have compiled them."""
        return self._env.__dict__.get("_compiled_step_and_maybe_reset") is None and not self._env.run_type_checks

    def step(self) -> bool:
        """Steps the env; returns whether a done flag is set. Raises SpecMismatch."""
        given = self._root.copy()
        arrived = self._env._step(given)
        if not isinstance(arrived, TensorDictBase):
            raise SpecMismatch(f"the step returned a {type(arrived).__name__}, expected a TensorDict")
        if not self._write.write_if_whole(arrived):
            self._write(self._completed(arrived))
        for path, value in leaves_of(given).items():
            column = self._columns.get(path)
            if column is not None and column is not value:  # the env has written into its input
                column.copy_(value)
        for column, source in self._moves:
            column.copy_(source)
        return any(flag.any() for flag in self._flags)

    def _completed(self, arrived: TensorDictBase) -> TensorDictBase:
        """What TorchRL makes of a step's result: rewards and flags of the right shape, and flags that are missing."""
        try:
            completed: TensorDictBase = self._env._step_proc_data(arrived)
        except Exception as error:
            if (misfit := self._write.misfit(arrived, [path_of(key) for key in self._env.done_keys])) is not None:
                raise misfit from error
            raise
        return completed


def bare_env(env: EnvBase, root: TensorDictBase, arrived: TensorDictBase, write: Writer) -> BareEnv | None:
    """The short way for `env`, if its steps are `EnvBase`'s. root, arrived: its columns; write: into `arrived`."""
    if not has_own_verbs(env) or has_stacks(root) or has_stacks(arrived):
        return None
    return BareEnv(env, root, arrived, write)
