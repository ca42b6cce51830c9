"""A checkpoint's file: what is saved comes back as it was, and any reader of safetensors sees the tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn, optim

from command import muster
from muster import load_policy
from muster.errors import ConfigError
from muster.training.checkpoints import packed, read_checkpoint

NAME = "checkpoint.safetensors"


def kept(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    """The state, saved and read."""
    (folder / NAME).write_bytes(packed(state))
    return read_checkpoint(folder)


def require_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            require_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            require_same(a, b)
    else:
        assert one == other or math.isnan(one)


def test_what_json_has_not_comes_back_as_it_was(tmp_path: Path):
    tied = torch.arange(6.0).reshape(2, 3)
    state = {
        "steps": 3, "seed": 1 << 127, "none": None, "flag": True, "text": 'é"\n', "empty": [{}, (), []],
        "floats": [1.5, math.inf, -math.inf, math.nan, 0.1],
        "pair": (1, (2.0, [3])), "by_number": {0: {"a": 1}, 1: {}}, "both": {0: "a", "0": torch.ones(1)},
        "$tuple": [1], "like ours": {"$tensor": "steps"}, "$dict": {"$dict": [[1, 2]]},
        "a/b": torch.ones(1), "a": {"b": torch.zeros(2)},
        "tied": {"weight": tied, "again": tied, "view": tied.T, "row": tied[1]},
        "spread": torch.ones(1, 1).expand(4, 5), "scalar": torch.tensor(7), "nothing": torch.zeros(0, 3),
        "last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last), "learnt": torch.ones(2),
        "kinds": [torch.ones(3, dtype=one) for one in (torch.bool, torch.uint8, torch.int64, torch.bfloat16)],
    }  # fmt: skip
    require_same(kept(tmp_path, {**state, "learnt": nn.Parameter(torch.ones(2))}), state)


def test_tensors_stand_by_their_path_and_all_else_is_json(tmp_path: Path):
    policy = nn.Linear(2, 1)
    kept(tmp_path, {"steps": 5, "policy": policy.state_dict(), "lengths": [torch.ones(1)]})
    tensors = load_file(tmp_path / NAME)
    assert sorted(tensors) == ["lengths/0", "policy/bias", "policy/weight"]
    assert torch.equal(tensors["policy/weight"], policy.weight)
    with safe_open(tmp_path / NAME, "pt") as file:
        state = json.loads(file.metadata()["muster"])
    assert (state["steps"], state["policy"]["bias"]) == (5, {"$tensor": "policy/bias"})


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ({1.5: 2}, "^a/b in the run's state is a dict with such keys, which no checkpoint has$"),
        (object(), "^a/b in the run's state is a object, which no checkpoint has$"),
        (torch.ones(2).to_sparse(), "^a/b in the run's state is a Tensor, which no checkpoint has$"),
        (torch.ones(2, dtype=torch.complex128), "^a tensor of the run's state cannot be saved: "),
    ],
    ids=["floats", "object", "sparse", "complex"],
)
def test_what_cannot_be_saved_is_named(held: Any, said: str):
    with pytest.raises(TypeError, match=said):
        packed({"a": {"b": held}})


OPTIMIZERS: list[Callable[..., optim.Optimizer]] = [
    partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True), optim.Adam, partial(optim.Adam, amsgrad=True),
    partial(optim.Adam, lr=torch.tensor(0.01), capturable=False, foreach=False), optim.AdamW, optim.Adamax, optim.NAdam,
    optim.RAdam, optim.Adagrad, optim.Adadelta, partial(optim.RMSprop, centered=True, momentum=0.5), optim.Rprop,
    optim.ASGD, optim.LBFGS,
]  # fmt: skip


@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda make: str(getattr(make, "func", make).__name__))
def test_an_optimizer_goes_on_as_if_it_had_never_been_saved(tmp_path: Path, make: Callable[..., optim.Optimizer]):
    def trained(steps: int, **states: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizer = make(net.parameters())
        if states:
            net.load_state_dict(states["policy"])
            optimizer.load_state_dict(states["optimizer"])

        def loss() -> float:
            optimizer.zero_grad()
            value = (net(torch.linspace(-1, 1, 30).reshape(10, 3)) - 1).square().mean()
            value.backward()
            return value.item()

        for _ in range(steps):
            optimizer.step(loss)
        return net.state_dict(), optimizer.state_dict()

    policy, optimizer = trained(3)
    halfway = {"policy": dict(policy), "optimizer": optimizer}
    require_same(kept(tmp_path, halfway), halfway)
    for whole, resumed in zip(trained(6), trained(3, **kept(tmp_path, halfway)), strict=True):
        require_same(dict(resumed), dict(whole))


def test_a_checkpoint_of_the_old_form_is_named_with_the_new_one(tmp_path: Path):
    run = tmp_path / "run"
    small = ("--backend=serial", "--num-envs=2", "--num-steps=16", "--num-minibatches=1", "--update-epochs=1")
    assert muster("train", "CartPole-v1", *small, "--total-steps=64", "--run-dir", str(run)).exit_code == 0
    said = "checkpoint must be a file of safetensors, such as 'best.safetensors', got 'best.pt'"
    with pytest.raises(ConfigError, match=f"^{said}$"):
        load_policy(run, checkpoint="best.pt")
    result = muster("eval", str(run), "--checkpoint=best.pt")
    assert (result.exit_code, result.stderr) == (2, f"muster eval: error: --{said}\n")
    (run / NAME).rename(run / "checkpoint.pt")
    before = {path: path.read_bytes() for path in run.iterdir()}
    for words in (("eval",), ("train", "--total-steps=96", "--resume"), ("train", "CartPole-v1", "--run-dir")):
        result = muster(*words, str(run))
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1), result.output
        assert "is a run of an older version of Muster: its checkpoint.pt is a pickle" in result.stderr
    assert {path: path.read_bytes() for path in run.iterdir()} == before
