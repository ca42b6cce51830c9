"""The facts that a worker sends about its envs, where an env holds what no other process can have."""

import threading

import gymnasium as gym
import numpy as np
import pytest
import zmq

import muster


class Served(gym.Env):
    """An env with an argument that cannot be pickled."""

    observation_space = gym.spaces.Box(0, 9, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, server):
        self.server = server

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {"kind": type(self.server).__name__}


@pytest.fixture
def served():
    gym.register("Served-v0", entry_point=Served)
    yield "Served-v0"
    del gym.registry["Served-v0"]


@pytest.mark.parametrize(("server", "kind"), [(zmq.Context, "Context"), (threading.Lock, "lock")])
def test_a_value_built_in_the_worker_that_no_spec_can_hold_is_no_reason_to_warn(served, server, kind, capfd):
    envs = muster.make_vec(served, 2, num_workers=1, env_kwargs={"server": muster.lazy(server)})
    assert envs.reset()[1]["kind"].tolist() == [kind] * 2
    envs.close()
    assert envs.spec is None
    assert capfd.readouterr().err == ""
