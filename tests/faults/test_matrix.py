"""Start method x autoreset mode x what happens on failure x fault: the expected end, and nothing left behind."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest
from faulty_envs import ACTS, FAULT_STEP, OBSERVATIONS, FaultyEnv

import muster
from muster.errors import CannotTravel, ClosedError, EnvError, WorkerDied, WorkerError, WorkerTimeout

CONTEXTS = ("forkserver", "fork", "spawn")
FAST_CONTEXTS = CONTEXTS[:2]  # spawned workers have the same launcher as those of the forkserver
MODES = ("next_step", "same_step", "disabled")
FAILURES = ("raise", "restart")

RAISED = ("raise in step", "two arguments", "keyword-only", "unpicklable exception", "SystemExit", "reward None")
DIED = {"os._exit": "exit code 3", "SIGKILL": "SIGKILL", "segfault": "SIGSEGV"}
HUNG = ("SIGSTOP", "hang in Python", "hang in C")
HARMLESS = ("threads", "children", "output flood")
AT_REST = ("raise in __init__", "raise in reset", "raise in close", "closes fds")
FAULTS = (*RAISED, *OBSERVATIONS, "unpicklable info", *DIED, *HUNG, *HARMLESS, *AT_REST)

NUM_ENVS, MATES = 4, (0, 1)  # two workers; env 1 goes wrong, env 0 shares its worker
ACTIONS = np.zeros(NUM_ENVS, np.int64)
# A healthy worker must not reach this limit on a machine so busy that nothing runs for a second.
STEP_TIMEOUT_S = 2.5
# Noticing takes 20 ms, killing and explaining less than a second, starting a worker on a busy machine the rest.
BOUND_S = 60.0


def cases() -> list[Any]:
    """All cases. Fast ones: each fault, with both reactions where its worker dies; modes and methods in turn."""
    params = []
    for fault, method, mode, on_failure in itertools.product(FAULTS, CONTEXTS, MODES, FAILURES):
        row, reaction = FAULTS.index(fault), FAILURES.index(on_failure)
        fast = MODES.index(mode) == (row + reaction) % 3 and method == FAST_CONTEXTS[(row + reaction) % 2]
        if fault in (*RAISED, *OBSERVATIONS, *HARMLESS, *HUNG):
            fast &= reaction == row // 2 % 2
        marks = () if fast else (pytest.mark.slow,)
        name = f"{fault}-{method}-{mode}-{on_failure}"
        params.append(pytest.param(fault, method, mode, on_failure, marks=marks, id=name))
    return params


def test_every_fault_of_the_envs_is_tried() -> None:
    assert set(ACTS) | set(OBSERVATIONS) <= set(FAULTS)


@pytest.mark.parametrize(("fault", "method", "mode", "on_failure"), cases())
@pytest.mark.usefixtures("leaves_nothing")
def test_fault(fault: str, method: str, mode: str, on_failure: str, tmp_path: Any, capfd: Any) -> None:
    start = time.monotonic()
    options = {
        "num_workers": 2,
        "context": method,
        "autoreset_mode": mode,
        "on_failure": on_failure,
        "check_finite": True,
        "step_timeout": STEP_TIMEOUT_S if fault in HUNG else None,
        "env_kwargs": {"fault": fault, "mark": str(tmp_path / "happened")},
    }
    if fault == "raise in __init__":
        said = r"env 1 \(worker 0, while it was built\): ValueError: raise in __init__"
        if on_failure == "restart":
            with pytest.warns(RuntimeWarning, match=rf"is started again \(1 of at most 10 times\): {said}"):
                muster.make_vec(FaultyEnv, NUM_ENVS, **options).close()
        else:
            with pytest.raises(EnvError, match=said):
                muster.make_vec(FaultyEnv, NUM_ENVS, **options)
    else:
        with muster.make_vec(FaultyEnv, NUM_ENVS, **options) as envs:
            if fault == "raise in close":
                play(envs, FAULT_STEP + 1)
                with pytest.raises(EnvError, match="env 1 .*: ValueError: raise in close"):
                    envs.close()
            else:
                {"raise": expect_error, "restart": expect_restart}[on_failure](envs, fault, mode)
    assert time.monotonic() - start < BOUND_S


def play(envs: Any, steps: int, episode: int = 0) -> None:
    """Resets and makes `steps` steps, in which nothing goes wrong."""
    obs, _ = envs.reset(seed=0)
    for step in range(steps + 1):
        np.testing.assert_array_equal(obs, expected_obs(episode, step))
        obs, rewards, terminated, truncated, infos = envs.step(ACTIONS)
        assert (rewards == 1).all()
        assert not terminated.any()
        assert not truncated.any()
        assert infos == {}


def expected_obs(episode: int, step: int) -> Any:
    return np.array([[env, episode, step] for env in range(NUM_ENVS)], np.float32)


def expect_error(envs: Any, fault: str, mode: str) -> None:
    if fault in HARMLESS:
        return play(envs, FAULT_STEP + 2)
    if fault == "closes fds":
        return expect_call_fails(envs)
    if fault == "raise in reset":
        with pytest.raises(EnvError, match="env 1 .*raise in reset"):
            envs.reset(seed=0)
        obs, _ = envs.reset(seed=0)
        np.testing.assert_array_equal(obs[:, 1], [1, 0, 1, 1])
        np.testing.assert_array_equal(envs.step(ACTIONS)[0][:, 2], 1)
        return None
    envs.reset(seed=0)
    for _ in range(FAULT_STEP - 1):
        envs.step(ACTIONS)
    error = pytest.raises(expected_error(fault), envs.step, ACTIONS).value
    if isinstance(error, WorkerError):
        assert (error.worker_index, error.env_indices) == (0, MATES)
        assert "in step of env 1" in str(error) or fault == "SIGSTOP"
        assert DIED.get(fault, "Its Python stack:") in str(error)
        if fault.startswith("hang"):
            assert fault.lower().replace(" ", "_") in str(error)
        with pytest.raises(ClosedError):
            envs.step(ACTIONS)
        return None
    assert "env 1" in str(error)
    assert error.batch.env_ids.tolist() == [0, 2, 3]
    if isinstance(error, EnvError):
        assert (error.env_index, error.worker_index) == (1, 0)
        np.testing.assert_array_equal(error.batch.obs, expected_obs(0, FAULT_STEP)[[0, 2, 3]])
    else:
        assert "info['deep']['the_lock']" in str(error)
    obs, _ = envs.reset()
    np.testing.assert_array_equal(obs, expected_obs(1, 0))
    np.testing.assert_array_equal(envs.step(ACTIONS)[0], expected_obs(1, 1))
    return None


def expected_error(fault: str) -> type[Exception]:
    if fault == "unpicklable info":
        return CannotTravel
    return WorkerDied if fault in DIED else WorkerTimeout if fault in HUNG else EnvError


def expect_call_fails(envs: Any) -> None:
    """Asserts that steps, which need no fd, work, and that calls, which need one, say why they fail."""
    play(envs, FAULT_STEP + 1)
    with pytest.raises(WorkerDied, match="closed file descriptors"):
        envs.get_attr("steps")


def expect_restart(envs: Any, fault: str, mode: str) -> None:
    if fault in HARMLESS:
        return play(envs, FAULT_STEP + 2)
    if fault == "raise in reset":
        obs, infos = envs.reset(seed=0)
        np.testing.assert_array_equal(obs, expected_obs(0, 0))
        assert "raise in reset" in infos["restarted"][1]
        assert infos["_restarted"].tolist() == [False, True, False, False]
        return None
    if fault == "closes fds":
        expect_call_fails(envs)
        lost, row = list(MATES), FAULT_STEP + 2
        result = envs.step(ACTIONS)
    else:
        envs.reset(seed=0)
        for _ in range(FAULT_STEP - 1):
            envs.step(ACTIONS)
        lost, row = list(MATES) if fault in (*DIED, *HUNG) else [1], FAULT_STEP - 1
        result = envs.step(ACTIONS)
    check_restart(envs, result, lost, row, mode)
    return None


def check_restart(envs: Any, result: Any, lost: list[int], last_step: int, mode: str) -> None:
    """The lost envs' episodes end truncated, the others lose no step, and all go on."""
    obs, rewards, terminated, truncated, infos = result
    is_lost = np.isin(range(NUM_ENVS), lost)
    np.testing.assert_array_equal(truncated, is_lost)
    np.testing.assert_array_equal(rewards, ~is_lost)
    assert not terminated.any()
    np.testing.assert_array_equal(infos["_restarted"], is_lost)
    assert envs.stats()["restarts"] == len(lost)

    expected, last = expected_obs(0, last_step + 1), expected_obs(0, last_step)
    expected[lost] = expected_obs(0, 0)[lost] if mode == "same_step" else last[lost]
    np.testing.assert_array_equal(obs, expected)
    if mode == "same_step":
        for env in lost:
            np.testing.assert_array_equal(infos["final_obs"][env], last[env])
    if mode == "disabled":
        obs, _ = envs.reset(options={"reset_mask": truncated})
        expected[lost] = expected_obs(0, 0)[lost]
        np.testing.assert_array_equal(obs, expected)
    steps = expected[:, 2]
    for _ in range(2):
        steps = np.where(is_lost & truncated & (mode == "next_step"), 0, steps + 1)
        obs, _, terminated, truncated, infos = envs.step(ACTIONS)
        assert not truncated.any()
        np.testing.assert_array_equal(obs[:, 2], steps)
        assert "restarted" not in infos
