"""States of envs: `get_states` and `set_states` of vector envs with ``replayable=True``, and `EnvState`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import random
import signal
import threading
import time
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation, NormalizeObservation, RecordEpisodeStatistics

import muster
from muster import EnvState
from muster.errors import (
    ConfigError,
    EnvError,
    MusterError,
    PendingError,
    ReplayDiffers,
    UsageError,
    WorkerDied,
    WrongType,
)
from processes import kill_worker
from slow import slow


class Nested(gym.Env[Any, Any]):
    """Draws all that it returns, nested observations and ends included. Also from `shared`, if it has that."""

    observation_space = spaces.Dict(
        {
            "a": spaces.Dict({"b": spaces.Box(-1, 1, (3,)), "c": spaces.Discrete(5)}),
            "t": spaces.Tuple((spaces.MultiBinary(3), spaces.Box(0, 255, (2, 2), np.uint8))),
        }
    )
    action_space = spaces.Dict({"x": spaces.Box(-1, 1, (2,)), "y": spaces.Tuple((spaces.Discrete(3),))})
    more = 0.0

    def __init__(self, step_s: float = 0.0) -> None:
        self.step_s = step_s

    def see(self) -> Any:
        draw = self.np_random
        flags, pixels = draw.integers(0, 2, 3).astype(np.int8), draw.integers(0, 255, (2, 2)).astype(np.uint8)
        return {"a": {"b": draw.uniform(-1, 1, 3).astype(np.float32), "c": int(draw.integers(5))}, "t": (flags, pixels)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.level = (options or {}).get("level", 0)
        return self.see(), {}

    def step(self, action: Any) -> Any:
        time.sleep(self.step_s)
        reward = float(action["x"].sum() + action["y"][0]) + self.level + self.more
        return self.see(), reward, bool(self.np_random.random() < 0.05), False, {"level": self.level}


class FromGlobals(gym.Env[Any, Any]):
    """Draws from the generators that all code of a process shares."""

    observation_space, action_space = spaces.Box(0, 1, (2,)), spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.array([random.random(), np.random.rand()], np.float32), {}  # noqa: NPY002

    def step(self, action: Any) -> Any:
        return self.reset()[0], 0.0, random.random() < 0.05, False, {}


class Noisy(gym.Wrapper[Any, Any, Any, Any]):
    """Adds `noise` to observations."""

    def __init__(self, env: Any, noise: Callable[[], float]) -> None:
        super().__init__(env)
        self.noise = noise

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return (obs + np.float32(self.noise()), *rest)


def keeps(env: Any) -> Any:
    return Noisy(env, iter(np.arange(1, 1e5) / 1e5).__next__)


def clock(env: Any) -> Any:
    return Noisy(env, lambda: time.time() % 1)


def shares(env: Any, generator: Any = np.random.default_rng(0)) -> Any:  # noqa: B008
    return Noisy(env, generator.random)


def step(envs: Any, actions: Any) -> Any:
    """One step, and the resets that it makes due; what envs have returned."""
    result = envs.step(actions)
    over = result[2] | result[3]
    if envs.metadata["autoreset_mode"] is gym.vector.AutoresetMode.DISABLED and over.any():
        envs.reset(options={"reset_mask": over})
    return result[:4]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return all(map(equal, one, other))
    return bool(np.array_equal(one, other))


def gone_on(envs: Any, steps: int, more: int) -> tuple[list[bytes], list[Any], list[Any]]:
    """The states of envs after random steps, then actions, and what envs have returned for them."""
    for _ in range(steps):
        step(envs, envs.sample_actions())
    states, actions, results = envs.get_states(), [], []
    for _ in range(more):
        actions.append(envs.sample_actions())
        results.append(step(envs, actions[-1]))
    return [state.to_bytes() for state in states], actions, results


wrapped = partial(
    muster.make_vec,
    "CartPole-v1",
    wrappers=[RecordEpisodeStatistics, partial(FrameStackObservation, stack_size=3)],
)
MAKERS: dict[str, Callable[..., Any]] = {
    "CartPole": partial(muster.make_vec, "CartPole-v1"),
    "nested": partial(muster.make_vec, Nested),
    "connect_four": partial(muster.make_vec, "pettingzoo/classic/connect_four_v3"),
    "wrapped": wrapped,
    "HalfCheetah": partial(muster.make_vec, "HalfCheetah-v5"),
    "Pong": partial(muster.make_vec, "ALE/Pong-v5", env_kwargs={"repeat_action_probability": 0.25}),
    "LunarLander": partial(muster.make_vec, "LunarLander-v3"),
    "DoorKey": partial(muster.make_vec, "minigrid:MiniGrid-DoorKey-5x5-v0"),
    "multiwalker": partial(muster.make_vec, "pettingzoo/sisl/multiwalker_v9"),
    "simple_spread": partial(muster.make_vec, "pettingzoo/mpe/simple_spread_v3"),
}
NEEDS = {"connect_four": "pettingzoo", "HalfCheetah": "mujoco", "Pong": "ale_py", "LunarLander": "Box2D"}
NEEDS |= {"DoorKey": "minigrid", "multiwalker": "Box2D", "simple_spread": "mpe2"}
ELSEWHERE = [
    {"num_workers": 2},
    {"backend": "serial"},
    {"backend": "thread"},
    {"context": "spawn"},
    {"context": "fork"},
]


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
@pytest.mark.parametrize("name", ["CartPole", "nested", "connect_four", *slow(*list(MAKERS)[3:])])
def test_envs_go_on_from_their_states_elsewhere_as_they_did(name: str, mode: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    options: dict[str, Any] = {"num_envs": 4, "autoreset_mode": mode, "replayable": True}
    with MAKERS[name](**options) as envs:
        envs.reset(seed=3)
        states, actions, results = gone_on(envs, 130, 500 if name == "CartPole" else 100)
    for elsewhere in ELSEWHERE if name == "CartPole" else ELSEWHERE[:2]:
        with MAKERS[name](**options, **elsewhere) as envs:
            envs.reset(seed=99)
            step(envs, envs.sample_actions())
            envs.set_states([EnvState.from_bytes(state) for state in states])
            for sent, expected in zip(actions, results, strict=True):
                assert equal(step(envs, sent), expected)


@pytest.mark.parametrize("options", [{"num_workers": 4}, *slow({"num_workers": 4, "context": "fork"})])
def test_a_worker_with_one_env_seeds_what_its_process_shares(options: Any) -> None:
    with muster.make_vec(FromGlobals, 4, replayable=True, **options) as envs:
        envs.reset(seed=3)
        states, actions, results = gone_on(envs, 60, 60)
        envs.set_states([EnvState.from_bytes(state) for state in states[::-1]])  # each in another worker
        for sent, expected in zip(actions, results, strict=True):
            assert equal(step(envs, sent[::-1]), tuple(rows[::-1] for rows in expected))


def test_each_episode_has_a_seed_of_its_own_whatever_steps_the_env() -> None:
    seen = []
    for options in ({"backend": "serial"}, {"num_workers": 1}, {"num_workers": 2, "autoreset_mode": "same_step"}):
        with muster.make_vec(Seeds, 2, replayable=True, **options) as envs:
            first, again = envs.reset(seed=5)[0], envs.reset()[0]
            for _ in range(3):
                obs = envs.step([0, 0])[0]
            if "autoreset_mode" in options:
                obs = envs.step([0, 0])[0]
            seen.append([*first.tolist(), *again.tolist(), *obs.tolist()])
    expected = [
        [np.random.SeedSequence(5 + i, spawn_key=(k,)).generate_state(1)[0] % 2**31] for k in (0, 1) for i in (0, 1)
    ]
    assert seen[0] == seen[1]
    assert seen[0][:4] == expected


class Seeds(gym.Env[Any, Any]):
    """Observes the seed of its reset; an episode has two steps."""

    observation_space, action_space = spaces.Box(-1, 2**31, (1,), np.int64), spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.seed, self.steps = -1 if seed is None else seed, 0
        return np.array([self.seed]), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.array([self.seed]), 0.0, self.steps == 2, False, {}


def test_one_state_is_branched_seven_ways() -> None:
    with muster.make_vec("CartPole-v1", 8, num_workers=2, replayable=True) as envs:
        envs.reset(seed=0)
        for _ in range(5):
            envs.step(envs.sample_actions())
        obs, _ = envs.set_states(envs.get_states([0]) * 7, env_ids=range(1, 8))
        assert (obs == obs[0]).all()
        assert envs.episode_lengths.tolist() == [5] * 8
        assert envs.episode_returns.tolist() == [5.0] * 8


def test_options_and_attributes_are_those_of_the_state() -> None:
    with muster.make_vec(Nested, 2, num_workers=1, replayable=True) as envs:
        envs.set_attr("more", 0.5)
        envs.reset(seed=1, options={"level": 7, "path": ["a"]})
        envs.step(envs.sample_actions())
        states = envs.get_states()
        envs.reset(seed=2)
        _, infos = envs.set_states(states)
        assert infos["level"].tolist() == [7, 7]
    with muster.make_vec(Nested, 2, num_workers=1, replayable=True) as envs:  # which is built anew, and told again
        envs.reset(seed=1)
        envs.set_attr("more", 0.5)
        envs.call(lambda env, index: vars(env).update(level=1))
        with pytest.raises(ReplayDiffers, match="the return is"):
            envs.step(envs.sample_actions())
            envs.set_states(envs.get_states())
        assert envs.call("more") == (0.5, 0.5)


# ---- what differs


@pytest.mark.parametrize("mode", ["next_step", *slow("same_step", "disabled")])
@pytest.mark.parametrize("on_failure", ["raise", "restart"])
@pytest.mark.parametrize("wrapper", [keeps, clock, shares, NormalizeObservation])
def test_an_env_that_does_not_come_to_its_state_is_named_and_begins_anew(
    wrapper: Any, on_failure: str, mode: str
) -> None:
    options: dict[str, Any] = {
        "num_workers": 2,
        "wrappers": [wrapper],
        "autoreset_mode": mode,
        "on_failure": on_failure,
    }
    with muster.make_vec("CartPole-v1", 4, replayable=True, **options) as envs:
        envs.reset(seed=1)
        while min(state.episode * state.steps for state in envs.get_states()) == 0:
            step(envs, envs.sample_actions())
        states = envs.get_states()
        with pytest.raises(ReplayDiffers, match=r"env \d did not come to step \d+ of its episode \d+ again") as caught:
            envs.set_states(states)
        anew = caught.value.was_reset
        assert caught.value.env_index in anew
        for env, (length, state) in enumerate(zip(envs.episode_lengths, states, strict=True)):
            assert length == (0 if env in anew else state.steps)
        assert envs.stats()["restarts"] == 0
        step(envs, envs.sample_actions())


def test_an_env_that_was_changed_by_its_first_episode_is_built_anew() -> None:
    with muster.make_vec("CartPole-v1", 2, wrappers=[NormalizeObservation], replayable=True) as envs:
        envs.reset(seed=1)
        states, actions, results = gone_on(envs, 5, 5)
        envs.reset()
        envs.set_states([EnvState.from_bytes(state) for state in states])
        for sent, expected in zip(actions, results, strict=True):
            assert equal(step(envs, sent), expected)


def test_an_env_that_raises_on_the_way_differs() -> None:
    with muster.make_vec("CartPole-v1", 1, replayable=True) as envs:
        envs.reset(seed=1)
        envs.step([0])
        state = dataclasses.replace(envs.get_states()[0], actions=np.array([7]).tobytes())
        with pytest.raises(ReplayDiffers, match="also built anew: AssertionError was raised after step 0"):
            envs.set_states([state])
        assert envs.step([0])[1] == 1.0


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_a_worker_that_dies_meanwhile(on_failure: str) -> None:
    options: dict[str, Any] = {"num_workers": 2, "on_failure": on_failure, "env_kwargs": {"step_s": 0.01}}
    with muster.make_vec(Nested, 2, replayable=True, **options) as envs:
        envs.reset(seed=8)
        while min(state.steps for state in envs.get_states()) < 20:
            envs.step(envs.sample_actions())
        states = envs.get_states()
        kill = threading.Timer(0.1, kill_worker, (envs, 1))
        kill.start()
        if on_failure == "raise":
            with pytest.raises(WorkerDied):
                envs.set_states(states)
        else:
            envs.set_states(states)
            assert envs.get_states() == states
            kill_worker(envs, 0)
            assert envs.get_states() == states  # the caller has them
        kill.join()


class Unseeded(gym.Env[Any, Any]):
    """Its resets draw from the operating system; its episodes have two steps."""

    observation_space, action_space = spaces.Box(0, 1, (1,), np.float64), spaces.Discrete(2)
    builds = 0

    def __init__(self, only: int = 9) -> None:
        Unseeded.builds += 1
        if Unseeded.builds > only:
            raise OSError("only once")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = 0
        return np.random.default_rng().random(1), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.random.default_rng().random(1), 1.0, self.steps == 2, False, {}


def test_a_state_without_steps_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Unseeded, "builds", -9)
    for ends in (False, True):  # the state of an episode's end is compared before the next one begins (same_step)
        with muster.make_vec(Unseeded, 1, backend="serial", replayable=True) as envs:
            envs.reset(seed=1)
            envs.reset()
            for _ in range(2 * ends):
                envs.step([0])
            states = envs.get_states()
            assert states[0].is_over is ends
        mode = "same_step" if ends else "next_step"
        with muster.make_vec(Unseeded, 1, backend="serial", autoreset_mode=mode, replayable=True) as envs:
            envs.reset(seed=1)
            with pytest.raises(ReplayDiffers, match="also built anew: observation is"):
                envs.set_states(states)


class Used(gym.Env[Any, Any]):
    """Counts its episodes, in a text, too."""

    observation_space = spaces.Dict(text=spaces.Text(9, charset="0123456789 in"), n=spaces.Box(0, 99, (1,)))
    action_space, n = spaces.Discrete(2), 0

    def see(self) -> Any:
        return {"text": f"{self.t} in {self.n}", "n": np.array([self.n], np.float32)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.n, self.t = self.n + 1, 0
        return self.see(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self.see(), 0.0, False, False, {}


def test_the_first_row_of_an_env_that_differs_is_its_own() -> None:
    with muster.make_vec(Used, 1, num_workers=1, replayable=True) as envs:
        envs.reset(seed=0)
        envs.reset()
        envs.step([0])
        with pytest.raises(ReplayDiffers) as caught:
            envs.set_states(envs.get_states())
    obs, _ = caught.value.result
    assert obs["text"] == (f"0 in {int(obs['n'][0, 0])}",)


def test_an_env_that_cannot_be_built_anew_is_not_stepped_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Unseeded, "builds", 0)
    with muster.make_vec(Unseeded, 1, backend="serial", replayable=True, env_kwargs={"only": 1}) as envs:
        envs.reset(seed=1)
        states = envs.get_states()
        for use in (lambda: envs.set_states(states), lambda: envs.step([0]), envs.reset):
            with pytest.raises(EnvError, match="only once"):
                use()


def test_the_end_of_an_episode_becomes_the_start_of_the_next_where_it_has_no_row() -> None:
    with muster.make_vec(Seeds, 1, backend="serial", replayable=True) as envs:
        envs.reset(seed=5)
        for _ in range(2):
            envs.step([0])
        ended = envs.get_states()
        following = envs.step([0])[0]
    with muster.make_vec(Seeds, 1, backend="serial", replayable=True, autoreset_mode="same_step") as envs:
        assert envs.set_states(ended)[0] == following
        assert [(state.episode, state.steps) for state in envs.get_states()] == [(1, 0)]


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_an_interrupted_set_leaves_no_state_that_is_wrong(backend: str) -> None:
    def interrupt(envs: Any) -> Any:
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            envs.set_states(states[::-1])

    with muster.make_vec(Nested, 2, backend=backend, env_kwargs={"step_s": 0.01}, replayable=True) as envs:
        envs.reset(seed=8)
        while min(state.steps for state in envs.get_states()) < 20:
            envs.step(envs.sample_actions())
        states = envs.get_states()
        interrupt(envs)
        while envs.num_pending:
            envs.recv()
        envs.step(envs.sample_actions())
        for env in range(2):
            with contextlib.suppress(UsageError):
                envs.set_states(envs.get_states([env]), [env])
        envs.set_states(states)


def test_a_seed_may_come_again() -> None:
    with muster.make_vec("CartPole-v1", 1, backend="serial", replayable=True) as envs:
        for _ in range(2):
            envs.reset(seed=0)
            assert envs.get_states()[0].steps == 0
            envs.step([0])
            assert envs.get_states()[0].steps == 1


def parts(*values: Any, **named: Any) -> Any:
    return Seeds()


LIKE: list[tuple[Any, dict[str, Any]]] = [
    (parts, {"env_kwargs": {"a": {"x", "y", "z"}, "b": {"c": 1, "d": 2}}}),
    (parts, {"env_kwargs": {"a": {"z", "y", "x"}, "b": {"d": 2, "c": 1}}}),
    (parts, {"env_kwargs": {"a": np.arange(5000), "b": 0}}),
    (parts, {"env_kwargs": {"a": np.arange(5000) % 2500, "b": 0}}),
    (partial(parts, 1), {}),
    (partial(parts, 2), {}),
    (Seeds, {"wrappers": [partial(gym.wrappers.TimeLimit, max_episode_steps=20)]}),
    (Seeds, {"wrappers": [partial(gym.wrappers.TimeLimit, max_episode_steps=30)]}),
    ("CartPole-v1", {}),
    ("CartPole-v1", {"env_kwargs": {"render_mode": "rgb_array"}}),
    (gym.spec("CartPole-v1"), {}),
    (partial(gym.make, "CartPole-v1"), {}),
]


def test_states_are_of_envs_that_are_alike() -> None:
    recipes = [_state_of(env, **options).recipe for env, options in LIKE]
    assert recipes[0] == recipes[1]
    assert recipes[8] == recipes[9] == recipes[10]
    assert len({*recipes}) == len(LIKE) - 3


# ---- bytes


def test_no_byte_can_be_changed() -> None:
    with muster.make_vec("CartPole-v1", 1, replayable=True, backend="serial") as envs:
        envs.reset(seed=1)
        envs.step([0])
        state = envs.get_states()[0]
    data = state.to_bytes()
    assert EnvState.from_bytes(data) == state == pickle.loads(pickle.dumps(state))
    assert len(data) < 400
    for at in range(len(data)):
        with pytest.raises(UsageError, match="state"):
            EnvState.from_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(UsageError, match="no state can be read"):
            EnvState.from_bytes(data[:at])
    bomb = data.partition(b"\n")[0] + b"\n" + zlib.compress(bytes(1 << 28))
    wrong: list[Any] = [b"[" * 100_000, bomb, b"", b"{}\n", 3, None, data.replace(b'"version": 1', b'"version": 2')]
    for one in wrong:
        with pytest.raises(UsageError, match="state"):
            EnvState.from_bytes(one)


# ---- what is refused


def test_what_does_not_fit_is_refused_with_the_envs_as_they_were() -> None:
    with muster.make_vec("CartPole-v1", 2, replayable=True, num_workers=1) as envs:
        with pytest.raises(UsageError, match="env 0 has not been reset"):
            envs.get_states()
        envs.reset(seed=1)
        envs.step([0, 1])
        states = envs.get_states()
        others = [_state_of("Acrobot-v1"), _state_of("CartPole-v1", env_kwargs={"sutton_barto_reward": True})]
        cases: list[tuple[type[MusterError], str, Any]] = [
            (ConfigError, "expected 2 states, one for each env, got 1", (states[:1],)),
            (MusterError, "distinct", (states, [1, 1])),
            (MusterError, "below num_envs=2", (states[:1], [2])),
            (WrongType, "expected a list of EnvState", ("x",)),
            (WrongType, "expected a list of EnvState", ([states[0], None],)),
            *((UsageError, r"states\[1\] is of the env", ([states[0], one],)) for one in others),
            *(
                (UsageError, said, ([dataclasses.replace(states[0], **{name: value})], [0]))
                for name, value, said in WRONG
            ),
        ]
        for kind, said, arguments in cases:
            with pytest.raises(kind, match=said):
                envs.set_states(*arguments)
        assert envs.get_states() == states
        for options in ({"a": np.zeros(2)}, {"a": (1,)}, {1: 2}, {"a": object()}):
            with pytest.raises(UsageError, match="what JSON has"):
                envs.reset(options=options)
        envs.send([0], [1])
        assert envs.get_states([0]) == states[:1]
        with pytest.raises(PendingError):
            envs.get_states()
        with pytest.raises(PendingError):
            envs.set_states(states)


WRONG: list[tuple[str, Any, str]] = [
    ("steps", 2, "has 8 bytes of actions and digests of 1 arrays, expected 2 times 8 bytes, and 1"),
    ("digests", (), "digests of 0 arrays, expected"),
    ("options", "{", r"the options of states\[0\] are no JSON"),
]


def _state_of(env: Any, **options: Any) -> EnvState:
    with muster.make_vec(env, 1, replayable=True, backend="serial", **options) as envs:
        envs.reset()
        state: EnvState = envs.get_states()[0]
        return state


class Texts(Seeds):
    action_space = spaces.Text(5)  # type: ignore[assignment]


def test_what_has_no_states_is_said() -> None:
    with (
        muster.make_vec("CartPole-v1", 1, backend="serial") as envs,
        pytest.raises(UsageError, match="replayable=True"),
    ):
        envs.get_states()
    with pytest.raises(UsageError, match="parts of no fixed size"):
        muster.make_vec(Texts, 1, replayable=True)
    with pytest.raises(ConfigError, match="replayable must be left out with concurrent"):
        muster.make_vec("CartPole-v1", 1, replayable=True, concurrent=True)
    with pytest.raises(ConfigError, match="replayable must be left out for coroutine envs"):
        muster.make_vec(Awaited, 1, replayable=True)


class Awaited(Seeds):
    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed)

    async def step(self, action: Any) -> Any:
        return super().step(action)


def test_after_a_failure_the_env_has_a_state_once_it_is_reset() -> None:
    def raises(env: Any, index: int) -> None:
        def step(action: Any) -> Any:
            del env.unwrapped.step
            raise ValueError(os.getpid())

        env.unwrapped.step = step

    with muster.make_vec("CartPole-v1", 1, replayable=True) as envs:
        envs.reset(seed=1)
        envs.call(raises)
        with pytest.raises(EnvError, match="ValueError"):
            envs.step([0])
        for _ in range(2):
            with pytest.raises(UsageError, match="env 0 has raised or was replaced in this episode"):
                envs.get_states()
            envs.step([0])
        envs.reset()
        assert envs.get_states()[0].episode == 1


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
def test_an_env_that_was_replaced_while_it_was_idle_has_no_state_until_it_is_reset(mode: str) -> None:
    with muster.make_vec("CartPole-v1", 2, replayable=True, on_failure="restart", autoreset_mode=mode) as envs:
        envs.reset(seed=1)
        envs.step([0, 0])
        kill_worker(envs, 0)
        assert envs.get_states()[0].steps == 1  # the caller has it
        assert step(envs, [0, 0])[3].tolist() == [True, False]
        if mode == "next_step":
            with pytest.raises(UsageError, match="env 0 has raised or was replaced"):
                envs.get_states()
            envs.step([0, 0])
        states = envs.get_states()
        assert [state.steps for state in states] == [0, 3 if mode == "next_step" else 2]
        envs.set_states(states)
