"""``worker_init``: what each worker does once before its first env, a function or the script's top level."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import muster
from muster.errors import ConfigError, EnvError
from processes import kill_worker
from sample_envs import Counter

WAYS: list[Any] = [
    {"num_workers": 2},
    {"num_workers": 2, "context": "fork"},
    {"caller_steps": True},
    {"backend": "thread"},
    {"backend": "serial"},
]
_made: list[int] = []
calls: list[int] = []


class Needy(Counter):
    """Can be built only where `prepare` was called; tells how often that was, and what came first."""

    def __init__(self) -> None:
        super().__init__()
        if not calls:
            raise LookupError("nobody has prepared anything")
        self.found = (os.getpid(), len(calls), calls[-1], len(_made))
        _made.append(1)

    def look(self) -> tuple[int, int, int, int]:
        return self.found


def prepare() -> None:
    info = muster.get_worker_info()
    assert info is not None
    assert info.env_index is None
    calls.append(info.worker_index)


def break_down() -> None:
    raise ValueError("no licence left")


@pytest.fixture(autouse=True)
def _nothing_was_prepared_here() -> Any:
    yield
    calls.clear()
    _made.clear()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_function_is_called_once_in_each_process_that_builds_envs_before_the_first(way: dict[str, Any]) -> None:
    with muster.make_vec(Needy, 3, worker_init=prepare, **way) as envs:
        found = envs.call("look")
    by_process: dict[int, list[Any]] = {}
    for pid, count, worker, built_before in found:
        assert count == 1
        by_process.setdefault(pid, []).append((worker, built_before))
    in_process = way.get("backend") in ("serial", "thread")
    assert (os.getpid() in by_process) == (in_process or "caller_steps" in way)
    for envs_of_process in by_process.values():
        assert [built_before for _, built_before in envs_of_process] == list(range(len(envs_of_process)))
        assert len({worker for worker, _ in envs_of_process}) == 1


@pytest.mark.parametrize("context", ["forkserver", "fork"])
def test_a_worker_that_replaces_another_one_does_the_same(context: str) -> None:
    options: dict[str, Any] = {"context": context, "on_failure": "restart", "worker_init": prepare}
    with muster.make_vec(Needy, 2, num_workers=2, **options) as envs:
        envs.reset(seed=0)
        before = envs.call("look")
        kill_worker(envs, 1)
        envs.step(np.zeros(2, np.int64))
        after = envs.call("look")
    assert after[0] == before[0]
    assert after[1][0] != before[1][0]
    assert after[1][1:] == (1, 1, 0)


@pytest.mark.parametrize("way", [*WAYS[:2], WAYS[-1]], ids=str)
def test_the_error_of_a_function_that_raises_says_whose_it_is(way: dict[str, Any]) -> None:
    with pytest.raises(EnvError, match="no licence left\nRaised by worker_init") as caught:
        muster.make_vec(Needy, 3, worker_init=break_down, **way)
    assert type(caught.value.__cause__) is ValueError


@pytest.mark.parametrize("init", [5, "Script", muster.lazy(prepare), lambda i: None], ids=["int", "str", "lazy", "i"])
def test_what_is_no_function_without_arguments_is_refused(init: Any) -> None:
    with pytest.raises(ConfigError, match="worker_init"):
        muster.make_vec(Counter, 1, worker_init=init)


@pytest.mark.parametrize("way", [{"backend": "serial"}, {"context": "fork"}], ids=str)
def test_a_script_has_run_already_where_envs_have_what_the_caller_has(way: dict[str, Any]) -> None:
    with muster.make_vec(Counter, 1, worker_init="script", **way) as envs:
        envs.reset(seed=0)


def test_the_trial_of_num_workers_auto_has_what_workers_have(capfd: pytest.CaptureFixture[str]) -> None:
    with muster.make_vec(Needy, 2, num_workers="auto", worker_init=prepare) as envs:
        envs.reset(seed=0)
    assert "two of it side by side are what each is alone" in capfd.readouterr().err


# ---- scripts


HEAD = """
import os, sys
import gymnasium as gym, numpy as np
import robotlib

robotlib.REGISTRY["arm"] = 5
CHOSEN, HELD = None, {}

class State:
    pass

