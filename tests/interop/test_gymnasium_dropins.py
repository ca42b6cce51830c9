import multiprocessing
import os
import signal
import time
import warnings
from functools import partial

import gymnasium
import numpy as np
import pytest
from dropin_envs import Careless, Counter, Interrupted, Raising, Repeater, Slow
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError
from gymnasium.vector import AsyncVectorEnv as TheirAsync
from gymnasium.vector.async_vector_env import _async_worker

from muster.interop.gymnasium import AsyncVectorEnv, SyncVectorEnv
from slow import slow

BOTH = pytest.mark.parametrize("vectorise", [SyncVectorEnv, AsyncVectorEnv])


@BOTH
def test_may_be_stepped_before_the_first_reset(vectorise):
    with vectorise([Counter] * 2) as envs:
        obs, rewards, *_ = envs.step([0, 1])
    assert obs.tolist() == [[1.0], [1.0]]
    assert rewards.tolist() == [1.0, 1.0]


@BOTH
def test_observations_are_cast_and_axes_of_length_one_filled_in(vectorise):
    with vectorise([Careless] * 2) as envs:
        obs, _ = envs.reset()
        assert obs.dtype == np.float32
        assert obs.shape == (2, 1)


def test_final_observations_of_discrete_spaces_are_numbers_as_the_env_gives_them():
    class Choice(gymnasium.Env):
        observation_space = gymnasium.spaces.Dict(
            {f"cell {i:02}": gymnasium.spaces.Discrete(4) for i in range(40)} | {"box": gymnasium.spaces.Box(0, 1)}
        )
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return self.observation(), {}

        def step(self, action):
            return self.observation(), 0.0, True, False, {}

        def observation(self):
            cells = {f"cell {i:02}": (int, np.int64)[i % 2](3) for i in range(40)}
            return cells | {"box": np.zeros(1, np.float32)}

    with SyncVectorEnv([Choice], autoreset_mode="SameStep") as envs:
        envs.reset()
        (final,) = envs.step([0])[4]["final_obs"]
    assert [type(final[f"cell {i:02}"]) for i in range(32)] == [int, np.int64] * 16
    assert {type(final[f"cell {i:02}"]) for i in range(32, 40)} == {np.int64}  # told apart are the first 32


@BOTH
def test_actions_that_fit_no_space_reach_the_env_as_they_were_given(vectorise):
    with vectorise([Repeater] * 2) as envs:
        envs.reset()
        envs.step(["left", "right"])
        assert envs.call("what") == (("str", "left"), ("str", "right"))
        envs.step(np.array([7, 8]))
        assert envs.call("what") == (("int64", 7), ("int64", 8))
        with pytest.raises(ValueError, match="2 actions"):
            envs.step([1, 2, 3])
        with pytest.raises(TypeError, match="2 actions"):
            envs.step(1)
        assert envs.step([0, 0])[0].tolist() == [[3.0], [3.0]]


@BOTH
def test_raises_the_envs_own_exception_and_stays_in_step(vectorise):
    with vectorise([Raising] * 2) as envs:
        envs.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(KeyError, match="no action 2"):
                envs.step([2, 1])
        assert envs.step([1, 1])[0].tolist() == [[1.0], [2.0]]


class Percent(Counter):
    """Raises a text with `%`."""

    text = "battery at 5 %d %s %(x) %"

    def reset(self, *, seed=None, options=None):
        raise ValueError(self.text)

    drain = reset


@pytest.mark.parametrize("verb", ["reset", "call"])
def test_a_percent_sign_in_an_envs_error_is_no_format(verb):
    envs = AsyncVectorEnv([Percent] * 2, context="fork")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match=r"^battery at 5 %d %s %\(x\) %"):
            getattr(envs, verb)(*["drain"] * (verb == "call"))
    assert sum(Percent.text in str(one.message) for one in caught) == 2
    envs.close()


@pytest.mark.parametrize("order", [[Raising, Interrupted], [Interrupted, Raising]])
def test_an_env_that_raises_does_not_swallow_ctrl_c(order):
    with SyncVectorEnv(order) as envs:
        envs.reset()
        with pytest.raises(KeyboardInterrupt):
            envs.step([2, 2])


