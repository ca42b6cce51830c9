"""What an interrupted call has left behind."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from gymnasium.error import NoAsyncCallError

from muster.errors import EnvError

C = TypeVar("C", bound=Callable[..., Any])


def settle(envs: Any) -> None:
    """Waits for every answer that a vector env still owes, and drops it: for those whose users cannot take it."""
    with contextlib.suppress(NoAsyncCallError, EnvError):
        envs.call_wait()
    while True:
        try:
            envs.recv()
        except NoAsyncCallError:
            return
        except EnvError:  # told already, or as good as: these steps are given up
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