class Arm(gym.Env):
    observation_space = gym.spaces.Box(-9, 999, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)
    def __init__(self):
        self.gain = robotlib.REGISTRY["arm"]
    def seen(self):
        return np.float32([self.gain, CHOSEN or 0, HELD.get("n", 0)])
    def reset(self, *, seed=None, options=None):
        return self.seen(), {}
    def step(self, action):
        return self.seen(), 0.0, False, False, {"state": State()}
    def variable(self):
        return os.environ["FROM_SCRIPT"]

def prepare():
    global CHOSEN
    robotlib.REGISTRY["arm"] = 6
    CHOSEN = 7
    HELD["n"] = 8

def tell(make):
    try:
        print(make(), flush=True)
    except Exception as error:
        notes = [note for note in getattr(error, "__notes__", ()) if "raceback" not in note]
        print(type(error).__name__, error, *notes, flush=True)

def first(**options):
    with muster.make_vec(Arm, 2, **options) as envs:
        rows = envs.reset()[0].tolist()
        assert type(envs.step([0, 0])[-1]["state"][0]) is State
        return rows[0] if rows[0] == rows[1] else rows

import muster
"""
RunScript = Callable[..., list[str]]


@pytest.fixture
def run(tmp_path: Path) -> RunScript:
    """Runs the code that follows HEAD in a script, and returns the lines that it prints."""
    (tmp_path / "robotlib.py").write_text("REGISTRY = {}\n")

    def run_script(code: str, how: tuple[str, ...] = ("train.py",), head: str = HEAD, name: str = "train.py") -> Any:
        script = tmp_path / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(head + textwrap.dedent(code))
        options: dict[str, Any] = {"input": script.read_text()} if how == ("-",) else {"stdin": subprocess.DEVNULL}
        command = [sys.executable, "-W", "error", *how]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, **options)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run_script


LINE = 'train.py:6 sets up `robotlib.REGISTRY["arm"] = 5`'


LACKS = "which workers do not run. If the env needs that, pass "


def test_make_vec_does_not_run_the_script_and_its_error_names_the_line_and_the_argument(run: RunScript) -> None:
    said = run(
        """
        if __name__ == "__main__":
            tell(first)
            tell(lambda: first(worker_init="script"))
            tell(lambda: first(context="fork"))
            tell(lambda: first(backend="serial"))
        """
    )
    assert said[0].startswith("EnvError env 0 (worker 0, while it was built): KeyError: 'arm'")
    assert said[1].startswith(f'{LINE}, {LACKS}worker_init="script": ')
    assert said[2:] == ["More: docs/problems/script-set-up.md"] + ["[5.0, 0.0, 0.0]"] * 3


REGISTERING = """
import numpy as np
import gymnasium as gym
import registries
import muster

registries.add_resolver("double", lambda x: 2 * x)
registries.start("other")

class Resolving(gym.Env):
    observation_space = gym.spaces.Box(0, 9, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, find):
        self.find = find

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        raise AssertionError(self.find("double"))

def tell(find):
    with muster.make_vec(Resolving, 1, env_kwargs={"find": find}) as envs:
        envs.reset()
        try:
            envs.call(lambda env, index: env.unwrapped.find("double"))
        except muster.errors.EnvError as error:
            print(*str(error).splitlines()[1:], flush=True)
"""


def test_what_the_script_registers_by_a_name_is_said_where_a_worker_lacks_it(run: RunScript, tmp_path: Path) -> None:
    (tmp_path / "registries.py").write_text(
        """
RESOLVERS = {}
class Unresolved(Exception): pass
def add_resolver(name, function): RESOLVERS[name] = function
def start(name): pass
def by_key(name): return RESOLVERS[name]
def by_its_own_error(name):
    if name not in RESOLVERS: raise Unresolved(f"nobody has registered {name}")
def otherwise(name): raise ValueError("the battery is empty")
"""
    )
    code = "if __name__ == '__main__':\n    tell(registries.by_key), tell(registries.by_its_own_error)\n"
    said = run(f"{code}    print('nothing')\n    tell(registries.otherwise)\n", head=REGISTERING)
    line = 'train.py:7 sets up `registries.add_resolver("double", lambda x: 2 * x)`, ' + LACKS
    assert [one.startswith(f'{line}worker_init="script"') for one in said[:2]] == [True, True], said
    assert said[2:] == ["nothing", ""]


MISSING = """
import pickle, sys
import muster

class State:
    pass

def attribute(env, index):
    getattr(sys.modules["__main__"], "Sta" + "te")
def evaluate(env, index):
    eval("Sta" + "te()")
