"""The contract of env APIs, for all APIs that exist: for each a hostile env, and one of the API's own."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import gymnasium as gym
import pytest
from agent_envs import Turns
from bare_loops import BareDmEnv, BareGymnasium, BareLoop, BareParallel, BareSubstrate, BareTurns, make
from env_api_contract import EnvApiContract
from hostile_envs import ReusingAgents, Telling


def needs(package: str, remedy: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=remedy)


class TestGymnasium(EnvApiContract):
    attribute = ("length", 5)

    def env(self) -> Any:
        return Telling

    def bare_loop(self) -> BareLoop:
        return BareGymnasium(Telling())


class TestCartPole(EnvApiContract):
    steps = 60
    renders = False
    attribute = ("_max_episode_steps", 500)

    def env(self) -> Any:
        return "CartPole-v1"

    def bare_loop(self) -> BareLoop:
        return BareGymnasium(gym.make("CartPole-v1"))


@needs("dm_env", "pip install dm-env")
class TestDmEnv(EnvApiContract):
    attribute = ("level", 1)
    packages = ("dm_env",)
    env_expression = "lambda: __import__('dm_env_envs').Walk()"

    def env(self) -> Any:
        from dm_env_envs import Walk

        return Walk

    def bare_loop(self) -> BareLoop:
        return BareWalk(self.env()())


class BareWalk(BareDmEnv):
    def seed(self, seed: int) -> None:
        self.env.task.random.seed(seed)


class TestParallel(EnvApiContract):
    attribute = ("possible_agents", ["a_0", "a_1", "b_0"])

    def env(self) -> Any:
        return ReusingAgents

    def bare_loop(self) -> BareLoop:
        return BareParallel(ReusingAgents())


@needs("mpe2", "pip install 'muster-rl[marl]'")
@pytest.mark.filterwarnings("ignore")
class TestSimpleTag(EnvApiContract):
    attribute = ("possible_agents", ["adversary_0", "adversary_1", "adversary_2", "agent_0"])
    packages = ("pettingzoo", "mpe2", "pygame")
    env_expression = "'pettingzoo/mpe/simple_tag_v3'"

    def env(self) -> Any:
        return functools.partial(make, "mpe2.simple_tag_v3", "parallel_env", max_cycles=8, render_mode="rgb_array")

    def bare_loop(self) -> BareLoop:
        return BareParallel(self.env()())


class TestTurns(EnvApiContract):
    renders = False
    attribute = ("possible_agents", ["p_0", "p_1", "p_2"])

    def env(self) -> Any:
        return Turns

    def bare_loop(self) -> BareLoop:
        return BareTurns(Turns())


@needs("pettingzoo", "pip install 'muster-rl[marl]'")
@pytest.mark.filterwarnings("ignore")
class TestTicTacToe(EnvApiContract):
    renders = False
    attribute = ("possible_agents", ["player_1", "player_2"])
    packages = ("pettingzoo", "pygame")
    env_expression = "'pettingzoo/classic/tictactoe_v3'"

    def env(self) -> Any:
        return "pettingzoo/classic/tictactoe_v3"

    def bare_loop(self) -> BareLoop:
        return BareTurns(make("pettingzoo.classic.tictactoe_v3", "env"))


@needs("dmlab2d", "python -m muster.envs.install_meltingpot")
@pytest.mark.filterwarnings("ignore")
class TestMeltingPot(EnvApiContract):
    steps = 10
    attribute = ("_num_players", 2)
    packages = ("meltingpot", "dmlab2d", "dm_env")
    env_expression = "'meltingpot/prisoners_dilemma_in_the_matrix__repeated'"

    def env(self) -> Any:
        return short_substrate

    def bare_loop(self) -> BareLoop:
        return BareSubstrate(short_substrate)


def short_substrate() -> Any:
    """A substrate of two players whose episodes end after eight steps."""
    from muster.envs.melting_pot import load_substrates

    substrates = load_substrates()
    config = substrates.get_config("prisoners_dilemma_in_the_matrix__repeated")
    build = config.lab2d_settings_builder

    def shortened(**options: Any) -> Any:
        settings = build(**options)
        settings["maxEpisodeLengthFrames"] = 8
        return settings

    with config.unlocked():
        config.lab2d_settings_builder = shortened
    return substrates.build_from_config(config, roles=tuple(config.default_player_roles))
