"""Big batches are handed out without being copied, and are nonetheless the caller's own."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Event
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import pytest
from gymnasium import spaces
from pettingzoo import ParallelEnv

import muster
from muster.errors import EnvError

NUM_ENVS = 4
SHAPE = (160, 120)  # of which four are more than is copied


class Numbered(gymnasium.Env):
    """Observations hold the number of the step throughout, beginning with 100 for each env; an action 1 raises."""

    action_space = spaces.Discrete(2)

    def __init__(self, episode_length: int, structured: bool = False, shape: tuple[int, int] = SHAPE) -> None:
        self._length, self._structured, self._shape = episode_length, structured, shape
        self.observation_space = spaces.Box(0, 60000, shape, np.uint16)
        if structured:
            self.observation_space = spaces.Dict({"camera": self.observation_space, "step": spaces.Discrete(60000)})

    def reset(self, *, seed=None, options=None):
        self._at = 100
        return self._obs(), {}

    def step(self, action):
        self._at += 1
        if action == 1:
            raise RuntimeError("as asked")
        return self._obs(), 0.0, self._at - 100 >= self._length, False, {}

    def _obs(self) -> Any:
        camera = np.full(self._shape, self._at, np.uint16)
        return {"camera": camera, "step": self._at} if self._structured else camera


SERIAL, THREAD = {"backend": "serial"}, {"backend": "thread", "num_workers": 2}
PROCESS, CALLER_STEPS = {"num_workers": 2}, {"num_workers": 2, "caller_steps": True}
KINDS = {
    "serial": (SERIAL, False),
    "thread": (THREAD, False),
    "process": (PROCESS, False),
    "caller_steps": (CALLER_STEPS, False),
    "serial, structured": (SERIAL, True),
    "process, structured": (PROCESS, True),
}


@pytest.fixture(params=KINDS)
def envs(request: pytest.FixtureRequest, leaves_nothing: None) -> Iterator[muster.VectorEnv]:
    options, structured = KINDS[request.param]
    with muster.make_vec(lambda: Numbered(5, structured), NUM_ENVS, **options) as made:
        made.reset(seed=0)
        yield made


NOTHING = np.zeros(NUM_ENVS, np.int64)


def big(obs: Any) -> npt.NDArray[np.uint16]:
    return obs["camera"] if isinstance(obs, dict) else obs


def held(obs: Any) -> list[int]:
    """What each row holds throughout."""
    rows = [int(row[0, 0]) for row in big(obs)]
    assert all((row == row[0, 0]).all() for row in big(obs))
    if isinstance(obs, dict):
        assert obs["step"].tolist() == rows
    return rows


def test_batches_that_are_kept_never_change(envs: muster.VectorEnv) -> None:
    batches = [envs.step(NOTHING)[0] for _ in range(40)]
    in_episode = [100 + step % 6 for step in range(1, 41)]
    assert [held(batch) for batch in batches] == [[number] * NUM_ENVS for number in in_episode]
    assert not any(np.shares_memory(big(a), big(b)) for a, b in pairwise(batches))


def test_a_view_keeps_its_batch(envs: muster.VectorEnv) -> None:
    view = big(envs.step(NOTHING)[0])[1, 3:5]
    for _ in range(12):
        envs.step(NOTHING)
    assert (view == 101).all()


def test_batches_are_writable_and_outlive_the_envs(envs: muster.VectorEnv) -> None:
    obs = big(envs.step(NOTHING)[0])
    obs += 1
    envs.step(NOTHING)
    envs.close()
    del envs
    gc.collect()
    assert held(obs) == [102] * NUM_ENVS
    obs[...] = 7


def test_a_loop_copies_nothing(envs: muster.VectorEnv) -> None:
    places = Counter()
    for _ in range(40):
        obs = envs.step(NOTHING)[0]
        places[big(obs).ctypes.data] += 1
    # The last batch is let go of once the next one is there. A step that was slow, on a busy machine, is copied.
    assert sum(times for _, times in places.most_common(2)) > 20


def test_some_envs_are_stepped_after_all(envs: muster.VectorEnv) -> None:
    big(envs.step(NOTHING)[0])[...] = 0
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


def test_an_env_that_raises_keeps_its_last_row(envs: muster.VectorEnv) -> None:
    held_back = [envs.step(NOTHING)[0] for _ in range(2)]
    with pytest.raises(EnvError, match="as asked"):
        envs.step(np.array([0, 0, 1, 0]))
    obs, _ = envs.reset(options={"reset_mask": np.array([True, False, False, False])})
    assert held(obs) == [100, 103, 102, 103]
    assert held(held_back[1]) == [102] * NUM_ENVS


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


def test_a_forked_child_has_its_own_copy_of_a_batch(envs: muster.VectorEnv) -> None:
    kept, obs = envs.step(NOTHING)[0], envs.step(NOTHING)[0]
    asks, answers = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(asks[1])
            big(kept)[...] = 7
            os.write(answers[1], b"x")
            os.read(asks[0], 1)
            os.write(answers[1], str(held(obs)).encode())
        finally:
            os._exit(0)
    os.read(answers[0], 1)
    assert (big(kept) == 101).all()
    big(obs)[...] = 9
    obs = None
    places = set()
    for _ in range(10):
        places.add(big(envs.step(NOTHING)[0]).ctypes.data)
    assert len(places) <= 3  # what was given back is lent again
    os.write(asks[1], b"x")
    assert os.read(answers[0], 100) == str([102] * NUM_ENVS).encode()
    os.waitpid(child, 0)
    assert (big(kept) == 101).all()
    for fd in (*asks, *answers):
        os.close(fd)


def test_a_fork_loses_nothing_that_another_thread_writes() -> None:
    def add(rows: Any, begun: Event, forked: Event) -> int:
        added = 0
        while not forked.is_set():
            np.add(rows, 1, out=rows, dtype=np.float64, casting="unsafe")  # slower than a copy
            added += 1
            begun.set()
        return added

    envs = muster.make_vec(lambda: Numbered(50, shape=(4000, 1000)), 1, backend="process")
    with envs, ThreadPoolExecutor() as executor:
        envs.reset()
        for step in range(1, 9):
            rows, begun, forked = envs.step(NOTHING[:1])[0], Event(), Event()
            adding = executor.submit(add, rows, begun, forked)
            begun.wait()
            if (child := os.fork()) == 0:
                os._exit(0)
            forked.set()
            os.waitpid(child, 0)
            assert (rows == 100 + step + adding.result()).all()


class Pair(ParallelEnv):
    """Two agents see the number of the step; the second one ends after three steps."""

    possible_agents = ("first", "second")
    metadata = {"name": "pair"}  # noqa: RUF012  # as PettingZoo has it

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(0, 60000, SHAPE, np.uint16)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self._at = list(self.possible_agents), 100
        return {agent: np.full(SHAPE, 100, np.uint16) for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        self._at += 1
        there = self.agents
        ended = {agent: agent == "second" and self._at >= 103 for agent in there}
        self.agents = [agent for agent in there if not ended[agent]]
        obs = {agent: np.full(SHAPE, self._at, np.uint16) for agent in there}
        return obs, dict.fromkeys(there, 1.0), ended, dict.fromkeys(there, False), {agent: {} for agent in there}


def test_agents_observations_are_lent_and_their_flags_are_the_last_ones(leaves_nothing: None) -> None:
    with muster.make_vec(Pair, 2, num_workers=2, groups={"first": "all", "second": "all"}) as envs:
        envs.reset()
        actions = {"all": np.zeros((2, 2), np.int64)}
        batches = [envs.step(actions) for _ in range(5)]
        seen = [batch[0]["all"][:, :, 0, 0].tolist() for batch in batches]
        assert seen == [[[at, at if at <= 103 else 0]] * 2 for at in range(101, 106)]
        assert [batch[4]["acting"]["all"][0].tolist() for batch in batches] == [
            [True, at < 103] for at in range(101, 106)
        ]
        actions["all"][:, 1] = 99  # of an agent that is not there any more, so it does not count
        assert envs.step(actions)[0]["all"][:, 0, 0, 0].tolist() == [106, 106]


def held_bytes(array: npt.NDArray[Any]) -> int:
    """What stays in memory as long as the array does."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.nbytes


def test_rewards_and_flags_that_are_kept_keep_no_observations() -> None:
    with muster.make_vec(Pair, 2, backend="serial", groups={"first": "all", "second": "all"}) as envs:
        envs.reset()
        kept = []
        for _ in range(5):
            obs, rewards, _, _, infos = envs.step({"all": np.zeros((2, 2), np.int64)})
            kept.append(obs)  # from the fourth step on batches are copied
            assert held_bytes(rewards["all"]) < 100
            assert held_bytes(infos["alive"]["all"]) < 100
    assert [obs["all"][0, 0, 0, 0] for obs in kept] == [101, 102, 103, 104, 105]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_actions_that_are_cast_or_lie_in_columns_lend_as_well(dtype: Any) -> None:
    groups = {"first": "a", "second": "b"}
    with muster.make_vec(Pair, 2, backend="serial", groups=groups) as envs:
        envs.reset()
        both = np.zeros((2, 2), dtype)
        places = Counter()
        for _ in range(10):
            obs = envs.step({"a": both[:, :1], "b": both[:, 1:]})[0]
            places[obs["a"].ctypes.data] += 1
    assert len(places) <= 3
