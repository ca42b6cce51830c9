"""Drops the answers that envs still owe after an interrupted call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import gymnasium
from gymnasium.error import NoAsyncCallError

from muster.errors import CannotTravel, EnvError, MusterError

C = TypeVar("C", bound=Callable[..., Any])


def drop_pending(envs: Any) -> None:
    """Waits for every answer that a vector env still owes, and drops it: for vector envs whose users cannot take it."""
    # Every recv() takes the answer, or the error, of at least one env.
    for take in (envs.call_wait, *[envs.recv] * envs.num_envs):
        try:
            take()
        except (NoAsyncCallError, EnvError, CannotTravel):  # nothing is pending, or a step that is given up failed
            continue
        except (MusterError, gymnasium.error.Error):
            raise
        except Exception:  # an env's own exception, as drop-ins raise it
            continue


def interruptible(method: C) -> C:
    """Decorates a method that waits for answers: it sets `interrupted` if Ctrl-C, or another exit, ends the method."""

    @functools.wraps(method)
    def noting(envs: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(envs, *args, **kwargs)
        except Exception:
            raise
        except BaseException:
            envs.interrupted = True
            raise

    return cast(C, noting)


def drop_interrupted(envs: Any, options: Mapping[str, Any] | None) -> None:
    """Drops the answers of an interrupted call, if a reset with `options` resets all envs; called before the reset."""
    if envs.interrupted and "reset_mask" not in (options or ()):
        drop_pending(envs)
        envs.interrupted = False
