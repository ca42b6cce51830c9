"""Marking what must stay where it is."""

from __future__ import annotations

import copy
import io
import pickle
import re
import weakref
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.nn.utils import parametrizations

from muster.errors import CannotTravel, WrongType
from muster.nn import TargetParams, functionalize, is_uncopyable, uncopyable, uncopyable_mark


@uncopyable("drives the arm over USB")
class Arm(nn.Linear):
    pass


@uncopyable
class Session:
    def act(self, obs: object) -> object:
        return obs


class Copy(Arm):
    uncopyable = False


class WithHooks(nn.Linear):
    """Brings all the methods that copy and pickle ask for, and does not mention the mark in them."""

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        return "copied"

    def __reduce__(self) -> Any:
        return str, ("pickled",)


class WithState(nn.Linear):
    def __getstate__(self) -> dict[str, Any]:
        return {"in_features": 2}


@uncopyable
class MarkedWithHooks(WithHooks):
    pass


PICKLERS: dict[str, Callable[[Any], object]] = {
    "pickle": pickle.dumps,
    "pickle's oldest protocol": lambda value: pickle.dumps(value, 0),
    "pickle in Python": pickle._dumps,  # type: ignore[attr-defined]  # what dill and others derive from
    "cloudpickle": cloudpickle.dumps,
    "torch.save": lambda value: torch.save(value, io.BytesIO()),
    "multiprocessing": ForkingPickler.dumps,
}
MARKED: dict[str, Callable[[], Any]] = {
    "class": lambda: Arm(2, 2),
    "class that is no module": Session,
    "class with methods of its own": lambda: MarkedWithHooks(2, 2),
    "object": lambda: uncopyable(nn.Linear(2, 2), "drives the arm"),
    "object with methods of its class": lambda: uncopyable(WithHooks(2, 2)),
    "object with a state of its class": lambda: uncopyable(WithState(2, 2)),
    "object whose class torch replaces": lambda: parametrizations.weight_norm(uncopyable(nn.Linear(2, 2))),
}
HOLDERS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda marked: marked,
    "list": lambda marked: {"policies": [marked]},
    "attribute": lambda marked: holding(nn.Tanh(), marked),
    "wrapper": lambda marked: TensorDictModule(marked, ["observation"], ["action"]),
    "module": lambda marked: nn.Sequential(nn.Tanh(), marked),
}


def holding(module: nn.Module, held: Any) -> nn.Module:
    module.held = held
    return module


def test_decorated_class_marks_its_instances_with_path_type_and_reason():
    mark = uncopyable_mark(nn.Sequential(nn.Tanh(), nn.Sequential(Arm(2, 2))))
    assert mark is not None
    assert mark.path == "policy.1.0"
    assert mark.type_name.endswith("Arm")
    assert mark.reason == "drives the arm over USB"


def test_an_instance_marks_itself_by_attribute_or_by_call():
    by_attribute, by_call = nn.Linear(2, 2), nn.Linear(2, 2)
    by_attribute.uncopyable = "holds the session"
    assert uncopyable(by_call) is by_call
    assert uncopyable_mark(by_attribute).reason == "holds the session"
    assert uncopyable_mark(by_call).reason == ""
    assert not is_uncopyable(nn.Linear(2, 2))


def test_callables_that_are_no_modules_and_their_methods():
    assert is_uncopyable(Session())
    assert uncopyable_mark(Session().act).path == "policy.__self__"
    assert not is_uncopyable(lambda obs: obs)


def test_the_mark_inside_a_wrapper_that_forwards_attributes_has_the_right_path():
    inner = nn.Linear(2, 2)
    inner.uncopyable = True
    policy = TensorDictModule(inner, in_keys=["observation"], out_keys=["action"])
    assert uncopyable_mark(policy).path == "policy.module"


def test_what_is_not_a_bool_or_a_string_is_no_mark():
    class Odd(nn.Module):
        def uncopyable(self) -> None: ...

    assert not is_uncopyable(Odd())


