"""Observations of float64, which every MuJoCo env gives, before policies of float32."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule

import muster
from muster.errors import ConfigError, SpecMismatch

COLLECTORS = {
    "Collector": (muster.Collector, {"make_vec_options": {"backend": "serial"}}),
    "MultiCollector": (muster.MultiCollector, {"num_collectors": 1}),
}


class Doubles(gym.Env):
    observation_space = spaces.Dict(
        {
            "speed": spaces.Box(-9, 9, (3,), np.float64),
            "cell": spaces.Discrete(5),
            "frame": spaces.Box(0, 255, (2,), np.uint8),
        }
    )
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self._seen(), {}

    def step(self, action):
        self.t += 1
        return self._seen(), 0.0, self.t == 5, False, {}

    def _seen(self):
        return {"speed": np.full(3, self.t / 3), "cell": self.t % 5, "frame": np.full(2, self.t, np.uint8)}


def _policies():
    net = torch.nn.Linear(3, 2)
    return {
        "function": lambda obs: net(obs["speed"]),
        "keys": TensorDictModule(net, in_keys=["speed"], out_keys=["action"]),
    }


@pytest.mark.parametrize("policy", ["function", "keys"])
@pytest.mark.parametrize("kind", COLLECTORS)
def test_the_error_names_them_and_what_to_write(kind, policy):
    collector, options = COLLECTORS[kind]
    told = r"float64, in 'speed', .*observation_dtype=torch.float32 to the collector.*policy.double\(\)"
    with (
        pytest.raises(SpecMismatch, match=told),
        collector(Doubles, _policies()[policy], num_envs=2, frames_per_batch=8, **options) as one,
    ):
        one.rollout()


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("policy", ["function", "keys"])
@pytest.mark.parametrize("kind", COLLECTORS)
def test_observation_dtype_converts_numbers_and_leaves_the_rest(kind, policy, compact):
    collector, options = COLLECTORS[kind]
    options = {**options, "compact": compact, "observation_dtype": torch.float32}
    with collector(Doubles, _policies()[policy], num_envs=2, frames_per_batch=24, **options) as one:
        batch = one.rollout()
    steps = torch.arange(12) % 5
    assert batch["speed"].dtype == torch.float32
    assert torch.equal(batch["speed"], (steps / 3).float()[None, :, None].expand(2, -1, 3))
    assert (batch["cell"].dtype, batch["frame"].dtype) == (torch.int64, torch.uint8)
    after = muster.rollout.next_observations(batch) if compact else batch["next"]
    assert after["speed"].dtype == torch.float32
    assert torch.equal(after["speed"][0, :, 0], ((steps + 1) / 3).float())


def test_what_is_no_dtype_of_numbers_is_refused():
    for wrong in (torch.int64, torch.bfloat16, "float32!"):
        with pytest.raises(
            ConfigError, match="observation_dtype must be torch.float16, torch.float32 or torch.float64"
        ):
            muster.Collector(Doubles, num_envs=1, frames_per_batch=1, observation_dtype=wrong)