@BOTH
def test_what_is_wrong_with_a_reset_mask_is_said_in_gymnasiums_words(vectorise):
    with vectorise([Counter] * 2) as envs:
        for mask, error, match in (
            ([True, False], TypeError, "must be a numpy array"),
            (np.ones(3, bool), ValueError, r"must have shape `\(2,\)`"),
            (np.ones(2), TypeError, "must have `dtype=np.bool_`"),
            (np.zeros(2, bool), ValueError, "at least one True value"),
        ):
            with pytest.raises(error, match=match):
                envs.reset(options={"reset_mask": mask})
        with pytest.raises(ValueError, match="expected 2 seeds"):
            envs.reset(seed=[1, 2, 3])


def test_sync_takes_an_env_that_exists_and_gives_access_to_it():
    env = Counter()
    for _ in range(2):  # and again, while the first vector env has it still
        envs = SyncVectorEnv([lambda: env])
        assert envs.envs[0] is env
        envs.reset()
    assert envs.step([0])[0].tolist() == [[1.0]]


def test_sync_with_autoreset_disabled_asserts_that_ended_envs_are_reset():
    envs = SyncVectorEnv([partial(Counter, 1), Counter], autoreset_mode="Disabled")
    envs.reset()
    *_, truncated, _ = envs.step([0, 0])
    with pytest.raises(AssertionError, match=r"envs \[0\] have ended"):
        envs.step([0, 0])
    envs.reset(options={"reset_mask": truncated})
    assert envs.step([0, 0])[0].tolist() == [[1.0], [2.0]]


def test_async_does_not_start_again_for_an_env_that_always_raises(recwarn):
    with pytest.raises(TypeError, match="lenght"):
        AsyncVectorEnv([partial(Counter, lenght=3)] * 2, num_workers=1)
    assert not recwarn.list


def test_a_timeout_leaves_the_step_pending_and_returns_nothing_stale():
    with AsyncVectorEnv([Slow] * 2) as envs:
        envs.reset()
        envs.step_async([2, 2])
        with pytest.raises(multiprocessing.TimeoutError, match=r"`step_wait` has timed out after 0.01 second"):
            envs.step_wait(timeout=0.01)
        with pytest.raises(TimeoutError):
            envs.step_wait(timeout=0)
        with pytest.raises(
            AlreadyPendingCallError, match="Calling `step_async` while waiting for a pending call to `step`"
        ):
            envs.step([0, 0])
        assert envs.step_wait()[0].tolist() == [[1.0], [1.0]]
        assert envs.step([0, 0])[0].tolist() == [[2.0], [2.0]]


@BOTH
def test_every_verb_of_a_closed_one_is_refused_in_gymnasiums_words(vectorise):
    envs = vectorise([Counter] * 2)
    envs.reset()
    envs.close()
    calls = [
        partial(envs.step, [0, 0]),
        envs.reset,
        envs.render,
        partial(envs.call, "where"),
        partial(envs.get_attr, "count"),
    ]
    calls += [partial(envs.set_attr, "count", 1), partial(envs.step_async, [0, 0]), envs.step_wait]
    for call in calls:
        with pytest.raises(ClosedEnvironmentError, match=rf"`{vectorise.__name__}`, after a call to `close"):
            call()
    envs.close()


@pytest.mark.parametrize(
    "refused",
    [
        lambda envs: envs.step_async([0, 0]),
        lambda envs: envs.step_async(action=[0, 0]),
        lambda envs: envs.reset(seed=[0]),
        lambda envs: envs.reset(options={"reset_mask": [True]}),
    ],
)
def test_a_call_that_is_refused_drops_nothing(refused):
    with AsyncVectorEnv([Counter] * 2) as envs:
        envs.reset()
        envs.step_async([0, 1])
        with pytest.raises((AlreadyPendingCallError, TypeError, ValueError)):
            refused(envs)
        with pytest.raises(AlreadyPendingCallError):
            envs.reset()
        assert envs.step_wait()[0].tolist() == [[1.0], [1.0]]


def test_close_with_a_timeout_ends_where_a_worker_has_died_in_the_pending_call():
    envs = AsyncVectorEnv([Slow] * 2)
    envs.reset()
    pid = envs.call("where")[1]
    envs.step_async([2, 2])
    os.kill(pid, signal.SIGKILL)
    with pytest.warns(UserWarning, match="waiting for a pending call to `step`"):
        envs.close(timeout=1)


def test_a_custom_worker_gets_gymnasiums_own_class():
    envs = AsyncVectorEnv([Counter] * 2, worker=_async_worker)
    assert type(envs) is TheirAsync
    envs.close()
    with pytest.raises(TypeError, match="num_workers"):
        AsyncVectorEnv([Counter], worker=_async_worker, num_workers=1)


