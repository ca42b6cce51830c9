"""Arguments that are built where the env runs, and released with it: ZeroMQ contexts, sockets, locks, file handles."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from muster.errors import NotBuilt, WrongType
from muster.introspection import place_of, subscript
from muster.worker_info import WorkerInfo, get_worker_info, worker_info_context

_log = logging.getLogger("muster")

_MAX_DEPTH = 100
_WITH_LAZIES = (dict, list, tuple, functools.partial)
_RELEASE_METHODS = ("close", "destroy", "term")


class Lazy:
    """An argument that is still to be built. ``muster.lazy`` makes one; ``Recipe.build`` replaces it with its value.

    Where that does not happen, using it as if it were the value raises NotBuilt. It can be copied, pickled, compared by
    identity, and shown.
    """

    __slots__ = ("args", "fn", "kwargs")

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.fn = fn
        self.args = args
        self.kwargs = kwargs

    def __repr__(self) -> str:
        try:
            fn, args, kwargs = (object.__getattribute__(self, name) for name in ("fn", "args", "kwargs"))
        except AttributeError:  # while it is unpickled
            return "muster.lazy(...)"
        shown = [getattr(fn, "__qualname__", repr(fn))]
        shown += [repr(arg) for arg in args]
        shown += [f"{key}={value!r}" for key, value in kwargs.items()]
        return f"muster.lazy({', '.join(shown)})"

    def __getattr__(self, name: str) -> NoReturn:
        # Protocols (copy, pickle, inspect, NumPy) ask for such names, and go on without them.
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name, name=name, obj=self)
        raise self._unbuilt(f"its attribute {name!r} was asked for")

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._unbuilt("it was used as if it were its value")

    # Python looks these up in the class.
    __call__ = __bool__ = __len__ = __iter__ = __contains__ = __getitem__ = __setitem__ = __delitem__ = _refuse
    __enter__ = __exit__ = __index__ = __int__ = __float__ = __fspath__ = __array__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = _refuse
    __pow__ = __rpow__ = __matmul__ = __rmatmul__ = __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _refuse
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __neg__ = __pos__ = __invert__ = __abs__ = _refuse
    __round__ = __trunc__ = __floor__ = __ceil__ = __complex__ = __bytes__ = __next__ = __reversed__ = _refuse
    __await__ = __aenter__ = __aexit__ = __aiter__ = __anext__ = _refuse

    def __format__(self, spec: str) -> str:
        return repr(self) if not spec else self._refuse()

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in Lazy.__slots__:
            raise self._unbuilt(f"its attribute {name!r} was set")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        raise self._unbuilt(f"its attribute {name!r} was deleted")

    def _unbuilt(self, used: str) -> NotBuilt:
        return NotBuilt(
            f"{self!r} has not been built, but {used}. It is built where its env is, if it is an argument: a value of "
            f"{_BUILT_IN}, or an argument of a functools.partial that is a factory, an env function or a wrapper; also "
            "inside dicts, lists, tuples and partials in these. This one lies elsewhere, such as in a closure or in an "
            "attribute of an object, or was handed to a class that is not Muster's. Make it an argument of its own, "
            "and build there what uses it"
        )


_BUILT_IN = "env_kwargs, wrapper_kwargs, monitor_kwargs or create_env_kwargs"


def lazy(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Lazy:
    """An argument of an env or wrapper that is built in the worker, once per env, by ``fn(*args, **kwargs)``.

    fn: called in the worker that the env is in.
    args, kwargs: what it is called with. They may be lazy themselves.

    It may be a value of `env_kwargs` (or of a drop-in's `wrapper_kwargs`, `monitor_kwargs` and `create_env_kwargs`), or
    an argument of a ``functools.partial`` that builds or wraps an env, also inside dicts, lists, tuples and partials.
    Only ``fn`` and its arguments travel. Inside ``fn``, ``muster.get_worker_info()`` names the env:
    ``lazy(lambda: 5555 + muster.get_worker_info().unique_index)``. One Lazy that is used twice is built once per env.

    If ``fn`` returns a context manager, its context is entered; not for locks and database connections: their
    ``with`` means something else. The value is released with the env, last built first: by leaving the context, else by
    the first of ``close()``, ``destroy()`` and ``term()`` that it has. Raises WrongType if ``fn`` is not callable.

    >>> import muster
    >>> is_odd = muster.lazy(lambda: muster.get_worker_info().env_index % 2 == 1)
    >>> with muster.make_vec("CartPole-v1", num_envs=2, env_kwargs={"sutton_barto_reward": is_odd}) as envs:
    ...     obs, infos = envs.reset(seed=0)
    ...     obs, rewards, terminated, truncated, infos = envs.step([0, 0])
    >>> rewards
    array([1., 0.])
    """
    if not callable(fn):
        raise WrongType(
            f"muster.lazy needs something to call in the worker, got {type(fn).__name__}. "
            "Write muster.lazy(zmq.Context), not muster.lazy(zmq.Context())."
        )
    if type(fn) is Lazy:
        raise WrongType(f"muster.lazy needs something to call in the worker, got {fn!r}, which is a value to build.")
    return Lazy(fn, args, kwargs)


class LazyValues:
    """Builds the lazy values of one env and remembers what has to be released."""

    def __init__(self) -> None:
        # By id of the original, which is kept so that its id cannot be taken by another object.
        self._resolved: dict[int, tuple[Any, Any]] = {}
        # By id: each resource that is noted for its release, and the value that the env gets for it.
        self._adopted: dict[int, tuple[Any, Any]] = {}
        self._releases: list[tuple[str, Callable[[], Any]]] = []

    @property
    def has_releases(self) -> bool:
        """True where a value has to be released."""
        return bool(self._releases)

    def resolve(self, value: Any, path: str, depth: int = 0) -> Any:
        """``value`` with every Lazy in it built, in dicts, lists, tuples and partials too; itself if it has none.

        path: the place of the value, for messages: ``env_kwargs["server"]``.  depth: the number of containers around
        it. Containers nested deeper than ``_MAX_DEPTH``, which Python might not be able to follow, stay as they are.
        """
        if id(value) in self._resolved:
            return self._resolved[id(value)][1]
        if type(value) is Lazy:
            return self._build(value, path)
        if type(value) not in _WITH_LAZIES or depth > _MAX_DEPTH:
            return value
        self._resolved[id(value)] = (value, value)  # for a container that holds itself
        result = value
        if type(value) is functools.partial:
            args = self.resolve(value.args, f"{path}.args", depth + 1)
            keywords = self.resolve(value.keywords, f"{path}.keywords", depth + 1)
            if args is not value.args or keywords is not value.keywords:
                result = functools.partial(value.func, *args, **keywords)
                vars(result).update(vars(value))
        else:
            items = value.items() if type(value) is dict else enumerate(value)
            resolved = {key: self.resolve(item, path + subscript(key), depth + 1) for key, item in items}
            originals = value.values() if type(value) is dict else value
            if any(new is not old for new, old in zip(resolved.values(), originals, strict=True)):
                result = resolved if type(value) is dict else type(value)(resolved.values())
        self._resolved[id(value)] = (value, result)
        return result

    def resolve_arguments(self, arguments: Mapping[str, Any], path: str) -> dict[str, Any]:
        """A new dict of keyword arguments, each resolved."""
        return {key: self.resolve(value, place_of(path, key)) for key, value in arguments.items()}

    def release(self, timeout_s: float) -> None:
        """Releases what was built, last first, within ``timeout_s`` seconds. Never raises; failures are logged."""
        deadline = time.monotonic() + timeout_s
        while self._releases:
            path, release = self._releases.pop()
            if hasattr(getattr(release, "__self__", None), "commit"):
                # SQLite refuses to close a database in another thread. Its close never waits; another database's may.
                _run(release, path, get_worker_info())
                continue
            # A release that hangs must not use up the time of those that come after it.
            share_s = max(0.0, deadline - time.monotonic()) / (len(self._releases) + 1)
            if not _run_bounded(release, path, share_s):
                _log.warning("%s was not released within %.3g s and is left behind.", path, share_s)
        self._resolved.clear()
        self._adopted.clear()

    def _build(self, value: Lazy, path: str) -> Any:
        args = [self.resolve(arg, f"{path}.args[{i}]") for i, arg in enumerate(value.args)]
        kwargs = self.resolve_arguments(value.kwargs, f"{path}.kwargs")
        try:
            built = self._adopt(value.fn(*args, **kwargs), path)
        except Exception as error:
            error.add_note(f"Raised while building {path} = {value!r}")
            raise
        self._resolved[id(value)] = (value, built)
        return built

    def _adopt(self, resource: Any, path: str) -> Any:
        """The value that the env gets for ``resource``. Lazies that return the same object release it once."""
        if id(resource) in self._adopted:
            return self._adopted[id(resource)][1]
        kind = type(resource)
        close = next((getattr(resource, m) for m in _RELEASE_METHODS if callable(getattr(kind, m, None))), None)
        if not _is_context_manager(resource):
            if close is not None:
                self._releases.append((path, close))
                self._adopted[id(resource)] = (resource, resource)
            return resource
        entered = kind.__enter__(resource)

        def leave() -> None:
            try:
                kind.__exit__(resource, None, None, None)
            except Exception:
                if close is None:
                    raise
                close()

        self._releases.append((path, leave))
        self._adopted |= {id(resource): (resource, entered), id(entered): (entered, entered)}
        return entered


def _is_context_manager(resource: object) -> bool:
    """Returns whether ``with`` opens and closes the resource, and does not just take a lock or start a transaction."""
    kind = type(resource)
    # multiprocessing's values and conditions have `acquire` as an attribute of their own.
    return (
        hasattr(kind, "__enter__")
        and hasattr(kind, "__exit__")
        and not hasattr(resource, "acquire")
        and not hasattr(kind, "commit")
    )


def _run_bounded(release: Callable[[], Any], path: str, timeout_s: float) -> bool:
    """Returns whether ``release()`` ended in time; an exception that it raises is logged, and counts as an end."""
    thread = threading.Thread(
        target=_run, args=(release, path, get_worker_info()), daemon=True, name=f"muster-release {path}"
    )
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()


def _run(release: Callable[[], Any], path: str, info: WorkerInfo | None) -> None:
    try:
        with worker_info_context(info):
            release()
    except BaseException as error:  # a SystemExit in a close() must not get any further either
        _log.warning("Releasing %s failed: %s: %s", path, type(error).__name__, error)
