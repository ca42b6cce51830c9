"""The forms that ``make_vec``'s env argument may take, each turned into a factory; other objects are refused."""

from __future__ import annotations

import contextlib
import inspect
import reprlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec, WrapperSpec

from muster.errors import RecipeError
from muster.introspection import callable_name, caller_stacklevel, module_name, type_name
from muster.lazy_values import Lazy
from muster.pickling import UserCall, find_culprits
from muster.recipes.existing_env import find_existing_env, is_env
from muster.recipes.gymnasium_ids import ForeignResolver, MakeGym, factory_of_id, factory_of_spec, noted_by_make_vec
from muster.recipes.named import env_named


@dataclass(frozen=True)
class EnvFunction:
    """A function that a drop-in hands to a vector env class, and that builds an env by ``build(**arguments)``.

    name: of the env, for messages.  labels: as for `Recipe`.  call: the user's call that has made this function.
    env_index: of the `num_envs` that the call asks for.
    """

    build: Callable[..., Any]
    arguments: Mapping[str, Any]
    name: str
    labels: tuple[str, str]
    call: UserCall
    env_index: int
    num_envs: int

    def words(self, outer: UserCall) -> UserCall:
        """The words for an env of this function in `outer`: what builds it is said as in the call that has made it."""
        return replace(outer, name=self.call.name, factory=self.call.factory, kwargs=self.call.kwargs)


@dataclass(frozen=True)
class Source:
    """One element of ``make_vec``'s env argument: its factory, and its name in messages.

    function: the element, where another front end has made it; the factory takes its arguments and no others.
    """

    factory: Callable[..., Any]
    name: str
    label: str
    num_envs: int | None = None
    wrappers: tuple[Callable[[Any], Any], ...] = ()
    function: EnvFunction | None = None


def sources_of(forms: Sequence[Any], several: bool, resolve_foreign_id: ForeignResolver | None) -> list[Source]:
    """The source of each form; a form that is in the list many times (``[make_env] * 64``) is examined once."""
    known: dict[int, Source] = {}
    sources = []
    for i, form in enumerate(forms):
        if id(form) not in known:
            known[id(form)] = _understand(form, f"env[{i}]" if several else "", resolve_foreign_id)
        sources.append(known[id(form)])
    return sources


def _understand(form: Any, label: str, resolve_foreign_id: ForeignResolver | None) -> Source:
    if isinstance(form, str):
        written, form = form, _named(form)
        if isinstance(form, str):
            return Source(factory_of_id(written, resolve_foreign_id), written, label or "env")
    if isinstance(form, EnvFunction):
        return Source(form.build, form.name, label or "factory", function=form)
    if is_env(form):
        form = _spec_of_instance(form, label or "env")
    if isinstance(form, EnvSpec):
        return Source(factory_of_spec(form), form.id, label or "env", *noted_by_make_vec(form))
    if not callable(form) or type(form) is Lazy:
        raise RecipeError(
            f"{label or 'env'} must be an env id, a gymnasium EnvSpec or a callable that builds an env, or a list of "
            f"these; got {type(form).__name__}: {reprlib.repr(form)}{_makers_in(form)}"
        )
    existing = find_existing_env(form, label or "factory")
    if existing is not None:
        path, env = existing
        raise RecipeError(
            f"{label or 'factory'} {callable_name(form)} holds an env that exists already: {path} is a "
            f"{type_name(env)}. Every env must be built where it runs; build it in the factory:\n"
            f"{factory_example(constructor_of(env))}{_why_it_stays(env, path)}"
        )
    return Source(form, callable_name(form), label or "factory")


def _named(written: str) -> Any:
    """The object that ``module:name`` or ``file.py:name`` names, or the id: that of Gymnasium comes first."""
    env_id = written.rpartition(":")[2]
    try:
        found = written if env_id in gym.registry else env_named(written)
    except RecipeError:
        if env_id not in gym.registry:  # the module, which is imported now, has not registered it
            raise
    return written if env_id in gym.registry else found


def _makers_in(form: Any) -> str:
    """The end of the message for a module of PettingZoo's kind: what to pass instead of the module."""
    if not inspect.ismodule(form):
        return ""
    names = [name for name in ("parallel_env", "env") if callable(getattr(form, name, None))]
    module = form.__name__.rpartition(".")[2]
    return f". Hand over what it builds envs with: {' or '.join(f'{module}.{name}' for name in names)}" if names else ""


