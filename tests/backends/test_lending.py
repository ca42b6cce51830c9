"""Big batches are handed out without being copied, and are nonetheless the caller's own."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from itertools import pairwise

import gymnasium
import numpy as np
import numpy.typing as npt
import pytest
from gymnasium import spaces

import muster
from muster.errors import EnvError

NUM_ENVS = 4
SHAPE = (160, 120)  # of which four are more than is copied


class Numbered(gymnasium.Env):
    """Observations hold the number of the step throughout, beginning with 100 for each env; an action 1 raises."""

    observation_space = spaces.Box(0, 60000, SHAPE, np.uint16)
    action_space = spaces.Discrete(2)

    def __init__(self, episode_length: int) -> None:
        self._length = episode_length

    def reset(self, *, seed=None, options=None):
        self._at = 100
        return self._obs(), {}

    def step(self, action):
        self._at += 1
        if action == 1:
            raise RuntimeError("as asked")
        return self._obs(), 0.0, self._at - 100 >= self._length, False, {}

    def _obs(self) -> npt.NDArray[np.uint16]:
        return np.full(SHAPE, self._at, np.uint16)


@pytest.fixture(params=["serial", "thread", "process", "caller_steps"])
def envs(request: pytest.FixtureRequest, leaves_nothing: None) -> Iterator[muster.VectorEnv]:
    options = {"backend": request.param}
    if request.param == "caller_steps":
        options = {"caller_steps": True}
    if request.param != "serial":
        options["num_workers"] = 2
    with muster.make_vec(lambda: Numbered(5), NUM_ENVS, **options) as made:
        made.reset(seed=0)
        yield made


NOTHING = np.zeros(NUM_ENVS, np.int64)


def held(obs: npt.NDArray[np.uint16]) -> list[int]:
    """What each row holds throughout."""
    assert all((row == row[0, 0]).all() for row in obs)
    return [int(row[0, 0]) for row in obs]


def test_batches_that_are_kept_never_change(envs: muster.VectorEnv) -> None:
    batches = [envs.step(NOTHING)[0] for _ in range(40)]
    in_episode = [100 + step % 6 for step in range(1, 41)]
    assert [held(batch) for batch in batches] == [[number] * NUM_ENVS for number in in_episode]
    assert not any(np.shares_memory(a, b) for a, b in pairwise(batches))


def test_a_view_keeps_its_batch(envs: muster.VectorEnv) -> None:
    view = envs.step(NOTHING)[0][1, 3:5]
    for _ in range(12):
        envs.step(NOTHING)
    assert (view == 101).all()


def test_batches_are_writable_and_outlive_the_envs(envs: muster.VectorEnv) -> None:
    obs = envs.step(NOTHING)[0]
    obs += 1
    envs.step(NOTHING)
    envs.close()
    del envs
    gc.collect()
    assert held(obs) == [102] * NUM_ENVS
    obs[...] = 7


def test_a_loop_copies_nothing(envs: muster.VectorEnv) -> None:
    places = set()
    obs = envs.step(NOTHING)[0]
    for _ in range(20):
        obs = envs.step(NOTHING)[0]
        places.add(obs.ctypes.data)
    assert len(places) == 2  # the last batch is let go of once the next one is there


def test_some_envs_are_stepped_after_all(envs: muster.VectorEnv) -> None:
    obs = envs.step(NOTHING)[0]
    obs[...] = 0
    envs.send(NOTHING[:2], [1, 2])
    assert held(envs.recv().obs) == [102, 102]
    assert held(envs.step(NOTHING)[0]) == [102, 103, 103, 102]


def test_an_env_that_raises_costs_the_others_nothing(envs: muster.VectorEnv) -> None:
    envs.step(NOTHING)
    actions = NOTHING.copy()
    actions[2] = 1
    with pytest.raises(EnvError, match="as asked") as error:
        envs.step(actions)
    assert error.value.batch.env_ids.tolist() == [0, 1, 3]
    assert held(error.value.batch.obs) == [102] * 3
    envs.reset(options={"reset_mask": np.array([False, False, True, False])})
    assert held(envs.step(NOTHING)[0]) == [103, 103, 101, 103]


def test_a_step_that_is_waited_for_twice(envs: muster.VectorEnv) -> None:
    envs.step(NOTHING)
    envs.step_async(NOTHING)
    assert held(envs.step_wait()[0]) == [102] * NUM_ENVS
    assert held(envs.step(NOTHING)[0]) == [103] * NUM_ENVS


def test_rows_of_envs_that_are_not_reset_are_those_that_were_stepped(leaves_nothing: None) -> None:
    with muster.make_vec(lambda: Numbered(50), NUM_ENVS, num_workers=2, autoreset_mode="disabled") as envs:
        envs.reset()
        obs = envs.step(NOTHING)[0]
        obs[...] = 0
        obs, _ = envs.reset(options={"reset_mask": np.array([True, False, False, False])})
        assert held(obs) == [100, 101, 101, 101]


def test_a_forked_child_keeps_what_it_was_forked_with(envs: muster.VectorEnv) -> None:
    obs = envs.step(NOTHING)[0]
    asks, answers = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.read(asks[0], 1)
            os.write(answers[1], str(held(obs)).encode())
        finally:
            os._exit(0)
    obs = None
    for _ in range(10):
        envs.step(NOTHING)
    os.write(asks[1], b"x")
    assert os.read(answers[0], 100) == str([101] * NUM_ENVS).encode()
    os.waitpid(child, 0)
    for fd in (*asks, *answers):
        os.close(fd)
