"""Programs that tests run are processes like those that Python starts, and none outlives its test."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import programs
from processes import is_alive, wait_for_end

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


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import os; os._exit(4)", 4, ""),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("import atexit; atexit.register(print, 'bye')\n1 / 0", 1, "bye"),
        ("import os; os.abort()", -signal.SIGABRT, ""),
    ],
)
def test_it_ends_as_a_fresh_one_does(code: str, status: int, said: str) -> None:
    forked, fresh = (programs.run("-c", code, fresh=fresh) for fresh in (False, True))
    assert forked.returncode == fresh.returncode == status
    assert forked.stdout == fresh.stdout
    assert said in forked.stdout + forked.stderr
    assert forked.stderr == fresh.stderr


def test_what_a_fork_cannot_have_is_refused() -> None:
    with pytest.raises(ValueError, match="option -X needs fresh=True"):
        programs.run("-X", "dev", "-c", "")
    with pytest.raises(ValueError, match="another PYTHONHASHSEED needs fresh=True"):
        programs.run("-c", "", env={**os.environ, "PYTHONHASHSEED": "5"})


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


def test_one_that_nobody_ends_ends_after_its_test() -> None:
    program = programs.start("-c", "import time; time.sleep(1000)")
    assert is_alive(program.pid)
    programs.end_all()
    assert not is_alive(program.pid)
    assert program.returncode == -signal.SIGKILL


def test_ctrl_c_arrives_though_the_tests_run_in_the_background() -> None:
    code = (
        "import os, signal\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "import conftest, programs\n"
        "with programs.start('-c', 'print(1, flush=True)\\nimport time; time.sleep(1000)', fresh=True) as program:\n"
        "    program.stdout.read(1)\n"
        "    program.send_signal(signal.SIGINT)\n"
        "assert program.returncode == -signal.SIGINT\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    assert programs.run("-c", code, env={**os.environ, "PYTHONPATH": path}).returncode == -signal.SIGINT
