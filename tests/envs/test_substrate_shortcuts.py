"""Substrates are stepped past Melting Pot's wrappers, and nobody can tell, but by the clock."""

from __future__ import annotations

from typing import Any

import dm_env
import numpy as np
import pytest
from bare_loops import calling_files

import muster
from muster.envs import resolve_foreign_id
from muster.errors import EnvError

pytest.importorskip("dmlab2d", reason="scripts/install_meltingpot.sh")
pytestmark = pytest.mark.filterwarnings("ignore")

SUBSTRATE = "prisoners_dilemma_in_the_matrix__repeated"


def lab2d_of(env: Any) -> Any:
    """The one inside the wrappers of an env that a call is given."""
    return env.env._env._env._env._env._env._env


def test_substrates_are_stepped_past_their_wrappers(monkeypatch: pytest.MonkeyPatch) -> None:
    callers: list[set[str]] = []
    observed: list[set[str]] = []
    transition = dm_env.transition

    def told(**of_lab2d: Any) -> Any:
        callers.append(calling_files())
        observed.append(set(of_lab2d["observation"]))
        return transition(**of_lab2d)

    monkeypatch.setattr(dm_env, "transition", told)
    with muster.make_vec(f"meltingpot/{SUBSTRATE}", 1, backend="serial") as envs:
        envs.reset(seed=0)
        for _ in range(4):
            envs.step(envs.action_space.sample())
        env = resolve_foreign_id(f"meltingpot/{SUBSTRATE}")()
        env.reset()
        env.step([0, 0])
        env.close()
        for seen in callers[:-1]:
            assert "multiplayer_wrapper.py" not in seen
        assert "multiplayer_wrapper.py" in callers[-1]
        shown = {"RGB", "INVENTORY", "READY_TO_SHOOT", "INTERACTION_INVENTORIES", "REWARD"}
        assert observed[0] == {f"{i}.{name}" for i in (1, 2) for name in shown} | {"WORLD.RGB"}
        assert {"GLOBAL.TEXT", "1.LAYER", "2.LAYER"} <= observed[-1] - observed[0]


def test_rows_of_a_substrate_are_what_lab2d_makes_when_asked_for_everything() -> None:
    with muster.make_vec(f"meltingpot/{SUBSTRATE}", 1, backend="serial") as envs:
        envs.reset(seed=0)
        for _ in range(10):
            obs, rewards, *_ = envs.step(envs.action_space.sample())
            made: list[Any] = []
            envs.call(lambda env, i, made=made: made.append(lab2d_of(env).observation()))
            assert {"GLOBAL.TEXT", "1.LAYER", "2.LAYER"} <= made[0].keys()
            for i in range(2):
                assert rewards["player"][0, i] == made[0][f"{i + 1}.REWARD"]
                for name, value in obs["player"].items():
                    assert np.array_equal(value[0, i], made[0][f"{i + 1}.{name}"])


def test_observations_of_lab2d_that_a_call_patches_are_shown() -> None:

    def darken(env: Any, env_index: int) -> None:
        lab2d = lab2d_of(env)
        observation = lab2d.observation

        def dark() -> dict[str, Any]:
            observations: dict[str, Any] = observation()
            if "1.LAYER" in observations:
                observations["1.RGB"] = observations["1.RGB"] * 0
            return observations

        lab2d.observation = dark

    with muster.make_vec(f"meltingpot/{SUBSTRATE}", 1, backend="serial") as envs:
        envs.reset(seed=0)
        obs, *_ = envs.step(envs.action_space.sample())
        assert obs["player"]["RGB"][0, 0].any()
        envs.call(darken)
        obs, *_ = envs.step(envs.action_space.sample())
        assert not obs["player"]["RGB"][0, 0].any()


class Recorded:
    """Lab2D's engine, noting which observations are made."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.made: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def observation(self, name: str) -> Any:
        self.made.add(name)
        return self.engine.observation(name)


def test_what_a_call_puts_around_the_engine_is_asked_for_everything() -> None:
    recorded: list[Recorded] = []

    def record(env: Any, env_index: int) -> None:
        lab2d = lab2d_of(env)
        lab2d._env = Recorded(lab2d._env)
        recorded.append(lab2d._env)

    with muster.make_vec(f"meltingpot/{SUBSTRATE}", 1, backend="serial") as envs:
        envs.reset(seed=0)
        envs.step(envs.action_space.sample())
        envs.call(record)
        envs.step(envs.action_space.sample())
    assert {"GLOBAL.TEXT", "1.LAYER", "1.RGB"} <= recorded[0].made


def test_a_step_of_lab2d_that_fails_leaves_all_its_observations(monkeypatch: pytest.MonkeyPatch) -> None:

    def fail(**of_lab2d: Any) -> Any:
        raise ValueError("no more")

    with muster.make_vec(f"meltingpot/{SUBSTRATE}", 1, backend="serial") as envs:
        envs.reset(seed=0)
        with monkeypatch.context() as patched, pytest.raises(EnvError, match="no more"):
            patched.setattr(dm_env, "transition", fail)
            envs.step(envs.action_space.sample())
        made: list[Any] = []
        envs.call(lambda env, i: made.append(lab2d_of(env).observation()))
        assert {"GLOBAL.TEXT", "1.LAYER", "1.RGB"} <= made[0].keys()
        envs.step(envs.action_space.sample())


def test_what_a_call_does_to_a_substrate_is_done() -> None:

    def stand_still(env: Any, env_index: int) -> None:
        choosing = env.env._env._env
        choosing._action_table = choosing._action_table[:1] * len(choosing._action_table)

    with muster.make_vec(f"meltingpot/{SUBSTRATE}", 1, backend="serial") as envs:
        envs.reset(seed=0)
        envs.step(envs.action_space.sample())
        seen: list[Any] = []
        envs.call(lambda env, i: seen.append(lab2d_of(env)))
        envs.call(stand_still)
        envs.step({"player": np.full((1, 2), 3)})
        assert not seen[0]._act_discrete.any()


def test_who_listens_to_a_substrate_hears_of_every_step() -> None:
    heard: list[Any] = []

    def build() -> Any:
        env = resolve_foreign_id(f"meltingpot/{SUBSTRATE}")()
        env.observables().timestep.subscribe(on_next=heard.append)
        return env

    with muster.make_vec(build, 1, backend="serial") as envs:
        envs.reset(seed=0)
        for _ in range(4):
            obs, *_ = envs.step(envs.action_space.sample())
        assert len(heard) == 5
        for i in range(2):
            assert np.array_equal(obs["player"]["RGB"][0, i], heard[-1].observation[i]["RGB"])
