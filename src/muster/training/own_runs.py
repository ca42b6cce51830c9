"""Run folders that this user's own ``muster train`` has made, told from those that came from elsewhere by a seal."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SEALED = ("env", "env_kwargs", "wrappers", "make_vec")  # what makes the envs, in config.json


def seal_of(config: Mapping[str, Any]) -> str:
    """The seal for a config.json: a MAC, by a key of this user's, of what makes the envs. Empty where no key can be."""
    key = _key()
    sealed = json.dumps([config.get(name) for name in SEALED], sort_keys=True)
    return hmac.new(key, sealed.encode(), hashlib.sha256).hexdigest() if key else ""


def is_own(config: Mapping[str, Any]) -> bool:
    """Whether this user has made the run, and nobody has changed since what makes its envs."""
    about = config.get("with")
    written, expected = about.get("seal") if isinstance(about, Mapping) else None, seal_of(config)
    return isinstance(written, str) and bool(expected) and hmac.compare_digest(written.encode(), expected.encode())


def _key() -> bytes:
    """The user's key, made at its first use; empty where the home folder cannot hold it."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser())
    path = state / "muster" / "run_key"
    aside = path.with_name(f"run_key.{secrets.token_hex(8)}")
    try:
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(32))
            with contextlib.suppress(FileExistsError):
                os.link(aside, path)  # whole at once, and the first of several wins
            aside.unlink()
        return path.read_bytes()
    except OSError:
        return b""
