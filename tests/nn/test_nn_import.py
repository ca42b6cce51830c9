"""What muster.nn exports."""

from __future__ import annotations

import muster.nn


def test_every_exported_name_exists():
    assert all(hasattr(muster.nn, name) for name in muster.nn.__all__)
