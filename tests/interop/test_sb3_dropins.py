import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from dropin_envs import Alone, Counter, Interrupted, InterruptsCaller, Raising, SeedOnly, Structured

import muster
from muster.errors import ConfigError

sb3 = pytest.importorskip("stable_baselines3")

from stable_baselines3.common.monitor import Monitor  # noqa: E402

from muster.interop.sb3 import DummyVecEnv, SubprocVecEnv, as_sb3, make_vec_env  # noqa: E402

# torch warns of what SB3 does with it.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:stable_baselines3")
FORK = {"start_method": "fork"}  # fresh processes import SB3 for their Monitor or wrapper, for seconds
BOTH = pytest.mark.parametrize(
    "vec_env_cls", [DummyVecEnv, partial(SubprocVecEnv, num_workers=2, **FORK)], ids=["dummy", "sub"]
)


@pytest.fixture
def make():
    """Closes what a test has made."""
    made = []

    def keep(vec_env):
        made.append(vec_env)
        return vec_env

    yield keep
    for vec_env in made:
        vec_env.close()


@BOTH
def test_seeds_and_options_are_used_once(vec_env_cls, make):
    envs = make(vec_env_cls([Counter] * 2))
    assert envs.seed(7) == [7, 8]
    envs.set_options([{"level": 1}, {}])
    envs.reset()
    envs.reset()
    assert envs.get_attr("seeds") == [[7, None], [8, None]]
    assert envs.get_attr("options") == [[{"level": 1}, None], [None, None]]


@BOTH
def test_an_env_whose_reset_knows_no_options_may_be_used(vec_env_cls, make):
    envs = make(vec_env_cls([SeedOnly] * 2))
    envs.seed(1)
    assert envs.reset().shape == (2, 1)


@BOTH
def test_attributes_and_methods_of_some_envs(vec_env_cls, make):
    envs = make(vec_env_cls([lambda: Monitor(Counter()), Counter, Counter]))
    assert envs.env_is_wrapped(Monitor) == [True, False, False]
    assert envs.env_is_wrapped(Monitor, indices=[2, 0]) == [False, True]
    envs.set_attr("mark", 5, indices=[0, -1])
    assert not envs.has_attr("mark")
    assert envs.get_attr("mark", indices=[-1, 0]) == [5, 5]
    with pytest.raises(AttributeError, match="mark"):
        envs.get_attr("mark")
    assert len(envs.env_method("where", indices=1)) == 1
    assert envs.reset().shape == (3, 1)  # and they are in step still


@pytest.mark.parametrize("order", [[Raising, Interrupted], [Interrupted, Raising]])
def test_an_env_that_raises_does_not_swallow_ctrl_c(order, make):
    envs = make(DummyVecEnv(order))
    envs.reset()
    with pytest.raises(KeyboardInterrupt):
        envs.step(np.array([2, 2]))


def test_training_goes_on_after_ctrl_c_in_a_step(make):
    envs = make(SubprocVecEnv([partial(InterruptsCaller, os.getpid()), Counter], num_workers=2))
    envs.reset()
    with pytest.raises(KeyboardInterrupt):
        envs.step(np.array([0, 0]))
    assert envs.reset().tolist() == [[0.0], [0.0]]
    assert envs.step(np.array([0, 0]))[0].tolist() == [[1.0], [1.0]]


def test_dummy_takes_an_env_that_exists_but_not_twice(make):
    env = Counter()
    first = make(DummyVecEnv([lambda: env]))
    second = make(DummyVecEnv([lambda: env]))
    assert first.envs[0] is second.envs[0] is env
    with pytest.raises(ValueError, match="returned the same env"):
        DummyVecEnv([lambda: env] * 2)


def test_dummy_gives_float32_rewards(make):
    envs = make(DummyVecEnv([Counter]))
    envs.reset()
    assert envs.step([0])[1].dtype == np.float32


