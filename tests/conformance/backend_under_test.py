"""The backend that a contract tests: how vector envs are made on it, and how two of them are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from gymnasium.utils.env_checker import data_equivalence

MakeVec = Callable[..., Any]


class BackendUnderTest:
    """A backend, described by how vector envs are made on it and by what it cannot do."""

    # Whether envs live in other processes. Then the tests look at deaths of workers and at what these leave.
    has_worker_processes: ClassVar[bool] = True
    # Whether the caller steps envs itself while it waits. Then a wait cannot time out.
    steps_in_the_caller: ClassVar[bool] = False
    # `num_workers` of a run of six envs, other than what `make_vec` takes; None where the backend takes no number.
    other_num_workers: ClassVar[int | None] = 3

    def make_vec(self, env: Any, num_envs: int | None = None, **options: Any) -> Any:
        """Makes a vector env on the backend. options: other options of `muster.make_vec`."""
        raise NotImplementedError

    @pytest.fixture
    def make(self, leaves_nothing: None) -> Iterator[MakeVec]:
        """Provides `make_vec`. Its vector envs are closed after the test, and have to leave nothing behind."""
        made: list[Any] = []

        def make(*args: Any, **options: Any) -> Any:
            made.append(self.make_vec(*args, **options))
            return made[-1]

        yield make
        for envs in made:
            envs.close()


def same_run(envs: Any, reference: Any, steps: int, seed: int = 3) -> None:
    """Asserts that two vector envs give identical rows for the same seeds and actions."""
    assert data_equivalence(envs.reset(seed=seed), reference.reset(seed=seed))
    envs.action_space.seed(seed)
    for t in range(steps):
        actions = envs.action_space.sample()
        for name, ours, theirs in zip(
            ("obs", "rewards", "terminated", "truncated", "infos"),
            envs.step(actions),
            reference.step(actions),
            strict=True,
        ):
            assert data_equivalence(ours, theirs), f"{name} differ at step {t}: {ours} and {theirs}"
