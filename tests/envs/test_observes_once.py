"""PettingZoo's converter has every agent observe twice in a step and drops one: once will do where nobody can tell."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import numpy as np
import pytest
from bare_loops import assert_rows_equal_a_bare_loop, make

import muster
from muster.envs.known_classes import OBSERVERS
from muster.errors import EnvError

SPREAD = "mpe2.simple_spread.simple_spread"
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def without_a_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")


def looks_of_a_step(
    module: str,
    code_of: Callable[[Any], CodeType],
    before: Callable[[Any], None] = lambda inner: None,
    num_resets: int = 1,
) -> float:
    """How often the fourth step of a module's parallel env runs a piece of code, per agent.

    code_of: tells it by the innermost env.  before: what is done to that before the step.
    """
    built: list[Any] = []
    calls = 0

    def build() -> Any:
        built.append(make(module, "parallel_env"))
        return built[-1]

    def listen(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code is code

    with muster.make_vec(build, 1, backend="serial") as envs:
        for seed in range(num_resets):
            envs.reset(seed=seed)
            for _ in range(3 if seed == num_resets - 1 else 1):
                envs.step(envs.action_space.sample())
        inner = built[-1].unwrapped
        code = code_of(inner)
        before(inner)
        actions = envs.action_space.sample()
        sys.setprofile(listen)
        try:
            envs.step(actions)
        finally:
            sys.setprofile(None)
        assert inner.last()[0] is not None
        return calls / len(inner.possible_agents)


@pytest.mark.parametrize("name", OBSERVERS)
def test_agents_observe_once_in_a_step_of_the_installed_releases(name: str) -> None:
    module = name.removesuffix(".raw_env")
    pytest.importorskip(module)
    assert looks_of_a_step(module, lambda inner: type(inner).observe.__code__) == 1


def test_so_they_do_after_hundreds_of_resets_that_make_their_observer_anew() -> None:
    pytest.importorskip("pettingzoo.butterfly.cooperative_pong_v6")
    looks = looks_of_a_step(
        "pettingzoo.butterfly.cooperative_pong_v6", lambda inner: type(inner).observe.__code__, num_resets=150
    )
    assert looks == 1


def in_its_class(env: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    observe = type(env).observe
    monkeypatch.setattr(type(env), "observe", lambda self, agent: observe(self, agent))


def in_the_env(env: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    env.observe = env.observe


def in_the_class_of_the_scenario(env: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    observation = type(env.scenario).observation
    monkeypatch.setattr(type(env.scenario), "observation", lambda self, agent, world: observation(self, agent, world))


def in_the_scenario(env: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    env.scenario.observation = env.scenario.observation


def by_another_scenario(env: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    env.scenario = type("Scenario", (type(env.scenario),), {})()


def in_its_last(env: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    env.last = env.last


@pytest.mark.parametrize("patch", [in_its_class, in_the_env, in_its_last])
@pytest.mark.parametrize("module", [SPREAD, "pettingzoo.butterfly.pistonball.pistonball"])
def test_they_observe_twice_once_the_env_was_patched(module: str, patch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(module)
    looks = looks_of_a_step(
        module, lambda inner: type(inner).observe.__code__, before=lambda inner: patch(inner, monkeypatch)
    )
    assert looks == 2


@pytest.mark.parametrize("patch", [in_the_class_of_the_scenario, in_the_scenario, by_another_scenario])
def test_they_observe_twice_once_the_scenario_was_patched(patch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mpe2")
    looks = looks_of_a_step(
        SPREAD,
        lambda inner: type(inner.scenario).observation.__code__,
        before=lambda inner: patch(inner, monkeypatch),
    )
    assert looks == 2


def noisy_spread(**kwargs: Any) -> Any:
    """A user's own, in which every look at the world draws a number."""
    from mpe2._mpe_utils.simple_env import make_env
    from mpe2.simple_spread.simple_spread import raw_env
    from pettingzoo.utils.conversions import parallel_wrapper_fn

    class Noisy(raw_env):  # type: ignore[misc]  # mpe2 is untyped
        def observe(self, agent: Any) -> Any:
            return super().observe(agent) + self.np_random.normal()

    return parallel_wrapper_fn(make_env(Noisy))(**kwargs)


def test_what_every_look_draws_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mpe2")
    monkeypatch.setitem(globals(), "parallel_env", noisy_spread)
    assert assert_rows_equal_a_bare_loop(__name__, "parallel_env", 60, backend="serial") > 0


@pytest.fixture
def spread() -> Iterator[tuple[Any, Any]]:
    """A vector env of one simple_spread, in its second step, and the innermost env."""
    pytest.importorskip("mpe2")
    inner: list[Any] = []

    def build() -> Any:
        env = make(SPREAD, "parallel_env")
        inner.append(env.unwrapped)
        return env

    with muster.make_vec(build, 1, backend="serial") as envs:
        envs.reset(seed=0)
        envs.step(envs.action_space.sample())
        yield envs, inner[-1]


def test_a_step_that_fails_leaves_the_env_as_it_was(spread: Any) -> None:
    envs, inner = spread
    inner.world.agents[0].accel = "much"
    with pytest.raises(EnvError):
        envs.step(envs.action_space.sample())
    assert "last" not in vars(inner)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs setitimer")
def test_so_does_one_that_is_interrupted_anywhere(spread: Any) -> None:
    envs, inner = spread
    actions, waits = envs.action_space.sample(), np.random.default_rng(0).uniform(5e-5, 6e-4, 1500)
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for wait in waits:
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, wait)
                while True:
                    envs.step(actions)
            assert "last" not in vars(inner)
            envs.reset()
            envs.step(actions)
    finally:
        signal.signal(signal.SIGALRM, previous)


def test_in_the_middle_of_a_step_last_is_what_the_env_makes_of_it(spread: Any) -> None:
    envs, inner = spread
    reward, seen = inner.scenario.reward, []

    def rewarding(agent: Any, world: Any) -> Any:
        seen.append(inner.last(True)[0])
        inner.last = "mine"
        return reward(agent, world)

    inner.scenario.reward = rewarding
    with pytest.raises(EnvError, match="not callable"):
        envs.step(envs.action_space.sample())
    assert seen[0].shape == (18,)
    assert inner.last == "mine"
