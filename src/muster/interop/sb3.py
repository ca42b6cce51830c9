"""Stable-Baselines3's vector envs on Muster's engine: each a `VecEnv`, for its algorithms, wrappers and callbacks."""

from __future__ import annotations

import os
import reprlib
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode

from muster.arguments import explains_keywords, with_ints
from muster.backends.base import Backend
from muster.errors import ConfigError, WrongType
from muster.extras import imports_for
from muster.hosts.questions import EnvCall
from muster.interop.env_calls import (
    CallMethod,
    OnSome,
    SetAttribute,
    get_named,
    has_attribute,
    is_wrapped,
    of_gymnasium,
)
from muster.interop.starting import (
    FromArguments,
    in_this_process,
    limits_of,
    processes,
    recipes_of,
    require_copies,
    ways_of,
)
from muster.introspection import callable_name, module_name
from muster.pickling import UserCall
from muster.pickling.main_module import MAIN_NAMES
from muster.pickling.walk import Walk
from muster.pool.environment import WorkerEnv
from muster.pool.set_up import WorkerInit
from muster.recipes.recipe import Recipe
from muster.spaces.compare import handed_out
from muster.spaces.tree import Array
from muster.transport.infos import InfoReader, Infos, split
from muster.vector.action_writers import OneByOneWriter
from muster.vector.assemble import LENIENT, assemble
from muster.vector.checks import is_replaced, seeds_of
from muster.vector.packing import Asked
from muster.vector.parts import SteppingOptions, first_envs_spaces
from muster.vector.raisers import originals_raised
from muster.vector.results import StepResult
from muster.vector.vector_env import VectorEnv

with imports_for("muster.interop.sb3 needs", "muster-rl[sb3]", "stable_baselines3"):
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.preprocessing import check_for_nested_spaces
    from stable_baselines3.common.vec_env.base_vec_env import VecEnv

__all__ = ["DummyVecEnv", "MusterVecEnv", "SubprocVecEnv", "as_sb3", "make_vec_env"]

SUBPROC_VEC_ENV = UserCall(
    "SubprocVecEnv", "env_fns", "SubprocVecEnv(env_fns) without num_workers", "DummyVecEnv", 'start_method="{method}"'
)
DUMMY_VEC_ENV = UserCall("DummyVecEnv", "env_fns", "SubprocVecEnv(env_fns)")
MAKE_DUMMY_VEC_ENV = UserCall("make_vec_env", "env_id", "vec_env_cls=SubprocVecEnv", kwargs="env_kwargs")
MAKE_VEC_ENV = replace(
    MAKE_DUMMY_VEC_ENV,
    one_each="vec_env_cls=SubprocVecEnv without num_workers in vec_env_kwargs",
    in_process="DummyVecEnv",
    context='vec_env_kwargs={{"start_method": "{method}"}}',
)

EnvFns = Iterable[Callable[[], gymnasium.Env[Any, Any]]]
Indices = None | int | Iterable[int]
VecStep = tuple[Any, npt.NDArray[Any], npt.NDArray[np.bool_], list[dict[str, Any]]]
_ROWS, _FINALS = "info_rows", "finals_by_env"
_PACKAGE, _WALK_S = "stable_baselines3", 0.1
_WITH_MODULE = (type, types.FunctionType, types.ModuleType)
_PASSED_BY = ("reset", "step", "step_async", "step_wait", "reset_async", "reset_wait")  # of the vector env


