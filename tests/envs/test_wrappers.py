"""Wrappers are stepped through, whoever puts them there and whenever."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from bare_loops import make
from gymnasium import spaces
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit
from pettingzoo import AECEnv
from pettingzoo.utils.wrappers import AssertOutOfBoundsWrapper, OrderEnforcingWrapper

import muster
from muster.envs import resolve_foreign_id
from muster.errors import EnvError
from slow import slow

CARTPOLE = "CartPole-v1"
SUBSTRATE = "prisoners_dilemma_in_the_matrix__repeated"


class Halving(gymnasium.Wrapper[Any, Any, Any, Any]):
    def step(self, action: Any) -> Any:
        obs, reward, *rest = self.env.step(action)
        return obs, 0.5 * float(reward), *rest


class LateLimit(TimeLimit):
    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated, truncated, {**info, "late": True}


class FailsOnce(gymnasium.Env[Any, Any]):
    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 4:
            raise RuntimeError("the fourth step")
        return np.zeros(2, np.float32), 1.0, False, False, {}


def limited(steps: int) -> Any:
    return TimeLimit(OrderEnforcing(PassiveEnvChecker(FailsOnce())), steps)


# ---- Gymnasium


@pytest.mark.parametrize("autoreset_mode", ["next_step", "same_step"])
@pytest.mark.parametrize("backend", ["serial", *slow("process")])
def test_episodes_end_when_their_time_is_up(backend: str, autoreset_mode: str) -> None:
    with muster.make_vec(
        "MountainCar-v0",
        2,
        backend=backend,
        env_kwargs={"max_episode_steps": 7},
        autoreset_mode=autoreset_mode,
    ) as envs:
        envs.reset(seed=0)
        ends = [bool(envs.step(np.zeros(2, np.int64))[3].all()) for _ in range(24)]
    period = 8 if autoreset_mode == "next_step" else 7
    assert [i for i, over in enumerate(ends) if over] == [6 + period * k for k in range(3)]


def test_the_time_limit_goes_on_counting_and_may_be_moved() -> None:
    with muster.make_vec("MountainCar-v0", 2, num_workers=2) as envs:
        envs.reset(seed=0)
        for _ in range(5):
            envs.step(np.zeros(2, np.int64))
        assert envs.get_attr("_elapsed_steps") == (5, 5)
        envs.set_attr("_max_episode_steps", [6, 8])
        assert [envs.step(np.zeros(2, np.int64))[3].tolist() for _ in range(3)] == [
            [True, False],
            [False, False],  # env 0 is reset
            [False, True],
        ]


def test_a_step_that_fails_is_not_counted() -> None:
    with muster.make_vec(functools.partial(limited, 50), 1, backend="serial") as envs:
        envs.reset(seed=0)
        for _ in range(3):
            envs.step(np.zeros(1, np.int64))
        with pytest.raises(EnvError, match="the fourth step"):
            envs.step(np.zeros(1, np.int64))
        assert envs.get_attr("_elapsed_steps") == (3,)


def test_a_time_limit_of_ones_own_is_stepped() -> None:
    with muster.make_vec(lambda: LateLimit(gymnasium.make(CARTPOLE), 100), 1, backend="serial") as envs:
        envs.reset(seed=0)
        for _ in range(5):
            assert envs.step(np.zeros(1, np.int64))[4]["late"].all()


def test_a_wrapper_put_inside_later_is_stepped() -> None:
    def wrap(env: Any, env_index: int) -> None:
        env.env = Halving(env.env)

    with muster.make_vec(CARTPOLE, 2, num_workers=2) as envs:
        envs.reset(seed=0)
        for _ in range(4):
            assert envs.step(np.zeros(2, np.int64))[1].tolist() == [1.0, 1.0]
        envs.call(wrap)
        assert envs.step(np.zeros(2, np.int64))[1].tolist() == [0.5, 0.5]


def test_a_step_patched_by_a_call_is_stepped() -> None:
    def patch(env: Any, env_index: int) -> None:
        step = env.step
        env.step = lambda action: (*step(action)[:4], {"patched": True})

    with muster.make_vec(CARTPOLE, 2, num_workers=2) as envs:
        envs.reset(seed=0)
        for _ in range(4):
            envs.step(np.zeros(2, np.int64))
        envs.call(patch)
        assert envs.step(np.zeros(2, np.int64))[4]["patched"].all()


def rewards_of(envs: Any, steps: int = 5) -> list[float]:
    return [float(envs.step(np.zeros(envs.num_envs, np.int64))[1][0]) for _ in range(steps)]


def with_reward_of_5(step: Any) -> Any:
    return lambda *args: (lambda result: (result[0], 5.0, *result[2:]))(step(*args))


@pytest.mark.parametrize("like_the_original", [True, False])
def test_a_patched_class_is_stepped(like_the_original: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    patched_step = with_reward_of_5(TimeLimit.step)
    with muster.make_vec(CARTPOLE, 1, backend="serial") as envs:
        envs.reset(seed=0)
        assert rewards_of(envs) == [1.0] * 5
        monkeypatch.setattr(
            TimeLimit, "step", functools.wraps(TimeLimit.step)(patched_step) if like_the_original else patched_step
        )
        assert rewards_of(envs, 3) == [5.0] * 3
        with muster.make_vec(CARTPOLE, 1, backend="serial") as others:
            others.reset(seed=0)
            assert rewards_of(others) == [5.0] * 5


class PatchesItsWrapper(FailsOnce):
    outermost: Any = None

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 4:
            self.outermost.step = with_reward_of_5(self.outermost.step)
        return np.zeros(2, np.float32), 1.0, False, False, {}


def patching_itself() -> Any:
    env = TimeLimit(PatchesItsWrapper(), 50)
    env.unwrapped.outermost = env
    return env


@pytest.mark.parametrize("backend", ["process", *slow("serial")])
def test_an_env_that_patches_its_own_wrapper_is_stepped_so(backend: str) -> None:
    with muster.make_vec(patching_itself, 1, backend=backend) as envs:
        envs.reset(seed=0)
        assert rewards_of(envs, 7) == [1.0] * 4 + [5.0] * 3


class GivesLists(FailsOnce):
    def step(self, action: Any) -> Any:
        return [np.zeros(2, np.float32), 1.0, False, None, {}]


def test_a_time_limit_makes_tuples_of_lists_and_overrules_truncated() -> None:
    with muster.make_vec(lambda: TimeLimit(GivesLists(), 1), 1, backend="serial", autoreset_mode="same_step") as envs:
        envs.reset(seed=0)
        assert [envs.step(np.zeros(1, np.int64))[3].tolist() for _ in range(5)] == [[True]] * 5


def test_envs_that_are_replaced_within_their_wrappers_are_let_go() -> None:
    built: list[Any] = []

    def replace(env: Any, env_index: int) -> None:
        env.env.env = FailsOnce()
        built.append(weakref.ref(env.env.env))

    with muster.make_vec(lambda: TimeLimit(OrderEnforcing(FailsOnce()), 9), 1, backend="serial") as envs:
        for _ in range(150):
            envs.call(replace)
            envs.reset(seed=0)
            envs.step(np.zeros(1, np.int64))
        gc.collect()
        assert sum(one() is not None for one in built) == 1


def test_closed_envs_are_let_go() -> None:
    envs = muster.make_vec(CARTPOLE, 2, backend="serial")
    seen: list[Any] = []
    envs.call(lambda env, env_index: seen.append(weakref.ref(env.unwrapped)))
    envs.reset(seed=0)
    for _ in range(5):
        envs.step(np.zeros(2, np.int64))
    envs.close()
    gc.collect()
    assert [one() for one in seen] == [None, None]


# ---- PettingZoo


def without_a_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")


@pytest.mark.filterwarnings("ignore")
def test_actions_out_of_bounds_are_clipped_as_pettingzoo_does(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pettingzoo.sisl.multiwalker_v9")
    without_a_display(monkeypatch)
    bare = make("pettingzoo.sisl.multiwalker_v9", "parallel_env")
    bare.reset(seed=3)
    with muster.make_vec("pettingzoo/sisl/multiwalker_v9", 1, backend="serial") as envs:
        envs.reset(seed=3)
        rng = np.random.default_rng(0)
        for _ in range(20):
            actions = rng.uniform(-3, 3, (1, 3, 4)).astype(np.float32)
            obs, rewards, *_ = envs.step({"walker": actions})
            told, bare_rewards, *_ = bare.step({agent: actions[0, i] for i, agent in enumerate(bare.possible_agents)})
            for i, agent in enumerate(bare.possible_agents):
                assert np.array_equal(obs["walker"][0, i], told[agent])
                assert rewards["walker"][0, i] == np.float32(bare_rewards[agent])
            if not bare.agents:
                break


def count_steps(where: str, env: Any, env_index: int) -> None:
    """Has the wrapper, or what it wraps, count its steps in a list."""
    wrapper = env.env if where == "outermost" else env.env.env
    step, steps = wrapper.step, env.env.__dict__.setdefault("counted", [])
    wrapper.step = lambda action: (steps.append(1), step(action))[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("where", ["outermost", "inside"])
def test_a_step_that_a_call_replaces_in_a_wrapper_of_turns_is_stepped(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mpe2")
    without_a_display(monkeypatch)
    with muster.make_vec(functools.partial(make, "mpe2.simple_spread_v3", "env"), 1, backend="serial") as envs:
        envs.reset(seed=0)
        for _ in range(3):
            envs.step(envs.action_space.sample())
        envs.call(functools.partial(count_steps, where))
        for _ in range(4):
            envs.step(envs.action_space.sample())
        assert len(envs.get_attr("counted")[0]) == 4


class Doubling:
    """A wrapper of the user's, around a turn-based env."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def last(self) -> Any:
        obs, reward, *rest = self.env.last()
        return obs, 2 * reward, *rest


