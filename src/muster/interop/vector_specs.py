"""The arguments of Gymnasium's ``make_vec``, read as Gymnasium reads them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gymnasium import VectorizeMode
from gymnasium.envs.registration import EnvSpec, _find_spec

from muster.interop.starting import FromArguments
from muster.pickling import UserCall
from muster.recipes.gymnasium_ids import factory_of_spec

Wrapper = Callable[[Any], Any]

_ASYNC = UserCall(
    name="make_vec",
    factory="id",
    kwargs="kwargs",
    context='vector_kwargs={{"context": "{method}"}}',
    in_process='vectorization_mode="sync"',
    one_each="make_vec without num_workers in vector_kwargs",
)
_SYNC = replace(_ASYNC, context="", in_process="", one_each='vectorization_mode="async"')
_BY_WORD = {mode.value: mode for mode in (VectorizeMode.SYNC, VectorizeMode.ASYNC)}


@dataclass(frozen=True)
class VectorSpec:
    """A vector env of `num_envs` envs, each made from `spec` with `kwargs`; `spec` itself has none.

    kwargs: the env's, in which values may be `muster.lazy`.  vector_kwargs: the vector env's own.
    """

    spec: EnvSpec
    kwargs: dict[str, Any]
    num_envs: int
    mode: VectorizeMode
    vector_kwargs: Mapping[str, Any]
    wrappers: Sequence[Wrapper]

    def env_fns(self) -> list[FromArguments]:
        """A factory for each env."""
        arguments = {"id": factory_of_spec(self.spec), "wrappers": list(self.wrappers), **self.kwargs}
        call = _ASYNC if self.mode is VectorizeMode.ASYNC else _SYNC
        count, labels = self.num_envs, (call.factory, "")
        return [FromArguments(_make, arguments, self.spec.id, labels, call, i, count) for i in range(count)]

    def recorded(self) -> EnvSpec:
        """The spec from which ``make_vec`` makes such a vector env again."""
        noted = {
            "num_envs": self.num_envs if self.num_envs != 1 else None,
            "vectorization_mode": self.mode.value,
            "vector_kwargs": self.vector_kwargs or None,
            "wrappers": self.wrappers or None,
        }
        spec = copy.deepcopy(self.spec)
        spec.kwargs = {**self.kwargs, **{name: value for name, value in noted.items() if value is not None}}
        return spec


def read_vector_spec(
    target: Any,
    num_envs: int,
    mode: VectorizeMode | str | None,
    vector_kwargs: Mapping[str, Any] | None,
    wrappers: Sequence[Wrapper] | None,
    kwargs: Mapping[str, Any],
) -> VectorSpec | None:
    """The vector env that the arguments describe. What a vector env's own spec has noted overrides them.

    None for all else: vector envs that the spec makes itself, and arguments that Gymnasium refuses. Raises Gymnasium's
    own errors for ids that it does not know.
    """
    if not isinstance(target, (str, EnvSpec)):
        return None
    spec = copy.deepcopy(target if isinstance(target, EnvSpec) else _find_spec(target))
    stored, spec.kwargs = spec.kwargs, {}
    num_envs = stored.pop("num_envs", num_envs)
    mode = stored.pop("vectorization_mode", mode)
    vector_kwargs = stored.pop("vector_kwargs", vector_kwargs)
    wrappers = stored.pop("wrappers", wrappers)
    if mode is None and spec.vector_entry_point is None:
        mode = VectorizeMode.SYNC
    if spec.entry_point is None or mode not in (*_BY_WORD, *_BY_WORD.values()):
        return None
    kwargs = {**stored, **kwargs}
    return VectorSpec(spec, kwargs, num_envs, VectorizeMode(mode), vector_kwargs or {}, wrappers or [])


def _make(id: Callable[..., Any], wrappers: Sequence[Wrapper], **kwargs: Any) -> Any:
    """Builds one env, in the process that will step it; the first wrapper is the innermost."""
    env = id(**kwargs)
    for wrapper in wrappers:
        env = wrapper(env)
    return env
