"""The short form of `make soak`."""

from __future__ import annotations

import pytest
from soak import soak


@pytest.mark.slow
@pytest.mark.usefixtures("leaves_nothing")
def test_no_row_is_wrong_stale_doubled_or_lost_under_fire() -> None:
    report = soak(20.0, seed=1)
    assert report.problems == []
    assert report.kills > 5
    assert report.truncations > 5
