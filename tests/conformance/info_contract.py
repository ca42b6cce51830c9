"""The infos that a vector env returns, on every backend."""

from __future__ import annotations

import copy
import enum
import functools
from collections import OrderedDict
from fractions import Fraction
from types import MappingProxyType
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


class Colour(enum.IntEnum):
    RED = 1


class Doors(enum.IntFlag):
    NORTH = 1
    EAST = 2


class Count(int):
    pass


class Share(float):
    pass


# What one env says in one info.
KINDS = {
    "int": 2**62,
    "float": 0.5,
    "bool": True,
    "complex": 1j,
    "fraction": Fraction(1, 3),
    "none": None,
    "pair": (1, 2),
    "enum": Colour.RED,
    "flags": Doors.NORTH | Doors.EAST,
    "count": Count(3),
    "share": Share(0.5),
    "float64": np.float64(0.5),
    "int64": np.int64(3),
    "longlong": np.longlong(3),
    "uint64": np.uint64(2**63),
    "float32": np.float32(0.5),
    "longdouble": np.longdouble(1) / 3,
    "complex64": np.complex64(1j),
    "day": np.datetime64("2020-01-01"),
    "text": np.str_("x"),
    "proxy": MappingProxyType({"a": 1}),
    "ordered": OrderedDict(a=1),
    "other byte order": np.array([1, 2], ">i4"),
    **{f"0-d {dtype}": np.array(1, dtype) for dtype in ("int64", "float64", "float32", "bool", "str", ">f8")},
}
# What envs say of one key where Gymnasium raises an error, or changes it, and what arrives then.
OBJECTS: list[list[Any]] = [[2**63, 1], [1, 2**63], [-(2**63) - 1, 1], [1, Colour.RED], [1, np.uint64(2**63)]]
OBJECTS += [[np.array(["a"]), np.array([1.5])], [np.array([1.5]), np.array(["a"])]]


def typed(value: Any) -> Any:
    """`value` in a form that is equal only where all types are, too."""
    if isinstance(value, dict):
        return type(value).__name__, {key: typed(one) for key, one in value.items()}
    if isinstance(value, np.ndarray) and value.ndim:
        return str(value.dtype), [typed(one) for one in value]
    return type(value).__name__, repr(value)


class Named(Counter):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return super().reset(seed=seed, options=options)[0], {"names": np.array(["a", None], object)}


class Computed(dict[str, int]):
    """Makes its values when it is asked for them."""

    def items(self) -> Any:
        return {"score": 7}.items()


class InfoContract:
    """The part of `BackendContract` that is about infos: Gymnasium's format, whatever the envs put into them."""

    @pytest.mark.parametrize("mode", ["next_step", "same_step"])
    @pytest.mark.parametrize("script", INFO_SCRIPTS)
    def test_infos_arrive_in_gymnasiums_format(self, make: MakeVec, script: str, mode: str) -> None:
        factory = functools.partial(Infos, INFO_SCRIPTS[script], length=5)
        reference = gym.vector.SyncVectorEnv([factory] * 3, autoreset_mode=AutoresetMode[mode.upper()])
        same_run(make([factory] * 3, autoreset_mode=mode), reference, 110 if script == "many" else 12)

    def test_values_keep_the_types_that_gymnasium_hands_on(self, make: MakeVec) -> None:
        scripts: list[list[dict[str, Any]]] = [[KINDS, {}], [{}, {"deep": KINDS}], [KINDS, {"int": None}]]
        scripts += [[Computed(), OrderedDict(KINDS), {}]]
        factories = [functools.partial(Infos, script, length=3) for script in scripts]
        envs = make(factories, autoreset_mode="same_step")
        reference = gym.vector.SyncVectorEnv(factories, autoreset_mode=AutoresetMode.SAME_STEP)
        envs.reset()
        reference.reset()
        for _ in range(3):  # the last one ends the episodes
            infos, expected = envs.step(np.zeros(4, int))[4], reference.step(np.zeros(4, int))[4]
            assert typed(infos) == typed(expected)

    def test_values_keep_the_types_that_sb3_hands_on(self, make: MakeVec) -> None:
        vec_env = pytest.importorskip("stable_baselines3.common.vec_env")
        from muster.interop.sb3 import as_sb3

        kinds = {key: value for key, value in KINDS.items() if key != "proxy"} | {"big": 2**63, "yes": np.bool_(True)}
        scripts: list[list[dict[str, Any]]] = [[kinds, {"none": 0}, {"deep": dict(kinds)}]] * 2
        # SB3 writes into the infos of its envs.
        ours, theirs = ([functools.partial(Infos, one, length=3) for one in copy.deepcopy(scripts)] for _ in range(2))
        envs, reference = as_sb3(make(ours, autoreset_mode="same_step")), vec_env.DummyVecEnv(theirs)
        envs.reset()
        reference.reset()
        for _ in range(3):
            expected = reference.step(np.zeros(2, int))[3]
            assert list(map(typed, envs.step(np.zeros(2, int))[3])) == list(map(typed, expected))

    @pytest.mark.parametrize("values", OBJECTS, ids=str)
    def test_numbers_that_share_no_dtype_arrive_as_objects(self, make: MakeVec, values: list[Any]) -> None:
        envs = make([functools.partial(Infos, [{"v": value}]) for value in values])
        envs.reset()
        column = envs.step(np.zeros(2, int))[4]["v"]
        assert column.dtype == object
        assert column.tolist() == values

    def test_an_info_may_be_another_mapping_than_a_dict_and_is_a_copy(self, make: MakeVec) -> None:
        class Live(Counter):
            def step(self, action: Any) -> Any:
                obs, *rest, _ = super().step(action)
                vars(self).setdefault("said", {})["count"] = self.count
                return (obs, *rest, MappingProxyType({"all": MappingProxyType(self.said), "count": self.count}))

        envs = make([Live] * 2)
        envs.reset()
        kept = [envs.step(np.zeros(2, int))[4] for _ in range(2)]
        assert [infos["count"].tolist() for infos in kept] == [[1, 1], [2, 2]]
        assert [infos["all"].tolist() for infos in kept] == [[{"count": 1}] * 2, [{"count": 2}] * 2]

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
