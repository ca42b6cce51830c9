"""What users pass as arguments: NumPy's integers are integers everywhere, and unknown keywords are told where to go."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import muster
from muster.errors import ConfigError, MusterError
from muster.interop import sb3
from muster.interop import torchrl as drop_in_torchrl
from muster.nn import MultiAgentConvNet, MultiAgentMLP, MultiAgentNet

i = np.int64
AGENTS = torch.zeros(2, 3, 4)
SERIAL = {"backend": "serial"}


def cart_pole() -> Any:
    return gym.make("CartPole-v1")


def mlp(**options: Any) -> torch.Tensor:
    sizes = {"n_agent_inputs": i(4), "n_agent_outputs": i(2), "n_agents": i(3)}
    return MultiAgentMLP(**{**sizes, "share_params": True, "centralised": False, **options})(AGENTS)


def conv(**options: Any) -> torch.Tensor:
    return MultiAgentConvNet(i(3), False, False, num_cells=i(8), depth=i(2), **options)(torch.zeros(2, 3, 4, 20, 20))


@pytest.mark.parametrize(
    ("call", "shape"),
    [
        (lambda: mlp(depth=i(2), num_cells=i(8)), (2, 3, 2)),
        (lambda: mlp(num_cells=[i(8), i(8)], share_params=False, centralised=True), (2, 3, 2)),
        (lambda: mlp(num_cells=np.array([8, 8])), (2, 3, 2)),
        (lambda: mlp(n_agent_outputs=(i(2), i(5))), (2, 3, 2, 5)),
        (lambda: mlp(n_agent_inputs=None, depth=i(1), num_cells=i(8), share_params=False), (2, 3, 2)),
        (lambda: conv(in_features=i(4), kernel_sizes=[(i(3), i(3)), i(3)], strides=i(2), paddings=i(1)), (2, 3, 200)),
        (lambda: conv(kernel_sizes=i(3)), (2, 3, 128)),
        (lambda: MultiAgentNet(lambda: torch.nn.Linear(4, 2), i(3))(AGENTS), (2, 3, 2)),
    ],
)
def test_networks_take_numpys_integers(call: Callable[[], torch.Tensor], shape: tuple[int, ...]):
    assert call().shape == shape


def test_vector_envs_and_collectors_take_numpys_integers():
    with muster.make_vec("CartPole-v1", i(2), backend="thread", num_workers=i(2)) as envs:
        assert type(envs.num_envs) is int
        envs.reset(seed=i(3))
    sizes: dict[str, Any] = {"num_envs": i(2), "frames_per_batch": i(10), "max_frames_per_traj": i(5), "seed": i(0)}
    collector = muster.Collector("CartPole-v1", total_frames=i(20), make_vec_options=SERIAL, **sizes)
    batches = list(collector)
    collector.shutdown()
    assert [batch.shape for batch in batches] == [(2, 5)] * 2
    with muster.MultiCollector(
        "CartPole-v1", num_collectors=i(1), max_restarts=i(1), context="fork", **sizes
    ) as several:
        assert next(iter(several)).shape == (2, 5)


def test_drop_ins_take_numpys_integers():
    envs = sb3.make_vec_env("CartPole-v1", n_envs=i(2), seed=i(1), start_index=i(0))
    envs.reset()
    assert len(envs.env_method("reset", indices=i(0))) == 1
    assert len(envs.get_attr("spec", indices=np.array([0, 1]))) == 2
    envs.close()
    from torchrl.envs import GymEnv

    many = drop_in_torchrl.ParallelEnv(i(1), lambda: GymEnv("CartPole-v1"), mp_start_method="fork")
    assert isinstance(many.set_seed(i(3)), int)
    many.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda: muster.make_vec("CartPole-v1", True, backend="serial"),
        lambda: muster.make_vec("CartPole-v1", np.True_, backend="serial"),
        lambda: mlp(n_agent_outputs=True),
        lambda: muster.Collector("CartPole-v1", frames_per_batch=True),
    ],
)
def test_a_bool_is_no_integer(call: Callable[[], Any]):
    with pytest.raises(ConfigError):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: muster.make_vec("CartPole-v1", 4, render_mode="rgb_array"),
            "make_vec() got an unexpected keyword argument 'render_mode'. A keyword of the env itself is passed as "
            "env_kwargs={\"render_mode\": 'rgb_array'}.",
        ),
        (
            lambda: muster.make_vec("CartPole-v1", 4, cluster="ray"),
            "'cluster'. Collectors have it: muster.MultiCollector(envs, policy, cluster=...). A keyword of the env",
        ),
        (
            lambda: muster.Collector("CartPole-v1", frames_per_batch=8, num_collectors=2),
            "Collectors have it: muster.MultiCollector(envs, policy, num_collectors=...). A keyword of the env",
        ),
        (lambda: muster.make_vec("CartPole-v1", 4, num_worker=2), "Did you mean num_workers? A keyword of the env"),
        (lambda: muster.diagnose("CartPole-v1", gravity=2.0), 'passed as env_kwargs={"gravity": 2.0}.'),
        (lambda: sb3.make_vec_env("CartPole-v1", 2, gravity=2.0), 'make_vec_env() got an unexpected keyword argument'),
        (
            lambda: muster.Collector("CartPole-v1", frames_per_batch=8, gravity=2.0),
            'Collector() got an unexpected keyword argument \'gravity\'. A keyword of the env itself is passed as '
            'make_vec_options={"env_kwargs": {"gravity": 2.0}}.',
        ),
        (
            lambda: muster.Collector("CartPole-v1", frames_per_batch=8, backend="serial"),
            "A keyword of make_vec is passed as make_vec_options={\"backend\": 'serial'}.",
        ),
        (
            lambda: muster.MultiCollector("CartPole-v1", frames_per_batch=8, num_collectors=1, wrappers=[]),
            'MultiCollector() got an unexpected keyword argument \'wrappers\'. A keyword of make_vec is passed as '
            'make_vec_options={"wrappers": []}.',
        ),
    ],
)  # fmt: skip
def test_an_unknown_keyword_says_where_it_goes(call: Callable[[], Any], message: str):
    with pytest.raises(TypeError) as caught:
        call()
    assert isinstance(caught.value, MusterError)
    assert message in str(caught.value)


@pytest.mark.parametrize("maker", [muster.make_vec, muster.Collector, muster.MultiCollector, muster.diagnose])
def test_makers_show_their_own_signature(maker: Callable[..., Any]):
    kinds = {parameter.kind for parameter in inspect.signature(maker).parameters.values()}
    assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
