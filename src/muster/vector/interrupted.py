"""What an interrupted call has left behind."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import gymnasium
from gymnasium.error import NoAsyncCallError

from muster.errors import CannotTravel, EnvError, MusterError

C = TypeVar("C", bound=Callable[..., Any])


def drop_pending(envs: Any) -> None:
    """Waits for every answer that a vector env still owes, and drops it: for those whose users cannot take it."""
    # Every recv() takes the answer of an env at least, or its error.
    for take in (envs.call_wait, *[envs.recv] * envs.num_envs):
        try:
            take()
        except (NoAsyncCallError, EnvError, CannotTravel):  # told already, or as good as: these steps are given up
            continue
        except (MusterError, gymnasium.error.Error):
            raise
        except Exception:  # an env's own, as the drop-ins raise them
            continue


def interruptible(method: C) -> C:
    """For methods that wait for answers: notes in `interrupted` that Ctrl-C, or another end of the program, came."""

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
    """Before a reset with `options`: if that is of all envs, drops what an interrupted call has left behind."""
    if envs.interrupted and "reset_mask" not in (options or ()):
        drop_pending(envs)
        envs.interrupted = False
