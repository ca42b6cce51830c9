"""What the doctor says of a policy factory: whether it builds the same policy each time."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing import shared_memory
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

import muster
from muster.doctor.diagnosis import Finding
from muster.doctor.policy_factory import judge_factory
from muster.envs import resolve_foreign_id
from muster.errors import WrongType
from muster.hosts.trial import Reporter, TrialOutcome
from muster.nn import MultiAgentMLP
from muster.pool.watch import Activity
from muster.recipes.recipe import Recipe, make_recipes

CARTPOLE = "CartPole-v1"


class Net(nn.Module):
    """Acts for CartPole. Each option makes it differ from what it is without."""

    def __init__(self, width: int = 8, *, more: bool = False, scale: Tensor | None = None) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
        self.scale = torch.ones(2) if scale is None else scale
        if more:
            self.more = nn.Linear(1, 1)

    def forward(self, obs: Tensor) -> Any:
        logits = self.layers(obs) * self.scale
        return {"action": logits.argmax(-1), "logits": logits}


class Locked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Sampling(Net):
    def forward(self, obs: Tensor) -> Any:
        return torch.distributions.Categorical(logits=self.layers(obs)).sample()


class Floating(Net):
    def forward(self, obs: Tensor) -> Any:
        return super().forward(obs)["logits"]


class TrialsHere:
    """Runs trials in this process: most of these tests ask what is found, not where."""

    def __init__(self, recipes: Sequence[Recipe] | None, timeout_s: float) -> None:
        self.recipes = recipes or ()

    def run(self, trial: Callable[..., None], **options: Any) -> TrialOutcome:
        outcome = TrialOutcome()
        try:
            trial(*self.recipes, Reporter(SimpleNamespace(report=outcome.take, activity=Activity())), **options)
            outcome.stage = None
        except Exception as error:
            outcome.how = f"raised {type(error).__name__}: {error}"
        return outcome


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Finding]]:
    """Findings about a factory: ``judge(factory, policy, env)``."""
    monkeypatch.setattr("muster.doctor.policy_factory.Trials", TrialsHere)

    def judged(factory: Any, policy: Any = None, env: Any = CARTPOLE) -> list[Finding]:
        recipes = make_recipes(env, 1, resolve_foreign_id=resolve_foreign_id)
        return judge_factory(factory, policy, TrialsHere(recipes, 20.0), 20.0)  # type: ignore[arg-type]

    return judged


def only(findings: list[Finding], severity: str) -> str:
    (text,) = [finding.text for finding in findings if finding.severity == severity]
    assert {finding.topic for finding in findings} == {"policy_factory"}
    return text


@pytest.mark.parametrize("factory", [Net, Locked, Sampling])
def test_the_same_policy_each_time_is_good_news(judge, factory):
    assert only(judge(factory), "good") == (
        "it builds the same architecture each time: 9 weights with equal names and shapes, outputs equal to 1e-6 with "
        "equal weights"
    )


def test_a_policy_gets_the_masks_that_infos_bring(judge):
    def policy(obs: Tensor, masks: Tensor) -> Tensor:
        return masks.int().argmax(-1)

    taxi = next(name for name in ("Taxi-v4", "Taxi-v3") if name in gym.registry)
    assert "outputs equal to 1e-6" in only(judge(lambda: policy, env=taxi), "good")


def test_the_same_as_the_policy_that_exists_whose_weights_it_gets_and_which_is_left_as_it_was(judge):
    policy = Locked()
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    text = only(judge(Net, policy), "good")
    assert text.startswith("it builds the same architecture as policy: 9 weights")
    assert "outputs equal to 1e-6" in text
    assert all(tensor.equal(before[name]) for name, tensor in policy.state_dict().items())


@pytest.mark.parametrize(
    ("policy", "factory", "words"),
    [
        (Net(9), Net, "'layers.0.weight' is [8, 4] float32, expected [9, 4] float32"),
        (Net(), functools.partial(Net, more=True), "unexpected 'more.weight', 'more.bias'"),
        (Net(more=True), Net, "missing 'more.weight', 'more.bias'"),
        (Net().double(), Net, "'layers.0.weight' is [8, 4] float32, expected [8, 4] float64"),
        (Net(), Floating, "outputs: missing 'logits'; outputs: 'action' is [2] float32, expected [] int64"),
        (Net(scale=torch.full((2,), 3.0)), Net, "with equal weights 'logits' differ by up to"),
    ],
    ids=["width", "more", "fewer", "dtype", "outputs", "constant"],
)
@pytest.mark.filterwarnings("ignore:.*overflow")
def test_what_differs_from_the_policy_that_exists_is_named(judge, policy, factory, words):
    text = only(judge(factory, policy), "warns")
    assert text.startswith("what it builds differs from policy: ")
    assert words in text


def test_a_constant_that_every_build_draws_is_named(judge):
    text = only(judge(lambda: Net(scale=torch.rand(2))), "warns")
    assert text.startswith("the second one differs from the first one: with equal weights ")
    assert "'logits' differ by up to" in text
    assert text.endswith("is neither a parameter nor a buffer")


def fail() -> Net:
    raise ValueError("no weights found")


@pytest.mark.parametrize(
    ("factory", "severity", "words"),
    [
        (fail, "blocks", "building the policy, it raised ValueError: no weights found"),
        (lambda: 3, "blocks", "policy_factory returned an object of type int, which cannot be called"),
        (lambda: nn.Linear(5, 2), "warns", "calling the policy on the env's observations, it raised RuntimeError"),
    ],
    ids=["raises", "no policy", "other inputs"],
)
def test_what_ends_it_is_told(judge, factory, severity, words):
    assert words in only(judge(factory), severity)


def test_a_factory_that_cannot_travel_is_told_with_the_path(judge):
    policy = Locked()
    (finding,) = judge(lambda: policy)
    assert finding.severity == "blocks"
    assert "because of policy_factory.<closure>.policy.lock (_thread.lock)" in finding.text


def test_lazy_policies_get_their_shapes_from_the_env(judge):
    def build() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(2), nn.Softmax(-1))

    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = build()

        def forward(self, obs: Tensor) -> Tensor:
            return self.net(obs).argmax(-1)

    findings = judge(lambda: TensorDictModule(Greedy(), ["observation"], ["action"]))
    assert "2 weights with equal names and shapes, outputs equal" in only(findings, "good")
    assert "the policy's '0.weight' has no shape yet" in only(judge(build, build()), "warns")


def test_a_policy_that_cannot_be_called_leaves_weights_to_compare(judge):
    findings = judge(Net, nn.Sequential(nn.Linear(5, 2)))
    assert "policy, called on the env's observations, raised RuntimeError" in only(findings, "note")
    assert "unexpected 'layers.0.weight'" in only(findings, "warns")


def test_without_an_env_weights_alone_are_compared(judge):
    findings = judge(Net, env=fail)
    assert only(findings, "good").endswith("9 weights with equal names and shapes")
    assert only(findings, "note").startswith("outputs were not compared: building the env for the policy, it raised")


def test_policies_of_several_agents_are_called_as_collectors_call_them(judge):
    pytest.importorskip("mpe2")

    class Greedy(nn.Module):
        def __init__(self, n_agents: int) -> None:
            super().__init__()
            self.net = MultiAgentMLP(18, 5, n_agents, centralised=False, share_params=False, depth=1, num_cells=8)

        def forward(self, obs: Tensor) -> Tensor:
            return self.net(obs).argmax(-1)

    def build(n_agents: int = 3) -> nn.Module:
        return TensorDictModule(Greedy(n_agents), [("agent", "observation")], [("agent", "action")])

    spread = "pettingzoo/mpe2/simple_spread_v3"
    assert "outputs equal to 1e-6" in only(judge(build, build(), spread), "good")
    plain = judge(lambda: lambda obs: {"agent": obs["agent"][..., 0].long()}, None, spread)
    assert "0 weights" in only(plain, "good")
    assert "expected 2 agents" in only(judge(functools.partial(build, 2), None, spread), "warns")


def test_diagnose_takes_functions_only():
    with pytest.raises(WrongType, match=r"policy_factory must be a function that builds the policy, got .*Tensor"):
        muster.diagnose(CARTPOLE, policy_factory=torch.ones(2))


def test_it_is_built_in_processes_of_its_own():
    findings = judge_factory(Locked, Net(), None, 60.0)
    assert "the same architecture as policy: 9 weights" in only(findings, "good")
    assert only(findings, "note") == "outputs were not compared: no env could be played for that, see above"


def test_no_trial_uses_what_it_shares_with_the_caller():
    memory = shared_memory.SharedMemory(create=True, size=8)
    memory.unlink()
    text = only(judge_factory(functools.partial(Net, scale=memory), None, None, 60.0), "warns")
    assert text.startswith("not tried: ")
    assert 'policy_factory.keywords["scale"] (multiprocessing.shared_memory.SharedMemory)' in text


@pytest.mark.slow
def test_diagnose_tells_it_beside_the_env():
    diagnosis = muster.diagnose(CARTPOLE, policy=Locked(), policy_factory=Net, seconds=0.2)
    assert diagnosis.policy is not None
    assert not diagnosis.policy.copyable
    assert "+ policy_factory: it builds the same architecture as policy" in str(diagnosis)
    assert "outputs equal to 1e-6 with equal weights" in str(diagnosis)
    assert not diagnosis.blocks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("my_policies:make", 0, "it builds the same architecture each time: 2 weights"),
        ("my_policies:absent", 1, "module my_policies has no 'absent'. It has: make"),
        ("make", 2, "--policy-factory must be module:make_policy"),
    ],
)
def test_the_command_takes_a_function_s_name(tmp_path: Path, name: str, status: int, words: str):
    (tmp_path / "my_policies.py").write_text("def make():\n    from torch import nn\n    return nn.Linear(3, 1)\n")
    command = [
        sys.executable,
        "-c",
        "import muster.cli; muster.cli.main()",
        "doctor",
        "Pendulum-v1",
        "--seconds",
        "0.1",
    ]
    done = subprocess.run(
        [*command, "--policy-factory", name], cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == status, done.stderr
    assert words in " ".join((done.stdout + done.stderr).replace("│", " ").split())
