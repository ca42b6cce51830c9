"""Classes of modules that only this process knows reach workers: loaded by path, made by hand, found before a chdir."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest

import muster
from muster.errors import CannotTravel, EnvError, WorkerDied

HELPER = """
import threading
COUNT = 0
class Note:
    pass
class Refused(Exception):
    pass
def count():
    global COUNT
    COUNT += 1
"""
ENV = """
import pickle
import gymnasium as gym, numpy as np
import known_here_helper as helper

START = 3
class Env(gym.Env):
    observation_space = gym.spaces.Box(0, 99, (2,), np.float64)
    action_space = gym.spaces.Discrete(2)
    class Inner:
        pass
    def reset(self, *, seed=None, options=None):
        global START
        helper.count()
        START += 1
        sent = [type(self), self.Inner, helper.Note]
        assert pickle.loads(pickle.dumps(sent)) == sent
        import known_here_helper
        assert known_here_helper is helper
        return np.array([START, helper.COUNT], float), {}
    def step(self, action):
        if action:
            raise helper.Refused("no")
        return np.zeros(2), 0.0, False, False, {"note": helper.Note()}
def make():
    return Env()
def start_at_8():
    global START
    START = 8
"""
LOCKED = "import threading\nLOCK = threading.Lock()\nCOUNT = 0\nNote = int\ndef count(): pass\n"


def by_path(name: str, code: str, folder: Path) -> types.ModuleType:
    (folder / f"{name}.py").write_text(code)
    return loaded(name, folder)


def loaded(name: str, folder: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def by_hand(name: str, code: str, folder: Path) -> types.ModuleType:
    module = sys.modules[name] = types.ModuleType(name)
    exec(code, vars(module))
    return module


@pytest.fixture(params=[by_path, by_hand])
def env(request, tmp_path, monkeypatch):
    """The module of an env, beside another one."""
    names = "known_here_helper", "known_here_env"
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)  # restored in the end
    _, env = (request.param(name, code, tmp_path) for name, code in zip(names, (HELPER, ENV), strict=True))
    return env


def test_envs_of_such_modules_run_in_workers_as_here(env, recwarn):
    registered = cloudpickle.list_registry_pickle_by_value()
    with muster.make_vec([env.Env, env.make]) as envs:
        assert envs.reset()[0].tolist() == [[4, 1]] * 2
        assert envs.reset()[0].tolist() == [[5, 2]] * 2
        infos = envs.step(np.array([0, 0]))[-1]
        assert type(infos["note"][0]) is env.helper.Note
        with pytest.raises(EnvError) as caught:
            envs.step(np.array([1, 0]))
    assert type(caught.value.__cause__) is env.helper.Refused
    assert (env.START, env.helper.COUNT) == (3, 0)
    assert cloudpickle.list_registry_pickle_by_value() == registered
    assert [str(one.message) for one in recwarn if one.category is UserWarning] == []


def test_what_worker_init_sets_in_such_a_module_counts(env):
    for send in (env.Env, env.make, lambda: env.Env()):
        with muster.make_vec(send, 1, worker_init=env.start_at_8) as envs:
            assert envs.reset()[0].tolist() == [[9, 1]]


@pytest.mark.parametrize("helper", [HELPER, LOCKED])
def test_a_worker_that_has_loaded_the_module_itself_uses_what_is_in_there(helper, tmp_path, monkeypatch):
    names = "known_here_helper", "known_here_env"
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)
    _, env = (by_path(name, code, tmp_path) for name, code in zip(names, (helper, ENV), strict=True))

    def load_both():
        for name in names:
            loaded(name, tmp_path)
        sys.modules[names[1]].START = 8

    with muster.make_vec([env.Env, env.make], worker_init=load_both) as envs:
        assert envs.reset()[0][:, 0].tolist() == [9] * 2
        assert envs.call(lambda env, i: type(env) is sys.modules["known_here_env"].Env) == (True, True)
    if helper is LOCKED:
        with pytest.raises(CannotTravel, match=r"helper\.LOCK(.|\n)*worker_init after which `import .*env, .*helper`"):
            muster.make_vec(env.Env, 1)


@pytest.mark.parametrize("package", ["gymnasium", "json", "known_here_package"])
def test_a_module_made_by_hand_may_have_a_name_in_a_package(env, package, tmp_path, monkeypatch):
    for name in ("known_here_package", f"{package}.known_here"):
        monkeypatch.setitem(sys.modules, name, None)
    by_hand("known_here_package", "__path__ = []", tmp_path)
    code = "import known_here_env\nclass Env(known_here_env.Env): pass\ndef make(): return Env()"
    made = by_hand(f"{package}.known_here", code, tmp_path)
    with muster.make_vec(made.make, 1) as envs:
        assert envs.reset()[0].tolist() == [[4, 1]]


def test_a_module_that_workers_find_and_that_needs_such_a_one_is_not_what_the_error_names(env, tmp_path, monkeypatch):
    (tmp_path / "found").mkdir()
    (tmp_path / "found" / "known_here_user.py").write_text("from known_here_env import Env\nclass Mine(Env): pass\n")
    monkeypatch.syspath_prepend(tmp_path / "found")
    monkeypatch.setitem(sys.modules, "known_here_user", None)
    del sys.modules["known_here_user"]
    with pytest.raises(CannotTravel, match="worker_init after which `import known_here_env` works"):
        muster.make_vec(importlib.import_module("known_here_user").Mine, 1)


def test_what_is_defined_after_a_fork_reaches_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "known_here_helper", None)
    with muster.make_vec("CartPole-v1", 1, backend="process", context="fork") as envs:
        note = by_hand("known_here_helper", HELPER, tmp_path).Note()
        envs.set_attr("note", note)
        assert type(envs.get_attr("note")[0]) is type(note)
        assert envs.reset(options={"note": note})[0].shape == (1, 4)


def test_a_fork_has_its_own_definitions_of_the_script_and_of_such_modules(tmp_path):
    code = """
