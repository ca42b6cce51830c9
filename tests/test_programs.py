"""Programs that tests run are processes like those that Python starts, and none outlives its test."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import programs
from processes import wait_for_end

SETTINGS = """
import json, multiprocessing, os, signal, sys, threading, warnings
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "main": sorted(vars(sys.modules["__main__"])), "name": __name__,
    "file": globals().get("__file__"), "cwd": os.getcwd(), "environ": dict(os.environ),
    "threads": threading.active_count(), "tasks": len(os.listdir("/proc/self/task")), "warn": sys.warnoptions,
    "fds": sorted(os.listdir("/proc/self/fd")),
    "signals": {number: str(signal.getsignal(number)) for number in signal.valid_signals()},
    "leader": os.getsid(0) == os.getpid(), "parent": os.getppid(), "stdin": sys.stdin.read(),
    "start": multiprocessing.get_start_method(allow_none=True), "folder": multiprocessing.process.ORIGINAL_DIR,
    "streams": [(one.name, one.mode, one.encoding, one.errors, one.line_buffering, one.seekable())
                for one in (sys.stdin, sys.stdout, sys.stderr, sys.__stderr__)],
    "filters": [str(one) for one in warnings.filters],
}))
"""


@pytest.mark.parametrize("how", [("-c", SETTINGS), ("-P", "-W", "error", "-W", "ignore::UserWarning", "program.py")])
def test_a_forked_program_finds_what_a_fresh_one_finds(how: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SETTINGS)
    environ = {**os.environ, "PYTHONPATH": "/first:/second", "TOLD": "1"}

    def found(**options: Any) -> dict[str, Any]:
        done = programs.run(*how, "a", "b c", cwd=tmp_path, env=environ, input="words", check=True, **options)
        return dict(json.loads(done.stdout))

    forked, fresh = found(), found(fresh=True)
    filters = fresh.pop("filters")
    assert [one for one in forked.pop("filters") if one in filters] == filters
    assert forked == fresh


@pytest.mark.parametrize("fresh", [False, True])
def test_all_that_it_has_started_ends_with_a_test_that_fails(fresh: bool) -> None:
    code = (
        "import os, subprocess, time\n"
        "children = [subprocess.Popen(['sleep', '1000'], process_group=0), subprocess.Popen(['sleep', '1000'])]\n"
        "if os.fork() == 0: os.setsid(); time.sleep(1000)\n"
        "print(*[child.pid for child in children], flush=True)\n"
        "time.sleep(1000)\n"
    )
    with pytest.raises(AssertionError), programs.start("-c", code, fresh=fresh) as program:
        assert program.stdout is not None
        pids = [program.pid, *map(int, program.stdout.readline().split())]
        raise AssertionError
    for pid in pids:
        wait_for_end(pid)
