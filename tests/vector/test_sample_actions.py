"""`sample_actions` draws what the envs' last masks allow, from the generator of the action space."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import muster
from muster.errors import ClosedError


class Walled(gym.Env):
    """Masks of 8 choices from 3 on, of 2 at each step, in the infos or the observation; "sometimes": each other row.

    Raises for an action that is not allowed. `wide`: the observation's mask is so big that batches lend it.
    """

    def __init__(self, gives: str, length: int = 5) -> None:
        self.gives, self.length, self.count, self.mask = gives, length, 0, None
        self.n = 70_000 if gives == "wide" else 8
        self.action_space = spaces.Discrete(self.n, start=3)
        self.observation_space = spaces.Box(0, 99, (1,), np.float32)
        if gives in ("obs", "wide"):
            mask = spaces.MultiBinary(self.n)
            self.observation_space = spaces.Dict({"action_mask": mask, "at": self.observation_space})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self._row()

    def step(self, action):
        if self.mask is not None and not self.mask[action - 3]:
            raise ValueError(f"{action} is not allowed")
        self.count += 1
        return (*self._row()[:1], 0.0, self.count >= self.length, False, self._row()[1])

    def _row(self):
        at = np.array([self.count], np.float32)
        self.mask = np.zeros(self.n, np.int8)
        self.mask[[self.count, -1]] = 1
        if self.gives in ("obs", "wide"):
            return {"action_mask": self.mask, "at": at}, {}
        if self.gives == "sometimes" and self.count % 2:
            self.mask = None
            return at, {}
        return at, {"action_mask": self.mask, "name": "an object, which the mail carries"}


@pytest.mark.parametrize("gives", ["infos", "sometimes", "obs", "wide"])
@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("options", [{"backend": "serial"}, {"copy": False, "num_workers": 2}])
def test_sampled_actions_are_those_that_the_last_row_allows(gives, mode, options):
    with muster.make_vec(lambda: Walled(gives), 3, autoreset_mode=mode, **options) as envs:
        envs.reset(seed=0)
        for _ in range(20):
            actions = envs.sample_actions()
            assert actions in envs.action_space
            envs.step(actions)


def test_without_masks_they_are_those_of_the_action_space():
    with muster.make_vec("CartPole-v1", 5, backend="serial") as envs:
        envs.action_space.seed(3)
        drawn = [envs.sample_actions() for _ in range(4)]
        envs.action_space.seed(3)
        assert all(np.array_equal(one, envs.action_space.sample()) for one in drawn)


@pytest.mark.parametrize("env", [lambda: Walled("infos"), "pettingzoo/classic/connect_four_v3"])
@pytest.mark.filterwarnings("ignore")  # SWIG's modules crash the interpreter where their warnings are errors
def test_the_seed_of_the_action_space_repeats_them(env):
    with muster.make_vec(env, 4, backend="serial") as envs:
        envs.reset(seed=0)
        runs = []
        for _ in range(2):
            envs.action_space.seed(5)
            runs.append([envs.sample_actions() for _ in range(5)])
        assert str(runs[0]) == str(runs[1])
        assert str(runs[0][0]) != str(runs[0][1])


def test_choices_that_are_allowed_are_equally_likely():
    with muster.make_vec(lambda: Walled("infos"), 500, backend="serial") as envs:
        envs.reset(seed=0)
        envs.action_space.seed(0)
        actions = envs.sample_actions()
        first, last = (np.mean(actions == action) for action in (3, 10))
    assert abs(first - 0.5) < 0.1
    assert abs(last - 0.5) < 0.1


def test_envs_that_owe_an_answer_allow_all():
    with muster.make_vec(lambda: Walled("infos"), 2, num_workers=2) as envs:
        envs.reset(seed=0)
        envs.send(envs.sample_actions()[:1], [0])
        assert {int(envs.sample_actions()[1]) for _ in range(20)} == {3, 10}
        envs.recv()
        assert {int(envs.sample_actions()[0]) for _ in range(20)} == {4, 10}


def test_all_is_allowed_before_the_first_reset_and_nothing_after_close():
    with muster.make_vec(lambda: Walled("obs"), 300, backend="serial") as envs:
        assert len(np.unique(envs.sample_actions())) == 8
    with pytest.raises(ClosedError):
        envs.sample_actions()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_agents_take_what_their_masks_allow(mode):
    with muster.make_vec("pettingzoo/classic/connect_four_v3", 2, num_workers=2, autoreset_mode=mode) as envs:
        _, infos = envs.reset(seed=0)
        lengths = []
        for _ in range(200):
            actions = envs.sample_actions()
            assert actions in envs.action_space
            masks = infos["action_mask"]["player"]
            assert np.take_along_axis(masks, actions["player"][..., None], -1).all()
            *_, terminated, _, infos = envs.step(actions)
            lengths += envs.episode_lengths[terminated].tolist()
        assert min(lengths) >= 7