import functools
class Note:
    def text(self): return ""
    @staticmethod
    def size(): return 1
@functools.lru_cache
def kept(): return 1
def count(): return 1
"""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "known_here_helper.py").write_text(code)
    script = f"""{code}
import operator, sys; sys.path[:0] = ["lib"]; import known_here_helper, muster
sys.path.remove("lib")
def is_own(env, index, module, path, one): return operator.attrgetter(path)(sys.modules[module]) is one
envs = muster.make_vec("CartPole-v1", 1, backend="process", context="fork")
for module in ("__main__", "known_here_helper"):
    for path in ("Note", "Note.text", "Note.size", "kept", "count"):
        sent = operator.attrgetter(path)(sys.modules[module])
        assert envs.call(is_own, module, path, sent) == (True,), (module, path)
envs.close()
print("all")
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "all\n", done.stderr


def test_an_id_may_name_a_class_of_such_a_module(env):
    gym.register("KnownHere-v0", "known_here_env:Env", disable_env_checker=True, order_enforce=False)
    try:
        with muster.make_vec("KnownHere-v0", 1, backend="process") as envs:
            assert envs.reset()[0].tolist() == [[4, 1]]
    finally:
        del gym.registry["KnownHere-v0"]


def test_a_value_of_such_a_module_reaches_envs_that_run(env):
    with muster.make_vec(env.Env, 1) as envs:
        assert envs.call(lambda env, index, note: type(note).__module__, env.helper.Note()) == ("known_here_helper",)
        envs.set_attr("note", env.helper.Note())
        assert type(envs.get_attr("note")[0]) is env.helper.Note
    with muster.make_vec("CartPole-v1", 1, backend="process", on_failure="restart") as envs:
        envs.reset()
        envs.set_attr("note", env.helper.Note())
        with pytest.raises(WorkerDied):
            envs.call(lambda env, index: os._exit(1))
        envs.step(np.array([0]))
        assert type(envs.get_attr("note")[0]) is env.helper.Note


def test_it_is_not_a_namesake_that_workers_find(tmp_path, monkeypatch):
    (tmp_path / "found").mkdir()
    (tmp_path / "found" / "known_here_env.py").write_text("class Env: pass")
    monkeypatch.syspath_prepend(tmp_path / "found")
    monkeypatch.setitem(sys.modules, "known_here_env", None)
    code = ENV.replace("import known_here_helper as helper", "class helper: COUNT = 7; count = Note = int")
    env = by_path(
        "known_here_env",
        code.replace("        import known_here_helper\n", "").replace(
            "        assert known_here_helper is helper\n", ""
        ),
        tmp_path,
    )
    with muster.make_vec(env.Env, 1) as envs:
        assert envs.reset()[0].tolist() == [[4, 7]]


def test_a_change_of_folder_hides_no_module_that_a_relative_path_has_led_to(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "lib" / "known_here_helper.py").write_text(HELPER)
    (tmp_path / "lib" / "known_here_env.py").write_text(ENV)
    script = (
        "import os, sys; sys.path[:0] = ['lib']; from known_here_env import Env; os.chdir('other'); import muster\n"
        "envs = muster.make_vec(Env, 1); print(envs.reset()[0].tolist(), *envs.call(lambda env, i: sys.path[0]))\n"
        "envs.close()"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.split("] ")[0] == "[[4.0, 1.0]", done.stderr
    assert os.fspath(tmp_path / "lib") in done.stdout


class Finder:
    """Finds one module, which has no file."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, cls()) if name == "known_here_found" else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        exec(ENV.replace("import known_here_helper as helper", "helper = None"), vars(module))


def install() -> None:
    sys.meta_path.append(Finder)


def test_where_a_finder_of_this_process_finds_it_an_error_names_it_and_worker_init_is_the_way_out(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    monkeypatch.setitem(sys.modules, "known_here_found", None)
    del sys.modules["known_here_found"]
    found = importlib.import_module("known_here_found")
    for send in (found.Env, lambda: found.Env()):
        with pytest.raises(CannotTravel) as caught:
            muster.make_vec(send, 1)
        assert "known_here_found" in str(caught.value)
        assert "Pass a function as worker_init after which `import known_here_found` works" in str(caught.value)
    with pytest.raises(CannotTravel, match="does not find Env of the module known_here_found"):
        muster.make_vec(found.Env, 1)
    muster.make_vec(found.Env, 1, worker_init=install).close()