class Timed(Counter):
    """Its observation is the time at which its step began and ended, in seconds."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2), {}

    def step(self, action):
        begin = time.monotonic()
        time.sleep(0.03)
        return np.array([begin, time.monotonic()]), 0.0, False, False, {}


@pytest.mark.parametrize("context", ["fork", *slow(None)])
@pytest.mark.parametrize("most", [2, *slow(1)])
def test_max_concurrency_limits_how_many_execute_at_once(most, context):
    with AsyncVectorEnv([Timed] * 5, context=context, max_concurrency=most) as envs:
        assert len(set(envs.call("where"))) == 5
        envs.reset(seed=0)
        rows, *_ = envs.step([0] * 5)
    assert max(sum(begin <= moment < end for begin, end in rows) for moment, _ in rows) <= most


class Noisy(Counter):
    """Its step returns the attribute `noise`; the action 1 raises, 2 ends the process."""

    goal = 7

    def step(self, action):
        if action == 1:
            raise ValueError("no such action")
        if action == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().reset()[0], float(getattr(self, "noise", -1)), False, False, {}


def read_the_env(env, index):
    return type(env).__name__, env.goal, isinstance(env, Noisy), env.unwrapped is env, str(env)


def set_goal(env, index):
    env.goal = 8


@pytest.mark.parametrize("context", ["fork", *slow(None)])
def test_max_concurrency_puts_nothing_around_the_envs(context):
    seen = []
    for options in ({}, {"max_concurrency": 1}):
        with AsyncVectorEnv([Noisy] * 2, context=context, **options) as envs:
            envs.reset()
            envs.set_attr("noise", [3, 4])
            assert envs.step([0, 0])[1].tolist() == [3.0, 4.0]
            envs.call(set_goal)
            seen.append([envs.get_attr("noise"), envs.call("goal"), envs.call("__str__"), envs.call(read_the_env)])
    assert seen[0] == seen[1]


@pytest.mark.parametrize("context", ["fork", *slow(None)])
def test_a_permit_is_not_lost_with_a_step_that_raises(context):
    with AsyncVectorEnv([Noisy] * 3, context=context, max_concurrency=1) as envs:
        envs.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(ValueError, match="no such action"):
                envs.step([1, 0, 0])
        envs.reset()
        assert envs.step([0, 0, 0])[1].tolist() == [-1.0] * 3


def test_envs_with_max_concurrency_are_packed_where_a_trial_shows_that_they_may(capfd):
    with AsyncVectorEnv([Counter] * 3, max_concurrency=1, num_workers="auto") as envs:
        assert len(envs.stats()["workers"]) == len(os.sched_getaffinity(0))
    assert "two of it side by side are what each is alone" in capfd.readouterr().err


def test_a_limit_of_concurrency_that_is_none_is_refused():
    with pytest.raises(ValueError, match="must be an integer or None"):
        AsyncVectorEnv([Counter], max_concurrency=1.5)
    with pytest.raises(ValueError, match="must be a positive or None"):
        AsyncVectorEnv([Counter], max_concurrency=0)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="env_fns is empty"):
        SyncVectorEnv([])
    with pytest.raises(TypeError, match=r"env_fns\[0\] must be a callable"):
        SyncVectorEnv([Counter()])
    with pytest.raises(ValueError, match="cannot find context for 'threads'"):
        AsyncVectorEnv([Counter], context="threads")


def test_make_vec_of_gymnasium_finds_the_classes_once_they_are_bound_there(monkeypatch):
    monkeypatch.setattr(gymnasium.vector, "AsyncVectorEnv", AsyncVectorEnv)
    envs = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="async")
    with envs:
        assert isinstance(envs, AsyncVectorEnv)
        assert envs.spec.id == "CartPole-v1"
        assert envs.reset(seed=1)[0].shape == (2, 4)


def test_envs_that_fail_or_hang_are_replaced_on_request():
    with AsyncVectorEnv([Counter, Raising, Slow], on_failure="restart", step_timeout=1.0) as envs:
        envs.reset()
        *_, truncated, infos = envs.step([2, 2, 1000])
        assert truncated.tolist() == [False, True, True]
        assert "no action 2" in infos["restarted"][1]
        assert "step_timeout" in infos["restarted"][2]
    with pytest.raises(TypeError, match="has no max_restarts"):
        AsyncVectorEnv([Counter], worker=_async_worker, max_restarts=3)
