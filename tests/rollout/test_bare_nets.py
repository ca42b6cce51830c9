"""Multi-agent networks without TensorDict keys: they act for the only group, or the error's code makes them act."""

import functools
import textwrap

import pytest
import torch
from agent_envs import Script
from gymnasium import spaces
from torch import nn

from muster.errors import ActionError, SpecMismatch
from muster.nn import MultiAgentMLP
from muster.rollout.collector import Collector
from muster.rollout.multi_collector import MultiCollector

pytest.importorskip("pettingzoo.sisl")
# SWIG's modules crash the interpreter where their warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore")
WALKER = "pettingzoo/sisl/multiwalker_v9"


@pytest.fixture(autouse=True)
def _no_display(monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")


def torchrl_mlp(*args, **kwargs):
    return pytest.importorskip("torchrl.modules").MultiAgentMLP(*args, **kwargs)


def collected(env, policy, **options):
    options = {"num_envs": 2, "frames_per_batch": 6, "make_vec_options": {"backend": "serial"}, **options}
    with Collector(env, policy, **options) as collector:
        return collector.rollout()


def code_in(message):
    """The code that a message shows, which it indents by four."""
    return textwrap.dedent("\n".join(line for line in message.splitlines() if line.startswith("    ")))


def remedied(message, **names):
    """The policy that the message's code makes."""
    exec(code_in(message), names)
    return names["policy"]


class OfBoards(nn.Module):
    """The network of vectors of floats, for boards of 3 x 3 x 2 integers."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, boards):
        return self.net(boards.flatten(2).float())


class Parts(Script):
    """The Script env with one group, observations of two parts and continuous actions."""

    def __init__(self):
        super().__init__(["a_0 a_1"] * 50, {})
        self.possible_agents = ["a_0", "a_1"]

    def observation_space(self, agent):
        return spaces.Dict(near=super().observation_space(agent), far=super().observation_space(agent))

    def action_space(self, agent):
        return spaces.Box(-1, 1, (3,))

    def _obs(self, agent):
        obs = super()._obs(agent)
        return {"near": obs, "far": -obs}


@pytest.mark.parametrize("make_net", [MultiAgentMLP, torchrl_mlp])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_network_acts_for_the_only_group(make_net, overlap):
    net = make_net(31, 4, 3, centralised=True, share_params=False)
    batch = collected(WALKER, net, overlap=overlap)
    with torch.no_grad():
        expected = net(batch["walker", "observation"])
    torch.testing.assert_close(batch["walker", "action"], expected)


def test_replicas_of_a_network_act_and_take_weights():
    net = MultiAgentMLP(31, 4, 3, centralised=False, share_params=True)
    with MultiCollector([WALKER] * 2, net, num_collectors=2, frames_per_batch=8, context="fork") as collector:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        collector.update_policy_weights_()
        batches = [collector.rollout() for _ in range(2)]
    assert not batches[1]["walker", "action"].any()


def test_a_subclass_that_takes_groups_itself_is_called_with_groups():
    class ByGroup(MultiAgentMLP):
        def forward(self, obs):
            return {"walker": {"action": super().forward(obs["walker"]), "seen": obs["walker"].sum(-1)}}

    batch = collected(WALKER, ByGroup(31, 4, 3, centralised=False, share_params=True))
    torch.testing.assert_close(batch["walker", "seen"], batch["walker", "observation"].sum(-1))


def test_outputs_that_are_no_actions_are_refused_as_those_of_one_agent():
    with pytest.raises(ActionError, match=r"walker.*expected shape \(2, 3, 4\), got \(2, 3, 5\)"):
        collected(WALKER, MultiAgentMLP(31, 5, 3, centralised=False, share_params=True))


def test_with_choices_the_code_of_the_error_draws_allowed_ones():
    net = MultiAgentMLP(18, 9, 2, centralised=False, share_params=True)
    with pytest.raises(SpecMismatch, match="have to be drawn from what it gives") as refusal:
        collected("pettingzoo/classic/tictactoe_v3", net)
    policy = remedied(str(refusal.value), net=OfBoards(net))
    batch = collected("pettingzoo/classic/tictactoe_v3", policy, frames_per_batch=100)
    allowed = batch["player", "action_mask"].gather(-1, batch["player", "action"].unsqueeze(-1)).squeeze(-1)
    assert allowed[batch["player", "acting"]].all()


def test_with_several_groups_the_code_of_the_error_acts_for_each():
    env = functools.partial(Script, ["a_0 a_1 b_0"] * 50, {})  # whose actions are 1, 2 and 3
    nets = [MultiAgentMLP(2, 3, agents, centralised=False, share_params=False) for agents in (2, 1)]
    with pytest.raises(SpecMismatch, match="2 groups of agents: 'a', 'b'") as refusal:
        collected(env, nets[0])
    batch = collected(env, remedied(str(refusal.value), nets=nets), frames_per_batch=60)
    for group in ("a", "b"):
        assert set(batch[group, "action"].unique().tolist()) <= {1, 2, 3}


def test_with_observations_of_parts_the_code_of_the_error_reads_them_all():
    net = MultiAgentMLP(4, 3, 2, centralised=False, share_params=True)
    with pytest.raises(SpecMismatch, match="observations of 2 parts") as refusal:
        collected(Parts, net)
    batch = collected(Parts, remedied(str(refusal.value), net=net))
    seen = torch.cat([batch["a", "observation", name] for name in ("near", "far")], -1)
    with torch.no_grad():
        either = (net(seen), net(torch.cat(seen.chunk(2, -1)[::-1], -1)))
    assert any(torch.allclose(batch["a", "action"], one) for one in either)


def test_the_code_of_the_error_makes_any_module_act():
    net = nn.Sequential(nn.Linear(31, 4), nn.Tanh())
    with pytest.raises(TypeError, match="must be Tensor, not dict") as failure:
        collected(WALKER, net)
    (note,) = failure.value.__notes__
    assert "called with a dict of observations by group" in note
    batch = collected(WALKER, remedied(note, net=net))
    with torch.no_grad():
        torch.testing.assert_close(batch["walker", "action"], net(batch["walker", "observation"]))


def test_the_error_of_a_function_is_its_own():
    def policy(obs):
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine") as failure:
        collected(WALKER, policy)
    assert not hasattr(failure.value, "__notes__")
