"""TorchRL's losses as Muster hands them out: equal to the originals, also for policies that cannot be copied."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

torchrl = pytest.importorskip("torchrl")

from loss_cases import (  # noqa: E402
    COPYING,
    Case,
    Plain,
    Uncopyable,
    batch_of,
    networks_of,
    trained,
)
from torchrl import objectives  # noqa: E402

from muster.errors import CannotTravel  # noqa: E402
from muster.interop.torchrl import losses  # noqa: E402
from muster.nn import uncopyable  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")

NAMES = [
    name
    for name in objectives.__all__
    if isinstance(one := getattr(objectives, name), type) and issubclass(one, objectives.LossModule)
]
# The functions of torchrl.objectives that copy a module: all others only share its tensors.
COPIES = {
    "common.LossModule.get_stateful_net",
    "cql.DiscreteCQLLoss.make_value_estimator",
    "ddpg.DDPGLoss.__init__",
    "multiagent.qmixer.QMixerLoss.__init__",
    "value.advantages.VTrace.for_loss",
}


def modules_in(networks: list[Any]) -> list[nn.Module]:
    return [module for network in networks for module in network.modules()]


def closed(networks: list[Any]) -> None:
    for module in modules_in(networks):
        for one in getattr(module, "sockets", ()):
            one.close()


def inside(networks: list[Any]) -> list[dict[str, Any]]:
    """Every attribute of every module in ``networks``; of its dicts their own items, too."""
    found = []
    for module in modules_in(networks):
        for value in [vars(module), *vars(module).values()]:
            if isinstance(value, dict):
                found.append(dict(value))
    return found


def changed(networks: list[Any], before: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """Where ``inside(networks)`` differs from what it was, but for the mode."""
    after = inside(networks)
    assert len(after) == len(before)
    return [
        (i, key)
        for i, (now, then) in enumerate(zip(after, before, strict=True))
        for key in now | then
        if key != "training" and (key not in now or key not in then or now[key] is not then[key])
    ]


def equal(left: list[Any], right: list[Any]) -> bool:
    tensors = [(a, b) for a, b in zip(left, right, strict=True) if isinstance(a, Tensor)]
    return bool(tensors) and all(a.equal(b) for a, b in tensors)


@pytest.mark.parametrize("case", COPYING.values(), ids=COPYING)
def test_three_updates_equal_the_original_s_and_leave_no_trace(case: Case):
    _, expected = trained(objectives, case, networks_of(case, Plain))
    for net in (Plain, Uncopyable):
        networks = networks_of(case, net)
        before = inside(networks)
        loss, seen = trained(losses, case, networks)
        assert equal(seen, expected)
        assert isinstance(loss, getattr(objectives, case.name))
        assert changed(networks, before) == []
        closed(networks)


def test_classes_are_the_originals_in_all_that_a_reader_sees():
    for name in NAMES:
        check_class(name)


def check_class(name: str) -> None:
    original, ours = getattr(objectives, name), getattr(losses, name)
    assert ours is not original
    assert inspect.signature(ours) == inspect.signature(original)
    assert inspect.getdoc(ours) == inspect.getdoc(original)
    assert inspect.getdoc(ours.get_stateful_net) == inspect.getdoc(original.get_stateful_net)
    assert pickle.loads(pickle.dumps(ours)) is ours
    for attribute in ("forward", "in_keys", "out_keys", "default_keys", "__new__"):
        static = [inspect.getattr_static(one, attribute, None) for one in (ours, original)]
        assert static[0] is static[1], attribute
    assert {n for n in NAMES if issubclass(getattr(losses, n), ours)} == {
        n for n in NAMES if issubclass(getattr(objectives, n), original)
    }


def test_all_other_names_are_handed_on():
    assert losses.__all__ == objectives.__all__
    assert losses.SoftUpdate is objectives.SoftUpdate
    assert losses.ValueEstimators is objectives.ValueEstimators


@pytest.mark.parametrize("case", COPYING.values(), ids=COPYING)
def test_losses_travel_and_state_dicts_fit_as_in_the_original(case: Case):
    loss, _ = trained(losses, case, networks_of(case, Plain))
    original, _ = trained(objectives, case, networks_of(case, Plain))
    batch = batch_of(case)
    torch.manual_seed(3)
    expected = loss(batch.clone())
    original.load_state_dict(loss.state_dict())
    others = [original, copy.deepcopy(loss)]
    try:
        pickle.dumps(original)
    except AttributeError:  # SAC's holds a function inside a function
        with pytest.raises(AttributeError):
            pickle.dumps(loss)
    else:
        others.append(pickle.loads(pickle.dumps(loss)))
    for other in others:
        torch.manual_seed(3)
        assert equal(list(other(batch.clone()).values()), list(expected.values()))


@pytest.mark.parametrize(
    "raising",
    [
        lambda *nets: losses.DDPGLoss(*nets, gamma=0.9),
        lambda *nets: losses.DDPGLoss(*nets, loss_fn="l2"),
        lambda *nets: losses.DDPGLoss(*nets).make_value_estimator("no such thing"),
        lambda *nets: losses.DDPGLoss(*nets).get_stateful_net("no_such_network"),
    ],
)
def test_what_raises_leaves_no_trace(raising: Any):
    networks = networks_of(COPYING["DDPG"], Uncopyable)
    before = inside(networks)
    with pytest.raises((TypeError, KeyError, AttributeError)):
        raising(*networks)
    assert changed(networks, before) == []
    with pytest.raises(RuntimeError, match="the robot cannot be copied"):
        copy.deepcopy(networks[0])
    closed(networks)


def test_the_network_that_is_taken_out_is_a_twin():
    networks = networks_of(COPYING["DDPG"], Uncopyable)
    loss = losses.DDPGLoss(*networks)
    taken = loss.get_stateful_net("actor_network")
    mine, its = taken.module, networks[0].module
    assert mine is not its
    assert type(mine) is Uncopyable
    assert mine.lock is its.lock
    assert mine.handle is its.handle
    assert mine.head.__self__ is mine.last
    assert mine.last.weight is loss.actor_network_params["module", "last", "weight"]
    with pytest.raises(RuntimeError, match="the robot cannot be copied"):
        copy.deepcopy(taken)
    closed(networks)


def test_a_mark_is_passed_over_and_stays():
    networks = [uncopyable(net, "drives the arm") for net in networks_of(COPYING["DDPG"], Plain)]
    loss = losses.DDPGLoss(*networks)
    for marked in (networks[0], loss.get_stateful_net("actor_network")):
        with pytest.raises(CannotTravel, match="drives the arm"):
            copy.deepcopy(marked)


def test_torchrl_copies_modules_in_five_places():
    folder = Path(objectives.__file__).parent
    found = set()
    for path in folder.rglob("*.py"):
        for name, function in functions_in(ast.parse(path.read_text(encoding="utf-8"))):
            called = [ast.unparse(call.func) for call in ast.walk(function) if isinstance(call, ast.Call)]
            if {"deepcopy", "copy.deepcopy"} & set(called):
                found.add(".".join([*path.relative_to(folder).with_suffix("").parts, name]))
    assert found == COPIES


def functions_in(tree: ast.AST, outer: tuple[str, ...] = ()) -> list[tuple[str, ast.AST]]:
    found: list[tuple[str, ast.AST]] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            found += functions_in(node, (*outer, node.name))
        elif isinstance(node, ast.FunctionDef):
            found.append((".".join([*outer, node.name]), node))
    return found
