"""Programs that fail, each repaired to the letter by the code that its error prints, and compared with the original."""

from __future__ import annotations

import functools
import os
import re
import threading
import time

import gymnasium
import numpy as np
import pytest
from remedy_programs import CASES, PROGRAMS, run

import muster
from muster.errors import CannotTravel
from muster.interop.gymnasium import AsyncVectorEnv
from sample_envs import Counter


@pytest.fixture
def _unregistered():
    yield
    gymnasium.registry.pop("Using-v0", None)


@pytest.mark.usefixtures("_unregistered")
@pytest.mark.parametrize("program", CASES)
def test_a_remedy_followed_to_the_letter_repairs_the_program(program, tmp_path):
    error = run(tmp_path / "failing.py", program.failing())
    assert isinstance(error, CannotTravel), error
    assert re.findall(r"muster\.\w+\.\S+|\b_Envs\b|_monitored", str(error)) == []
    assert run(tmp_path / "repaired.py", program.repaired(str(error))) == program.expected


def test_the_other_way_out_that_is_named_works(tmp_path):
    program = PROGRAMS["sb3, a lambda"]
    said = str(run(tmp_path / "failing.py", program.failing()))
    assert 'start_method="fork" copies all objects' in said
    assert "DummyVecEnv hands over this very object" in said
    for other in ('SubprocVecEnv(env_fns * 2, start_method="fork")', "DummyVecEnv(env_fns * 2)"):
        text = program.failing().replace("SubprocVecEnv(env_fns * 2)", other)
        assert run(tmp_path / "other.py", text) == program.expected


REMEDY = " Set step_timeout= to end waits for envs that hang."


class SlowToBuild(Counter):
    def __init__(self):
        time.sleep(1.0)
        super().__init__()


@pytest.mark.parametrize(
    ("make", "phase", "remedy"),
    [
        (lambda: AsyncVectorEnv([functools.partial(Counter, step_s=1.0)] * 2, num_workers=2), "step", REMEDY),
        (lambda: muster.make_vec(Counter, 1, env_kwargs={"step_s": 1.0}), "step", REMEDY),
        (lambda: AsyncVectorEnv([SlowToBuild] * 2, num_workers=1), "build", ""),
        (lambda: muster.make_vec(SlowToBuild, 1), "build", " It may go on until start_timeout=300.0."),
    ],
)
def test_only_a_call_that_has_a_time_limit_is_advised_to_set_it(make, phase, remedy, monkeypatch, caplog):
    monkeypatch.setattr("muster.pool.watch.AFTER_S", [0.3])
    with make() as envs:
        envs.reset()
        envs.step(np.zeros(envs.num_envs, int))
    [said] = [line for line in caplog.messages if f" in {phase} for " in line]
    look = f" To look at all workers: muster top {os.getpid()}."
    assert said.splitlines()[0].partition(".")[2].partition(".")[2] == remedy + look


class Holding(Counter):
    def __init__(self, thing, render_mode=None):
        super().__init__()
        self.thing = thing


def own_env(**kwargs):
    from torchrl.envs import GymEnv

    return GymEnv("Holding-v0", **kwargs)


@pytest.fixture
def _registered():
    gymnasium.register("Holding-v0", entry_point=Holding)
    yield
    del gymnasium.registry["Holding-v0"]


HANDED_OVER = {
    "a dict": lambda thing: {"thing": thing},
    "a list": lambda thing: [{"thing": thing}] * 2,
    "a closure": lambda thing: None,
}


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("handed_over", HANDED_OVER)
def test_what_hands_over_the_very_object_for_torchrl_can_be_followed(handed_over):
    import torchrl.envs

    from muster.interop.torchrl import ParallelEnv

    lock, num_workers = threading.Lock(), 2
    create_env_kwargs = HANDED_OVER[handed_over](lock)
    create_env_fn = own_env
    if create_env_kwargs is None:
        create_env_fn = lambda: own_env(thing=lock)  # noqa: E731  # as users write it
    with pytest.raises(CannotTravel) as raised:
        ParallelEnv(num_workers, create_env_fn, create_env_kwargs=create_env_kwargs)
    (own,) = re.findall(r"  (torchrl\.\S.*) hands over this very object\.", str(raised.value))
    env = eval(own, {"torchrl": torchrl} | locals())
    env.reset()
    assert [one._env.unwrapped.thing is lock for one in env._envs] == [True, True]
    env.close()


def test_a_function_for_torchrl_that_is_none_is_named_as_it_was_given():
    from muster.interop.torchrl import ParallelEnv

    with pytest.raises(TypeError, match=r"^create_env_fn must be a callable that returns an env, got Lazy$"):
        ParallelEnv(2, muster.lazy(Holding))
    with pytest.raises(TypeError, match=r"^create_env_fn\[1\] must be a callable that returns an env, got int$"):
        ParallelEnv(2, [Holding, 3])
