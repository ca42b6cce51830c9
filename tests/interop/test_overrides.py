"""Subclasses of the drop-ins: what they override is called as often, and with the same arguments, as in originals."""

import contextlib
import warnings

import gymnasium
import numpy as np
import pytest
from dropin_envs import Counter

sb3 = pytest.importorskip("stable_baselines3")

from gymnasium.vector import AsyncVectorEnv as TheirAsync  # noqa: E402
from gymnasium.vector import SyncVectorEnv as TheirSync  # noqa: E402
from gymnasium.vector.async_vector_env import _async_worker  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv as TheirDummy  # noqa: E402
from stable_baselines3.common.vec_env import SubprocVecEnv as TheirSubproc  # noqa: E402

from muster import Collector  # noqa: E402
from muster.interop.gymnasium import AsyncVectorEnv, SyncVectorEnv  # noqa: E402
from muster.interop.sb3 import DummyVecEnv, SubprocVecEnv  # noqa: E402
from slow import slow  # noqa: E402

# Forked: fresh processes would import this module, and with it SB3.
FORK = {
    TheirAsync: {"context": "fork"},
    AsyncVectorEnv: {"context": "fork"},
    TheirSubproc: {"start_method": "fork"},
    SubprocVecEnv: {"start_method": "fork"},
}
ORIGINALS = {
    SyncVectorEnv: TheirSync,
    AsyncVectorEnv: TheirAsync,
    DummyVecEnv: TheirDummy,
    SubprocVecEnv: TheirSubproc,
}
STEPPED = pytest.mark.parametrize("base", [DummyVecEnv, *slow(AsyncVectorEnv, SubprocVecEnv)])


class Pictured(Counter):
    """Renders a picture of its number of steps."""

    render_mode = "rgb_array"

    def render(self):
        return np.full((2, 2, 3), self.count, np.uint8)


ACTIONS = np.array([1])
# Each public verb of the originals, with arguments.
GYMNASIUM = [
    ("reset", {"seed": 3}),
    ("step", {"actions": ACTIONS}),
    ("call", {"name": "observe"}),
    ("get_attr", {"name": "count"}),
    ("set_attr", {"name": "count", "values": 0}),
    ("render", {}),
    ("np_random", None),
    ("np_random_seed", None),
]
IN_TWO = [
    ("reset_async", {}),
    ("reset_wait", {}),
    ("step_async", {"actions": ACTIONS}),
    ("step_wait", {}),
    ("call_async", {}),
    ("call_wait", {}),
]
CLOSING = [("close", {}), ("close", {}), ("close_extras", None)]
SB3 = [
    ("seed", {"seed": 3}),
    ("set_options", {}),
    ("reset", {}),
    ("step", {"actions": ACTIONS}),
    ("step_async", {"actions": ACTIONS}),
    ("step_wait", {}),
    ("has_attr", {"attr_name": "count"}),
    ("has_attr", {"attr_name": "no_such_thing"}),
    ("get_attr", {"attr_name": "count"}),
    ("set_attr", {"attr_name": "count", "value": 0}),
    ("env_method", {"method_name": "observe"}),
    ("env_is_wrapped", {"wrapper_class": gymnasium.Wrapper}),
    ("get_images", {}),
    ("render", {"mode": "rgb_array"}),
    ("close", {}),
]
PROGRAMS = {
    SyncVectorEnv: [*GYMNASIUM, *CLOSING],
    AsyncVectorEnv: [*GYMNASIUM, *IN_TWO, *CLOSING],
    DummyVecEnv: SB3,
    SubprocVecEnv: SB3,
}
VERBS = {base: [verb for verb in dict(program) if not verb.startswith("np_")] for base, program in PROGRAMS.items()}
# All at once, and one by one; with processes that takes seconds.
TABLE = [*VERBS.items()]
TABLE += [(base, [verb]) for base in (SyncVectorEnv, DummyVecEnv) for verb in VERBS[base]]
TABLE += slow(*((base, [verb]) for base in (AsyncVectorEnv, SubprocVecEnv) for verb in VERBS[base]))


def _noting(base, calls, *verbs):
    """A class derived from `base` that notes the calls of `verbs`."""

    def override(verb):
        def method(self, *args, **kwargs):
            calls.append(f"{verb}{args}{kwargs}")
            return getattr(super(Mine, self), verb)(*args, **kwargs)

        return method

    Mine = type("Mine", (base,), {verb: override(verb) for verb in verbs})
    return Mine


