"""Env ids and Gymnasium's ``EnvSpec``, turned into factories that make the same env in a process that knows neither."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import importlib.util
import pickle
import re
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import gymnasium as gym
from gymnasium.envs.registration import EnvCreator, EnvSpec, _find_spec, load_env_creator

from muster.errors import RecipeError
from muster.extras import is_installed, missing
from muster.pickling import is_plain
from muster.pickling.functools_pickling import dumps as by_value
from muster.pickling.main_module import is_only_here
from muster.pickling.walk import is_importable

FOREIGN_PREFIXES = ("pettingzoo/", "meltingpot/")
"""First parts of the ids that are resolved by the layer above instead of by Gymnasium."""

# Prefixes of the names that users of other libraries write.
_LIKELY_PREFIXES = (*FOREIGN_PREFIXES, *(f"pettingzoo/{family}/" for family in ("sisl", "butterfly", "classic", "mpe")))

ForeignResolver = Callable[[str], Callable[..., Any]]
"""Returns the factory of an id that starts with one of FOREIGN_PREFIXES; raises RecipeError for an unknown one."""

# Ids that no other library has. Of ALE's other ids ALE itself knows the names.
_ATARI = re.compile(r"ALE/|\w+NoFrameskip(-v\d+)?$")

_GYMNASIUM = "gymnasium."
# Parameters of `gymnasium.make` itself.
_OPTIONS_OF_MAKE = ("id", "max_episode_steps", "disable_env_checker")
# What Gymnasium's make_vec leaves in the spec of the vector env that it makes.
_VECTOR_KEYS = ("num_envs", "vectorization_mode", "vector_kwargs", "wrappers")


@dataclass(frozen=True)
class MakeGym:
    """A factory that calls ``gymnasium.make``.

    target: the spec, which need not be registered where the env is made; or ``"module:Id-v0"`` for a module that is to
    be imported only there.  late_wrappers: (class, kwargs) to apply after ``make``, which can only
    apply wrappers that it imports by name.
    """

    target: EnvSpec | str
    late_wrappers: tuple[tuple[Callable[..., Any], dict[str, Any]], ...] = field(default=())

    def __call__(self, **kwargs: Any) -> Any:
        target = self.target
        if isinstance(target, EnvSpec):
            as_they_are = self._as_they_are()
            target = copy.copy(target)
            target.kwargs = {name: value for name, value in target.kwargs.items() if name not in as_they_are}
            kwargs = {**as_they_are, **kwargs}
        env = gym.make(target, **kwargs)
        for wrapper, wrapper_kwargs in self.late_wrappers:
            env = wrapper(env=env, **wrapper_kwargs)
        return env

    def as_partial(self) -> functools.partial[Any]:
        """This factory, with those arguments of its spec as keywords that may hold lazy values."""
        return functools.partial(self, **self._as_they_are())

    def _as_they_are(self) -> dict[str, Any]:
        """The spec's arguments that are passed on as they are.

        Gymnasium makes deep copies of a spec's arguments; locks cannot be copied, and sockets must not be.
        """
        if isinstance(self.target, str):
            return {}
        arguments = self.target.kwargs.items()
        return {name: value for name, value in arguments if name not in _OPTIONS_OF_MAKE and not is_plain(value)}


def factory_of_id(env_id: str, resolve_foreign_id: ForeignResolver | None = None) -> Callable[..., Any]:
    """The factory of an env id. Nothing is built, and no module is imported that only a worker needs.

    Raises Gymnasium's own error for an id that it does not know, RecipeError for an unknown id of Muster's own.
    """
    if env_id.startswith(FOREIGN_PREFIXES) and env_id not in gym.registry:
        if resolve_foreign_id is not None:
            return resolve_foreign_id(env_id)
        raise RecipeError(
            f"No envs of the kind {env_id.split('/')[0]!r} are available here (asked for: {env_id!r}). "
            "Pass a factory that builds the env, or a Gymnasium id."
        )
    module, colon, registered_id = env_id.rpartition(":")
    if colon and registered_id not in gym.registry and module not in sys.modules:
        _check_installed(module, env_id)
        return MakeGym(env_id)
    if env_id not in gym.registry and (_ATARI.match(env_id) or _may_be_atari(env_id)):
        _register_atari(env_id)
    try:
        return factory_of_spec(_find_spec(env_id))
    except gym.error.UnregisteredEnv as error:
        if resolve_foreign_id is not None:
            _suggest(error, env_id, resolve_foreign_id)
        raise


def module_of(env_id: str) -> str:
    """The package that has the env of an id that names no module; "" for an id of the registry."""
    kind, _, name = env_id.partition("/")
    if env_id in gym.registry:
        return ""
    if f"{kind}/" in FOREIGN_PREFIXES:
        return "mpe2" if kind == "pettingzoo" and name.startswith("mpe") else kind
    return "ale_py" if _ATARI.match(env_id) or _may_be_atari(env_id) else ""


def _suggest(error: Exception, env_id: str, resolve_foreign_id: ForeignResolver) -> None:
    for prefix in _LIKELY_PREFIXES:
        with contextlib.suppress(RecipeError, ModuleNotFoundError):
            resolve_foreign_id(prefix + env_id)
            error.add_note(f"Envs of other libraries have longer ids. Did you mean {prefix + env_id!r}?")


def factory_of_spec(spec: EnvSpec) -> MakeGym:
    """The factory of a spec. Names in modules that only this process knows are looked up here."""
    if spec.entry_point is None:
        raise RecipeError(
            f"EnvSpec {spec.id!r} has no entry_point, so no env can be made from it; register it with one."
        )
    portable = _portable(spec)
    if "vectorization_mode" in portable.kwargs:
        portable.kwargs = {key: value for key, value in portable.kwargs.items() if key not in _VECTOR_KEYS}
    wrappers = getattr(portable, "additional_wrappers", ())
    first_late = next((i for i, w in enumerate(wrappers) if _is_only_here(w.entry_point)), len(wrappers))
    portable.additional_wrappers = tuple(wrappers[:first_late])
    late = tuple((load_env_creator(w.entry_point), w.kwargs or {}) for w in wrappers[first_late:])
    return MakeGym(portable, late)


def pack_registrations() -> list[bytes]:
    """The ids that this process registered in addition to Gymnasium's own, for `register_packed` in a fresh process.

    That process imports nothing for ids that it does not make, where their modules can be named.  Specs that cannot be
    pickled are left out: their ids are unknown in the fresh process.
    """
    named, held = [], []
    for spec in map(_named, gym.registry.values()):
        if isinstance(spec.entry_point, str) and not _is_only_here(spec.entry_point):
            if not spec.entry_point.startswith(_GYMNASIUM):
                named.append(spec)
        elif spec.entry_point is not None:
            held.append(_portable(spec))
    packed = []
    for specs in (named, *([spec] for spec in held)):
        with contextlib.suppress(Exception):
            packed.append(by_value(specs, lays_main=True))
    return packed


def register_packed(packed: Sequence[bytes]) -> list[EnvSpec]:
    """Registers what `pack_registrations` has packed elsewhere, and returns it; leaves out what cannot be rebuilt here.

    From now on this process does not warn where one of these ids is registered once more.
    """
    specs: list[EnvSpec] = []
    for data in packed:
        with contextlib.suppress(Exception):
            specs += pickle.loads(data)
    gym.registry.update({spec.id: spec for spec in specs})
    if specs:
        # A module that registers its ids at import finds them here already: that is no news for anybody.
        ids = "|".join(re.escape(spec.id) for spec in specs)
        warnings.filterwarnings("ignore", rf".*Overriding environment (?:{ids}) already in registry", UserWarning)
    return specs


def noted_by_make_vec(spec: EnvSpec) -> tuple[int | None, tuple[Callable[[Any], Any], ...]]:
    """The num_envs and wrappers in the spec of Gymnasium's vector env; None and () in that of an env."""
    if "vectorization_mode" not in spec.kwargs:
        return None, ()
    return spec.kwargs.get("num_envs", 1), tuple(spec.kwargs.get("wrappers") or ())


