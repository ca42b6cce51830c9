"""Ray clusters on this machine, on loopback and behind a token, that tests start and connect to from programs."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

has_ray = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not has_ray, reason="Ray is not installed: pip install 'muster-rl[ray]'")
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


@dataclass
class RunningCluster:
    process: subprocess.Popen[str]
    address: str
    environ: dict[str, str]

    def ask(self, line: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"


def run_cluster(raylets: int = 1) -> Iterator[RunningCluster]:
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")  # sockets below it have long names
    environ = {
        "RAY_TMPDIR": folder,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        LOOPBACK: "0",
        # A raylet that is killed stays a zombie here, which Ray takes to be alive until it misses these.
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "1000",
        "RAY_health_check_failure_threshold": "3",
    }
    process = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("ray_cluster.py"), str(raylets)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **environ},
    )
    assert process.stdout is not None
    try:
        yield RunningCluster(process, process.stdout.readline().strip(), environ)
    finally:
        process.communicate(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)
