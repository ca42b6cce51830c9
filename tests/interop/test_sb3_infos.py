"""What an env says in its info reaches SB3 as it was said, whatever other envs say."""

from functools import partial

import gymnasium
import numpy as np
import pytest
from dropin_envs import Counter, Raising

sb3 = pytest.importorskip("stable_baselines3")

from stable_baselines3.common import vec_env  # noqa: E402

import muster  # noqa: E402
from muster.interop.sb3 import DummyVecEnv, SubprocVecEnv, as_sb3  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:stable_baselines3")


def around_make_vec(env_fns):
    return as_sb3(muster.make_vec(env_fns, backend="serial", autoreset_mode="same_step"))


ALL = pytest.mark.parametrize(
    "vec_env_cls",
    [DummyVecEnv, partial(SubprocVecEnv, num_workers=2, start_method="fork"), around_make_vec],
    ids=["dummy", "sub", "as_sb3"],
)
SAID = {
    "alike": {"count": 3, "score": 0.5, "won": True, "small": np.int8(3), "list": [1, 2], "map": np.arange(3)},
    "numbers": {"count": 3, "score": 0.5, "won": True, "small": np.float32(0.5)},
    "differing": {
        "flag": True,
        "big": 2**60 + 1,
        "pixels": np.arange(3, dtype=np.uint8),
        "nest": {"p": {"q": 1}},
        "none": None,
        "final_obs": 7,
        "final_info": {"z": 1},
        "foo": 1,
        "_foo": 2,
    },
    "others": {"flag": 3, "big": 0.5, "pixels": np.arange(3) * 1.5, "nest": 5, "none": 4, "_foo": "x", "text": "y"},
    "nothing": {},
}


class Saying(Counter):
    """Its infos are what `said` names."""

    def __init__(self, said):
        super().__init__(2)
        self.said = SAID[said]

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options=options)[0], dict(self.said)

    def step(self, action):
        *rest, _ = super().step(action)
        return (*rest, dict(self.said))


def typed(value):
    """`value` in a form that is equal only where all types are, too."""
    if isinstance(value, dict):
        return {key: typed(one) for key, one in value.items()}
    return type(value).__name__, getattr(value, "dtype", None), np.asarray(value).tolist()


@ALL
def test_infos_equal_those_of_sb3s_own(vec_env_cls):
    for saids in (("alike", "alike"), ("numbers", "numbers"), ("differing", "others", "nothing")):
        check_infos(vec_env_cls, [partial(Saying, said) for said in saids])


def check_infos(vec_env_cls, fns):
    theirs, ours = vec_env.DummyVecEnv(fns), vec_env_cls(fns)
    try:
        theirs.reset()
        ours.reset()
        for _ in range(4):
            assert list(map(typed, ours.reset_infos)) == list(map(typed, theirs.reset_infos))
            actions = np.zeros(len(fns), int)
            *_, expected = theirs.step(actions)
            *_, got = ours.step(actions)
            assert list(map(typed, got)) == list(map(typed, expected))
    finally:
        ours.close()


def test_a_vector_env_tells_others_its_own_infos():
    envs = muster.make_vec([partial(Saying, "numbers")] * 2, backend="serial", autoreset_mode="same_step")
    wrapped = as_sb3(envs)
    try:
        wrapped.reset()
        wrapped.step(np.zeros(2, int))
        *_, infos = envs.step(np.zeros(2, int))
        assert infos["count"].tolist() == [3, 3]
        assert infos["_count"].tolist() == [True, True]
        *_, rows = wrapped.step(np.zeros(2, int))
        assert [row["count"] for row in rows] == [3, 3]
    finally:
        wrapped.close()


def test_a_restarted_env_says_so_in_its_own_info_only():
    envs = muster.make_vec([Raising] * 2, backend="thread", autoreset_mode="same_step", on_failure="restart")
    wrapped = as_sb3(envs)
    try:
        wrapped.reset()
        wrapped.step(np.array([0, 0]))
        obs, rewards, dones, infos = wrapped.step(np.array([0, 2]))
    finally:
        wrapped.close()
    assert obs.tolist() == [[2], [0]]
    assert rewards.tolist() == [2, 0]
    assert dones.tolist() == [False, True]
    assert "no action 2" in infos[1].pop("restarted")
    assert infos == [
        {"count": 2, "TimeLimit.truncated": False},
        {"terminal_observation": np.array([1], np.float32), "TimeLimit.truncated": True},
    ]


def test_dummy_vec_envs_infos_stay_as_they_were():
    class Growing(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            self.path = [0]
            return np.zeros(1, np.float32), {"path": self.path}

        def step(self, action):
            self.path.append(len(self.path))
            return np.zeros(1, np.float32), 0.0, False, False, {"path": self.path}

    told = {}
    for name, vec_env_cls in (("theirs", vec_env.DummyVecEnv), ("ours", DummyVecEnv)):
        envs = vec_env_cls([Growing] * 2)
        envs.reset()
        told[name] = [envs.step(np.zeros(2, int))[3] for _ in range(3)]
        envs.close()
    assert [[info["path"] for info in infos] for infos in told["ours"]] == [
        [info["path"] for info in infos] for infos in told["theirs"]
    ]


@pytest.mark.parametrize("vec_env_cls", [DummyVecEnv, SubprocVecEnv])
def test_what_vec_normalize_writes_into_its_space_reaches_nobody_else(vec_env_cls):
    class Mixed(gymnasium.Env):
        observation_space = gymnasium.spaces.Dict(
            img=gymnasium.spaces.Box(0, 255, (8, 8, 1), np.uint8), vec=gymnasium.spaces.Box(-1, 1, (3,), np.float32)
        )
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return {"img": np.full((8, 8, 1), 200, np.uint8), "vec": np.zeros(3, np.float32)}, {}

        def step(self, action):
            return self.reset()[0], 0.0, False, False, {}

    envs = vec_env_cls([Mixed] * 2)
    normal = vec_env.VecNormalize(envs, norm_obs_keys=["vec"])
    normal.reset()
    normal.step(np.zeros(2, int))
    assert envs.vector_env.single_observation_space["vec"] == Mixed.observation_space["vec"]
    assert normal.get_original_obs()["img"].dtype == np.uint8
    envs.close()
