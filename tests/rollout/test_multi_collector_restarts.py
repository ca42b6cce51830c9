"""``MultiCollector(on_failure="restart")``: what an env's failure costs, how often, and what the counts say."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
import warnings

import pytest
import torch
from agent_envs import Script
from collecting import zeros_policy
from counting_env import CountingEnv

import muster
import programs
from muster.errors import ClosedError, EnvError, WorkerError
from muster.rollout.collector import Collector
from muster.rollout.multi_collector import MultiCollector as AnyMultiCollector
from processes import wait_for_end
from slow import slow

# A forked process has PyTorch already; the default, a fresh one, takes seconds to import it.
MultiCollector = functools.partial(AnyMultiCollector, context="fork", num_collectors=2)
Restarting = functools.partial(MultiCollector, on_failure="restart")


class Breaking(CountingEnv):
    """Raises in its seventh step, and again in the seventh after it was built again."""

    def __init__(self, length: int = 5) -> None:
        super().__init__(length=length)
        self.steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 7:
            raise ValueError("the gear is broken")
        return super().step(action)


class Stillborn(CountingEnv):
    def reset(self, *, seed=None, options=None):
        raise ValueError("no room to start in")


class Alone(Breaking):
    """Must be alone in its process, and is built there once."""

    metadata = {"one_per_process": True}  # noqa: RUF012  # as Gymnasium's
    built_in: set[int] = set()  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        if os.getpid() in self.built_in:
            raise RuntimeError("the simulator runs already in this process")
        self.built_in.add(os.getpid())


class Pair(Script):
    """Two agents whose process ends in the seventh step."""

    def __init__(self) -> None:
        super().__init__(["a_0 b_0"] * 9)

    def step(self, actions):
        if self.t == 6:
            os._exit(3)
        return super().step(actions)


ENVS = [CountingEnv, CountingEnv, CountingEnv, Breaking]


@pytest.mark.parametrize("sync", [True, False])
def test_an_env_that_raises_costs_one_row_and_not_its_neighbours(sync):
    def lose_three():
        lost = 0
        while lost < 3:
            batch = collector.rollout()
            mask, truncated = batch["collector", "mask"], batch["next", "truncated"][..., 0]
            assert mask[:-1].all()
            assert truncated.equal(~mask)
            assert mask[-1].sum() >= 8
            lost += int((~mask).sum())

    told = r"env 3 failed and was replaced; its episode ends truncated with a masked row.* ValueError: the gear is"
    frames = 40 if sync else 20
    with (
        Restarting(ENVS, zeros_policy, frames_per_batch=frames, sync=sync) as collector,
        pytest.warns(RuntimeWarning, match=told),
    ):
        lose_three()


@pytest.mark.filterwarnings("ignore:env 3 failed and was replaced:RuntimeWarning")
def test_a_replica_collects_what_a_collector_does_when_an_env_raises():
    with Restarting(ENVS, zeros_policy, frames_per_batch=40) as collector:
        got = [collector.rollout() for _ in range(3)]
        stats = collector.stats()["collectors"]
    with Collector(
        ENVS, zeros_policy, frames_per_batch=40, make_vec_options={"backend": "serial", "on_failure": "restart"}
    ) as other:
        expected = [other.rollout() for _ in range(3)]
        of_envs = other.stats()["envs"]
    for a, b in zip(got, expected, strict=True):
        for key in (
            "observation",
            ("next", "observation"),
            ("next", "reward"),
            ("next", "done"),
            ("collector", "mask"),
        ):
            assert a[key].equal(b[key]), key
    assert collector.frames == other.frames == 116
    assert stats["restarts"] == of_envs["restarts"] == 4
    assert stats["env_steps"] == of_envs["env_steps"]


@pytest.mark.filterwarnings("ignore:env 3 failed and was replaced:RuntimeWarning")
@pytest.mark.parametrize("sync", [True, *slow(False)])
def test_an_env_that_keeps_failing_is_an_error_in_the_end(sync):
    frames = 80 if sync else 40
    with Restarting(ENVS, zeros_policy, frames_per_batch=frames, max_restarts=4, sync=sync) as collector:
        with pytest.raises(
            WorkerError,
            match=r"collector 1 \(envs 2 to 3\) failed 5 times .*max_restarts=4.*the collectors are closed.*"
            r"The last failure: env 3: ValueError: the gear is broken",
        ) as caught:
            for _ in range(30):
                collector.rollout()
        assert caught.value.env_indices == (2, 3)
        with pytest.raises(ClosedError, match="make another MultiCollector"):
            collector.rollout()


def test_an_env_that_cannot_be_reset_is_an_error_at_once():
    with pytest.raises(WorkerError, match=r"collector 1 \(env 1\) failed 11 times .*env 1: ValueError: no room"):
        Restarting([CountingEnv, Stillborn], zeros_policy, frames_per_batch=4)


def test_a_policy_that_keeps_failing_is_an_error_in_the_end():
    def failing(obs):
        if obs[0, 1] == 2:
            raise ZeroDivisionError("no action is good enough")
        return torch.zeros(len(obs), dtype=torch.int64)

    with (
        Restarting(CountingEnv, failing, frames_per_batch=8, max_restarts=2) as collector,
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        with pytest.raises(WorkerError, match=r"collector \d \(env \d\) failed 3 times.*: ZeroDivisionError: no "):
            for _ in range(4):
                assert not collector.rollout()["collector", "mask"].any()
    told = [one for one in told if issubclass(one.category, RuntimeWarning)]  # since 3.12 Python warns of each fork
    assert len(told) == 4
    assert all("ZeroDivisionError: no action is good enough" in str(one.message) for one in told)


def test_an_env_that_must_be_alone_in_its_process_gets_another_one():
    with Restarting([CountingEnv, Alone], zeros_policy, frames_per_batch=10) as collector:
        whole = [collector.rollout()]
        with pytest.warns(RuntimeWarning, match=r"collector 1 \(env 1\) was replaced.*env 1 .*the gear is broken"):
            lost = collector.rollout()
        whole.append(collector.rollout())
    assert all(batch["collector", "mask"].all() for batch in whole)
    assert lost["collector", "mask"].tolist() == [[True] * 5, [False] * 5]


def test_agents_of_a_collector_that_died_end_truncated():
    with Restarting(Pair, frames_per_batch=20) as collector, pytest.warns(RuntimeWarning, match="exit code 3"):
        batch = collector.rollout()
    assert not batch["collector", "mask"].any()
    for flag in (("next", "truncated"), ("next", "a", "truncated"), ("next", "b", "done")):
        assert batch[flag][:, 0].all()
        assert not batch[flag][:, 1:].any()


class Deadly(CountingEnv):
    """Ends its process the first time that it is given 1.0 as its goal."""

    def __init__(self, mark):
        super().__init__()
        self.mark, self._goal = mark, 0.0

    @property
    def wall(self):
        return 0.0

    @property
    def goal(self):
        return self._goal

    @goal.setter
    def goal(self, goal):
        if goal == 1.0 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self._goal = goal


@pytest.mark.parametrize("dies", ["before", "meanwhile"])
def test_a_value_reaches_the_envs_of_a_replica_that_dies_before_or_while_it_is_set(dies, tmp_path):
    mark = tmp_path / "dead"
    if dies == "before":
        mark.touch()
    with Restarting(functools.partial(Deadly, mark), zeros_policy, num_envs=4, frames_per_batch=8) as collector:
        with pytest.raises(EnvError, match="wall"):
            collector.set_attr("wall", 5.0)  # refused, so not set again
        if dies == "before":
            pid = collector.stats()["collectors"]["workers"][0]["pid"]
            os.kill(pid, signal.SIGKILL)
            wait_for_end(pid)
        collector.set_attr("goal", [1.0, 2.0, 3.0, 4.0])
        assert collector.get_attr("goal") == (1.0, 2.0, 3.0, 4.0)
        with pytest.warns(RuntimeWarning, match=r"collector 0 \(envs 0 to 1\) was replaced"):
            collector.rollout()
        assert collector.get_attr("goal") == (1.0, 2.0, 3.0, 4.0)


class Halting(CountingEnv):
    """Hangs in its third step, once."""

    def __init__(self, mark):
        super().__init__(length=9)
        self.mark = mark

    def step(self, action):
        if self.count == 2 and not self.mark.exists():
            self.mark.touch()
            threading.Event().wait()
        return super().step(action)


def test_a_replaced_collector_is_warned_of_with_the_batch_that_it_has_cost(tmp_path):
    options = {"num_collectors": 1, "frames_per_batch": 2, "sync": False}
    envs = functools.partial(Halting, tmp_path / "hung")
    with Restarting(envs, zeros_policy, **options) as collector:
        collector.rollout()  # its collector is in the next one already
        while not (tmp_path / "hung").exists():
            time.sleep(0.01)
        (worker,) = collector.stats()["collectors"]["workers"]
        os.kill(worker["pid"], signal.SIGKILL)
        assert collector.get_attr("length") == (9,)  # which waits for that one; filters make errors of warnings
        with pytest.warns(RuntimeWarning, match=r"collector 0 \(env 0\) was replaced.*killed by SIGKILL") as told:
            batch = collector.rollout()
    assert not batch["collector", "mask"].any()
    assert [one.filename for one in told] == [__file__]


def refuse_second(env, index):
    """Has the envs with an odd index refuse another goal."""
    if index % 2:
        env.unwrapped.refuses = True


class Choosy(CountingEnv):
    """May refuse a goal."""

    goal = refuses = 0

    def __setattr__(self, name, value):
        if name == "goal" and self.refuses:
            raise ValueError(f"no goal of {value}")
        super().__setattr__(name, value)


def test_values_are_set_again_in_a_replica_in_which_another_env_has_refused_its_own():
    with Restarting(Choosy, zeros_policy, num_envs=4, frames_per_batch=8) as collector:
        collector.set_attr("goal", [1, 2, 3, 4])
        collector.call(refuse_second)
        with pytest.raises(EnvError, match="no goal of 6"):
            collector.set_attr("goal", [5, 6, 7, 8])
        pid = collector.stats()["collectors"]["workers"][0]["pid"]
        os.kill(pid, signal.SIGKILL)
        wait_for_end(pid)
        with pytest.warns(RuntimeWarning, match=r"collector 0 \(envs 0 to 1\) was replaced"):
            collector.rollout()
        assert collector.get_attr("goal") == (5, 2, 7, 4)


def test_stats_count_the_envs_steps_and_resets():
    with MultiCollector(functools.partial(CountingEnv, length=5), zeros_policy, num_envs=4, frames_per_batch=40) as c:
        for _ in range(3):
            c.rollout()
        stats = c.stats()["collectors"]
        c.reset()
        c.rollout()
        later = c.stats()["collectors"]
    assert stats["env_steps"] == c.frames - 40 == 120
    assert [worker["env_steps"] for worker in stats["workers"]] == [60, 60]
    assert [worker["resets"] for worker in stats["workers"]] == [14, 14]  # the first two, and after every five steps
    assert all(worker["collecting"] + worker["waiting"] == pytest.approx(1.0) for worker in stats["workers"])
    assert stats["restarts"] == 0
    assert later["env_steps"] == 160


def test_policies_are_told_their_collector_and_envs_their_index():
    def told():
        info = muster.get_worker_info()
        assert info is not None
        index = -1 if info.env_index is None else info.env_index
        return [index, info.worker_index, info.num_workers, info.num_envs]

    class Told(CountingEnv):
        def __init__(self):
            super().__init__()
            self.index = told()[0]

        def step(self, action):
            assert told()[0] == self.index >= 0
            return super().step(action)

    def build():
        in_factory = torch.tensor(told())

        def act(obs):
            assert torch.equal(in_factory, torch.tensor(told()))
            return {"action": zeros_policy(obs), "told": in_factory.expand(len(obs), 4)}

        return act

    with MultiCollector(Told, policy_factory=build, num_envs=6, frames_per_batch=12) as collector:
        batch = collector.rollout()
    assert batch["told"][:, 0].tolist() == [[-1, 0, 2, 6]] * 3 + [[-1, 1, 2, 6]] * 3


_WITHOUT_STDOUT = """
import os, sys
import gymnasium, muster, numpy as np, torch

class Chatty(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 2, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.ones(2, np.float32), {{}}

    def step(self, action):
        os.write(1, b"what an env may print, to whoever is there")
        return np.ones(2, np.float32), 0.0, False, False, {{}}

os.close(1)
with muster.MultiCollector(Chatty, lambda obs: torch.zeros(len(obs), dtype=torch.int64), num_envs=2, num_collectors=2,
                           frames_per_batch=8, context={context!r}) as collector:
    batch = collector.rollout()
    open(sys.argv[1], "w").write(str(bool((batch["observation"] == 1).all() and batch["collector", "mask"].all())))
"""


@pytest.mark.parametrize("context", ["fork", *slow("forkserver")])
def test_batches_are_never_where_stdout_was(context, tmp_path):
    script, told = tmp_path / "script.py", tmp_path / "told"
    script.write_text(_WITHOUT_STDOUT.format(context=context))
    done = programs.run(script, told, imports=programs.TORCH)
    assert told.exists(), done.stderr
    assert told.read_text() == "True"
