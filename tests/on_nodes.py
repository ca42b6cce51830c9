"""A pytest plugin, `pytest -p on_nodes FILE`: the collectors of that file's tests are on 2 nodes.

Those with one collector are on one node. context="fork" is left out: nodes start collectors afresh.
"""

from __future__ import annotations

import functools
from typing import Any

from local_nodes import LocalNodes
from muster.rollout.multi_collector import MultiCollector

NODES = 2


def pytest_configure() -> None:
    MultiCollector.__init__ = on_nodes(MultiCollector.__init__)  # type: ignore[method-assign]


def on_nodes(init: Any) -> Any:
    @functools.wraps(init)
    def begin(self: MultiCollector, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("cluster") is None:
            kwargs |= {"cluster": LocalNodes(NODES), "context": "auto"}
        init(self, *args, **kwargs)

    return begin