def unpickle(env, index):
    pickle.loads(b"c__main__\\nState\\n)R.")
def of_another_module(env, index):
    getattr(sys, "Sta" + "te")
def of_no_script(env, index):
    eval("undefined")

def tell(*acts, **options):
    with muster.make_vec("CartPole-v1", 1, **options) as envs:
        for act in acts:
            try:
                envs.call(act)
                print("ok", flush=True)
            except muster.errors.EnvError as error:
                print(type(error.__cause__).__name__, *str(error).splitlines()[1:], flush=True)
"""


def test_an_error_about_a_name_that_arrived_nowhere_says_what_to_write(run: RunScript) -> None:
    said = run(
        """
        if __name__ == "__main__":
            tell(attribute, evaluate, unpickle, of_another_module, of_no_script)
            tell(attribute, worker_init="script")
            tell(attribute, worker_init=int)
        """,
        head=MISSING,
    )
    sentence = (
        "A worker has of the script only what its envs' code names. Name what is missing in a method of the env. Or "
        'pass worker_init="script": each worker then runs the script\'s top level first, for which that needs a main '
        "guard. More: docs/problems/script-set-up.md"
    )
    assert said[:2] == [f"AttributeError {sentence}", f"NameError {sentence}"]
    assert said[2:] == ["AttributeError", "AttributeError", "NameError", "ok", "AttributeError"]


def test_what_a_function_sets_in_the_script_envs_find_there(run: RunScript) -> None:
    said = run(
        """
        if __name__ == "__main__":
            for options in ({}, {"context": "fork"}, {"backend": "serial"}):
                CHOSEN = None
                HELD.clear()
                tell(lambda: first(worker_init=prepare, **options))
        """
    )
    assert said == ["[6.0, 7.0, 8.0]"] * 3


@pytest.mark.slow
def test_collectors_do_what_make_vec_does(run: RunScript) -> None:
    pytest.importorskip("torch")
    said = run(
        """
        def row(kind, init=None, **options):
            options |= {"make_vec_options": {"worker_init": init}}
            made = kind(Arm, None, frames_per_batch=2, total_frames=2, **options)
            try:
                return next(iter(made))["observation"].reshape(-1, 3).unique(dim=0).tolist()
            finally:
                made.shutdown()
        if __name__ == "__main__":
            tell(lambda: row(muster.Collector, num_envs=1))
            tell(lambda: row(muster.MultiCollector, num_collectors=1))
            tell(lambda: row(muster.Collector, "script", num_envs=2))
            tell(lambda: row(muster.MultiCollector, "script", num_collectors=2))
            tell(lambda: row(muster.MultiCollector, prepare, num_collectors=2, context="fork"))
        """
    )
    assert said[2] == said[5] == "More: docs/problems/script-set-up.md"
    del said[2:6:3]
    assert said[:4:2] == [
        "EnvError env 0 (worker 0, while it was built): KeyError: 'arm'",
        "EnvError env 0 (collector 0, while it was built): KeyError: 'arm'",
    ]
    about = f'{LINE}, {LACKS}worker_init="script": '
    assert all(line.startswith(about) for line in said[1:4:2])
    assert said[4:] == ["[[5.0, 0.0, 0.0]]"] * 2 + ["[[6.0, 7.0, 8.0]]"]


def test_the_script_runs_as_multiprocessing_runs_it_and_what_the_caller_has_made_of_it_counts(run: RunScript) -> None:
    said = run(
        """
        os.environ["FROM_SCRIPT"] = "script"
        sys.path.insert(0, "nowhere")
        np.seterr(divide="raise")
        class Noted:
            x: int
        print("top", __name__, sys.argv[1:], Noted.__annotations__["x"].__name__)
        class Late(Arm):
            def seen(self):
                return np.float32([self.gain, sys.path.count("nowhere"), sys.modules["__main__"].HELD["n"]])
        def look(env, index):
            return env.variable(), np.geterr()["divide"], os.path.basename(os.getcwd()), os.path.basename(__file__)
        if __name__ == "__main__":
            HELD["n"] = 3
            np.seterr(divide="ignore")
            os.mkdir("elsewhere")
            os.chdir("elsewhere")
            options = {"worker_env": {"FROM_SCRIPT": "worker_env"}, "on_failure": "restart", "worker_init": "script"}
            with muster.make_vec(Late, 1, **options) as envs:
                envs.reset()
                print(envs.call(look)[0])
                try:
                    envs.call(lambda env, index: os._exit(3))
                except Exception:
                    pass
                print(envs.step([0])[0].tolist(), envs.call(look)[0])
        """,
        ("train.py", "argument"),
    )
    top, looked = "top {} ['argument'] int".format, ("worker_env", "ignore", "elsewhere", "train.py")
    assert said == [
        *(top("__main__"), top("__mp_main__"), f"{looked}"),
        *(top("__mp_main__"), f"[[5.0, 1.0, 3.0]] {looked}"),
    ]


@pytest.mark.parametrize(
    ("how", "name"),
    [
        (("-m", "package.train"), "package/train.py"),
        pytest.param(("-m", "package"), "package/__main__.py", marks=pytest.mark.slow),
        pytest.param(("folder",), "folder/__main__.py", marks=pytest.mark.slow),
    ],
    ids=["module", "package", "folder"],
)
def test_a_script_may_be_a_module_or_a_folder(run: RunScript, how: tuple[str, ...], name: str) -> None:
    code = """
        if __name__ == "__main__":
            tell(lambda: first(worker_init="script"))
        """
    head = HEAD.replace("import robotlib", "sys.path.insert(0, os.getcwd())\nimport robotlib")
    assert run(code, how, head, name) == ["[5.0, 0.0, 0.0]"]


_GUARD = 'if __name__ == "__main__":'


@pytest.mark.parametrize(
    ("how", "code", "refusal"),
    [
        (("-",), "tell(lambda: first(worker_init='script'))", "but this process runs none"),
        (("train.py",), "tell(lambda: first(worker_init='script'))", "but that has no main guard"),
        (
            ("train.py",),
            f"tell(lambda: first(worker_init='script'))\n{_GUARD}\n    pass",
            "and line 46 of it would start workers again",
        ),
    ],
    ids=["stdin", "no guard", "outside the guard"],
)
def test_a_script_that_cannot_be_run_again_is_refused(
    run: RunScript, how: tuple[str, ...], code: str, refusal: str
) -> None:
    [said] = run(code, how)
    assert said.startswith('ConfigError worker_init="script" runs the top level of ')
    assert refusal in said
    assert "pass a function that sets up what envs need instead" in said


@pytest.mark.parametrize("content", [None, "a = ("], ids=["a notebook", "cannot be parsed"])
def test_what_is_no_script_is_refused(content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    if content is not None:
        main.__file__ = str(tmp_path / "train.py")
        (tmp_path / "train.py").write_text(content)
    with pytest.raises(ConfigError, match="but this process runs none .* a notebook, -c, stdin, or no source code"):
        muster.make_vec(Counter, 1, worker_init="script")


def test_a_script_that_ends_the_program_ends_no_drop_in_and_empties_no_log_file(run: RunScript) -> None:
    said = run(
        """
        import logging, robotlib
        from muster.interop.gymnasium import AsyncVectorEnv
        logging.getLogger("log").addHandler(logging.FileHandler("run.log", "w"))
        if "exits" in sys.argv and __name__ != "__main__":
            sys.exit("not for workers")
        robotlib.Robot = Arm
        if __name__ == "__main__":
            logging.getLogger("log").error("begun")
            AsyncVectorEnv([Arm]).close()
            print(open("run.log").read(), end="")
            sys.argv.append("exits")
            tell(lambda: AsyncVectorEnv([Arm]))
        """
    )
    assert said[:2] == ["begun", "EnvError env 0 (worker 0, while it was built): SystemExit: not for workers"]
    assert said[2].startswith("Raised by ")


def test_a_script_that_fails_or_starts_workers_itself_ends_with_an_error(run: RunScript) -> None:
    said = run(
        f"""
        if "fails" in sys.argv and __name__ != "__main__":
            raise FileExistsError("there is one already")
        if "starts" in sys.argv and __name__ != "__main__":
            first(worker_init=prepare)
        {_GUARD}
            for word in ("fails", "starts"):
                sys.argv.append(word)
                tell(lambda: first(worker_init="script"))
                sys.argv.remove(word)
        """
    )
    assert said[0] == "EnvError env 0 (worker 0, while it was built): FileExistsError: there is one already"
    assert said[1].startswith("Raised by ")
    assert said[1].endswith("train.py. Each worker runs its top level before its first env.")
    assert said[2].startswith("EnvError env 0 (worker 0, while it was built): muster.errors.UsageError: ")
    assert "makes a vector env at its top level, outside its main guard" in said[2]
