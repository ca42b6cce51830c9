"""The doorbell, the stepping loop and the watchdog of Muster's workers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_Check = Callable[..., None]

class Command:
    STEP: int
    RESET: int
    STEP_PROVIDED: int

class Status:
    OK: int
    RAISED: int
    LOST: int

class Doing:
    NOTHING: int
    STEPPING: int
    RESETTING: int
    TALKING: int

class Autoreset:
    NEXT_STEP: int
    SAME_STEP: int
    DISABLED: int

class Unusual:  # bits
    INFOS: int
    NOT_OK: int
    FINALS: int

class InfoRow:
    STEP: int
    FINAL: int
    COUNT: int

class InfoSchema:
    EMPTY: int
    PICKLED: int
    FIRST: int

class InfoKind:  # others are numbers
    ARRAY: int
    DICT: int
    OBJECT: int

class Branch:
    DICT: int
    TUPLE: int
    STACK: int

class AgentFlag:
    ALIVE: int
    ACTING: int
    TERMINATED: int
    TRUNCATED: int

class SlabLayout:
    def __init__(self, **fields: int) -> None: ...
    def host_state(self, host: int, /) -> dict[str, int]: ...

class ObsNode:
    """A node of the tree that writes observations. ``ObsNode()`` is the node of a value that travels as an object.

    Like the nodes of the other trees it moves into the object that it is passed to, and must not be used afterwards.
    """

    @staticmethod
    def leaf(
        *, is_integer: bool, store: _Check, rows: npt.NDArray[Any], offset: int, final_offset: int, lent: bool
    ) -> ObsNode: ...
    @staticmethod
    def branch(*, kind: int, keys: tuple[Any, ...], children: list[ObsNode], mismatch: _Check) -> ObsNode: ...

class ActionNode:
    @staticmethod
    def leaf(*, rows: npt.NDArray[Any], offset: int, first: int, scalars: tuple[Any, ...]) -> ActionNode: ...
    @staticmethod
    def branch(*, kind: int, keys: tuple[Any, ...], children: list[ActionNode]) -> ActionNode: ...

class BatchNode:
    @staticmethod
    def leaf(*, rows: npt.NDArray[Any], offset: int, lent: bool, low: list[int], high: list[int]) -> BatchNode: ...
    @staticmethod
    def branch(*, kind: int, keys: tuple[Any, ...], children: list[BatchNode]) -> BatchNode: ...

class Stepper:
    def __init__(
        self,
        *,
        slab: SlabLayout,
        host: int,
        first_env: int,
        envs: list[Any],
        obs: ObsNode,
        action: ActionNode,
        autoreset: int,
        check_finite: bool,
        actions_by_mail: bool,
        lends_objects: bool,
        env_host: object,
        wait_budget: Any,
    ) -> None: ...
    def run(self) -> None: ...
    def reset_env(self, i: int, seed: object, options: object, passes_options: bool = True) -> BaseException | None: ...
    def replace_env(self, i: int, env: object, seed: object) -> None: ...
    def acknowledge(self, i: int, /) -> None: ...
    def refuse(self, i: int, exception: BaseException, /) -> None: ...
    def describe_schemas(self) -> tuple[Any, ...]: ...

class AgentRow:
    def __init__(
        self,
        slots: Mapping[Any, tuple[Any, ...]],
        sizes: list[int],
        rewards: npt.NDArray[np.float32],
        flags: npt.NDArray[np.bool_],
    ) -> None: ...
    def start_episode(self) -> None: ...
    def start(self) -> None: ...
    def choose(self, by_group: list[Any], agents: list[Any], /) -> dict[Any, Any]: ...
    def put_alike(
        self, agents: list[Any], observations: list[Any], rewards: list[Any], terminated: bool, truncated: bool, /
    ) -> None: ...
    def put(
        self, agent: object, obs: object, reward: object, terminated: bool, truncated: bool, acts: bool
    ) -> None: ...
    def put_all(
        self,
        before: list[Any],
        after: list[Any],
        observations: Mapping[Any, Any],
        rewards: Mapping[Any, Any],
        terminations: Mapping[Any, Any],
        truncations: Mapping[Any, Any],
        /,
    ) -> int: ...
    def take_places(self) -> list[list[Any]]: ...
    def end_of_step(self, over: bool, /) -> tuple[float, bool, bool]: ...

class Caller:
    def __init__(
        self,
        *,
        slab: SlabLayout,
        memory: npt.NDArray[np.uint8],
        first_envs: Sequence[int],
        obs: BatchNode | None,
        action: BatchNode | None,
        lent: list[npt.NDArray[Any]],
        must_reset: bool,
        steps_unreset: bool,
        wait_budget: Any,
    ) -> None: ...
    closed: bool
    calling: bool
    @property
    def num_pending(self) -> int: ...
    def require_open(self) -> None: ...
    def set_local(self, stepper: Stepper, /) -> None: ...
    def bring_home(self) -> None: ...
    def expect_infos(
        self, schemas: bytes, columns: list[tuple[str, str, npt.NDArray[Any]]], provided: npt.NDArray[np.bool_], /
    ) -> None: ...
    def forget_infos(self) -> None: ...
    def write(self, actions: object, env_ids: npt.NDArray[np.int64] | None) -> bool: ...
    def send(self, env_ids: npt.NDArray[np.int64] | None, objects: bool, as_whole: bool, copies: bool) -> None: ...
    def request_resets(self, env_ids: npt.NDArray[np.int64], /) -> None: ...
    def announce_message(self, host: int, /) -> None: ...
    def wait(self, min_envs: int, slice_ns: int) -> bool: ...
    def collect(self, copies: bool, columns: bool) -> tuple[Any, ...]: ...
    def keep_rows(self, arrays: list[npt.NDArray[Any]], /) -> None: ...
    def failed(self) -> list[int]: ...
    def restore(self, env: int, /) -> None: ...
    def ask_again(self, env: int, /) -> None: ...
    def lose_host(self, host: int, /) -> list[int]: ...
    def is_pending(self, env: int, /) -> bool: ...
    def finished(self, env: int, /) -> bool: ...
    def host_of(self, env: int, /) -> int: ...

def copied(obs: Any, /) -> Any: ...
def split_agents(
    rewards: npt.NDArray[np.float32],
    flags: npt.NDArray[np.bool_],
    slots: list[tuple[str, int, int]],
    names: tuple[str, ...],
    /,
) -> tuple[dict[str, npt.NDArray[np.float32]], dict[str, dict[str, npt.NDArray[np.bool_]]]]: ...
def gather_columns(
    columns: list[tuple[str, str, npt.NDArray[Any]]], ids: npt.NDArray[np.int64] | None, provided: npt.NDArray[np.bool_]
) -> dict[str, npt.NDArray[Any]]: ...
def running() -> tuple[Any, int] | None:
    """The pair (env_host, i) where this thread steps or resets env i of that env host, None where it does neither."""

def map_bytes(*, fd: int, size: int) -> npt.NDArray[np.uint8]: ...
def ticks() -> int: ...
def start_watchdog(caller_pidfd: int, *, stderr_pipe: int = -1, stderr_to: int = -1, tail: int = -1) -> None: ...
def set_death_signal(number: int, /) -> None: ...
def kill_started(*, root: int, session: int, is_reaped: bool = False) -> None: ...

FLAG_NAMES: tuple[str, ...]  # the names of agents' flags in infos, in the order of AgentFlag
RECORD_FIELDS: tuple[tuple[str, str, int], ...]  # name, NumPy's format, offset
RECORD_BYTES: int
HOST_BYTES: int
CALLER_BYTES: int
CACHE_LINE: int
SLICE_NS: int
MARK: str
EXIT_FDS_CLOSED: int
