"""`MultiAgentVectorEnv`: N envs of many agents behind the methods of `VectorEnv`, with agents batched by group."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from muster.envs.groups import Agent
from muster.spaces.compare import handed_out
from muster.transport.infos import Infos
from muster.vector.agent_rows import RowVectorEnv
from muster.vector.results import AgentBatch, AgentsStepResult, ByGroup


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
    ``state=True``. ``discount``, float64, and ``_discount`` ``[N]`` where the discounts of a dm_env env of several
    players are not what the ends of its agents say. ``agent_infos`` by agent: everything else that the env reports.
    With same_step autoreset `obs`, ``alive``, ``acting``, ``action_mask`` and ``state`` are the new episode's;
    ``final_obs`` and ``final_info`` hold those of the old episode in the rows where ``_final_obs`` is True.

    Actions are ``[N, A, ...]`` by group; those of agents that are not acting are ignored. With ``copy=False`` obs,
    ``action_mask`` and ``state`` are views, valid until that env's next send.
    """

    def __init__(self, rows: RowVectorEnv) -> None:
        self._rows = rows
        self._layout = rows.layout
        self.num_envs = rows.num_envs
        self.metadata = rows.metadata
        self.render_mode = rows.render_mode
        self.single_observation_space = handed_out(self._layout.observation_space())
        self.single_action_space = handed_out(self._layout.action_space())

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
        return self._rows.reset(seed=seed, options=options)

    def reset_async(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        """Starts `reset`; `reset_wait` or `recv` takes the result."""
        self._rows.reset_async(seed=seed, options=options)

    def reset_wait(self, timeout: float | None = None) -> tuple[ByGroup, Infos]:
        """The result of `reset_async`. Raises WaitTimeout after `timeout` seconds; the reset then stays pending."""
        return self._rows.reset_wait(timeout)

    def step(self, actions: Mapping[str, Any], *, _copies: bool | None = None) -> AgentsStepResult:
        """Steps every env: obs, rewards, terminated, truncated, infos, as the class describes them.

        actions: ``[N, A, ...]`` by group. Raises ActionError before anything is sent, EnvError, WorkerDied.
        """
        return self._rows.step(actions, _copies=_copies)  # type: ignore[return-value]  # rewards are by group

    def step_async(self, actions: Mapping[str, Any]) -> None:
        """Sends the actions; `step_wait` or `recv` takes the results."""
        self._rows.step_async(actions)

    def step_wait(self, timeout: float | None = None) -> AgentsStepResult:
        """The result of `step_async`. Raises WaitTimeout after `timeout` seconds; the step then stays pending."""
        return self._rows.step_wait(timeout)  # type: ignore[return-value]  # likewise

    def send(
        self, actions: Mapping[str, Any], env_ids: Sequence[int] | npt.NDArray[np.integer[Any]] | None = None
    ) -> None:
        """Sends actions ``[n, A, ...]`` by group to envs `env_ids`, or to all. See `VectorEnv.send`."""
        self._rows.send(actions, env_ids)

    def recv(
        self, min_envs: int | None = None, timeout: float | None = None, *, _copies: bool | None = None
    ) -> AgentBatch:
        """The results of the envs that are ready, once at least `min_envs` are. See `VectorEnv.recv`."""
        batch: AgentBatch = self._rows.recv(min_envs, timeout, _copies=_copies)
        return batch

    def drop_pending(self) -> None:
        """Waits for every answer that envs still owe, and drops it: for front ends whose users cannot take it."""
        self._rows.drop_pending()

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

    def close(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Closes envs and workers, see `VectorEnv.close_extras`."""
        self._rows.close(timeout=timeout, terminate=terminate)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._rows.__exit__(kind, error, traceback)
