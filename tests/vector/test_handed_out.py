"""What a vector env hands out stays what it was, whatever the env, or whoever got it, does next."""

import functools
import os

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import muster
from slow import slow

BACKENDS = {
    "process": {"num_workers": 2},
    "serial": {"backend": "serial"},
    "thread": {"backend": "thread"},
    "caller_steps": {"caller_steps": True},
}


class Growing(gym.Env):
    """Its infos hold a list and a dict that it goes on changing in place."""

    observation_space = spaces.Dict(img=spaces.Box(0, 255, (2,), np.uint8), vec=spaces.Box(-1, 1, (3,), np.float32))
    action_space = spaces.Discrete(2)

    def __init__(self, crashes_at=None, mark=None):
        self.crashes_at, self.mark = crashes_at, mark

    def reset(self, *, seed=None, options=None):
        self.path, self.told = [0], {"seen": [1]}
        return self._seen(), self._info()

    def step(self, action):
        self.path.append(len(self.path))
        self.told["seen"].append(2)
        if len(self.path) == self.crashes_at and not os.path.exists(self.mark):
            open(self.mark, "w").close()
            os._exit(3)
        return self._seen(), 0.0, len(self.path) == 4, False, self._info()

    def _seen(self):
        return {"img": np.full(2, 200, np.uint8), "vec": np.zeros(3, np.float32)}

    def _info(self):
        return {"path": self.path, "told": self.told}


@pytest.mark.parametrize("mode", ["same_step", *slow("next_step")])
@pytest.mark.parametrize("backend", ["process", *slow(*(name for name in BACKENDS if name != "process"))])
def test_infos_are_the_same_in_every_backend(backend, mode):
    with muster.make_vec(Growing, 2, autoreset_mode=mode, **BACKENDS[backend]) as envs:
        infos = [envs.reset()[1], *(envs.step(np.zeros(2, int))[4] for _ in range(4))]
    paths = [info["path"][1] for info in infos]
    fourth = [0] if mode == "same_step" else [0, 1, 2, 3]
    assert paths == [[0], [0, 1], [0, 1, 2], fourth, [0, 1] if mode == "same_step" else [0]]
    assert [len(info["told"]["seen"][1]) for info in infos] == [len(path) for path in paths]
    if mode == "same_step":
        assert infos[3]["final_info"]["path"][1] == [0, 1, 2, 3]


def test_objects_that_cannot_be_copied_are_passed_in_process():
    class Holder(Growing):
        def _info(self):
            return {"generator": (i for i in range(3))}

    with muster.make_vec(Holder, 1, backend="serial") as envs:
        envs.reset()
        assert next(envs.step(np.zeros(1, int))[4]["generator"][0]) == 0


@pytest.mark.parametrize("backend", ["process", *slow("serial", "thread")])
def test_a_space_that_was_edited_is_not_what_others_are_compared_with(backend, tmp_path):
    make = functools.partial(Growing, crashes_at=3 if backend == "process" else None, mark=tmp_path / "crashed")
    with muster.make_vec(make, 2, on_failure="restart", autoreset_mode="same_step", **BACKENDS[backend]) as envs:
        edited = spaces.Box(-10, 10, (2,), np.float32)
        envs.single_observation_space.spaces["img"] = edited  # as SB3's VecNormalize does
        envs.reset()
        restarted = 0
        for _ in range(8):
            obs, *_, infos = envs.step(np.zeros(2, int))
            restarted += sum(infos.get("_restarted", ()))
            assert obs["img"].dtype == np.uint8
        assert (restarted > 0) == (backend == "process")
        assert all(space["img"].dtype == np.uint8 for space in envs.get_attr("observation_space"))
