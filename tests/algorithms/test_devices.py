"""PPO and MAPPO on another device than the CPU: on a GPU where there is one, else on tensors that claim to be there."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from elsewhere import OnElsewhere

import muster
from muster.algorithms import MAPPO, PPO, ActorCritic, MAPPOConfig, PPOConfig
from muster.errors import ConfigError

SMALL = {"num_envs": 2, "num_steps": 8, "num_minibatches": 2, "update_epochs": 2, "total_steps": 32, "seed": 3}
NORMALIZED = {"normalize_observations": True, "normalize_rewards": True}
GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"))
CASES = {
    "one agent, normalised": ("CartPole-v1", NORMALIZED),
    "continuous, with memory": ("Pendulum-v1", {"policy": "gru", "sequence_length": 4}),
    "codes": ("Taxi-v4", {}),
    "agents, a critic of the state": ("pettingzoo/mpe/simple_spread_v3", NORMALIZED),
    "agents with memory, each its own": (
        "pettingzoo/mpe/simple_speaker_listener_v4",
        {"policy": "gru", "sequence_length": 4, "share_params": False, "critic": "own"},
    ),
}  # fmt: skip


def trained(env_id, options, device):
    kind, config = (MAPPO, MAPPOConfig) if "/" in env_id else (PPO, PPOConfig)
    state = {"state": True} if kind is MAPPO else {}
    with muster.make_vec(env_id, 2, backend="serial", autoreset_mode="same_step", **state) as envs:
        algorithm = kind(envs, config(**SMALL, **options), device=device)
        metrics = list(algorithm.train())
    return algorithm, metrics


@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter")  # torch takes them for placeholders
@pytest.mark.parametrize("device", ["meta", GPU])
@pytest.mark.parametrize("case", CASES)
def test_a_run_on_another_device_learns_and_goes_on_on_the_cpu(case, device):
    """The tensors that only claim to be elsewhere draw the CPU's numbers: the run is the CPU's, but for last digits."""
    env_id, options = CASES[case]
    here, on_cpu = trained(env_id, options, "cpu")
    with OnElsewhere() if device == "meta" else nullcontext():
        there, metrics = trained(env_id, options, device)
        assert there.device.type == device
        if device == "meta":
            assert metrics[-1].as_row() == pytest.approx(on_cpu[-1].as_row(), rel=1e-3, abs=1e-5, nan_ok=True)
        here.load_state_dict(there.state_dict())
        there.load_state_dict(here.state_dict())
        assert here.steps == there.steps == 32


def test_a_network_that_cannot_be_moved_is_named_with_the_option():
    class Fixed(ActorCritic):
        def _apply(self, function, recurse=True):
            raise RuntimeError("no room")

    said = pytest.raises(ConfigError, match="^device='meta': .*Fixed cannot be moved there: RuntimeError: no room")
    with muster.make_vec("CartPole-v1", 2, backend="serial", autoreset_mode="same_step") as envs, OnElsewhere(), said:
        PPO(envs, PPOConfig(**SMALL), Fixed, device="meta")


def test_auto_takes_the_cpu_for_small_networks():
    algorithm, _ = trained("CartPole-v1", {}, "auto")
    assert algorithm.device.type == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a CUDA GPU")
def test_a_device_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="device 'cuda' cannot be used"):
        trained("CartPole-v1", {}, "cuda")
