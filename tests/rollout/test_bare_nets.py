"""Multi-agent networks without TensorDict keys: they act for the only group, or the error says how they get keys."""

import pytest
import torch
from torch import nn

from muster.errors import SpecMismatch
from muster.nn import MultiAgentMLP
from muster.rollout.collector import Collector

pytest.importorskip("pettingzoo.sisl")
# SWIG's modules crash the interpreter where their warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore")
WALKER = "pettingzoo/sisl/multiwalker_v9"


@pytest.fixture(autouse=True)
def _no_display(monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")


def torchrl_mlp(*args, **kwargs):
    return pytest.importorskip("torchrl.modules").MultiAgentMLP(*args, **kwargs)


def collected(env, policy):
    with Collector(env, policy, num_envs=2, frames_per_batch=6, make_vec_options={"backend": "serial"}) as collector:
        return collector.rollout()


@pytest.mark.parametrize("make_net", [MultiAgentMLP, torchrl_mlp])
def test_a_network_acts_for_the_only_group(make_net):
    net = make_net(31, 4, 3, centralised=True, share_params=False)
    batch = collected(WALKER, net)
    with torch.no_grad():
        expected = net(batch["walker", "observation"])
    torch.testing.assert_close(batch["walker", "action"], expected)


def test_a_subclass_that_takes_groups_itself_is_called_with_groups():
    class ByGroup(MultiAgentMLP):
        def forward(self, obs):
            return {"walker": {"action": super().forward(obs["walker"]), "seen": obs["walker"].sum(-1)}}

    batch = collected(WALKER, ByGroup(31, 4, 3, centralised=False, share_params=True))
    torch.testing.assert_close(batch["walker", "seen"], batch["walker", "observation"].sum(-1))


def test_where_one_tensor_is_not_all_the_error_says_how_to_give_keys():
    net = MultiAgentMLP(18, 9, 2, centralised=False, share_params=True)
    with pytest.raises(
        SpecMismatch, match=r"maps one tensor to one tensor.*TensorDictModule.*\('player', 'action_mask'\)"
    ):
        collected("pettingzoo/classic/tictactoe_v3", net)
    with pytest.raises(TypeError, match="must be Tensor, not dict") as failure:
        collected(WALKER, nn.Linear(31, 4))
    (note,) = failure.value.__notes__
    assert "called with a dict of observations by group" in note
    assert "The envs have ('walker', 'observation'), " in note
    assert note.endswith("and need ('walker', 'action')")


def test_the_error_of_a_function_is_its_own():
    def policy(obs):
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine") as failure:
        collected(WALKER, policy)
    assert not hasattr(failure.value, "__notes__")