@pytest.mark.filterwarnings("ignore")
def test_a_wrapper_that_a_call_puts_around_an_env_of_turns_is_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mpe2")
    without_a_display(monkeypatch)

    def wrap(env: Any, env_index: int) -> None:
        env.env = Doubling(env.env)

    def rewards(wraps: bool) -> Any:
        with muster.make_vec(functools.partial(make, "mpe2.simple_spread_v3", "env"), 1, backend="serial") as envs:
            envs.reset(seed=0)
            if wraps:
                envs.call(wrap)
            zeros = {"agent": np.zeros((1, 3), np.int64)}
            return sum(envs.step(zeros)[1]["agent"] for _ in range(9))

    assert np.allclose(rewards(True), 2 * rewards(False))


@pytest.mark.filterwarnings("ignore")
def test_envs_that_know_their_adapter_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mpe2")
    without_a_display(monkeypatch)
    seen: list[Any] = []

    def know(env: Any, env_index: int) -> None:
        env.env.unwrapped.owner = env
        seen.append(weakref.ref(env.env.unwrapped))

    envs = muster.make_vec("pettingzoo/mpe/simple_spread_v3", 1, backend="serial")
    envs.reset(seed=0)
    envs.step(envs.action_space.sample())
    envs.call(know)
    envs.close()
    gc.collect()
    assert seen[0]() is None


