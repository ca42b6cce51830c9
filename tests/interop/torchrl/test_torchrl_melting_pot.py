"""TorchRL's Melting Pot envs with the light install: no bots, no TensorFlow."""

from __future__ import annotations

import collections
from functools import partial
from typing import Any

import pytest
import torch

torchrl = pytest.importorskip("torchrl")
pytest.importorskip("dmlab2d", reason="python -m muster.envs.install_meltingpot")
pytest.importorskip("ml_collections", reason="python -m muster.envs.install_meltingpot")

from torchrl.envs import SerialEnv, check_env_specs  # noqa: E402
from torchrl.envs.libs import meltingpot as original  # noqa: E402
from torchrl.envs.utils import MarlGroupMapType  # noqa: E402

from muster.errors import CannotTravel  # noqa: E402
from muster.interop.torchrl import MeltingpotEnv, MeltingpotWrapper, ParallelEnv  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

SMALL = "prisoners_dilemma_in_the_matrix__repeated"
ASKED: collections.Counter[str] = collections.Counter()


class Watched(MeltingpotEnv):
    """A Melting Pot env that counts what its process asks of the engine, and keeps what it has told last."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        import dmlab2d

        spoken = dmlab2d.Environment.observation

        def observation(env: Any) -> Any:
            observed = spoken(env)
            ASKED.update(list(observed))
            return observed

        dmlab2d.Environment.observation = observation
        super().__init__(*args, **kwargs)

    def renders(self) -> int:
        return ASKED["WORLD.RGB"]

    def _reset(self, *args: Any, **kwargs: Any) -> Any:
        self.told = super()._reset(*args, **kwargs)
        return self.told.clone()

    def _step(self, tensordict: Any) -> Any:
        self.told = super()._step(tensordict)
        return self.told.clone()


def test_a_user_builds_one_in_the_caller():
    env = MeltingpotEnv(SMALL)
    assert MeltingpotEnv is original.MeltingpotEnv
    assert SMALL in MeltingpotEnv.available_envs
    check_env_specs(env)
    rollout = MeltingpotWrapper(env._env, max_steps=2).rollout(5)
    assert rollout["next", "terminated"].flatten().tolist() == [False, True]
    env.close()


def test_an_env_that_exists_already_is_told_by_the_engine_in_it_and_the_function_to_write():
    env = MeltingpotEnv(SMALL)
    for given, where in ((env, "create_env_fn"), (lambda: env, "create_env_fn.<closure>.env")):
        with pytest.raises(CannotTravel, match=rf"^{where} is an env that exists already") as caught:
            ParallelEnv(6, given)
        assert f"{where}{'._env' * 8}: dmlab2d.dmlab2d_pybind.Lab2d: " in str(caught.value)
        assert "return MeltingpotEnv(...)" in str(caught.value)
    with pytest.raises(CannotTravel, match=r"^create_env_fn\[1\].<closure>.env is an env"):
        ParallelEnv(2, [partial(MeltingpotEnv, SMALL), lambda: env])
    env.close()


def test_the_factory_works_with_torchrls_keys_and_nothing_is_rendered_twice():
    envs = ParallelEnv(2, lambda: Watched(SMALL, max_steps=3), mp_start_method="fork")
    envs.reset()
    before = list(envs.renders())
    rollout = envs.rollout(9, break_when_any_done=False)
    # A reset to begin with, nine steps, and a reset after every third of them but the last.
    assert [after - count for after, count in zip(envs.renders(), before, strict=True)] == [1 + 9 + 2] * 2
    assert rollout["next", "done"][:, :, 0].tolist() == [[False, False, True] * 3] * 2
    envs.close()
    serial = SerialEnv(2, partial(MeltingpotEnv, SMALL, max_steps=3))
    assert layout(rollout) == layout(serial.rollout(9, break_when_any_done=False))
    serial.close()


def layout(rows: Any) -> dict[Any, Any]:
    return {key: (rows[key].shape, rows[key].dtype) for key in rows.keys(True, True)}


GROUPS = [
    MarlGroupMapType.ALL_IN_ONE_GROUP,
    MarlGroupMapType.ONE_GROUP_PER_AGENT,
    {"a": ["player_1"], "b": ["player_0"]},
]


@pytest.mark.parametrize("groups", GROUPS, ids=["one", "each", "named"])
def test_rows_are_what_the_env_told_in_its_worker(groups: Any):
    make = partial(Watched, SMALL, max_steps=3, group_map=groups, categorical_actions=groups != GROUPS[1])
    envs = ParallelEnv(2, make, mp_start_method="fork")
    data = envs.reset()
    for step in range(7):
        for row, told in zip(data, envs.told, strict=True):
            for key in told.keys(True, True):
                assert torch.equal(row[key], told[key]), (step, key)
        stepped = envs.step(envs.rand_action(data))["next"]
        for row, told in zip(stepped, envs.told, strict=True):
            assert sorted(map(str, row.keys(True, True))) == sorted(map(str, told.keys(True, True)))
            for key in told.keys(True, True):
                assert torch.equal(row[key], told[key]), (step, key)
        data = envs.reset() if stepped["done"].all() else stepped
    assert [set(one) for one in envs.group_map] == [set(data.keys()) - {"done", "terminated", "RGB"}] * 2
    envs.close()