def _portable(spec: EnvSpec) -> EnvSpec:
    """A copy of `spec` that holds its entry point itself where `spec` only names one that no worker finds."""
    portable = copy.copy(spec)
    if _is_only_here(portable.entry_point):
        portable.entry_point = cast(EnvCreator, load_env_creator(str(portable.entry_point)))
    return portable


def _named(spec: EnvSpec) -> EnvSpec:
    """A copy of `spec` that names its entry point; `spec` itself where no name leads to it, or where it is named."""
    entry_point: Any = spec.entry_point
    if not isinstance(entry_point, (type, types.FunctionType)) or not is_importable(entry_point):
        return spec
    if "." in entry_point.__qualname__:  # Gymnasium finds only names at the top of a module
        return spec
    named = copy.copy(spec)
    named.entry_point = f"{entry_point.__module__}:{entry_point.__qualname__}"
    return named


def _is_only_here(entry_point: Any) -> bool:
    return type(entry_point) is str and is_only_here(entry_point.split(":")[0])


def _check_installed(module: str, env_id: str) -> None:
    # Only the topmost package: looking for a submodule imports its parents.
    package = module.split(".")[0]
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(
            f"No module named {package!r}, which the id {env_id!r} asks to import. Install it, or check the spelling.",
            name=package,
        )


def _may_be_atari(env_id: str) -> bool:
    """Returns whether the id is of no namespace and no registered family: ALE's older ids are such, ``Pong-v4``."""
    name = env_id.partition("-v")[0]
    known = {spec.name for spec in gym.registry.values() if spec.namespace is None}
    return not {"/", ":"} & set(env_id) and name not in known and is_installed("ale_py")


def _register_atari(env_id: str) -> None:
    try:
        importlib.import_module("ale_py")
    except ModuleNotFoundError as error:
        sentence = missing(f"{env_id!r} needs", "the Arcade Learning Environment", "pip install ale-py")
        raise ModuleNotFoundError(sentence, name="ale_py") from error
