"""Cases that `make test-all` runs: further combinations of what the other cases have shown one by one."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*cases: Any) -> list[Any]:
    """The values of a parameter, each of a case for `make test-all`."""
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]