class MusterVecEnv(VecEnv):
    """SB3's `VecEnv` around a `muster.VectorEnv` with ``autoreset_mode="same_step"``. Made by `as_sb3`.

    envs: the vector env, which `close` closes.

    >>> import muster
    >>> from muster.interop.sb3 import MusterVecEnv, as_sb3
    >>> envs = as_sb3(muster.make_vec("CartPole-v1", num_envs=2, autoreset_mode="same_step"))
    >>> isinstance(envs, MusterVecEnv), envs.vector_env.num_envs
    (True, 2)
    >>> envs.close()
    """

    def __init__(self, envs: VectorEnv) -> None:
        if not isinstance(envs, VectorEnv) or is_replaced(envs, *_PASSED_BY):
            raise WrongType(
                f"as_sb3 takes a muster.VectorEnv, got {type(envs).__name__}. Write SubprocVecEnv(env_fns), "
                'DummyVecEnv([make_env]), or as_sb3(muster.make_vec(make_env, num_envs, autoreset_mode="same_step")). '
                "A VecEnv of SB3's is used as it is; for several agents use muster.Collector with a policy of muster.nn"
            )
        mode = envs.metadata["autoreset_mode"]
        if mode is not AutoresetMode.SAME_STEP:
            raise ConfigError(
                f'SB3 resets envs in the step that ends their episode, but autoreset_mode is "{mode.name.lower()}"; '
                'make it by muster.make_vec(..., autoreset_mode="same_step"), or SubprocVecEnv(env_fns)'
            )
        require_copies(envs)
        self.vector_env = envs
        self._composes = is_replaced(self, "step_async", "step_wait")
        self._rows = RowReader(envs.info_reader.columns)
        check_for_nested_spaces(envs.single_observation_space)
        seen, acts = handed_out(envs.single_observation_space), handed_out(envs.single_action_space)
        super().__init__(envs.num_envs, seen, acts)

    @property
    def closed(self) -> bool:
        """True once `close` was called."""
        return self.vector_env.closed

    # ---- stepping

    def reset(self) -> Any:
        """Resets all envs with the seeds and options set before; returns obs ``[N, ...]``."""
        seeds, options = list(self._seeds), list(self._options)
        self._reset_seeds()
        self._reset_options()
        self.vector_env.drop_pending()  # results of a step that Ctrl-C has ended
        _start_resets(self.vector_env, seeds, options)
        obs, infos = self.vector_env.reset_wait(_copies=True, _reader=self._rows)
        self.reset_infos = info_rows(infos, self.num_envs)
        return obs

    def step_async(self, actions: Any) -> None:
        """Sends `actions` ``[N, ...]``; `step_wait` takes the results."""
        self.vector_env.step_async(actions)

    def step_wait(self) -> VecStep:
        """Returns obs ``[N, ...]``, rewards ``[N]``, dones bool ``[N]``, and N infos."""
        return self._as_rows(self.vector_env.step_wait(_copies=True, _reader=self._rows))

    def step(self, actions: Any) -> VecStep:
        """Steps all envs by `actions`: `step_async` and `step_wait` in one call."""
        if self._composes:
            return super().step(actions)
        return self._as_rows(self.vector_env.step(actions, _copies=True, _reader=self._rows))

    def close(self) -> None:
        """Closes envs and workers."""
        self.vector_env.close()

    def _as_rows(self, result: StepResult) -> VecStep:
        obs, rewards, terminated, truncated, infos = result
        if not infos:  # then no episode has ended, either
            return obs, rewards, terminated, [{"TimeLimit.truncated": False} for _ in range(self.num_envs)]
        rows = info_rows(infos, self.num_envs)
        for env, (final_obs, final_info) in infos.get(_FINALS, {}).items():
            self.reset_infos[env], rows[env] = rows[env], final_info
            final_info["terminal_observation"] = final_obs
        for row, cut_off in zip(rows, (truncated & ~terminated).tolist(), strict=True):
            row["TimeLimit.truncated"] = cut_off
        return obs, rewards, terminated | truncated, rows

    # ---- the envs themselves

    def has_attr(self, attr_name: str) -> bool:
        """True if every env has the attribute `attr_name`."""
        return all(self._do(partial(has_attribute, name=attr_name), None))

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """The attribute `attr_name` of the envs `indices`, looked up through wrappers; None for all envs."""
        return self._do(partial(get_named, name=attr_name), indices)

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Sets the attribute `attr_name` of the envs `indices` to `value`, on their outermost wrapper."""
        self._do(SetAttribute(attr_name, value), indices)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        """The results of ``env.method_name(*method_args, **method_kwargs)`` of the envs `indices`."""
        return self._do(CallMethod(method_name, method_args, method_kwargs), indices)

    def env_is_wrapped(self, wrapper_class: type, indices: Indices = None) -> list[bool]:
        """For each of the envs `indices` True if it has a wrapper of the class `wrapper_class`."""
        return self._do(partial(is_wrapped, wrapper=wrapper_class), indices)

    def get_images(self) -> Sequence[npt.NDArray[Any] | None]:
        """Images of all envs; None for each, with a warning, where the render mode is not ``rgb_array``."""
        if self.render_mode != "rgb_array":
            warnings.warn(
                f"The render mode is {self.render_mode}, but this method assumes it is `rgb_array` to obtain images.",
                stacklevel=2,
            )
            return [None] * self.num_envs
        return self._do(CallMethod("render"), None)

    def _do(self, act: EnvCall, indices: Indices) -> list[Any]:
        wanted = [range(self.num_envs)[i] for i in self._get_indices(with_ints(indices))]
        results = self.vector_env.call(act if len(wanted) == self.num_envs else OnSome(frozenset(wanted), act))
        return [results[i] for i in wanted]


def _start_resets(envs: VectorEnv, seeds: list[int | None], options: list[dict[str, Any]]) -> None:
    """Starts resetting every env with its own seed and options."""
    if not any(options):
        envs.reset_async(seed=seeds)
        return
    envs.require_idle("reset")
    for env, one in enumerate(options):
        envs.reset_some(np.array([env]), seeds[env : env + 1], one, passes_options=bool(one))


class _Envs(VectorEnv):
    """A vector env that takes envs without `options` in ``reset``, as SB3's own do and Muster's do not."""

    def __init__(self, backend: Backend, max_restarts: int | None = None, *, ignores_surplus: bool = False) -> None:
        writer = partial(OneByOneWriter, ignores_surplus=ignores_surplus)
        parts = replace(LENIENT, spaces=first_envs_spaces, writer=writer)
        options = SteppingOptions(AutoresetMode.SAME_STEP, max_restarts=max_restarts)
        super().__init__(assemble(backend, parts, options))

    def reset_async(
        self, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        """Starts `reset`; the envs' own ``reset`` receives `options` only where there are any."""
        if options:
            super().reset_async(seed=seed, options=options)
            return
        self.require_idle("reset")
        self.reset_some(ids := np.arange(self.num_envs), seeds_of(seed, ids), None, passes_options=False)


