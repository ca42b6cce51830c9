"""What the tests of the doctor share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from muster.doctor import trials
from muster.hosts.trial import Trials
from muster.pool.launcher_client import LauncherClient


@pytest.fixture(scope="module")
def kept_launchers() -> Iterator[None]:
    """Keeps the launcher of all trials, which runs already: its start may take longer than a test's short limit."""
    with LauncherClient.kept():
        Trials(None, 60.0).run(trials.importing, target="json:loads")
        yield
