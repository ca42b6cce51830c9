"""Marking what must stay where it is."""

from __future__ import annotations

from tensordict.nn import TensorDictModule
from torch import nn

from muster.nn import is_uncopyable, uncopyable, uncopyable_mark


@uncopyable("drives the arm over USB")
class Arm(nn.Linear):
    pass


@uncopyable
class Session:
    def act(self, obs: object) -> object:
        return obs


class Copy(Arm):
    uncopyable = False


def test_plain_modules_are_not_marked():
    assert not is_uncopyable(nn.Linear(2, 2))
    assert uncopyable_mark(nn.Linear(2, 2)) is None


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


def test_a_subclass_takes_the_mark_back():
    assert not is_uncopyable(Copy(2, 2))


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