class DummyVecEnv(MusterVecEnv):
    """Steps all envs in the calling thread, one after the other. Arguments are those of SB3's class, and:

    worker_init: as for `SubprocVecEnv`; a function is called here, once.

    >>> import gymnasium
    >>> from muster.interop.sb3 import DummyVecEnv
    >>> envs = DummyVecEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
    >>> envs.reset().shape
    (2, 4)
    >>> envs.close()
    """

    def __init__(self, env_fns: EnvFns, *, worker_init: WorkerInit = None) -> None:
        backend = in_this_process(recipes_of(env_fns, DUMMY_VEC_ENV, (of_gymnasium,), may_reuse=True), worker_init)
        with originals_raised():
            envs = _Envs(backend, ignores_surplus=True)
        self.envs = backend.envs
        if len({id(env.unwrapped) for env in self.envs}) != len(self.envs):
            raise ConfigError(
                "Several env_fns returned the same env. Each must build a new one: not `lambda: env`, but a function "
                "that calls the constructor or gymnasium.make."
            )
        super().__init__(envs)
        self.metadata = self.envs[0].metadata

    def step_async(self, actions: Any) -> None:
        """Keeps `actions` ``[N, ...]`` for `step_wait`, which steps the envs."""
        self.actions = actions

    def step_wait(self) -> VecStep:
        """Steps all envs by what `step_async` has kept. Returns obs, rewards, dones and infos, as `step` does."""
        return self._as_rows(self.vector_env.step(self.actions, _copies=True, _reader=self._rows))

    has_attr = VecEnv.has_attr  # which asks `get_attr`, as SB3's class does

    def _as_rows(self, result: StepResult) -> VecStep:
        obs, rewards, dones, rows = MusterVecEnv._as_rows(self, result)
        return obs, rewards.astype(np.float32), dones, rows


