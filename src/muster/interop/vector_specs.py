"""The arguments of Gymnasium's ``make_vec``, read as Gymnasium reads them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gymnasium import VectorizeMode
from gymnasium.envs.registration import EnvSpec, _find_spec

from muster.interop.starting import FromArguments
from muster.pickling import UserCall
from muster.recipes.gymnasium_ids import factory_of_spec

Wrapper = Callable[[Any], Any]

_SYNC = UserCall("make_vec", "id", 'vectorization_mode="async"', kwargs="kwargs")
_ASYNC = replace(
    _SYNC,
    one_each="make_vec without num_workers in vector_kwargs",
    in_process='vectorization_mode="sync"',
    context='vector_kwargs={{"context": "{method}"}}',
)
_BY_WORD = {mode.value: mode for mode in (VectorizeMode.SYNC, VectorizeMode.ASYNC)}


def read_vector_spec(
    target: Any,
    num_envs: int,
    mode: VectorizeMode | str | None,
    vector_kwargs: Mapping[str, Any] | None,
    wrappers: Sequence[Wrapper] | None,
    kwargs: Mapping[str, Any],
) -> tuple[VectorizeMode, list[FromArguments], Mapping[str, Any], EnvSpec] | None:
    """The vector env that the arguments describe: its mode, a factory for each env, and the vector env's own arguments.

    With the spec from which ``make_vec`` makes such a vector env again. What a vector env's own spec has noted
    overrides the arguments. kwargs: the env's, in which values may be `muster.lazy`.
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
    mode, kwargs = VectorizeMode(mode), {**stored, **kwargs}
    call = _ASYNC if mode is VectorizeMode.ASYNC else _SYNC
    how = {"id": factory_of_spec(spec), "wrappers": list(wrappers or ()), **kwargs}
    env_fns = [FromArguments(_make, how, spec.id, (call.factory, ""), call, i, num_envs) for i in range(num_envs)]
    noted = {"vectorization_mode": mode.value, "vector_kwargs": vector_kwargs or None, "wrappers": wrappers or None}
    noted["num_envs"] = num_envs if num_envs != 1 else None
    spec.kwargs = {**kwargs, **{name: value for name, value in noted.items() if value is not None}}
    return mode, env_fns, vector_kwargs or {}, spec


def _make(id: Callable[..., Any], wrappers: Sequence[Wrapper], **kwargs: Any) -> Any:
    """Builds one env, in the process that will step it; the first wrapper is the innermost."""
    env = id(**kwargs)
    for wrapper in wrappers:
        env = wrapper(env)
    return env
