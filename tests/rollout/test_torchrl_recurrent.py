"""TorchRL's recurrent modules over whole batches of collectors: what they computed step by step, once more."""

from __future__ import annotations

import pytest
import torch
from labelled_env import KINDS, N, T, batches_of, collector_of
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch.testing import assert_close

pytestmark = pytest.mark.filterwarnings("ignore")
pytest.importorskip("torchrl")
MODULES = {"LSTMModule": ["recurrent_state_h", "recurrent_state_c"], "GRUModule": ["recurrent_state"]}


def policy_of(name: str) -> TensorDictSequential:
    import torchrl.modules

    torch.manual_seed(0)
    module = getattr(torchrl.modules, name)(input_size=3, hidden_size=4, in_key="observation", out_key="embed")
    return TensorDictSequential(
        module, TensorDictModule(lambda embed: (embed.sum(-1) > 0).long(), in_keys=["embed"], out_keys=["action"])
    )


def in_recurrent_mode(policy, name, batch):
    """What the policy computes over a batch ``[N, T]``, which has states only where rows or episodes begin."""
    from torchrl.modules import set_recurrent_mode

    later = ~batch["is_init"].squeeze(-1)
    later[:, 0] = False
    begun = batch.exclude("embed").clone()
    for state in MODULES[name]:
        begun[state][later] = torch.nan
    with set_recurrent_mode(True), torch.no_grad():
        return policy(begun)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(("kind", "options"), [("Collector", {"overlap": True}), *((kind, {}) for kind in KINDS)])
def test_a_pass_over_the_batch_gives_what_was_recorded_step_by_step(kind, options, name):
    policy = policy_of(name)
    for batch in batches_of(kind, policy, **options):
        assert batch["embed"].shape == (N, T, 4)
        assert_close(in_recurrent_mode(policy, name, batch)["embed"], batch["embed"])


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_a_buffer_and_slices_of_episodes_give_it_too(kind, name):
    from torchrl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer

    length, policy = 4, policy_of(name)
    sampler = SliceSampler(slice_len=length, traj_key=("collector", "traj_ids"))
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(2 * N * T, ndim=2), sampler=sampler, batch_size=20 * length
    )
    with collector_of(kind, policy, total_frames=2 * N * T, replay_buffer=buffer) as collector:
        assert list(collector) == [None, None]
    for batch in (buffer[:], buffer.sample().reshape(-1, length)):
        assert_close(in_recurrent_mode(policy, name, batch)["embed"], batch["embed"])