class SubprocVecEnv(MusterVecEnv):
    """Steps the envs in worker processes. Arguments are those of SB3's class, and:

    start_method: "forkserver", "spawn" or "fork"; None starts fresh processes that never fork the caller.
    num_workers: None for one process per env, as in SB3; a number for so many processes that share the envs, which is
        for envs that share nothing; "auto" for one per usable core where a trial has shown that, as `muster.make_vec`.
    worker_env: environment variables of the workers, as for `muster.make_vec`.
    worker_init: a function that each worker calls before its first env, or "script", as for `muster.make_vec`. None is
        "script" where the script has a main guard and its top level calls something, or assigns into an attribute or an
        item: workers of SB3's class run it, too.
    on_failure, max_restarts, step_timeout: as for `muster.make_vec`: what raised, died or hung is an error, or with
        "restart" is replaced, and its episode ends truncated.
    max_concurrent_starts: how many workers build their envs at the same time, as for `muster.make_vec`.

    `close` waits for a pending step, and for the envs to close, as long as these take, as SB3's does. After 5 s a line
    says which envs are still closing; Ctrl-C ends the wait.

    >>> import gymnasium
    >>> from muster.interop.sb3 import SubprocVecEnv
    >>> envs = SubprocVecEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
    >>> obs = envs.reset()
    >>> obs, rewards, dones, infos = envs.step([0, 1])
    >>> rewards, infos[0]
    (array([1., 1.]), {'TimeLimit.truncated': False})
    >>> envs.close()
    """

    def __init__(
        self,
        env_fns: EnvFns,
        start_method: str | None = None,
        *,
        num_workers: Asked = None,
        worker_env: WorkerEnv | None = None,
        worker_init: WorkerInit = None,
        on_failure: str = "raise",
        max_restarts: int = 10,
        max_concurrent_starts: int | None = None,
        step_timeout: float | None = None,
    ) -> None:
        recipes = recipes_of(env_fns, SUBPROC_VEC_ENV, (of_gymnasium,))
        with originals_raised():
            preloads = (_PACKAGE,) if start_method in (None, "forkserver") and _refer_to_sb3(recipes) else ()
            ways = ways_of(start_method, 1, worker_env, worker_init, preloads=preloads)
            limits = limits_of(on_failure, max_restarts, step_timeout, max_concurrent_starts)
            super().__init__(_Envs(processes(recipes, ways, limits, num_workers), limits.restarts))


def _refer_to_sb3(recipes: Iterable[Recipe]) -> bool:
    """True if workers import SB3, and with it PyTorch, for their objects or for the modules of these."""
    parts = {str(one.env_index): (one.factory, one.kwargs) for one in recipes}
    modules = {_module_of(value) for value in Walk(parts, limit_s=_WALK_S)}
    found = (sys.modules.get(name) for name in modules.difference(MAIN_NAMES))  # of the script, only what is used
    named = (value for module in found if type(module) is types.ModuleType for value in [*vars(module).values()])
    modules |= {_module_of(value) for value in named if issubclass(type(value), _WITH_MODULE)}
    return any(name.partition(".")[0] == _PACKAGE for name in modules)


def _module_of(value: Any) -> str:
    if type(value) is types.ModuleType:
        return str(vars(value).get("__name__"))
    return str(module_name(value if issubclass(type(value), _WITH_MODULE) else type(value)))


def as_sb3(envs: VectorEnv) -> MusterVecEnv:
    """A vector env as an SB3 `VecEnv`.

    envs: a `muster.VectorEnv`, made with ``autoreset_mode="same_step"``.

    Raises ConfigError for another mode, and WrongType, which says what to write, for anything else.

    >>> import muster
    >>> from muster.interop.sb3 import as_sb3
    >>> envs = as_sb3(muster.make_vec("CartPole-v1", num_envs=2, autoreset_mode="same_step"))
    >>> envs.reset().shape
    (2, 4)
    >>> envs.close()
    """
    return MusterVecEnv(envs)


