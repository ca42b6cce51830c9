"""Recipes: the arguments of ``make_vec``, turned into one instruction per env that can be carried out anywhere."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import pickle
import reprlib
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium as gym

from muster.arguments import whole
from muster.errors import ConfigError, RecipeError
from muster.introspection import callable_name, place_of
from muster.lazy_values import LazyValues
from muster.pickling import MAKE_VEC, UserCall, current_call, dumps, find_shared, not_rebuilt, takes
from muster.pickling.main_module import Init, run_once
from muster.pickling.shared_pickling import receiving
from muster.pickling.travel import Unpickler
from muster.recipes.existing_env import LiveEnvs
from muster.recipes.gymnasium_ids import ForeignResolver, MakeGym, pack_registrations, register_packed
from muster.recipes.sources import Source, check_call, factory_example, sources_of

_RELEASE_AFTER_ERROR_S = 5.0
_live_envs = LiveEnvs()


@dataclass(frozen=True, eq=False)
class Recipe:
    """The instruction for building one env. Immutable; can be sent to another process if its parts can.

    name: for messages, ``"CartPole-v1"`` or ``"my_module.make_env"``.
    factory: called with ``kwargs``, in which lazy values are built first; ``wrappers`` are applied in order.
    labels: the names of factory and kwargs in the user's call, for messages. Where the second is empty, the keys of
    ``kwargs`` are arguments of that call.
    may_reuse: whether the factory may return an env that is in use already, as some other libraries' vector envs allow.
    call: the user's call that the recipe comes from, in words.
    permits: held while an env executes; None where any number of envs may do so at once.
    """

    env_index: int
    name: str
    factory: Callable[..., Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    wrappers: tuple[Callable[[Any], Any], ...] = ()
    labels: tuple[str, str] = ("factory", "env_kwargs")
    may_reuse: bool = False
    call: UserCall = MAKE_VEC
    permits: AbstractContextManager[Any] | None = None

    @property
    def opens_window(self) -> bool:
        """True where the env shows itself to people: several in a process may disturb each other's windows."""
        of_spec = getattr(self.factory.target, "kwargs", {}) if type(self.factory) is MakeGym else {}
        return bool({**of_spec, **self.kwargs}.get("render_mode") == "human")

    def build(self) -> BuiltEnv:
        """Builds the env in this process.

        Raises RecipeError if the result is no new env. Exceptions of the factory, a wrapper or a lazy value pass
        through, after the lazy values built so far are released.
        """
        values = LazyValues()
        try:
            factory, kwargs = self.factory, values.resolve_arguments(self.kwargs, self.labels[1])
            if type(factory) is MakeGym:
                factory = values.resolve(factory.as_partial(), self.labels[0])
            elif type(factory) is functools.partial:
                factory = values.resolve(factory, self.labels[0])
            made = self._checked(factory(**kwargs), f"{self.labels[0]} {self.name}")
            if not self.may_reuse and not _live_envs.add(made):
                raise RecipeError(
                    f"{self.labels[0]} {self.name} returned the same {type(made).__name__} twice: for env "
                    f"{self.env_index} it gave one that is in use already. It must build a new env whenever it is "
                    f"called:\n{factory_example('MyEnv(...)')}"
                )
            return BuiltEnv(self._wrapped(made, values), made, values)
        except BaseException:
            values.release(_RELEASE_AFTER_ERROR_S)
            raise

    def parts(self) -> dict[str, Any]:
        """The objects that have to travel, by their names in messages."""
        factory, kwargs = self.labels
        named: dict[str, Any] = {}
        if type(self.factory) is MakeGym:
            named = {factory: self.factory.target, f"{factory}.wrappers": self.factory.late_wrappers}
        elif kwargs:  # else it is a function of Muster's
            named = {factory: self.factory}
        for key, value in self.kwargs.items():
            if kwargs or type(value) is not dict:
                named[place_of(kwargs, key)] = value
            else:
                named |= {place_of(key, inner): one for inner, one in value.items()}
        return named | {f"wrappers[{i}]": wrapper for i, wrapper in enumerate(self.wrappers)}

    def _wrapped(self, made: Any, values: LazyValues) -> Any:
        env = made
        try:
            for i, wrapper in enumerate(self.wrappers):
                if type(wrapper) is functools.partial:
                    wrapper = values.resolve(wrapper, f"wrappers[{i}]")
                env = self._checked(wrapper(env), f"wrapper {callable_name(wrapper)}")
        except BaseException:
            _live_envs.discard(made)
            with contextlib.suppress(Exception):  # the wrapper's own error is the one to report
                closing = made.close()
                if inspect.iscoroutine(closing):
                    closing.close()  # nobody awaits it
            raise
        return env

    def _checked(self, env: Any, source: str) -> Any:
        if env is None:
            raise RecipeError(f"Env {self.env_index}: {source} returned None. Is a `return` missing?")
        if isinstance(env, (type, gym.vector.VectorEnv)):
            raise RecipeError(f"Env {self.env_index}: {source} returned {env!r}; expected one env.")
        return env


