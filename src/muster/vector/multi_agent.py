"""`MultiAgentVectorEnv`: N envs of many agents behind the methods of `VectorEnv`, with agents batched by group."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from muster._core import split_agents
from muster.envs.groups import Agent
from muster.envs.layout import (
    ACTING,
    ALIVE,
    FLAG_NAMES,
    FLAGS,
    HAS_MASKS,
    MASKS,
    OBS,
    REWARDS,
    SHARED,
    STATE,
    TERMINATED,
    TRUNCATED,
)
from muster.errors import ActionError, CannotTravel, EnvError
from muster.spaces.tree import Array
from muster.transport.infos import Infos
from muster.vector.agent_rows import FINAL_ROWS, RowVectorEnv
from muster.vector.checks import env_ids_of
from muster.vector.results import Batch, Bools, any_true

ByGroup = dict[str, Any]
Rewards = dict[str, npt.NDArray[np.float32]]
StepResult = tuple[ByGroup, Rewards, Bools, Bools, Infos]


class AgentBatch(NamedTuple):
    """What `MultiAgentVectorEnv.recv` returns for the n envs that were ready, in the order of their ids.

    env_ids: int64 ``[n]``.  The rest as from `step`, with n rows.
    """

    env_ids: npt.NDArray[np.int64]
    obs: ByGroup
    rewards: Rewards
    terminated: Bools
    truncated: Bools
    infos: Infos


class MultiAgentVectorEnv:
    """Many multi-agent envs, stepped by a backend. Made by `muster.make_vec`.

    Agents stand in fixed slots: group g has A slots, in the order of ``groups[g]``; arrays are ``[N, A, ...]``. An
    agent that is not there is a row of zeros with ``alive`` False; the row of the step in which it ends still
    holds its observation.

    obs: by group, an array or a structure of arrays ``[N, A, ...]``; what all agents observe alike stands once under
    ``obs["shared"]``, ``[N, ...]``.  rewards: float32 ``[N, A]`` by group.
    terminated, truncated: bool ``[N]``, of the whole env: terminated if every agent ended and none was truncated.
    infos: by group, bool ``[N, A]``: ``alive``, the agent's row holds something; ``acting``, the agent's action counts
    in the next step; ``agent_terminated`` and ``agent_truncated``, the agent ended in this step. ``action_mask``
    ``[N, A, n]`` where the env provides masks, or announces them in its spaces, never all False. ``state``
    ``[N, ...]`` and ``_state`` ``[N]``, all True, where the env has a state and `make_vec` was called with
    ``state=True``. ``agent_infos`` by agent: everything else that the env reports.
    With same_step autoreset `obs`, ``alive``, ``acting``, ``action_mask`` and ``state`` are the new episode's;
    ``final_obs`` and ``final_info`` hold those of the old episode in the rows where ``_final_obs`` is True.

    Actions are ``[N, A, ...]`` by group; those of agents that are not acting are ignored. With ``copy=False`` obs,
    ``action_mask`` and ``state`` are views, valid until that env's next send.
    """

    def __init__(self, rows: RowVectorEnv) -> None:
        self._rows = rows
        self._layout = rows.layout
        self._slots = self._layout.slots()
        self._bounds = [(name, slot.start, slot.stop) for name, slot in self._slots.items()]
        self.num_envs = rows.num_envs
        self.metadata = rows.metadata
        self.render_mode = rows.render_mode
        self.single_observation_space = self._layout.observation_space()
        self.single_action_space = self._layout.action_space()

    @property
    def groups(self) -> dict[str, list[Agent]]:
        """The agents of each group, in the order of their slots."""
        return {name: list(agents) for name, agents in self._layout.groups.items()}

    @functools.cached_property
    def observation_space(self) -> spaces.Dict:
        """The space of `obs`: ``[N, A, ...]`` by group."""
        return self._layout.observation_space(self.num_envs)

    @functools.cached_property
    def action_space(self) -> spaces.Dict:
        """The space of actions: ``[N, A, ...]`` by group."""
        return self._layout.action_space(self.num_envs)

    @property
    def state_space(self) -> spaces.Space[Any] | None:
        """The space of one env's ``infos["state"]``; None for envs without a state, or without ``state=True``."""
        return self._layout.state_space

    @property
    def mask_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of one agent's action mask, for the groups that may have masks."""
        return dict(self._layout.mask_shapes)

    # ---- stepping

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[ByGroup, Infos]:
        """Resets all envs, or those in ``options["reset_mask"]`` (bool ``[N]``). See `VectorEnv.reset`."""
        return self._reset_result(lambda: self._rows.reset(seed=seed, options=options))

    def reset_async(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        """Starts `reset`; `reset_wait` or `recv` takes the result."""
        self._rows.reset_async(seed=seed, options=options)

    def reset_wait(self, timeout: float | None = None) -> tuple[ByGroup, Infos]:
        """The result of `reset_async`. Raises WaitTimeout after `timeout` seconds; the reset then stays pending."""
        return self._reset_result(lambda: self._rows.reset_wait(timeout))

    def step(self, actions: Mapping[str, Any]) -> StepResult:
        """Steps every env: obs, rewards, terminated, truncated, infos, as the class describes them.

        actions: ``[N, A, ...]`` by group. Raises ActionError before anything is sent, EnvError, WorkerDied.
        """
        return self.step_with(actions, self.copy)

    def step_with(self, actions: Mapping[str, Any], copies: bool) -> StepResult:
        """Steps as `step` does. copies: True for copies of observations, False for views, whatever `copy` says."""
        return self._step_result(
            lambda: self._sending(lambda acts: self._rows.step_with(acts, copies), actions, None), copies
        )

    def step_async(self, actions: Mapping[str, Any]) -> None:
        """Sends the actions; `step_wait` or `recv` takes the results."""
        self._sending(self._rows.step_async, actions, None)

    def step_wait(self, timeout: float | None = None) -> StepResult:
        """The result of `step_async`. Raises WaitTimeout after `timeout` seconds; the step then stays pending."""
        return self._step_result(lambda: self._rows.step_wait(timeout), self.copy)

    def send(
        self, actions: Mapping[str, Any], env_ids: Sequence[int] | npt.NDArray[np.integer[Any]] | None = None
    ) -> None:
        """Sends actions ``[n, A, ...]`` by group to envs `env_ids`, or to all. See `VectorEnv.send`."""
        self._sending(lambda acts: self._rows.send(acts, env_ids), actions, env_ids)

    def recv(self, min_envs: int | None = None, timeout: float | None = None) -> AgentBatch:
        """The results of the envs that are ready, once at least `min_envs` are. See `VectorEnv.recv`."""
        return self.recv_with(min_envs, timeout, self.copy)

    def recv_with(self, min_envs: int | None, timeout: float | None, copies: bool) -> AgentBatch:
        """Receives as `recv` does. copies: True for copies of observations, False for views, whatever `copy` says."""
        batch = self._converting(lambda: self._rows.recv_with(min_envs, timeout, copies), copies)
        return self._batch(batch, copies)

    # ---- everything else, as VectorEnv

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The results of ``env.name(*args, **kwargs)`` of every env; the attribute's value where it is not callable."""
        return self._rows.call(name, *args, **kwargs)

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Starts `call`; `call_wait` takes the results."""
        self._rows.call_async(name, *args, **kwargs)

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """The results of `call_async`. Raises WaitTimeout after `timeout` seconds; the call then stays pending."""
        return self._rows.call_wait(timeout)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """The attribute `name` of every env, looked up through wrappers."""
        return self._rows.get_attr(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Sets the attribute `name` of every env, to ``values[i]`` where `values` is a list or tuple."""
        self._rows.set_attr(name, values)

    def render(self) -> tuple[Any, ...]:
        """Every env's ``render()``."""
        return self._rows.render()

    def stats(self) -> dict[str, Any]:
        """The time and resources that each worker has used, see `VectorEnv.stats`."""
        return self._rows.stats()

    @property
    def copy(self) -> bool:
        """Whether ``obs``, ``action_mask`` and ``state`` are the caller's own, see `VectorEnv.copy`."""
        return self._rows.copy

    def counts(self) -> tuple[int, int, int]:
        """Env steps, resets and restarts so far, see `VectorEnv.counts`."""
        return self._rows.counts()

    @property
    def episode_returns(self) -> npt.NDArray[np.float64]:
        """float64 ``[N]``: each env's sum of all agents' rewards since its last reset, see `VectorEnv`."""
        return self._rows.episode_returns

    @property
    def episode_lengths(self) -> npt.NDArray[np.int64]:
        """int64 ``[N]``: env steps behind `episode_returns`; of turn-based envs, turns."""
        return self._rows.episode_lengths

    @property
    def closed(self) -> bool:
        """Whether the vector env is closed for good: by `close`, or after an error that says so."""
        return bool(self._rows.closed)

    def close(self, timeout: float = 5.0, terminate: bool = False) -> None:
        """Closes envs and workers, within about `timeout` seconds; `terminate` does not wait for env.close()."""
        self._rows.close(timeout=timeout, terminate=terminate)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._rows.__exit__(kind, error, traceback)

    # ---- inside

    def _reset_result(self, take: Callable[[], Any]) -> tuple[ByGroup, Infos]:
        rows, infos = self._converting(take, self.copy)
        obs, _, infos = self._by_group(rows, infos, None, self.copy)
        return obs, infos

    def _step_result(self, take: Callable[[], Any], copies: bool) -> StepResult:
        rows, _, terminated, truncated, infos = self._converting(take, copies)
        obs, rewards, infos = self._by_group(rows, infos, truncated, copies)
        return obs, rewards, terminated, truncated, infos

    def _batch(self, batch: Batch, copies: bool) -> AgentBatch:
        obs, rewards, infos = self._by_group(batch.obs, batch.infos, batch.truncated, copies)
        return AgentBatch(batch.env_ids, obs, rewards, batch.terminated, batch.truncated, infos)

    def _converting(self, take: Callable[[], Any], copies: bool) -> Any:
        """The result of `take()`; an error's `batch`, the rows of envs that did not fail, becomes an AgentBatch."""
        try:
            return take()
        except (EnvError, CannotTravel) as error:
            if isinstance(error.batch, Batch):
                error.batch = self._batch(error.batch, copies)
            raise

    def _by_group(
        self, rows: Any, infos: Infos, truncated: Bools | None, copies: bool
    ) -> tuple[ByGroup, Rewards, Infos]:
        rewards, flags = rows[REWARDS], rows[FLAGS]
        if not copies:  # only observations are views, as from `VectorEnv`
            rewards, flags = rewards.copy(), flags.copy()
        if infos:
            final = infos.pop(FINAL_ROWS, None)
            if truncated is not None and "_restarted" in infos and (lost := infos["_restarted"] & truncated).any():
                if final is None:
                    rewards, flags = _cut_off(rewards, flags, lost)
                else:
                    final = dict(enumerate(final))
                    final[REWARDS], final[FLAGS] = _cut_off(final[REWARDS], final[FLAGS], lost)
            if final is not None:
                over = infos["_final_obs"]
                rewards = np.where(over[:, None], final[REWARDS], rewards)
                flags = flags.copy()
                flags[over, TERMINATED:] = final[FLAGS][over, TERMINATED:]
                infos["final_obs"] = self._obs(final)
                _, about = self._split(final[REWARDS], final[FLAGS])
                infos["final_info"] |= self._about_agents(final, about)
        by_group, about = self._split(rewards, flags)
        infos |= self._about_agents(rows, about)
        return self._obs(rows), by_group, infos

    def _split(self, rewards: Array, flags: Array) -> tuple[Rewards, Infos]:
        """Rewards by group, and infos with the flags by group."""
        return split_agents(rewards, flags, self._bounds, FLAG_NAMES)

    def _obs(self, rows: Any) -> ByGroup:
        obs = dict(zip(self._slots, rows[OBS], strict=True))
        if rows[SHARED]:
            obs["shared"] = rows[SHARED]
        return obs

    def _about_agents(self, rows: Any, about: Infos) -> Infos:
        """`about`, with the other parts of a row that belong into infos: action masks and the state."""
        if any_true(rows[HAS_MASKS]):
            about["action_mask"] = dict(zip(self._layout.mask_shapes, rows[MASKS], strict=True))
        if self._layout.state_space is not None:
            about["state"], about["_state"] = rows[STATE], np.ones(len(rows[REWARDS]), np.bool_)
        return about

    def _sending(self, send: Callable[[Any], Any], actions: Any, env_ids: Any) -> Any:
        """Sends `actions`; if they are refused, tries again with allowed actions for agents that are not acting."""
        try:
            return send(actions)
        except ActionError:
            ignoring = self._ignoring_idle(actions, env_ids)
            if ignoring is None:
                raise
            return send(ignoring)

    def _ignoring_idle(self, actions: Any, env_ids: Any) -> ByGroup | None:
        """`actions` with allowed values for agents whose actions do not count; None where the actions are no batch."""
        if not isinstance(actions, Mapping) or set(actions) != set(self._slots):
            return None
        flags = self._rows.flags()
        acting = flags[:, ACTING] if env_ids is None else flags[env_ids_of(env_ids, self.num_envs), ACTING]
        try:
            return {
                name: _without_idle(self._layout.action_spaces[name], actions[name], acting[:, slot])
                for name, slot in self._slots.items()
            }
        except (ValueError, TypeError, RuntimeError):  # NumPy and others may raise any of these for arbitrary objects
            return None


def _without_idle(space: spaces.Space[Any], actions: Any, acting: Bools) -> Any:
    """`actions`, ``[n, A, ...]`` of `space`, with allowed values where `acting` ``[n, A]`` is False.

    Raises ActionError where `actions` is no such batch.
    """
    if isinstance(space, spaces.Dict):
        if not isinstance(actions, Mapping) or set(actions) != set(space.spaces):
            raise ActionError("other keys")
        return {key: _without_idle(one, actions[key], acting) for key, one in space.items()}
    if isinstance(space, spaces.Tuple):
        if not isinstance(actions, (tuple, list)):
            raise ActionError("no tuple")
        return tuple(_without_idle(one, part, acting) for one, part in zip(space.spaces, actions, strict=True))
    if not isinstance(space, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        return actions
    actions, shape = np.asarray(actions), space.shape or ()
    if actions.shape != (*acting.shape, *shape) or actions.dtype.kind not in "iub":
        raise ActionError("another shape, or no integers")
    if actions.dtype == np.uint64:  # which together with int64 would become floats
        actions = actions.astype(np.int64)
    allowed = 0 if isinstance(space, spaces.MultiBinary) else space.start
    return np.where(acting.reshape(*acting.shape, *(1 for _ in shape)), actions, allowed)


def _cut_off(rewards: Array, flags: Array, lost: Bools) -> tuple[Array, Array]:
    """Copies of `rewards` and `flags` in which the envs `lost` truncate all agents that were left.

    lost: bool ``[n]``, the envs that were restarted. Their rows repeat the last ones, so their rewards become 0.
    """
    rewards, flags = rewards.copy(), flags.copy()
    left = flags[lost, ALIVE] & ~flags[lost, TERMINATED] & ~flags[lost, TRUNCATED]
    rewards[lost], flags[lost] = 0, False
    flags[lost, ALIVE] = flags[lost, TRUNCATED] = left
    return rewards, flags