def _ran(base, program, verbs):
    """What the calls of `program` return, and which calls of `verbs` each of them makes."""
    calls = []
    envs = _noting(base, calls, *verbs)([Pictured], **FORK.get(base, {}))
    made = [("making", None, list(calls))]
    for name, kwargs in program:
        calls.clear()
        args = ("observe",) if name == "call_async" else ()
        result = None
        if kwargs is not None:
            result = getattr(envs, name)(*args, **kwargs)
        elif hasattr(type(envs), name) and name != "close_extras":
            result = getattr(envs, name)
        if name == "np_random":
            result = [one.random() for one in result]
        elif name.startswith("step") and len(result or ()) == 4:  # infos of SB3's are a list or a tuple
            result = [*result[:-1], *result[-1]]
        made.append((name, repr(result), list(calls)))
    return made


@pytest.mark.parametrize("case", TABLE, ids=lambda case: f"{case[0].__name__}-{'-'.join(case[1][:2])}")
def test_each_verb_calls_what_the_originals_calls(case):
    base, verbs = case
    assert _ran(base, PROGRAMS[base], verbs) == _ran(ORIGINALS[base], PROGRAMS[base], verbs)


@pytest.mark.parametrize("doing", ["step", *slow("reset", "call")])
@pytest.mark.parametrize("terminate", [False, *slow(True)])
def test_close_calls_the_override_for_what_is_pending(doing, terminate):
    seen = []
    for base in (AsyncVectorEnv, TheirAsync):
        envs = _noting(base, calls := [], f"{doing}_wait")([Counter], **FORK[base])
        envs.reset()
        calls.clear()
        getattr(envs, f"{doing}_async")(*{"reset": (), "step": (ACTIONS,), "call": ("observe",)}[doing])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            envs.close(terminate=terminate)
        seen.append(calls)
    assert seen[0] == seen[1] != []


def _subclass(base):
    return type("Mine", (base,), {"step_wait": lambda self: "mine"})


def _patched_for_good(base):
    cls = type("Mine", (base,), {})
    cls.step_wait = lambda self: "mine"
    return cls


WAYS = {
    "a subclass": _subclass,
    "a subclass of a subclass": lambda base: type("Yours", (_subclass(base),), {}),
    "a mixin": lambda base: type("Mine", (type("Mixin", (), {"step_wait": lambda self: "mine"}), base), {}),
    "set on the class": _patched_for_good,
    "step calls super": lambda base: type("Yours", (_subclass(base),), {"step": lambda self, a: base.step(self, a)}),
}


@STEPPED
@pytest.mark.parametrize("way", WAYS)
def test_step_returns_what_the_override_of_step_wait_returns(base, way):
    with contextlib.closing(WAYS[way](base)([Counter], **FORK.get(base, {}))) as envs:
        envs.reset()
        assert envs.step(ACTIONS) == "mine"
        if base is AsyncVectorEnv:
            base.step_wait(envs)


def test_a_subclass_leaves_the_envs_open_where_its_close_extras_does():
    calls = []

    class Kept(SyncVectorEnv):
        def close_extras(self):
            calls.append("close_extras")

    env = Counter()
    env.close = lambda: calls.append("close")
    envs = Kept([lambda: env])
    envs.close()
    envs.close()
    assert envs.closed
    assert calls == ["close_extras"]


@pytest.mark.parametrize("verb", ["step", "step_wait"])
def test_a_collector_steps_by_a_subclasss_own_methods(verb):
    calls = []
    cls = _noting(AsyncVectorEnv, calls, verb)
    envs = cls([Counter] * 2, context="fork", autoreset_mode="SameStep")
    with Collector(envs, frames_per_batch=6) as collector:
        next(iter(collector))
    assert len(calls) == 3
    assert "_copies" not in "".join(calls)


def test_a_subclass_of_the_sync_class_may_have_methods_that_the_async_class_has():
    class Mine(SyncVectorEnv):
        def reset_async(self, **kwargs):
            self.result = self.reset(**kwargs)

        def call_async(self, name):
            self.result = self.call(name)

        def step_async(self, actions):
            self.result = self.step(actions)

    with contextlib.closing(Mine([Counter])) as envs:
        envs.reset_async(seed=1)
        envs.step_async(ACTIONS)
        envs.call_async("count")
        assert envs.result == (1,)


def test_a_custom_worker_is_refused_for_a_subclass_whose_methods_would_be_lost():
    with pytest.raises(TypeError, match="derive Mine from gymnasium.vector.AsyncVectorEnv"):
        _noting(AsyncVectorEnv, [], "step")([Counter], worker=_async_worker)