class BuiltEnv:
    """An env and the lazy values that live as long as it does."""

    def __init__(self, env: Any, made: Any, values: LazyValues) -> None:
        self.env = env
        self.values = values
        self._made = made  # what the factory returned, before the wrappers

    def release(self, timeout_s: float) -> None:
        """Releases the env's lazy values within ``timeout_s`` seconds, after the env was closed. Never raises."""
        _live_envs.discard(self._made)
        self.values.release(timeout_s)


def make_recipes(
    env: Any,
    num_envs: int | None = None,
    env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    wrappers: Sequence[Callable[[Any], Any]] | None = (),
    *,
    resolve_foreign_id: ForeignResolver | None = None,
) -> list[Recipe]:
    """One Recipe per env, for every form of ``make_vec``'s arguments. No env is built.

    resolve_foreign_id: returns the factory of a ``pettingzoo/...`` or ``meltingpot/...`` id; None refuses such ids.
    Raises RecipeError for arguments that do not describe a new env, ConfigError for numbers that do not fit together,
    and Gymnasium's own errors for ids that Gymnasium does not know.
    """
    several = isinstance(env, (list, tuple))
    forms = list(env) if several else [env]
    if several and not forms:
        raise ConfigError("env is an empty list: give one id, EnvSpec or factory per env.")
    sources = sources_of(forms, several, resolve_foreign_id)
    count = _count_envs(sources, several, num_envs)
    kwargs_list = _kwargs_per_env(env_kwargs, count)
    wrappers = () if wrappers is None else wrappers
    if not isinstance(wrappers, (list, tuple)):
        raise RecipeError(f"wrappers must be a list of callables that take an env and return one, got {wrappers!r}.")
    for i, wrapper in enumerate(wrappers):
        if not callable(wrapper):
            raise RecipeError(f"wrappers[{i}] must be a callable that takes an env and returns one, got {wrapper!r}.")
    call = current_call()
    kwargs_label = f"{call.kwargs}[{{}}]" if isinstance(env_kwargs, (list, tuple)) else call.kwargs
    recipes = []
    for i in range(count):
        source = sources[i] if several else sources[0]
        check_call(source, kwargs_list[i])
        all_wrappers, labels = source.wrappers + tuple(wrappers), (source.label, kwargs_label.format(i))
        recipe = Recipe(i, source.name, source.factory, kwargs_list[i], all_wrappers, labels, call=call)
        if (made := source.function) is not None:
            recipe = replace(recipe, kwargs=made.arguments, labels=made.labels, call=made.words(call))
        recipes.append(recipe)
    return recipes


