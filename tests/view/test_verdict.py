"""The verdict on a run: each cause by two looks, and by a program that makes it so."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import muster
from muster._core import Doing
from muster.pool.watch import seconds
from muster.view.looks import Look, Process, look_before
from muster.view.top import Top
from muster.view.verdict import Cause, verdict
from spinning import OPTIONS, Spinning

DT = 2.0


def looks(
    steps: Sequence[int] = (100, 100),
    in_env: Sequence[float] = (0.5, 0.5),
    copying: float = 0.0,
    ready: float = 0.0,
    cpu: float = 0.5,
    cores: int = 2,
    **after: Any,
) -> Cause:
    """The verdict on workers with two envs each, by shares of two seconds; `host`: of worker 1 at the second look."""
    host, process, is_stepped = after.pop("host", {}), after.pop("process", {}), after.pop("is_stepped", True)
    before = look_before(len(steps))
    hosts = [
        one._replace(
            envs=range(2 * one.number, 2 * one.number + 2),
            env_steps=steps[one.number],
            in_env=int(DT * in_env[one.number] / seconds(1)),
            copying=int(DT * copying / seconds(1)),
            pending=0 if is_stepped else None,
        )
        for one in before.hosts
    ]
    processes = [Process(10 + one.number, "S", DT * cpu, DT * ready) for one in hosts]
    hosts[1], processes[1] = hosts[1]._replace(**host), processes[1]._replace(**process)
    first = before._replace(at=0.0, processes=[Process(one.pid) for one in processes], caller=Process(1))
    return verdict(first, Look(DT, hosts, processes, Process(1, "S", DT * 0.1), 4.0, cores, is_stepped, **after))


@pytest.mark.parametrize(
    ("seen", "kind", "said"),
    [
        ({"in_env": (0.97, 0.95)}, "envs", "step 0.96 of the time, 40 ms a step; 100 env steps a second are what this"),
        ({"in_env": (0.97, 0.95), "cores": 4}, "envs", "are what 2 of 4 cores can give. More workers, by num_workers="),
        ({"steps": (0, 0), "in_env": (0.97, 0.95)}, "envs", "no step has ended within 2 s"),
        ({"in_env": (0.02, 0.04), "asked": 0.1}, "caller", "38.8 of 40 ms a step lie between step and step"),
        ({"in_env": (0.02, 0.04)}, "waiting", "38.8 of 40 ms a step: for the caller between step and step, or"),
        ({"in_env": (0.02, 0.04), "asked": 0.9}, "uneven", "workers step 0.03 of the time and wait 0.97 of it, most"),
        ({"in_env": (0.9, 0.2)}, "straggler", "worker 0 (envs 0, 1) is 4.5 times as slow as the others"),
        ({"in_env": (0.1, 0.1), "copying": 0.6}, "copying", "copying takes 0.60 of the workers' time, 24 of 40 ms"),
        ({"in_env": (0.9, 0.9), "ready": 0.5}, "machine", "no core for 0.50 of the time; 1.5 or more runnable"),
        (
            {"in_env": (0.9, 0.9), "resetting": (0.6, 0.4), "host": {"resets": 10}},
            "resets",
            "resets: 0.50 of the workers' time, 200 ms each",
        ),
        ({"host": {"doing": Doing.STEPPING, "env": 3, "for_s": 41.0}}, "hang",
         "env 3 hangs: in step for 41 s, 4,100 times its mean. Its stack: py-spy dump --pid 11"),
        ({"host": {"doing": Doing.RESETTING, "env": 3, "for_s": 12.0}}, "straggler", "worker 1"),
        ({"process": {"state": "T"}}, "hang", "worker 1 (pid 11) is stopped by a signal; kill -CONT 11"),
        ({"steps": (0, 0), "in_env": (0.0, 0.0)}, "idle", "no env was stepped for 2 s"),
        ({"is_stepped": False, "cpu": 0.8, "steps": (0, 0), "in_env": (0.0, 0.0)}, "idle", "0.80 of a core each"),
        ({"is_stepped": False, "cpu": 0.9}, "outside", "the policy: collectors step envs for 0.50 of the time"),
        ({"is_stepped": False, "cpu": 0.2, "in_env": (0.1, 0.1)}, "caller", "wait for the learner"),
        # Those that lie between two answers.
        ({"in_env": (0.5, 0.56)}, "between", "between the envs and the caller: workers step 0.53 of the time and wait"),
        ({"in_env": (0.84, 0.84), "asked": 0.9}, "between", "workers step 0.84 of the time and wait 0.16"),
        ({"in_env": (0.2, 0.2), "asked": 0.3}, "between", "workers step 0.20 of the time and wait 0.80"),
    ],
)  # fmt: skip
def test_two_looks_have_one_cause_and_its_numbers(seen: dict[str, Any], kind: str, said: str) -> None:
    cause = looks(**seen)
    assert cause.kind == kind
    assert said in cause.sentence


def test_stats_has_the_verdict_since_the_last_call() -> None:
    with muster.make_vec(Spinning, 2, num_workers=1, env_kwargs={"ms": 4.0}) as envs:
        envs.reset(seed=0)
        for _ in range(10):
            envs.step(np.zeros(2, np.int64))
        first = envs.stats()
        assert first["workers"][0]["index"] == 0
        assert first["workers"][0]["envs"] == [0, 1]
        time.sleep(0.2)
        assert envs.stats()["verdict"].startswith("idle: no env was stepped for 0.2")


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", OPTIONS)
def test_a_program_that_makes_it_so_is_judged_so_in_ten_looks_of_ten(kind: str, spins: Any) -> None:
    top = Top(spins(kind))
    top.look()
    if kind == "hang":
        time.sleep(2)
    found = []
    for _ in range(10):
        top.wait(2.0, lambda for_s: bool(time.sleep(for_s)))
        found += [run["verdict"]["kind"] for run in top.look()]
    assert found == [kind] * 10
