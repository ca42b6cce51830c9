"""`EnvState`: what an env was given since its episode began, from which any other env like it comes to the same state.

That holds for envs that draw from their own generators, seeded by ``reset(seed=...)``: such an env is a function of its
recipe, a seed and its actions. Whether it does is checked each time, by digests of the last observation.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from muster.errors import UsageError
from muster.spaces.tree import Array
from muster.transport.slab import Slab
from muster.worker_info import seeds_of_envs

NONE = "null"  # no options, as JSON
_VERSION = 1
MOST_OPTIONS = 1 << 19
MOST_ACTIONS = 1 << 28  # of actions
_HEADER_BYTES = 1 << 20
_KINDS = {"recipe": str, "options": str, "seed": int, "episode": int, "steps": int, "actions": bytes}
_KINDS |= {"is_over": bool, "episode_return": float, "digests": tuple}


@dataclass(frozen=True)
class EnvState:
    """The state of an env, from `get_states` of a vector env, for `set_states` of any with such an env.

    recipe: the env's name, and a digest of its arguments and spaces.
    seed, episode: that of all its episodes, of ``reset(seed=...)``, and how many of these were before this one.
    options: of the reset that began the episode, as JSON.
    steps, actions: how many actions there were since, and their bytes.
    is_over: whether the last step ended the episode.  episode_return: the sum of its rewards.
    digests: of the last observation, hex strings for its arrays.

    It is plain data, which can be pickled, compared, and kept as bytes. Raises UsageError.

    >>> import muster
    >>> with muster.make_vec("CartPole-v1", num_envs=4, replayable=True) as envs:
    ...     obs, infos = envs.reset(seed=0)
    ...     obs, *_ = envs.step([0, 1, 0, 1])
    ...     states = envs.get_states([0])
    ...     _ = envs.step([1, 1, 1, 1])
    ...     again, infos = envs.set_states(states * 3, env_ids=[1, 2, 3])
    >>> [(row == obs[0]).all() for row in again[1:]]
    [np.True_, np.True_, np.True_]
    """

    recipe: str
    seed: int
    episode: int
    options: str
    steps: int
    actions: bytes
    is_over: bool
    episode_return: float
    digests: tuple[str, ...]

    def to_bytes(self) -> bytes:
        """The state as a line of JSON, with the actions packed behind it, for `from_bytes`."""
        fields = {"version": _VERSION, **asdict(self), "actions": len(self.actions)}
        fields["episode_return"] = self.episode_return.hex()
        fields["check"] = _check(fields, self.actions)
        return json.dumps(fields).encode() + b"\n" + zlib.compress(self.actions)

    @classmethod
    def from_bytes(cls, data: bytes) -> EnvState:
        """The state of which `to_bytes` gave `data`. Executes nothing of it. Raises UsageError for any other bytes."""
        try:
            line = bytes(data[:_HEADER_BYTES]).partition(b"\n")[0]
            fields = json.loads(line)
            if (version := fields["version"]) != _VERSION:
                raise UsageError(f"the state has version {version!r}, and this Muster reads {_VERSION}: use its own")
            actions, check = _unpacked(data[len(line) + 1 :], fields["actions"]), fields.pop("check")
            if check != _check(fields, actions):
                raise _unreadable("its check does not fit")
            del fields["version"]
            fields |= {"actions": actions, "episode_return": float.fromhex(fields["episode_return"])}
            return cls(**{**fields, "digests": tuple(fields["digests"])})
        except UsageError:
            raise
        except Exception as error:
            raise _unreadable(str(error)) from error

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            value = vars(self)[name]
            if type(value) is not kind or (type(value) is int and not 0 <= value < 1 << 64):
                raise UsageError(f"{name} of a state must be {kind.__name__}, ints of 64 bits, got {value!r:.100}")


def seed_of_episode(seed: int, episode: int) -> int:
    """The seed of one of an env's resets, the first of which since ``reset(seed=seed)`` is episode 0."""
    return seeds_of_envs(np.random.SeedSequence(seed, spawn_key=(episode,)))[0]


def digests_of(arrays: Sequence[Array], env: int) -> tuple[str, ...]:
    """The digests of an env's observation. arrays: of the leaves, ``[N, *shape]``. Objects have none."""
    return tuple(hashlib.blake2b(array[env].tobytes(), digest_size=8).hexdigest() for array in arrays)


def difference(state: EnvState, slab: Slab, env: int) -> tuple[str, Any, Any] | None:
    """The first part of an env's last row in `slab` that is another: its name, the state's, and the row's."""
    record, leaves = slab.records[env], slab.plan.obs.leaves
    pairs: list[tuple[str, Any, Any]] = [
        ("the length", state.steps, int(record["episode_length"])),
        ("its end", state.is_over, bool(record["episode_over"])),
        ("the return", state.episode_return, float(record["episode_return"])),
        *zip((leaf.path for leaf in leaves), state.digests, digests_of(slab.obs.arrays, env), strict=False),
    ]
    return next((pair for pair in pairs if repr(pair[1]) != repr(pair[2])), None)  # NaN is NaN


def _check(fields: Mapping[str, Any], actions: bytes) -> str:
    digest = hashlib.blake2b(json.dumps(fields).encode(), digest_size=8)
    digest.update(actions)
    return digest.hexdigest()


def _unpacked(packed: bytes, length: int) -> bytes:
    if not 0 <= length <= MOST_ACTIONS:
        raise _unreadable(f"{length} bytes of actions are not between 0 and {MOST_ACTIONS}")
    unpacker = zlib.decompressobj()
    actions = unpacker.decompress(packed, length + 1)
    if len(actions) != length or not unpacker.eof or unpacker.unused_data:
        raise _unreadable(f"there are not exactly {length} bytes of actions")
    return actions


def _unreadable(why: str) -> UsageError:
    return UsageError(
        f"no state can be read from these bytes, of which some are lost or changed: {why}. EnvState.from_bytes reads "
        "what to_bytes() has returned"
    )
