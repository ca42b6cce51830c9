"""The infos that a vector env returns, on every backend."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from backend_under_test import MakeVec, same_run
from gymnasium.vector import AutoresetMode

from sample_envs import Counter, Infos

INFO_SCRIPTS = {
    "numbers": [{"a": 1, "b": 2.5, "c": True, "d": np.float32(3), "e": np.arange(3)}],
    "strings": [{"name": "x", "n": 1}],
    "nested": [{"deep": {"deeper": {"x": 1.5}, "y": 2}, "empty": {}}],
    "changing": [{}, {"a": 1}, {"b": "text"}, {"a": 2, "b": "more"}, {"c": None}],
    "many": [{f"key{i}": i} for i in range(100)],
    "big": [{"image": np.ones((100, 100)), "small": 1}],
    "odd": [{1: "one"}, {"array": np.array(["a", None])}],
}


class Named(Counter):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return super().reset(seed=seed, options=options)[0], {"names": np.array(["a", None], object)}


class InfoContract:
    """The part of `BackendContract` that is about infos: Gymnasium's format, whatever the envs put into them."""

    @pytest.mark.parametrize("mode", ["next_step", "same_step"])
    @pytest.mark.parametrize("script", INFO_SCRIPTS)
    def test_infos_arrive_in_gymnasiums_format(self, make: MakeVec, script: str, mode: str) -> None:
        factory = functools.partial(Infos, INFO_SCRIPTS[script], length=5)
        reference = gym.vector.SyncVectorEnv([factory] * 3, autoreset_mode=AutoresetMode[mode.upper()])
        same_run(make([factory] * 3, autoreset_mode=mode), reference, 110 if script == "many" else 12)

    def test_ints_too_big_for_a_column_arrive_as_objects(self, make: MakeVec) -> None:
        envs = make([functools.partial(Infos, [{"huge": 2**70}])] * 2)
        envs.reset()
        assert envs.step(np.zeros(2, int))[4]["huge"].tolist() == [2**70] * 2

    def test_infos_of_some_envs_and_of_different_types(self, make: MakeVec) -> None:
        scripts: list[list[dict[str, Any]]] = [[{"v": 1}], [{"v": 2.7}], [{}], [{"v": np.int32(5), "w": "s"}]]
        envs = make([functools.partial(Infos, script) for script in scripts])
        envs.reset()
        infos = envs.step(np.zeros(4, int))[4]
        assert infos["v"].tolist() == [1.0, 2.7, 0.0, 5.0]
        assert infos["_v"].tolist() == [True, True, False, True]
        assert infos["w"].tolist() == [None, None, None, "s"]

    def test_infos_of_some_envs_are_not_taken_for_those_of_all(self, make: MakeVec) -> None:
        scripts: list[list[dict[str, Any]]] = [[{"v": 1}], [{}], [{}]]
        envs = make([functools.partial(Infos, script) for script in scripts])
        envs.reset()
        envs.send(np.zeros(1, int), [0])
        assert envs.recv().infos["v"].tolist() == [1]
        assert envs.step(np.zeros(3, int))[4]["_v"].tolist() == [True, False, False]

    def test_infos_with_shapes_or_kinds_that_differ_become_objects(self, make: MakeVec) -> None:
        scripts: list[list[dict[str, Any]]] = [[{}], [{"v": np.zeros(2)}], [{"v": np.zeros(3)}], [{"v": "text"}]]
        envs = make([functools.partial(Infos, script) for script in scripts])
        envs.reset()
        column = envs.step(np.zeros(4, int))[4]["v"]
        assert column[0] is None
        assert [len(value) for value in column[1:]] == [2, 3, 4]

    def test_infos_that_are_dicts_in_some_envs_and_numbers_in_others_become_objects(self, make: MakeVec) -> None:
        scripts: list[list[dict[str, Any]]] = [[{"v": {"deep": 2}}], [{"v": 1}], [{"v": {"deep": 3}}]]
        envs = make([functools.partial(Infos, script) for script in scripts])
        envs.reset()
        assert envs.step(np.zeros(3, int))[4]["v"].tolist() == [{"deep": 2}, 1, {"deep": 3}]

    def test_a_number_after_none_has_a_column_of_its_own(self, make: MakeVec) -> None:
        envs = make([functools.partial(Infos, [{"v": None}, {"v": 1.5}])] * 2)
        envs.reset()
        assert envs.step(np.zeros(2, int))[4]["v"].tolist() == [None, None]
        infos = envs.step(np.zeros(2, int))[4]
        assert infos["v"].dtype == np.float64
        assert infos["v"].tolist() == [1.5, 1.5]

    def test_a_partial_reset_spreads_arrays_of_objects(self, make: MakeVec) -> None:
        envs = make([Named] * 2)
        envs.reset()
        infos = envs.reset(options={"reset_mask": np.array([False, True])})[1]
        assert infos["names"].tolist() == [[None, None], ["a", None]]
        assert infos["_names"].tolist() == [False, True]

    def test_an_info_that_holds_itself_is_an_error_and_no_crash(self, make: MakeVec) -> None:
        class Endless(Counter):
            def step(self, action: Any) -> Any:
                obs, *rest, info = super().step(action)
                info["itself"] = info
                return (obs, *rest, info)

        envs = make([Endless] * 2)
        envs.reset(seed=0)
        with pytest.raises(RecursionError):
            envs.step(np.zeros(2, int))
