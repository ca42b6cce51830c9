"""TargetParams: soft and hard updates, for modules that cannot be copied too."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from muster.errors import UsageError
from muster.nn import TargetParams


def fill(module: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)


def test_soft_update_by_hand():
    net = nn.Linear(2, 1)
    fill(net, 1.0)
    target = TargetParams(net)
    fill(net, 3.0)
    target.update(0.25)
    assert target.params["weight"].flatten().tolist() == [1.5, 1.5]  # 0.75 * 1 + 0.25 * 3
    assert target.params["bias"].item() == 1.5
    assert target(torch.ones(2)).item() == 4.5
    assert net.weight.flatten().tolist() == [3.0, 3.0]


@pytest.mark.parametrize("tau", [-0.1, 1.5, float("nan")])
def test_a_tau_outside_the_range_is_refused(tau):
    with pytest.raises(ValueError, match="not in"):
        TargetParams(nn.Linear(2, 1)).update(tau)


def test_policies_that_cannot_be_copied_train_against_their_target(uncopyable_policy):
    policy = uncopyable_policy
    target = TargetParams(policy)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    x = torch.randn(8, 3)
    before = target(x)
    for _ in range(3):
        loss = (policy(x) - target(x) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(target(x), before)
    assert not torch.allclose(policy(x), before)
    target.hard_update()
    torch.testing.assert_close(target(x), policy(x))


def test_no_gradient_reaches_the_target_but_the_arguments_have_theirs():
    net = nn.Linear(2, 1)
    x = torch.ones(2, requires_grad=True)
    target = TargetParams(net)
    target(x).backward()
    assert net.weight.grad is None
    torch.testing.assert_close(x.grad, net.weight[0])


def test_buffers_become_equal_and_a_call_in_training_mode_writes_only_the_targets():
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    target = TargetParams(net)
    target(torch.randn(8, 3) + 5)
    assert net[1].num_batches_tracked == 0
    assert target.params["1.num_batches_tracked"] == 1
    net(torch.randn(8, 3) - 5)
    net(torch.randn(8, 3) - 5)
    target.update(0.5)
    torch.testing.assert_close(target.params["1.running_mean"], net[1].running_mean)
    assert target.params["1.num_batches_tracked"] == 2


def test_untied_parameters_have_a_target_each_after_a_hard_update():
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    net[1].weight = net[0].weight
    target = TargetParams(net)
    net[1].weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(UsageError, match=r"1\.weight"):
        target.update(0.5)
    target.hard_update()
    assert target(torch.ones(2)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("through", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copied_target_follows_the_copied_module(through):
    net = nn.Sequential(nn.Linear(2, 1), nn.Dropout(1.0))
    fill(net, 1.0)
    target = TargetParams(net)
    copied_net, copied_target = through((net, target))
    fill(copied_net, 3.0)
    copied_net.eval()
    copied_target.update(0.5)
    assert copied_target(torch.ones(2)).item() == 6.0
    assert target(torch.ones(2)).item() == 0.0  # the original drops everything out
    net.eval()
    assert target(torch.ones(2)).item() == 3.0


def test_a_changed_layout_is_named_and_hard_update_starts_afresh():
    net = nn.Linear(2, 1)
    target = TargetParams(net)
    net.weight = nn.Parameter(torch.ones(1, 3))
    with pytest.raises(UsageError, match=r"'weight' is \[1, 2\] on cpu, .* \[1, 3\]"):
        target.update(0.5)
    target.hard_update()
    assert target(torch.ones(3)).shape == (1,)


def test_state_dict_round_trip():
    net, other = nn.Linear(2, 1), nn.Linear(2, 1)
    saved = {name: tensor.clone() for name, tensor in TargetParams(net).state_dict().items()}
    target = TargetParams(other)
    target.load_state_dict(saved)
    torch.testing.assert_close(target(torch.ones(2)), net(torch.ones(2)))
    nn.Linear(2, 1).load_state_dict(target.state_dict())
    with pytest.raises(UsageError, match="bias"):
        target.load_state_dict({"weight": saved["weight"]})


def test_other_dtypes_are_refused_before_any_tensor_changes():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    fill(net, 1.0)
    target = TargetParams(net)
    fill(net, 3.0)
    net[1].double()
    with pytest.raises(UsageError, match=r"'1\.weight' is \[1, 2\] on cpu, torch\.float32, .* torch\.float64"):
        target.update(0.5)
    assert all((tensor == 1).all() for tensor in target.params.values())
    target.load_state_dict(net.state_dict())  # which converts
    assert all((tensor == 3).all() for tensor in target.params.values())
    assert target.params["1.weight"].dtype == torch.float32


@pytest.mark.parametrize("strange", [torch.empty(1, device="meta"), torch.ones(1).to_sparse()], ids=["meta", "sparse"])
def test_tensors_that_cannot_be_copied_are_refused_before_any_changes(strange):
    net = nn.Linear(2, 1)
    fill(net, 1.0)
    target = TargetParams(net)
    with pytest.raises(UsageError, match="'bias' is"):
        target.load_state_dict({"weight": torch.zeros(1, 2), "bias": strange})
    assert all((tensor == 1).all() for tensor in target.params.values())