def _spec_of_instance(env: Any, label: str) -> EnvSpec:
    """The spec of an existing env that was passed itself; warns about it. Raises RecipeError if the spec is no use."""
    spec, lost = spec_of(env)
    if spec is None or lost is not None:
        reason = "carries no spec that it could be rebuilt from"
        if lost is not None:
            reason = f"its wrapper {lost.name} did not record its arguments (gymnasium.utils.RecordConstructorArgs)"
        raise RecipeError(
            f"{label} is an env that exists already ({type_name(env)}), and {reason}. Every env is built where it "
            f"runs; hand over a factory instead:\n{factory_example(constructor_of(env))}"
            f"{_why_it_stays(env, label)}"
        )
    warnings.warn(
        f"{label} is an env that exists already ({type_name(env)}). New ones are made from its spec {spec.id!r}; "
        f"the one given is not used. To be rid of this warning pass the id, the spec or a factory.",
        UserWarning,
        stacklevel=caller_stacklevel(),
    )
    return spec


def spec_of(env: Any) -> tuple[EnvSpec | None, WrapperSpec | None]:
    """The spec of an env, if that makes envs, and the first wrapper that it cannot rebuild, as it lacks arguments."""
    spec = None
    if isinstance(env, gym.Env):
        with contextlib.suppress(Exception):  # a property of a user's class may raise anything
            spec = env.spec
    if not isinstance(spec, EnvSpec) or spec.entry_point is None:
        return None, None
    return spec, next((wrapper for wrapper in spec.additional_wrappers if wrapper.kwargs is None), None)


def check_call(source: Source, kwargs: Mapping[str, Any]) -> None:
    """Raises RecipeError if the factory's signature does not accept ``kwargs``: in the caller, before workers start."""
    if source.function is not None:
        if kwargs:
            maker = source.function.call.name
            raise RecipeError(
                f"{source.label} {source.name} comes from {maker} with all its arguments, and takes no env_kwargs; got "
                f"{sorted(kwargs)}. Pass them to {maker}."
            )
        return
    if type(source.factory) is MakeGym:
        return
    try:
        # Not the signature of the wrapped function: a decorator may add arguments that this function requires.
        signature = inspect.signature(source.factory, follow_wrapped=False)
    except (TypeError, ValueError):  # builtins without one
        return
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        passed = f"with env_kwargs {sorted(kwargs)}" if kwargs else "without arguments"
        raise RecipeError(
            f"{source.label} {source.name}{signature} cannot be called {passed}: {error}. Pass what it needs in "
            "env_kwargs (a dict, or a list with a dict per env); muster.get_worker_info().env_index tells envs apart."
        ) from None


def constructor_of(env: Any) -> str:
    """The code that builds an env like `env`, with its wrappers except those that ``gymnasium.make`` adds."""
    wrappers = []
    while isinstance(env, gym.Wrapper):
        if type(env).__module__ != "gymnasium.wrappers.common":
            wrappers.append(type(env).__name__)
        env = env.env
    if (built := _built_by_a_module(env)) is not None:
        return built
    spec = vars(env).get("spec") if hasattr(env, "__dict__") else None
    code = f'gymnasium.make("{spec.id}")' if isinstance(spec, EnvSpec) else f"{type(env).__name__}(...)"
    for wrapper in reversed(wrappers):
        code = f"{wrapper}({code}, ...)"
    return code


def _built_by_a_module(env: Any) -> str | None:
    """The code for an env of PettingZoo or Melting Pot: their classes are not called directly. None for other envs."""
    with contextlib.suppress(Exception):  # code of a user's class may raise anything
        package, family, *_ = module_name(type(getattr(env, "unwrapped", env))).split(".")
        if package == "meltingpot":
            return 'substrate.build(...)   # from meltingpot import substrate; or give the id "meltingpot/<substrate>"'
        if package in ("pettingzoo", "mpe2"):
            name, make = env.metadata["name"], "env" if hasattr(env, "agent_iter") else "parallel_env"
            parent = package if package == "mpe2" else f"{package}.{family}"
            return f"{name}.{make}(...)   # from {parent} import {name}"
    return None


def factory_example(constructor: str) -> str:
    return f"    def make_env():\n        return {constructor}"


def what_blocks(env: Any, path: str) -> str:
    """A line for each of the first parts of the env that cannot be sent; "" where all of it can."""
    blocking = [culprit for culprit in find_culprits(env, path, limit_s=1.0) if culprit.severity == "blocks"]
    return "".join(f"\n  {culprit.path}: {culprit.type}: {culprit.reason}" for culprit in blocking[:3])


def _why_it_stays(env: Any, path: str) -> str:
    """The parts of the env that could not have been sent anyway, to show users what their env holds."""
    lines = what_blocks(env, path)
    return f"\nIt could not have been sent to a worker either:{lines}" if lines else ""