@pytest.mark.parametrize("save", [torch.save, pickle.dump], ids=["torch.save", "pickle"])
@pytest.mark.parametrize("marked", MARKED.values(), ids=MARKED)
def test_whoever_saves_a_module_is_told_to_save_its_weights(marked: Callable[[], Any], save: Any, tmp_path: Path):
    policy = marked()
    with pytest.raises(CannotTravel) as raised, (tmp_path / "policy").open("wb") as file:
        save({"policy": policy}, file)
    if not isinstance(policy, nn.Module):
        assert "state_dict" not in str(raised.value)
        return
    way = next(line for line in str(raised.value).splitlines() if "state_dict" in line)
    saving, loading = re.findall(r"[\w.]+\(\S*?\([^()]*\)(?:, \w+)?\)", way)
    path = tmp_path / "weights"
    names = {"policy": policy, "path": path, "torch": torch}
    eval(saving, names)
    weights = {name: one.clone() for name, one in policy.state_dict().items()}
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    eval(loading, names)
    assert all(torch.equal(one, weights[name]) for name, one in policy.state_dict().items())


@pytest.mark.parametrize("marked", MARKED.values(), ids=MARKED)
def test_what_is_marked_can_neither_be_copied_nor_pickled(marked: Callable[[], Any]):
    for copying in (copy.copy, copy.deepcopy, *PICKLERS.values()):
        with pytest.raises(CannotTravel, match=r"is marked as uncopyable in .*test_marks\.py:\d+"):
            copying(marked())


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
@pytest.mark.parametrize("copying", [copy.deepcopy, *PICKLERS.values()], ids=["deepcopy", *PICKLERS])
def test_neither_can_what_holds_it(holder: Callable[[Any], Any], copying: Callable[[Any], object]):
    for marked in (Arm(2, 2), uncopyable(nn.Linear(2, 2), "drives the arm over USB")):
        with pytest.raises(CannotTravel, match="drives the arm over USB"):
            copying(holder(marked))


def test_a_mark_that_was_taken_back_hinders_nothing():
    by_call = uncopyable(WithState(2, 2))
    by_call.uncopyable = False
    plain = uncopyable(nn.Linear(2, 2))
    plain.uncopyable = False
    of_instance = Arm(2, 2)
    of_instance.uncopyable = False
    for module in (Copy(2, 2), plain, of_instance):
        for same in (copy.copy(module), copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert type(same) is type(module)
            assert same.weight.equal(module.weight)
    assert pickle.loads(pickle.dumps(by_call)).in_features == 2


def test_all_that_copies_nothing_works_as_before():
    policy = ProbabilisticTensorDictSequential(
        TensorDictModule(uncopyable(Arm(2, 2)), ["observation"], ["loc"]),
        ProbabilisticTensorDictModule(
            ["loc"], ["action"], distribution_class=lambda loc: torch.distributions.Normal(loc, 1)
        ),
    )
    arm, x = policy[0].module, torch.ones(3, 2)
    expected = arm(x)
    call, params = functionalize(arm)
    assert call(params, x).equal(expected)
    assert TargetParams(arm)(x).equal(expected)
    assert torch.compile(arm, backend="eager")(x).equal(expected)
    assert nn.Linear(2, 2).load_state_dict(arm.state_dict())
    assert policy.to(torch.float64) is policy
    assert arm(x.double()).dtype is torch.float64
    assert torch.save(policy.state_dict(), io.BytesIO()) is None


def test_a_marked_object_ends_when_nobody_holds_it():
    marked = uncopyable(nn.Linear(2, 2))
    alive = weakref.ref(marked)
    del marked
    assert alive() is None


def test_a_marked_class_that_is_sent_by_value_travels_and_its_instances_still_do_not():
    @uncopyable("drives the arm")
    class Local(nn.Linear):
        pass

    factory = pickle.loads(cloudpickle.dumps(lambda: Local(2, 2)))
    with pytest.raises(CannotTravel, match="drives the arm"):
        cloudpickle.dumps(factory())


@pytest.mark.parametrize("target", [3, object(), Session().act])
def test_what_takes_no_attributes_cannot_be_marked(target: object):
    with pytest.raises(WrongType, match="cannot be marked: it takes no attributes"):
        uncopyable(target)
