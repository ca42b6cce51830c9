"""The pool behind a `ParallelEnv`: the worker processes, and the channels between them and TorchRL's verbs.

TorchRL's verbs send a message to each env, wait for the envs, and receive what comes back. A channel only notes the
message; waiting or receiving sends what was noted, to all envs at once: as numbers where the columns hold all the rest,
else as one pickle for each env.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from torchrl.envs.common import EnvMetaData

from muster.interop.starting import NOUNS, processes, sealed, ways_of
from muster.interop.torchrl.collector_channels import Refused
from muster.interop.torchrl.columns import Columns, EnvRows
from muster.interop.torchrl.env_worker import NO_KEYS, Command, schema_of
from muster.interop.torchrl.leaves import Key, Keys
from muster.pool.limits import Limits, in_all
from muster.recipes.recipe import Recipe
from muster.vector.assemble import LENIENT, vector_env_of
from muster.vector.packing import Asked
from muster.vector.parts import SteppingOptions
from muster.vector.raisers import originals_raised
from muster.vector.vector_env import VectorEnv

# Imported once, before workers are forked from what has imported them.
PRELOADS = ("torch", "tensordict", "torchrl.envs")
# The messages that are numbers, where the columns hold the rest.
_COMMANDS = {"step": Command.STEP, "step_and_maybe_reset": Command.STEP_AND_RESET, "reset": Command.RESET}


class ParallelEnvs:
    """The worker processes of one `ParallelEnv`, which have built its envs. options: of `ways_of`."""

    def __init__(self, recipes: Sequence[Recipe], num_workers: Asked, memory_check: str, **options: Any) -> None:
        self.num_envs = len(recipes)
        self._arguments = [(recipe.labels[1], recipe.kwargs) for recipe in recipes]
        ways = ways_of(preloads=PRELOADS, **options)
        self.start_method = ways.context
        self._key_sets: dict[Keys, int] = {}
        self._noted: dict[int, tuple[Any, Any]] = {}
        self._answers: dict[int, Any] = {}
        self._columns: Columns | None = None
        self._has_objects = False
        with originals_raised():
            self._backend = processes(
                *(recipes, ways, Limits(nouns=NOUNS), num_workers), name="num_processes", memory_check=memory_check
            )
            envs = vector_env_of(self._backend, LENIENT, SteppingOptions(AutoresetMode.DISABLED))
        assert isinstance(envs, VectorEnv)
        self.vector_env = envs
        self._of_all = {one: np.full((self.num_envs, 2), (one, NO_KEYS), np.int64) for one in Command}

    # ---- before the first step

    def metadata(self, envs: Sequence[int]) -> list[EnvMetaData]:
        """TorchRL's description of each of these envs, made by its worker."""
        found = self.vector_env.call("env_metadata", list(envs))
        return [found[env] for env in envs]

    def require_alike(self, first: EnvMetaData) -> None:
        """Raises ConfigError for an env with other leaves than those of the first env."""
        if self.num_envs == 1:
            return
        for env, difference in enumerate(self.vector_env.call("differs_from", schema_of(first))):
            if difference:
                (label, own), (first_label, first) = self._arguments[env], self._arguments[0]
                given = f" ({label} is {reprlib.repr(own)}, and {first_label} {reprlib.repr(first)})"
                raise Refused(
                    f"worker metadata are incompatible: env {env} differs from env 0: {difference}"
                    f"{given * (label != first_label)}. Pass envs that differ as a list of functions, one for each env"
                )

    def attach(
        self, columns: Columns, rows: Sequence[EnvRows], reset_keys: Keys, step_keys: Keys, objects: Keys
    ) -> None:
        """Has the workers map the columns; from now on, messages without objects are numbers."""
        self._columns = columns
        self._has_objects = bool(objects)
        self.vector_env.call("attach", dict(enumerate(rows)), reset_keys, step_keys, objects)

    # ---- messages

    def note(self, env: int, name: Any, data: Any) -> None:
        """Notes a message for an env, which `exchange` sends."""
        self._noted[env] = (name, data)

    def answer(self, env: int) -> Any:
        """The answer of an env that nobody has taken; sends what is noted first."""
        if env in self._noted:
            self.exchange()
        return self._answers.pop(env)

    def exchange(self, envs: Iterable[int] | None = None) -> None:
        """Sends the messages that are noted for all envs, or for `envs`, and waits until they are answered.

        Other messages and answers, and what envs still owe, are dropped: they are of a verb that Ctrl-C has ended.
        Raises what an env has raised.
        """
        noted = {env: self._noted[env] for env in (self._noted if envs is None else envs)}
        self._noted, self._answers = {}, {}
        self.vector_env.drop_pending()
        if noted and (numbers := self._as_numbers(noted)) is not None:
            self._run(list(noted), numbers)
        elif noted:
            pickled = {env: self._pickled(env, message) for env, message in noted.items()}
            self._answers = dict(enumerate(self.vector_env.call("perform", pickled)))

    def _run(self, envs: Sequence[int], actions: Sequence[tuple[int, int]]) -> None:
        """Has some envs carry out commands, and waits for them. actions: the command and key set of each."""
        if len(envs) == self.num_envs:
            self.vector_env.step(np.array(actions, np.int64)[np.argsort(envs)])
        else:
            self.vector_env.send(np.array(actions, np.int64), envs)
            self.vector_env.recv()

    def run_all(self, command: Command) -> None:
        """Has all envs carry out a command without a key set, and waits for them."""
        if self._noted or self.vector_env.interrupted or self.vector_env.num_pending:
            self.exchange(())
        self.vector_env.step(self._of_all[command])

    def number_of(self, keys: Sequence[Key]) -> int:
        """The number of a set of keys, which the workers learn when it is new."""
        names = tuple(keys)
        number = self._key_sets.get(names)
        if number is None:
            number = len(self._key_sets) + 1
            self.vector_env.call("learn_keys", number, names)
            self._key_sets[names] = number
        return number

    def _as_numbers(self, noted: dict[int, tuple[Any, Any]]) -> list[tuple[int, int]] | None:
        """The messages as numbers; None where one of them carries objects."""
        if self._columns is None:
            return None
        numbers = []
        for name, data in noted.values():
            command = _COMMANDS.get(name) if isinstance(name, str) else None
            if command is None:
                return None
            resets = command is Command.RESET
            keys, objects = data if resets else (data.get("next_td_passthrough_keys"), "non_tensor_data" in data)
            if objects or (resets and self._has_objects):
                return None
            numbers.append((int(command), self.number_of(keys) if keys else NO_KEYS))
        return numbers

    def _pickled(self, env: int, message: tuple[Any, Any]) -> bytes:
        name = message[0] if isinstance(message[0], str) else ".".join(message[0])
        return sealed(message, f"what {name} sends to env {env}", message[1], context=self.start_method)

    # ---- closing

    def close(self, shutdown_timeout: float) -> None:
        """Closes the envs and ends the processes, after at most this many seconds for each and once more for all."""
        limit_s = shutdown_timeout * (self._backend.num_workers + 1)
        self.vector_env.close_within(in_all(limit_s, f"shutdown_timeout={shutdown_timeout:g}"))
        if self._columns is not None:
            self._columns.close()


class EnvChannel:
    """One env of a pool, as TorchRL's verbs speak to it."""

    def __init__(self, pool: ParallelEnvs, env: int) -> None:
        self._pool = pool
        self.env = env

    def send(self, message: tuple[Any, Any]) -> None:
        """Notes a message: its name, or a tuple of attributes' names, and its data."""
        self._pool.note(self.env, *message)

    def recv(self) -> Any:
        """The answer to the oldest message that has one."""
        return self._pool.answer(self.env)
