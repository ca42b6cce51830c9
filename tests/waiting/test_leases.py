"""Envs that are lent to tasks of asyncio."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections import Counter
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from waiting_envs import DELAY, HANG, RAISE, Bound, Coroutines

import muster
from muster.errors import ClosedError, EnvError, MusterError, PendingError, UsageError, WaitTimeout
from processes import kill_worker

WAYS: dict[str, dict[str, Any]] = {
    "serial": {"backend": "serial"},
    "thread": {"backend": "thread"},
    "workers": {"num_workers": 2},
    "concurrent": {"num_workers": 2, "concurrent": True},
    "caller_steps": {"num_workers": 1, "caller_steps": True},
}
DISABLED: dict[str, Any] = {"autoreset_mode": "disabled"}


async def episode(envs: Any, seed: int, steps: int = 5) -> list[Any]:
    async with envs.lease() as env:
        obs, info = await env.reset(seed=seed)
        rows = [obs.tolist()[1:], {**info, "env": None}]
        assert info["env"] in (env.env_index, -1)
        for _ in range(steps):
            obs, reward, terminated, truncated, info = await env.step(0)
            rows += [obs.tolist()[1:], reward, terminated, truncated, info["text"], sorted(info)]
        return rows


@pytest.mark.parametrize("env", [Coroutines, Bound])
@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_of_a_serial_run(way: str, env: Any, leaves_nothing: None) -> None:
    async def run(envs: Any, seeds: range) -> list[Any]:
        return await asyncio.gather(*(episode(envs, seed) for seed in seeds))

    with muster.make_vec(env, 1, backend="serial", **DISABLED) as envs:
        expected = [asyncio.run(run(envs, range(seed, seed + 1)))[0] for seed in range(12)]
    with muster.make_vec(env, 3, **DISABLED, **WAYS[way]) as envs:
        assert asyncio.run(run(envs, range(12))) == expected
        assert asyncio.run(run(envs, range(3))) == expected[:3]  # in another loop, once the first has ended
        envs.reset(seed=0)  # and by anybody else again


def test_actions_and_observations_of_all_spaces(leaves_nothing: None) -> None:
    from sample_envs import Everything

    async def run(envs: Any, alone: Any) -> None:
        async with envs.lease() as env:
            obs, _ = await env.reset(seed=3)
            np.testing.assert_equal(obs, alone.reset(seed=3)[0])
            alone.action_space.seed(1)
            for _ in range(5):
                action = alone.action_space.sample()
                row, expected = await env.step(action), alone.step(action)
                np.testing.assert_equal(row[0], expected[0])
                assert row[1:4] == expected[1:4]

    with muster.make_vec(Everything, 2, num_workers=1, **DISABLED) as envs:
        asyncio.run(run(envs, Everything()))


def test_each_lease_waits_for_itself_alone(leaves_nothing: None) -> None:
    async def one(envs: Any, action: int) -> float:
        async with envs.lease() as env:
            await env.reset(seed=0)
            began = time.monotonic()
            await env.step(action)
            return time.monotonic() - began

    async def run(envs: Any) -> list[float]:
        return await asyncio.gather(*(one(envs, DELAY if i == 0 else 0) for i in range(8)))

    with muster.make_vec(Coroutines, 8, num_workers=1, **DISABLED) as envs:
        slow, *others = asyncio.run(run(envs))
        assert slow >= 0.3
        assert max(others) < 0.25


def test_failures_time_limits_and_cancellation(leaves_nothing: None) -> None:
    async def run(envs: Any) -> None:
        async with envs.lease() as env, envs.lease() as other:
            await asyncio.gather(env.reset(seed=0), other.reset(seed=0))
            failed, fine = await asyncio.gather(env.step(RAISE), other.step(0), return_exceptions=True)
            assert isinstance(failed, EnvError)
            assert failed.env_index == env.env_index
            assert fine[1] == 1.0
            with pytest.raises(WaitTimeout):
                await other.step(DELAY, timeout=0.05)
            assert (await other.step(0))[1] == 2.0  # the answer to the one before
            assert (await other.step(0))[1] == 3.0
            waits = asyncio.ensure_future(env.step(DELAY))
            await asyncio.sleep(0.05)
            waits.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waits
            assert (await env.step(0))[1] == 2.0  # that of the cancelled one, the first, was dropped
            with pytest.raises(UsageError):
                await asyncio.gather(other.step(DELAY), other.step(0))
        with pytest.raises(UsageError, match="given back"):
            await env.step(0)

    with muster.make_vec(Coroutines, 2, num_workers=1, **DISABLED) as envs:
        asyncio.run(run(envs))


def test_what_was_cancelled_or_late_reaches_nobody_else(leaves_nothing: None) -> None:
    async def cancelled(envs: Any) -> None:
        async with envs.lease() as env:
            await env.reset(seed=0)
            await env.step(DELAY)

    async def run(envs: Any) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(cancelled(envs), 0.1)
        async with envs.lease() as env:  # the other env, at once
            await env.reset(seed=1)
            with pytest.raises(WaitTimeout):
                await env.step(DELAY, timeout=0.05)
            obs, _ = await env.reset(seed=7)  # not the step's row
            assert obs[1:].tolist() == [0, np.random.default_rng(7).random()]
            waits = asyncio.ensure_future(env.step(DELAY))
            await asyncio.sleep(0.05)
            waits.cancel()
            steps = await asyncio.gather(env.step(0), env.step(0), return_exceptions=True)
            assert [type(one) for one in steps] == [tuple, PendingError]
            assert steps[0][1] == 2.0
        lease = envs.lease()
        async with lease:
            with pytest.raises(UsageError, match="in use"):
                await lease.__aenter__()

    with muster.make_vec(Coroutines, 2, num_workers=1, **DISABLED) as envs:
        asyncio.run(run(envs))
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(cancelled(envs), 0.1))
        asyncio.run(run(envs))  # in another loop, though an env owes an answer to the one before
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(cancelled(envs), 0.1))
        assert envs.reset(seed=7)[0][:, 1].tolist() == [0, 0]  # nobody wants that answer
        asyncio.run(run(envs))


def test_a_restart_ends_the_episode_truncated(leaves_nothing: None) -> None:
    async def run(envs: Any) -> None:
        async with envs.lease() as env:
            await env.reset(seed=0)
            pid = envs.stats()["workers"][0]["pid"]
            step = asyncio.ensure_future(env.step(DELAY))
            await asyncio.sleep(0.1)
            os.kill(pid, signal.SIGKILL)
            _, reward, terminated, truncated, info = await step
            assert (reward, terminated, truncated) == (0.0, False, True)
            assert "SIGKILL" in info["restarted"]
            assert (await env.reset(seed=4))[0][1:].tolist() == [0, np.random.default_rng(4).random()]

    with muster.make_vec(Coroutines, 2, num_workers=1, on_failure="restart", **DISABLED) as envs:
        asyncio.run(run(envs))


@pytest.mark.parametrize("how", ["within", "thread", "death"])
def test_the_end_of_a_vector_env_wakes_all(how: str, leaves_nothing: None) -> None:
    async def hangs(envs: Any) -> None:
        async with envs.lease() as env:
            await env.reset(seed=0)
            await env.step(HANG)

    async def waits(envs: Any) -> None:
        async with envs.lease():
            raise AssertionError("lent twice")

    async def run(envs: Any) -> list[Any]:
        tasks = [asyncio.ensure_future(one(envs)) for one in (hangs, hangs, waits)]
        await asyncio.sleep(0.2)
        if how == "within":
            envs.close()
        elif how == "thread":
            threading.Thread(target=envs.close).start()
        else:
            kill_worker(envs, 0)
        return await asyncio.gather(*tasks, return_exceptions=True)

    with muster.make_vec(Coroutines, 2, num_workers=1, **DISABLED) as envs:
        ended = asyncio.run(run(envs))
        kind = MusterError if how == "death" else ClosedError
        assert [type(one) for one in ended if not isinstance(one, kind)] == [], ended


def test_leases_need_a_loop_and_the_right_mode() -> None:
    async def lease(envs: Any) -> None:
        async with envs.lease():
            pass

    with muster.make_vec(Coroutines, 1, backend="serial") as envs, pytest.raises(UsageError, match="disabled"):
        asyncio.run(lease(envs))
    with muster.make_vec(Coroutines, 2, num_workers=1, **DISABLED) as envs:
        with pytest.raises(UsageError, match=r"asyncio\.run"):
            envs.lease()
        envs.reset(seed=0)
        envs.send([0, 0])
        with pytest.raises(UsageError, match="owe answers"):
            asyncio.run(lease(envs))
        envs.recv()
        loops: list[Any] = []

        async def two() -> None:
            async with envs.lease():
                thread = threading.Thread(
                    target=lambda: loops.append(pytest.raises(UsageError, asyncio.run, lease(envs)))
                )
                thread.start()
                while thread.is_alive():
                    await asyncio.sleep(0.01)

        asyncio.run(two())
        assert "two event loops" in str(loops[0].value)


@pytest.mark.slow
@pytest.mark.parametrize("env", [Coroutines, Bound])
def test_3000_episodes_of_300_leases_beside_a_killer(env: Any, leaves_nothing: None) -> None:
    generator, lent = random.Random(0), Counter[int]()

    async def one(envs: Any, seed: int) -> Any:
        async with envs.lease() as lease:
            lent[lease.env_index] += 1
            assert lent[lease.env_index] == 1
            try:
                obs, info = await lease.reset(seed=seed)
                if "restarted" in info:  # another episode
                    return None
                rows = [obs[2]]
                for _ in range(5):
                    obs, _, _, truncated, info = await lease.step(0)
                    if truncated:
                        assert "restarted" in info
                        return None
                    rows.append(obs[2])
                return rows
            finally:
                lent[lease.env_index] -= 1

    async def kill(envs: Any) -> None:
        while True:
            await asyncio.sleep(0.2)
            pid = generator.choice(envs.stats()["workers"])["pid"]
            if pid is not None:
                os.kill(pid, signal.SIGKILL)

    async def run(envs: Any) -> list[Any]:
        killer = asyncio.ensure_future(kill(envs))
        tasks = []
        for seed in range(3000):
            task = asyncio.ensure_future(one(envs, seed))
            if generator.random() < 0.1:
                asyncio.get_running_loop().call_later(generator.random() * 20, task.cancel)
            tasks.append(task)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        killer.cancel()
        return ended

    options: dict[str, Any] = {"on_failure": "restart", "max_restarts": 10_000, "concurrent": True, "num_workers": 4}
    with muster.make_vec(env, 300, env_kwargs={"wait_s": 0.02}, **options, **DISABLED) as envs:
        ended = asyncio.run(run(envs))
    whole = 0
    for seed, rows in enumerate(ended):
        if isinstance(rows, list):
            numbers = np.random.default_rng(seed)
            assert rows == [numbers.random() for _ in rows]
            whole += 1
        else:
            assert rows is None or isinstance(rows, asyncio.CancelledError)
    assert whole > 300


def test_leases_of_a_gymnasium_id(leaves_nothing: None) -> None:
    async def run(envs: Any) -> int:
        async with envs.lease() as env:
            await env.reset(seed=1)
            for t in range(500):
                if any((await env.step(t % 2))[2:4]):
                    return t
        return -1

    with muster.make_vec("CartPole-v1", 2, **DISABLED) as envs:
        found = asyncio.run(run(envs))
    alone = gym.make("CartPole-v1")
    alone.reset(seed=1)
    assert found == next(t for t in range(500) if any(alone.step(t % 2)[2:4]))