def test_a_number_of_workers_that_is_no_number_is_refused():
    with pytest.raises(ConfigError, match="num_workers must be a number of workers, \"auto\" or None, got 'all'"):
        SubprocVecEnv([Counter], num_workers="all")


def test_make_vec_env_seeds_monitors_and_wraps(tmp_path, make):
    envs = make(
        make_vec_env(
            "CartPole-v1",
            2,
            seed=3,
            start_index=4,
            monitor_dir=str(tmp_path / "logs"),
            env_kwargs={"sutton_barto_reward": True},
        )
    )
    assert type(envs) is DummyVecEnv
    assert envs.env_is_wrapped(Monitor) == [True, True]
    assert envs.render_mode == "rgb_array"
    envs.reset()
    assert envs.get_attr("np_random_seed") == [3, 4]
    for _ in range(100):
        *_, dones, infos = envs.step(np.ones(2, int))
        if dones.any():
            break
    assert infos[int(np.flatnonzero(dones)[0])]["episode"]["l"] > 0
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["4.monitor.csv", "5.monitor.csv"]


@BOTH
def test_dict_and_tuple_actions_come_one_for_each_env(vec_env_cls, make):
    envs = make(vec_env_cls([Structured] * 2))
    actions = [envs.action_space.sample() for _ in range(2)]
    envs.reset()
    envs.step(actions)
    assert [given for _, given in envs.env_method("what")] == actions
    as_a_tuple_of_arrays = np.array([0, 1]), np.array([2, 3])  # as many envs as an action has parts
    envs.step(as_a_tuple_of_arrays)
    assert [list(given) for _, given in envs.env_method("what")] == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="expected 2 actions"):
        envs.step(actions[:1])


@pytest.mark.parametrize(
    ("options", "words"),
    [({}, 'autoreset_mode="same_step"'), ({"autoreset_mode": "same_step", "copy": False}, "copy=True")],
)
def test_as_sb3_refuses_a_vector_env_that_does_not_step_as_sb3s_do(options, words):
    with muster.make_vec(Counter, 2, backend="serial", **options) as envs, pytest.raises(ValueError, match=words):
        as_sb3(envs)


def test_make_vec_env_says_what_to_pass_for_an_env_that_exists():
    with pytest.raises(
        TypeError,
        match="takes an env id, .*Every env is built where it runs",
    ):
        make_vec_env(Alone(), n_envs=2)


def test_envs_that_fail_are_replaced_on_request(make):
    envs = make(SubprocVecEnv([Counter, Raising], on_failure="restart", **FORK))
    envs.reset()
    _, _, dones, infos = envs.step(np.array([2, 2]))
    assert dones.tolist() == [False, True]
    assert infos[1]["TimeLimit.truncated"]
    assert "no action 2" in infos[1]["restarted"]
    assert envs.step(np.zeros(2, int))[0].tolist() == [[2.0], [1.0]]


@pytest.mark.usefixtures("launchers_of_users")
@pytest.mark.parametrize(
    ("make_envs", "expected"),
    [
        (lambda: make_vec_env(Counter, 2, vec_env_cls=SubprocVecEnv), True),
        pytest.param(lambda: SubprocVecEnv([lambda: Monitor(Counter())] * 2), True, marks=pytest.mark.slow),
        (lambda: SubprocVecEnv([Counter] * 2), False),
    ],
    ids=["make_vec_env", "a function that names Monitor", "envs without SB3"],
)
def test_what_forks_the_workers_has_imported_sb3_where_they_need_it(make_envs, expected, make, capfd):
    envs = make(make_envs())
    assert envs.reset().shape == (2, 1)
    (parent,) = {Path(f"/proc/{pid}/stat").read_text().split()[3] for pid in envs.env_method("where")}
    assert ("/libtorch" in Path(f"/proc/{parent}/maps").read_text()) is expected
    assert "without preloaded modules" not in capfd.readouterr().err
