"""How many processes `make_vec` starts by itself."""

import copy

import gymnasium as gym
import pytest

from muster.pool.set_up import Processes
from muster.recipes.recipe import make_recipes
from muster.vector.packing import count_processes

HUMAN = copy.deepcopy(gym.spec("CartPole-v1"))
HUMAN.kwargs["render_mode"] = "human"
SEEN = {"render_mode": "human"}


@pytest.mark.parametrize("asked", [None, "auto"])
@pytest.mark.parametrize(
    ("env", "env_kwargs"),
    [("CartPole-v1", SEEN), ("CartPole-v1", [{}, {}, SEEN, {}]), (HUMAN, None), (HUMAN, {"gravity": 9.8})],
)
def test_envs_with_windows_have_a_process_each(asked, env, env_kwargs, capfd):
    assert _processes(env, env_kwargs, asked) == 4


@pytest.mark.parametrize(("env", "env_kwargs"), [("CartPole-v1", None), (HUMAN, {"render_mode": "rgb_array"})])
def test_envs_of_known_ids_without_windows_share_one_per_core(env, env_kwargs):
    assert _processes(env, env_kwargs, None) == 2


def _processes(env, env_kwargs, asked):
    recipes = make_recipes(env, 4, env_kwargs)
    return count_processes(recipes, asked, 2, Processes(), 60.0, packs=True)
