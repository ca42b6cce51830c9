"""Infos of a vector env, taken apart again into one dict for each env."""

from __future__ import annotations

from typing import Any

import numpy as np


def info_rows(infos: dict[str, Any], num_envs: int) -> list[dict[str, Any]]:
    """One info for each env, with the keys that it gave itself. `infos`: as Gymnasium's vector envs return them."""
    rows: list[dict[str, Any]] = [{} for _ in range(num_envs)]
    for key, column in infos.items():
        given = infos.get(f"_{key}")
        if not isinstance(given, np.ndarray):
            continue  # a mask, whose own key has been dealt with
        values = info_rows(column, num_envs) if isinstance(column, dict) else column
        for env in np.flatnonzero(given).tolist():
            rows[env][key] = values[env]
    return rows
