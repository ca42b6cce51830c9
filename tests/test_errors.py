"""Errors hold facts, put them into words, and travel."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from muster.errors import (
    CollectorError,
    ConfigError,
    EnvError,
    LimitReached,
    MusterError,
    NodeLost,
    PendingError,
    SpecMismatch,
    WorkerDied,
    WorkerError,
    WorkerName,
    WorkerTimeout,
)

NAME = WorkerName("worker", 1, range(2, 4))

ERRORS = [
    WorkerError(NAME, "failed 2 times"),
    WorkerDied(NAME, "in step of env 3", -9, "a person.", "the last words"),
    WorkerDied(NAME, "in step of env 3", None, "ValueError: no", is_thread=True),
    WorkerTimeout(NAME, "in step of env 3", "step_timeout=1.0", 1.5, "<stack>", " It waits."),
    WorkerTimeout(NAME, "building its envs", "start_timeout=1.0 s"),
    CollectorError(NAME, "ValueError: no"),
    NodeLost(NAME, "node-a", "its process has ended"),
    EnvError(
        "ValueError: no", env_index=3, worker_index=1, step=5, original_type="ValueError", worker_traceback="<tb>"
    ),
    SpecMismatch("observation: shape is (2,)", env_index=3),
    PendingError("step: a call is pending", "call"),
    LimitReached(24, "Too many open files"),
    ConfigError("num_envs", "a whole number of at least 1", 0),
    ConfigError("give policy or policy_factory, not both"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    "carried", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"]
)
def test_comes_back_as_it_was(error: MusterError, carried: Callable[[Any], Any]) -> None:
    back = carried(error)
    assert (type(back), str(back), vars(back), back.args) == (type(error), str(error), vars(error), error.args)


@pytest.mark.parametrize(
    ("envs", "name"), [((), "worker 1"), (range(3, 4), "worker 1 (env 3)"), (range(2, 4), str(NAME))]
)
def test_a_workers_name_tells_its_envs(envs: Any, name: str) -> None:
    assert str(WorkerName("worker", 1, envs)) == name


def test_an_options_error_has_public_facts_and_any_name_of_the_option() -> None:
    error = ConfigError("num_envs", "at least 1", "x")
    assert (error.option, error.expected, error.got) == ("num_envs", "at least 1", "x")
    assert str(error) == "num_envs must be at least 1, got 'x'"
    assert error.naming("--num-envs") == "--num-envs must be at least 1, got 'x'"


def test_a_death_has_public_facts() -> None:
    error = WorkerDied(NAME, "in step of env 3", -9, "a person.", "the last words")
    assert (error.worker_index, error.env_indices, error.exit_code) == (1, (2, 3), -9)
    assert (error.doing, error.cause, error.last_words) == ("in step of env 3", "a person.", "the last words")
    assert not error.is_thread
    assert error.headline == "worker 1 (envs 2 to 3) died: killed by SIGKILL. It was in step of env 3."


def test_the_death_of_a_thread_names_its_exception() -> None:
    error = WorkerDied(NAME, "in step of env 3", None, "ValueError: no", is_thread=True)
    assert str(error) == (
        "worker 1 (envs 2 to 3), a thread, ended by ValueError: no. It was in step of env 3. The vector env is closed."
    )


def test_a_timeout_has_public_facts() -> None:
    error = WorkerTimeout(NAME, "in step of env 3", "step_timeout=1.0", 1.5, "", " It waits.")
    assert (error.doing, error.limit, error.elapsed_s) == ("in step of env 3", "step_timeout=1.0", 1.5)
    assert (error.stack, error.hint) == ("", " It waits.")
    assert "and was killed" in str(error)  # a process whose stack is not known is no thread
    assert "A thread cannot be killed" in str(WorkerTimeout(NAME, "building its envs", "start_timeout=1.0 s"))
