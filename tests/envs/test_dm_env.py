"""dm_env's single-agent envs behind Gymnasium's API."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import muster
from muster.envs.dm_env import space_of
from muster.errors import SpecMismatch
from sample_envs import INT32
from slow import slow

dm_env = pytest.importorskip("dm_env", reason="pip install dm-env")
specs = dm_env.specs


class Task:
    """Draws numbers below 50 from a generator of one of the three kinds."""

    def __init__(self, generator: str) -> None:
        kinds: dict[str, Any] = {
            "RandomState": np.random.RandomState,
            "Generator": np.random.default_rng,
            "Random": random.Random,
        }
        self.random = kinds[generator](0)

    def draw(self) -> int:
        if isinstance(self.random, random.Random):
            return self.random.randrange(50)
        return int(
            self.random.integers(50) if isinstance(self.random, np.random.Generator) else self.random.randint(50)
        )


class Walk(dm_env.Environment):
    """Counts to `length` and ends with `discount`."""

    def __init__(
        self, length: int = 3, discount: float | None = 0.0, nested: bool = False, generator: str = "RandomState"
    ) -> None:
        self.task = Task(generator)
        self.length, self.discount, self.nested = length, discount, nested
        self.level = 1

    def observation_spec(self) -> Any:
        if not self.nested:
            return specs.BoundedArray((2,), np.float32, minimum=0, maximum=[9, 99])
        return {
            "z": specs.Array((), np.float64),
            "a": [specs.DiscreteArray(5), specs.Array((2, 2), np.uint8)],
            "on": specs.Array((1,), np.bool_),
        }

    def action_spec(self) -> Any:
        return (
            specs.BoundedArray((2,), np.float64, minimum=-1.0, maximum=1.0) if self.nested else specs.DiscreteArray(4)
        )

    def reset(self) -> Any:
        self.t, self.drawn = 0, self.task.draw()
        return dm_env.restart(self._obs())

    def step(self, action: Any) -> Any:
        self.action_spec().validate(action)  # its dtype, too
        self.t += 1
        self.action = action
        kind = dm_env.StepType.LAST if self.t == self.length else dm_env.StepType.MID
        last = kind is dm_env.StepType.LAST
        return dm_env.TimeStep(kind, None if self.t == 1 else 0.5, self.discount if last else 1.0, self._obs())

    def _obs(self) -> Any:
        if not self.nested:
            return np.array([self.t, self.drawn], np.float32)
        return {"on": np.array([True]), "a": [3, np.full((2, 2), self.t, np.uint8)], "z": 0.25}


@pytest.mark.parametrize(
    ("discount", "terminates", "info"), [(0.0, True, None), (1.0, False, None), (0.9, False, 0.9), (None, False, None)]
)
def test_the_last_discount_tells_termination_from_truncation(discount: Any, terminates: bool, info: Any) -> None:
    with muster.make_vec(Walk, 2, env_kwargs={"discount": discount}, backend="serial") as envs:
        assert isinstance(envs, muster.VectorEnv)
        assert envs.single_action_space == spaces.Discrete(4, **INT32)
        envs.reset(seed=0)
        _, rewards, terminated, truncated, infos = envs.step(np.zeros(2, np.int32))
        assert rewards.tolist() == [0, 0]  # None
        envs.step(np.zeros(2, np.int32))
        obs, rewards, terminated, truncated, infos = envs.step(np.zeros(2, np.int32))
        assert obs[:, 0].tolist() == [3, 3]
        assert rewards.tolist() == [0.5, 0.5]
        assert terminated.tolist() == [terminates] * 2
        assert truncated.tolist() == [not terminates] * 2
        assert infos.get("discount", np.array([None]))[0] == info
        assert envs.step(np.zeros(2, np.int32))[0][:, 0].tolist() == [0, 0]


class Lives(Walk):
    """A walk of as many steps as it has `discounts`, one for each step."""

    def __init__(self, *discounts: Any) -> None:
        super().__init__(len(discounts))
        self.discounts = discounts

    def step(self, action: Any) -> Any:
        return super().step(action)._replace(discount=self.discounts[self.t - 1])


@pytest.mark.parametrize("mode", ["same_step", *slow("disabled", "next_step")])
@pytest.mark.parametrize(
    "kind", [float, np.float32, np.array, lambda one: np.array([one])], ids=["float", "float32", "0-d", "1-d"]
)
def test_discounts_are_reported_where_the_flags_do_not_tell_them(kind: Any, mode: str) -> None:
    given = [1.0, 0.0, None, 0.5, 0.0], [1.0, 1.0, 0.25, 1.0, 0.75]
    expected = [[], [(0, 0.0)], [(1, 0.25)], [(0, 0.5)], [(1, 0.75)]]  # by step: env and discount
    lives = [functools.partial(Lives, *(None if one is None else kind(one) for one in each)) for each in given]
    with muster.make_vec(lives, backend="serial", autoreset_mode=mode) as envs:
        envs.reset(seed=0)
        for told in expected:
            *_, terminated, truncated, infos = envs.step(np.zeros(2, np.int32))
            infos = infos.get("final_info", infos)
            provided = np.flatnonzero(infos.get("_discount", [])).tolist()
            assert [(i, infos["discount"][i]) for i in provided] == told
        assert (terminated.tolist(), truncated.tolist()) == ([True, False], [False, True])


def test_nested_specs_become_nested_spaces_with_sorted_keys() -> None:
    with muster.make_vec(Walk, 2, env_kwargs={"nested": True}, backend="serial") as envs:
        obs, _ = envs.reset(seed=0)
        assert list(obs) == ["a", "on", "z"]
        assert obs["z"].tolist() == [0.25, 0.25]
        assert obs["a"][0].tolist() == [3, 3]
        assert obs["a"][1].shape == (2, 2, 2)
        assert obs["on"].dtype == np.bool_
        envs.step(np.full((2, 2), 0.5))
        assert envs.get_attr("action")[1].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("generator", ["RandomState", "Generator", "Random"])
def test_seeds_reach_the_generator_of_the_task(generator: str) -> None:
    with muster.make_vec(Walk, 3, env_kwargs={"generator": generator}, backend="serial") as envs:
        first, again, other = (envs.reset(seed=seed)[0][:, 1].tolist() for seed in (5, 5, 6))
        assert first == again
        assert first[1:] == other[:-1]


@pytest.mark.parametrize(
    ("spec", "space"),
    [
        (specs.DiscreteArray(3), spaces.Discrete(3, **INT32)),
        (specs.DiscreteArray(3, dtype=np.int64), spaces.Discrete(3)),
        (specs.Array((2,), np.float32), spaces.Box(-np.inf, np.inf, (2,), np.float32)),
        (specs.Array((2,), np.int16), spaces.Box(-32768, 32767, (2,), np.int16)),
        (specs.BoundedArray((2,), np.int64, 0, [3, 4]), spaces.Box(np.array([0, 0]), np.array([3, 4]), dtype=np.int64)),
    ],
)
def test_specs_become_spaces_of_their_shape_dtype_and_bounds(spec: Any, space: Any) -> None:
    assert space_of(spec, "observation") == space


@pytest.mark.parametrize("spec", [specs.StringArray(()), object(), None])
def test_specs_without_a_space_are_named(spec: Any) -> None:
    with pytest.raises(SpecMismatch, match=r"observation\['name'\] has the spec"):
        space_of({"name": spec}, "observation")
