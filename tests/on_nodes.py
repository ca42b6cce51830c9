"""A pytest plugin, `pytest -p on_nodes FILE`: the collectors of that file's tests are on 2 nodes.

Those with one collector are on one node. context="fork" is left out: nodes start collectors afresh.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from local_nodes import LocalNodes
from muster.rollout.multi_collector import MultiCollector

NODES = 2
_STAYS = "a policy that stays here cannot act for envs on nodes: CannotTravel, see test_travelling_to_nodes.py"
# By parts of their names, the tests that mean nothing on nodes.
SKIPPED = {"[staying": _STAYS, "test_uncopyable_policy_stays_with_a_warning": _STAYS}


def pytest_configure() -> None:
    MultiCollector.__init__ = on_nodes(MultiCollector.__init__)  # type: ignore[method-assign]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for part, reason in SKIPPED.items():
            if part in item.name:
                item.add_marker(pytest.mark.skip(reason=reason))


def on_nodes(init: Any) -> Any:
    @functools.wraps(init)
    def begin(self: MultiCollector, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("cluster") is None:
            kwargs |= {"cluster": LocalNodes(NODES), "context": "auto"}
        init(self, *args, **kwargs)

    return begin
