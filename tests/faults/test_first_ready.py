"""`recv(min_envs=1)` of envs whose info keys change with every episode: every row is right."""

from __future__ import annotations

from typing import Any

import pytest
from first_ready import check_rows

from slow import slow

WORKERS = [{"num_workers": 4}, {"num_workers": 2}, {"num_workers": 8}]
LONG_RUNS, LONG_ROWS = 20, 20_000


@pytest.mark.parametrize(
    "options",
    [WORKERS[0], {"backend": "thread"}, *slow(*WORKERS[1:], {"num_workers": 1, "caller_steps": True})],
    ids=str,
)
def test_rows_that_are_ready_first_are_right(options: dict[str, Any]) -> None:
    assert check_rows(2000, **{"num_workers": 2, **options}) == 0


@pytest.mark.parametrize("backend", ["process", *slow("thread")])
def test_rows_are_right_or_marked_while_envs_raise(backend: str) -> None:
    assert check_rows(2000, raises=True, backend=backend, num_workers=2) > 100


# One may be killed just before the close.
KILLED = pytest.mark.filterwarnings("ignore:worker . .* was killed before it closed envs:RuntimeWarning")


@pytest.mark.usefixtures("leaves_nothing")
@KILLED
def test_rows_are_right_or_marked_while_workers_are_killed() -> None:
    assert check_rows(2000, raises=True, kill_every_s=0.2, num_workers=4) > 100


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("options", WORKERS, ids=str)
def test_many_rows_that_are_ready_first_are_right(options: dict[str, Any]) -> None:
    for _ in range(LONG_RUNS):
        assert check_rows(LONG_ROWS, **options) == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("leaves_nothing")
@KILLED
@pytest.mark.parametrize("options", WORKERS, ids=str)
def test_many_rows_are_right_or_marked_while_workers_are_killed(options: dict[str, Any]) -> None:
    assert check_rows(LONG_ROWS, raises=True, kill_every_s=0.2, **options) > 100
