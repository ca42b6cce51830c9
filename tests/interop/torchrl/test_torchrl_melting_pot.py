"""TorchRL's Melting Pot envs with the light install: no bots, no TensorFlow."""

from __future__ import annotations

import collections
from functools import partial
from typing import Any

import pytest

torchrl = pytest.importorskip("torchrl")
pytest.importorskip("dmlab2d", reason="python -m muster.envs.install_meltingpot")
pytest.importorskip("ml_collections", reason="python -m muster.envs.install_meltingpot")

from torchrl.envs import SerialEnv  # noqa: E402

from muster.errors import CannotTravel  # noqa: E402
from muster.interop.torchrl import MeltingpotEnv, ParallelEnv  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

SMALL = "prisoners_dilemma_in_the_matrix__repeated"
ASKED: collections.Counter[str] = collections.Counter()


class Watched(MeltingpotEnv):
    """A Melting Pot env that counts what its process asks of the engine."""

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
