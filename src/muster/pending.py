"""What an interrupted call has left behind."""

from __future__ import annotations

import contextlib
from typing import Any

from muster.errors import EnvError, NotPendingError


def settle(envs: Any) -> None:
    """Waits for every answer that a vector env still owes, and drops it: for those whose users cannot take it."""
    with contextlib.suppress(NotPendingError, EnvError):
        envs.call_wait()
    while True:
        try:
            envs.recv()
        except NotPendingError:
            return
        except EnvError:  # told already, or as good as: these steps are given up
            continue