@explains_keywords()
def make_vec_env(
    env_id: str | Callable[..., gymnasium.Env[Any, Any]],
    n_envs: int = 1,
    seed: int | None = None,
    start_index: int = 0,
    monitor_dir: str | None = None,
    wrapper_class: Callable[..., gymnasium.Env[Any, Any]] | None = None,
    env_kwargs: dict[str, Any] | None = None,
    vec_env_cls: Callable[..., VecEnv] | None = None,
    vec_env_kwargs: dict[str, Any] | None = None,
    monitor_kwargs: dict[str, Any] | None = None,
    wrapper_kwargs: dict[str, Any] | None = None,
) -> VecEnv:
    """Monitored envs in one `VecEnv`, by default a `DummyVecEnv`; the arguments are those of SB3's function.

    Values in `env_kwargs`, `monitor_kwargs` and `wrapper_kwargs` may be `muster.lazy`: each is built where its env is,
    and released with it, also where `vec_env_cls` is a class of SB3's. Raises WrongType for an env that exists already.

    >>> from muster.interop.sb3 import SubprocVecEnv, make_vec_env
    >>> envs = make_vec_env("CartPole-v1", n_envs=2, seed=0, vec_env_cls=SubprocVecEnv)
    >>> envs.reset().shape
    (2, 4)
    >>> envs.close()
    """
    if not isinstance(env_id, str) and not callable(env_id):
        raise WrongType(
            f"make_vec_env takes an env id, a class or a function that builds an env, got {reprlib.repr(env_id)}. "
            "Every env is built where it runs"
        )
    cls = vec_env_cls or DummyVecEnv
    call = MAKE_DUMMY_VEC_ENV if isinstance(cls, type) and issubclass(cls, DummyVecEnv) else MAKE_VEC_ENV
    fns = [
        FromArguments(
            _monitored,
            {
                "env_id": env_id,
                "action_seed": None if seed is None else with_ints(seed + rank),
                "monitor_path": None if monitor_dir is None else os.path.join(monitor_dir, str(rank)),
                "monitor_kwargs": dict(monitor_kwargs or {}),
                "wrapper_class": wrapper_class,
                "wrapper_kwargs": dict(wrapper_kwargs or {}),
                "env_kwargs": dict(env_kwargs or {}),
            },
            env_id if isinstance(env_id, str) else callable_name(env_id),
            (call.factory, ""),
            call,
            rank - start_index,
            n_envs,
        )
        for rank in range(start_index, start_index + n_envs)
    ]
    vec_env = cls(fns, **(vec_env_kwargs or {}))
    vec_env.seed(seed)
    return vec_env


def _monitored(
    env_id: str | Callable[..., Any],
    action_seed: int | None,
    monitor_path: str | None,
    monitor_kwargs: dict[str, Any],
    wrapper_class: Callable[..., Any] | None,
    wrapper_kwargs: dict[str, Any],
    env_kwargs: dict[str, Any],
) -> Any:
    """Builds one env of `make_vec_env`, in the process that will step it."""
    if not isinstance(env_id, str):
        env = of_gymnasium(env_id(**env_kwargs))
    else:
        try:
            env = gymnasium.make(env_id, **{"render_mode": "rgb_array", **env_kwargs})
        except TypeError:  # an env without render modes
            env = gymnasium.make(env_id, **env_kwargs)
    if action_seed is not None:
        env.action_space.seed(action_seed)
    if monitor_path is not None:
        os.makedirs(os.path.dirname(monitor_path), exist_ok=True)
    env = Monitor(env, filename=monitor_path, **monitor_kwargs)
    return env if wrapper_class is None else wrapper_class(env, **wrapper_kwargs)


class RowReader(InfoReader):
    """Reads infos as one dict for each env, which the values of other envs cannot change; all types stay.

    `info_rows` returns the dicts; those of steps that ended an episode are under `_FINALS`, each with its observation.
    """

    in_core = False

    def read_plain(self, ids: Array) -> Infos | None:
        plan = self.columns.plan_for(ids)
        if plan.columns is None:
            return None
        rows: list[Infos] = [{} for _ in range(len(ids))]
        with_infos = np.flatnonzero(plan.provided).tolist()
        for (key, _, column), kind in zip(plan.columns, plan.kinds, strict=True):
            values = split(column[ids], kind)
            for row in with_infos:
                rows[row][key] = values[row]
        return {_ROWS: rows}

    def read(self, ids: Array, objects: Sequence[Iterator[Any]]) -> Infos:
        plain = self.read_plain(ids)
        return plain or {_ROWS: [self.last(env, rest) for env, rest in zip(ids.tolist(), objects, strict=True)]}

    def add(self, infos: Infos, info: Infos, row: int, count: int) -> None:
        infos.setdefault(_ROWS, [{} for _ in range(count)])[row] |= info
        if row in (finals := infos.get(_FINALS, {})):
            finals[row][1].update(info)

    def add_final(self, infos: Infos, obs: Any, info: Infos, row: int, count: int) -> None:
        infos.setdefault(_FINALS, {})[row] = obs, info


def info_rows(infos: Infos, num_envs: int) -> list[Infos]:
    """One info for each env, with the keys that the env itself provided. infos: as `RowReader` reads them."""
    rows: list[Infos] | None = infos.get(_ROWS)
    return [{} for _ in range(num_envs)] if rows is None else rows