def pack(
    recipes: Sequence[Recipe],
    *,
    start_method: str,
    big: list[pickle.PickleBuffer] | None = None,
    fds: list[int] | None = None,
    init: Init | None = None,
) -> bytes:
    """The recipes as bytes for another process; functions and classes of ``__main__``, and of other modules that only
    this process knows, travel by value.

    The ids that are registered here travel too, for factories that call ``gymnasium.make``. Returns in under 5 s even
    if an object hangs while it is pickled. big: receives the memory of big arrays, fds the file descriptors of what
    multiprocessing shares; `unpack` then needs both. Without `fds` such objects cannot travel.
    init: a function that is called there before the recipes are rebuilt.
    Warns about objects that arrive as something else (an open file) or are huge. Raises CannotTravel.
    """
    inner: list[pickle.PickleBuffer] = []
    parts, call = _parts_of(recipes, init), recipes[0].call
    before = () if init is None else (init,)
    apart = None if big is None else inner
    packed = dumps(
        list(recipes), parts, start_method=start_method, big=apart, fds=fds, before=before, lays_main=True, call=call
    )
    content = (pack_registrations(), call, pickle.PickleBuffer(packed), init is not None)
    if big is None:
        return pickle.dumps(content, protocol=5)
    whole = pickle.dumps(content, protocol=5, buffer_callback=lambda buffer: not takes(buffer, big))
    big += inner
    return whole


def unpack(
    data: bytes, big: Iterable[Any] = (), fds: Sequence[int] = (), run: Callable[[Init], None] = run_once
) -> list[Recipe]:
    """The recipes that ``pack`` packed. big, fds: what ``pack`` took out, if any, in the same order.

    run: calls the `init` that was packed with them. Raises what it raises, and CannotTravel where something cannot be
    rebuilt here.
    """
    buffers = iter(big)
    registrations, call, packed, has_init = pickle.loads(data, buffers=buffers)
    registered = register_packed(registrations)
    load = Unpickler(io.BytesIO(packed), buffers=buffers).load
    if has_init:
        run(_loaded(load, fds, "worker_init", "What it needs has to be importable in the worker."))
    instead = f"Build it in the worker instead:\n{textwrap.indent(call.lazily(), ' ' * 6)}"
    recipes: list[Recipe] = _loaded(load, fds, f"a part of {call.sent()}", instead)
    # Again: what the caller registered last counts, not what a module has registered that was imported just now.
    gym.registry.update({spec.id: spec for spec in registered})
    return recipes


def _loaded(load: Callable[[], Any], fds: Sequence[int], what: str, instead: str) -> Any:
    try:
        with receiving(fds):
            return load()
    except Exception as error:
        raise not_rebuilt(f"{what} was sent to the worker, but", error, instead) from error


def shared_by(recipes: Sequence[Recipe], init: Init | None = None, *, by_fork: bool) -> str:
    """The objects that running envs share with this process, in words, see `find_shared`; "" for none."""
    return find_shared(_parts_of(recipes, init), by_fork=by_fork)


def _parts_of(recipes: Sequence[Recipe], init: Init | None) -> dict[str, Any]:
    own = {} if init is None else {"worker_init": init}
    return own | {name: part for recipe in recipes for name, part in recipe.parts().items()}


def _count_envs(sources: Sequence[Source], several: bool, num_envs: int | None) -> int:
    if num_envs is None:
        return len(sources) if several else sources[0].num_envs or 1
    count = whole("num_envs", num_envs, 1)
    if several and count != len(sources):
        raise ConfigError(
            f"num_envs={count}, but env is a list of {len(sources)}; leave num_envs out, or make them equal."
        )
    return count


def _kwargs_per_env(env_kwargs: Any, count: int) -> list[Mapping[str, Any]]:
    if env_kwargs is None:
        return [{}] * count
    per_env = list(env_kwargs) if isinstance(env_kwargs, (list, tuple)) else [env_kwargs] * count
    if len(per_env) != count:
        raise ConfigError(
            f"env_kwargs is a list of {len(per_env)} dicts for {count} envs; give one dict per env, or one dict."
        )
    for i, kwargs in enumerate(per_env):
        if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
            raise ConfigError(
                f"env_kwargs must be a dict of keyword arguments (or a list of {count} of them), got "
                f"{type(kwargs).__name__} for env {i}: {reprlib.repr(kwargs)}"
            )
    return [dict(kwargs) for kwargs in per_env]
