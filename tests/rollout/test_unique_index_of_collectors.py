"""``unique_index`` in envs of collectors, at home and on nodes of one machine."""

from __future__ import annotations

import secrets
from typing import Any

import pytest

import muster
from local_nodes import LocalNodes
from muster.pool.unique_indices import TREE
from served_envs import BASE, Served, indices


@pytest.mark.parametrize("nodes", [0, 2])
def test_collectors_and_what_runs_beside_them(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TREE, str(secrets.randbits(40)))
    cluster: Any = LocalNodes(nodes) if nodes else None  # of one machine
    with (
        muster.make_vec(Served, 2, backend="thread") as evaluation,
        muster.MultiCollector(
            Served, None, num_collectors=3, num_envs=6, frames_per_batch=24, total_frames=48, cluster=cluster
        ) as collector,
    ):
        evaluation.reset()
        assert len([*collector]) == 2
        ports = [*evaluation.call("port"), *collector.call("port")]
        assert sorted(ports) == [BASE + i for i in range(8)]
        assert [env for env, _ in collector.call(indices)] == [*range(6)]
