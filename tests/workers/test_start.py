"""How the workers of one vector env start together."""

import os
import resource
import runpy
import sys
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import muster
import programs
from envs import Scripted
from muster.errors import EnvError, LimitReached, UsageError, WorkerDied
from slow import slow

# Its env is built only where two processes have imported the module.
_MODULE = """
import os, time
from pathlib import Path
import gymnasium

marks = Path(__file__).parent / "marks"
(marks / str(os.getpid())).touch()


class Env(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        deadline = time.monotonic() + 30
        while len(list(marks.iterdir())) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)

    def imported(self):
        return len(list(marks.iterdir()))
"""


@pytest.mark.parametrize("context", ["forkserver", *slow("spawn")])
def test_the_other_workers_import_while_the_first_builds(
    context: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"imported_by_all_{context}"
    (tmp_path / "marks").mkdir()
    (tmp_path / f"{name}.py").write_text(_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    with muster.make_vec(import_module(name).Env, 2, num_workers=2, context=context, start_timeout=20) as envs:
        assert envs.call("imported") == (3, 3)


@pytest.mark.parametrize("context", ["forkserver", *slow("fork")])
def test_too_few_file_descriptors_leave_nothing_and_tell_what_to_do(context: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    try:
        with pytest.raises(LimitReached, match=r"worker \d+ .*, of 40, could not start: Too many open files"):
            muster.make_vec("CartPole-v1", 40, num_workers=40, context=context)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


_BESIDE_THE_LINES = """
import os, sys
from pathlib import Path
import muster

{before}
with muster.make_vec("CartPole-v1", 3, num_workers=2, context={context!r}) as envs:
    envs.reset(seed=0)
    done = "stepped %d" % len(envs.step([0, 1, 0])[0])
Path(sys.argv[1]).write_text(done)
"""


@pytest.mark.parametrize("context", ["forkserver", *slow("spawn", "fork")])
@pytest.mark.parametrize(
    "before",
    [
        *slow("os.close(1)", "os.close(2)", "sys.stdout = None", "sys.stdout = object()"),
        "os.closerange(0, 3)",
        "os.close(1); log = open('log', 'w')",
        "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')",
    ],
)
def test_workers_start_without_stdout_or_a_working_directory(before: str, context: str, tmp_path: Path) -> None:
    script, told = tmp_path / "script.py", tmp_path / "told"
    script.write_text(_BESIDE_THE_LINES.format(before=before, context=context))
    programs.run(script, told, cwd=tmp_path)
    assert told.read_text() == "stepped 3"


_TELLS_FLAGS = """
import sys
import gymnasium
import muster


class Telling(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Discrete(2)

    def flags(self):
        return sys.flags.optimize, "error::FutureWarning" in sys.warnoptions, sys.get_int_max_str_digits()


with muster.make_vec(Telling, 2, num_workers=1, context=sys.argv[1]) as envs:
    print(set(envs.call("flags")))
"""


@pytest.mark.parametrize("context", ["forkserver", *slow("spawn", "fork")])
def test_workers_run_under_the_flags_of_the_caller_and_not_on_what_lies_about(context: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_TELLS_FLAGS)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "json.py").write_text("raise ImportError('not the json that was meant')")
    flags = ["-O", "-W", "error::FutureWarning", "-X", "int_max_str_digits=900"]
    done = programs.run(*flags, tmp_path / "script.py", context, cwd=tmp_path / "elsewhere", fresh=True)
    assert done.stdout == "{(1, True, 900)}\n", done.stderr


@pytest.mark.parametrize("context", ["forkserver", "fork", *slow("spawn")])
def test_workers_leave_nothing_that_python_would_warn_of(context: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_BESIDE_THE_LINES.format(before="", context=context))
    done = programs.run("-W", "error", "-X", "dev", tmp_path / "script.py", tmp_path / "told", fresh=True)
    assert (tmp_path / "told").read_text() == "stepped 3"
    assert done.stderr == ""


def test_the_path_may_be_long_and_hold_what_imports_pass_over(monkeypatch: pytest.MonkeyPatch) -> None:
    long = [f"/nowhere/{'x' * 1000}/{i}" for i in range(200)]
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/nowhere"), b"/nowhere", *long])
    with muster.make_vec("CartPole-v1", 1, context="spawn") as envs:
        (path,) = envs.call(lambda env, i: sys.path)
    assert [entry for entry in path if isinstance(entry, str)] == [one for one in sys.path if isinstance(one, str)]


@pytest.mark.parametrize("executable", ["", None])
def test_an_unknown_python_is_an_error_that_names_it(executable: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(UsageError, match=r'sys\.executable.*context="fork"'):
        muster.make_vec("CartPole-v1", 1, context="spawn")
    with muster.make_vec("CartPole-v1", 1, context="fork") as envs:
        envs.reset()


_RUN = """
import gymnasium
import muster

OBSERVED = 1


class Env(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return OBSERVED, {}


with muster.make_vec(Env, 2, num_workers=1) as envs:
    observed = envs.reset()[0].tolist()
"""


@pytest.mark.parametrize("name", ["<run_path>", "__main__"])
def test_a_script_that_runpy_runs_may_make_envs(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_RUN)
    assert runpy.run_path(str(tmp_path / "train.py"), run_name=name)["observed"] == [1, 1]


class Fragile(Scripted):
    """Fails while it is built the first times; the others take so long that they have not failed yet."""

    def __init__(self, notes: str, times: int, way: str, most_s: float = 0.0):
        super().__init__()
        if self.index == 1:
            count = len(list(Path(notes).iterdir()))
            (Path(notes) / str(count)).touch()
            if count < times:
                {"raise": self.fail, "exit": partial(os._exit, 3), "hang": partial(time.sleep, 60.0)}[way]()
        time.sleep(most_s)

    def fail(self):
        raise ValueError("not yet")


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("raise", {}),
        ("exit", {"num_workers": 2}),
        *(
            pytest.param(way, {"context": context}, marks=pytest.mark.slow)
            for way, context in (("raise", "spawn"), ("exit", "fork"), ("hang", "forkserver"), ("hang", "fork"))
        ),
    ],
)
def test_a_worker_that_fails_at_its_start_is_started_again(way: str, options: dict[str, Any], tmp_path: Path) -> None:
    if way == "hang":
        options |= {"start_timeout": 5}
    kwargs = {"notes": str(tmp_path), "times": 2, "way": way}
    with (
        pytest.warns(RuntimeWarning, match=r"failed at its start, and is started again \([12] of at most 2") as warned,
        muster.make_vec(Fragile, 3, env_kwargs=kwargs, on_failure="restart", max_restarts=2, **options) as envs,
    ):
        assert envs.reset(seed=0)[0][:, 0].tolist() == [0, 1, 2]
    assert len(warned) == 2
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(("restarts", "built"), [({"on_failure": "restart", "max_restarts": 1}, 2), ({}, 1)])
@pytest.mark.parametrize(
    ("way", "error"), [("raise", EnvError), *[pytest.param("exit", WorkerDied, marks=pytest.mark.slow)]]
)
@pytest.mark.filterwarnings("ignore:.*is started again:RuntimeWarning")
def test_the_last_failure_ends_the_start_at_once(
    way: str, error: type[Exception], restarts: dict[str, Any], built: int, tmp_path: Path
) -> None:
    kwargs = {"notes": str(tmp_path), "times": 9, "way": way, "most_s": 60.0}
    with pytest.raises(error, match=r"env 1\W.*(not yet|exit code 3)"):
        muster.make_vec(Fragile, 3, env_kwargs=kwargs, start_timeout=30, **restarts)
    assert len(list(tmp_path.iterdir())) == built