class Blinded(AECEnv[Any, Any, Any]):
    """Two take turns until, after three, all are done; the last one to be told of it sees NaN."""

    metadata: ClassVar[dict[str, Any]] = {"name": "blinded"}
    possible_agents: ClassVar[list[str]] = ["a_0", "a_1"]

    def observation_space(self, agent: Any) -> Any:
        return spaces.Box(-9, 9, (1,), np.float32)

    def action_space(self, agent: Any) -> Any:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents = self.possible_agents[:]
        self.agent_selection = "a_0"
        self.turns = 0
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict(self.rewards)
        self.infos = {agent: {} for agent in self.agents}

    def observe(self, agent: Any) -> Any:
        return np.array([np.nan if self.turns == 3 else self.turns], np.float32)

    def step(self, action: Any) -> None:
        if self.terminations[self.agent_selection]:
            self._was_dead_step(action)
            return
        self.turns += 1
        self.agent_selection = "a_1" if self.agent_selection == "a_0" else "a_0"
        self.terminations = dict.fromkeys(self.agents, self.turns == 3)


def test_an_env_of_turns_goes_on_after_an_error_that_left_nobody() -> None:
    make_env = lambda: OrderEnforcingWrapper(AssertOutOfBoundsWrapper(Blinded()))  # noqa: E731
    turn = {"a": np.zeros((1, 2), np.int64)}
    with muster.make_vec(make_env, 1, backend="serial", check_finite=True) as envs:
        envs.reset(seed=0)
        for _ in range(2):
            envs.step(turn)
        with pytest.raises(EnvError, match="NaN"):
            envs.step(turn)
        assert [envs.step(turn)[2].item() for _ in range(3)] == [True, False, False]


# ---- Melting Pot


def lab2d_of(env: Any) -> Any:
    """The one inside the wrappers of an env that a call is given."""
    return env.env._env._env._env._env._env._env


@pytest.mark.filterwarnings("ignore")
def test_rows_of_a_substrate_are_what_lab2d_makes_when_asked_for_everything() -> None:
    pytest.importorskip("dmlab2d", reason="python -m muster.envs.install_meltingpot")
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


@pytest.mark.filterwarnings("ignore")
def test_what_a_call_does_to_a_substrate_is_done() -> None:
    pytest.importorskip("dmlab2d", reason="python -m muster.envs.install_meltingpot")

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


@pytest.mark.filterwarnings("ignore")
def test_who_listens_to_a_substrate_hears_of_every_step() -> None:
    pytest.importorskip("dmlab2d", reason="python -m muster.envs.install_meltingpot")
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
