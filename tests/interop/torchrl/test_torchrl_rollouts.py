"""The loop by leaves against TorchRL's own: the same batches, state and draws, bit for bit."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from slow import slow

pytest.importorskip("torchrl")

with warnings.catch_warnings(action="ignore"):  # TorchRL's own, of itself
    from torchrl.collectors import Collector
from torchrl.data import Binary, Bounded, Composite, LazyTensorStorage, OneHot, ReplayBuffer, Unbounded
from torchrl.envs import (
    Compose,
    EnvBase,
    InitTracker,
    RewardScaling,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from torchrl.envs.libs.gym import GymEnv, GymWrapper, default_info_dict_reader
from torchrl.envs.utils import ExplorationType, RandomPolicy
from torchrl.modules import (
    MLP,
    EGreedyModule,
    LSTMModule,
    OneHotCategorical,
    ProbabilisticActor,
    QValueActor,
    TanhNormal,
)
from torchrl.testing.mocking_classes import (
    CountingEnv,
    CountingEnvWithString,
    EnvWithDynamicSpec,
    HeterogeneousCountingEnv,
    MultiKeyCountingEnv,
    NestedCountingEnv,
)

from muster.errors import SpecMismatch
from muster.interop.torchrl import Collector as Ours
from muster.interop.torchrl import ParallelEnv

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Threads that wait for each other take longer than these steps."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cart_pole(*transforms: Any, **options: Any) -> Any:
    env = GymEnv("CartPole-v1", **options)
    return TransformedEnv(env, Compose(*(make() for make in transforms))) if transforms else env


class Drifts(EnvBase):
    """Two envs of four numbers, which end at different steps."""

    def __init__(self) -> None:
        super().__init__(batch_size=[2])
        self.observation_spec = Composite(observation=Unbounded((2, 4)), shape=(2,))
        self.action_spec = OneHot(2, shape=(2, 2))
        self.reward_spec = Unbounded((2, 1))
        self.done_spec = Composite(
            {name: Binary(1, (2, 1), dtype=torch.bool) for name in ("done", "terminated", "truncated")}, shape=(2,)
        )
        self.random = torch.Generator()
        self.place, self.steps = torch.zeros(2, 4), torch.zeros(2, 1, dtype=torch.int64)

    def _set_seed(self, seed: int | None) -> None:
        self.random.manual_seed(seed or 0)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDict:
        given = None if tensordict is None else tensordict.get("_reset", None)
        mask = torch.ones(2, 1, dtype=torch.bool) if given is None else given
        self.place = torch.where(mask, torch.rand(2, 4, generator=self.random), self.place)
        self.steps = torch.where(mask, 0, self.steps)
        return TensorDict({"observation": self.place}, [2])

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        self.steps = self.steps + 1
        self.place = self.place + tensordict["action"].float().repeat(1, 2)
        ended = self.steps >= torch.tensor([[4], [7]])
        return TensorDict({"observation": self.place, "reward": self.place.sum(-1), "terminated": ended}, [2])


def pendulum() -> Any:
    return TransformedEnv(GymEnv("Pendulum-v1"), StepCounter(7))


def net(inputs: int = 4, outputs: int = 2) -> nn.Module:
    return MLP(in_features=inputs, out_features=outputs, num_cells=[8], activation_class=nn.Tanh)


def drawing(**options: Any) -> ProbabilisticActor:
    module = TensorDictModule(net(), ["observation"], ["logits"])
    keys = {"distribution_class": OneHotCategorical, "return_log_prob": True, **options}
    return ProbabilisticActor(module, in_keys=["logits"], **keys)


def steering() -> ProbabilisticActor:
    module = TensorDictModule(nn.Sequential(net(3, 2), Halves()), ["observation"], ["loc", "scale"])
    return ProbabilisticActor(module, ["loc", "scale"], distribution_class=TanhNormal, return_log_prob=True)


class Halves(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[..., :1], x[..., 1:].exp()


class Greedy(nn.Module):
    """Takes the observation, as modules without keys do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return nn.functional.one_hot(self.net(observation).argmax(-1), 2)


def exploring() -> Any:
    env = cart_pole()
    actor = QValueActor(net(), in_keys=["observation"], spec=env.full_action_spec)
    return TensorDictSequential(actor, EGreedyModule(spec=env.full_action_spec, eps_init=0.5))


class Writes:
    """A callable that reads what the collector adds, and returns another tensordict."""

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        choice = (td["observation"].sum(-1) > 0).long() + td["collector", "traj_ids"] % 2
        return (
            td.copy()
            .set("action", nn.functional.one_hot(choice % 2, 2))
            .set(("seen", "sum"), td["observation"].sum(-1))
        )


def recurrent() -> tuple[Any, Any]:
    lstm = LSTMModule(input_size=4, hidden_size=3, in_key="observation", out_key="embedded")
    policy = TensorDictSequential(
        lstm, TensorDictModule(nn.Linear(3, 2), ["embedded"], ["logits"]), drawing().module[-1]
    )
    return (lambda: TransformedEnv(cart_pole(InitTracker), lstm.make_tensordict_primer())), policy


def collector_of(kind: type[Collector], make_env: Any, policy: Any, **options: Any) -> Collector:
    def made() -> Any:
        env = make_env()
        env.set_seed(5)
        return env

    torch.manual_seed(0)
    made_policy = policy() if callable(policy) and not isinstance(policy, (nn.Module, Writes, RandomPolicy)) else policy
    torch.manual_seed(1)
    return kind(made, made_policy, **{"frames_per_batch": 24, "total_frames": -1, **options})


def same(ours: TensorDictBase, theirs: TensorDictBase) -> None:
    ours_keys, theirs_keys = set(ours.keys(True)), set(theirs.keys(True))
    assert ours_keys == theirs_keys
    assert (ours.batch_size, ours.names, ours.device) == (theirs.batch_size, theirs.names, theirs.device)
    for key in theirs_keys:
        one, other = ours.get(key), theirs.get(key)
        if isinstance(other, TensorDictBase):
            assert one.batch_size == other.batch_size
        else:
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def check(make_env: Any, policy: Any = drawing, batches: int = 3, between: Any = None, **options: Any) -> Any:
    """Compares batches, carriers and draws; between: is called with the collector after each batch."""
    results = []
    for kind in (Ours, Collector):
        own = {name: make() if name in ("interruptor", "replay_buffer") else make for name, make in options.items()}
        collector = collector_of(kind, make_env, policy, **own)
        iterator, taken = iter(collector), []
        for _ in range(batches):
            batch = next(iterator)
            taken.append(collector.replay_buffer[:].clone() if batch is None else batch.clone())
            if between is not None:
                between(collector)
        results.append((taken, collector._carrier.clone(), torch.get_rng_state(), collector.state_dict()))
        if kind is Ours:
            loop = collector._loop
        collector.shutdown()
    (ours, carrier, state, saved), (theirs, their_carrier, their_state, their_saved) = results
    for one, other in zip(ours, theirs, strict=True):
        same(one, other)
    same(carrier, their_carrier)
    assert torch.equal(state, their_state)
    assert (saved["frames"], saved.get("traj_pool")) == (their_saved["frames"], their_saved.get("traj_pool"))
    return loop


TRANSFORMS = (StepCounter, RewardSum, InitTracker)


@pytest.mark.parametrize(
    ("make_env", "policy", "road", "plain"),
    [
        (cart_pole, drawing, "GymRoad", True),
        (partial(cart_pole, *TRANSFORMS), drawing, "GymRoad", True),
        (partial(cart_pole, partial(StepCounter, 6)), drawing, "GymRoad", True),
        (cart_pole, Greedy, "GymRoad", True),
        (partial(cart_pole, device="cpu"), exploring, "GymRoad", False),
        (pendulum, steering, "GymRoad", True),
        (cart_pole, None, "GymRoad", False),
        (cart_pole, Writes(), "GymRoad", False),
        (partial(cart_pole, RewardSum, lambda: RewardScaling(0.1, 2.0), StepCounter), drawing, "StepRoad", True),
        (partial(SerialEnv, 3, cart_pole), drawing, "StepRoad", True),
        (
            lambda: TransformedEnv(SerialEnv(3, cart_pole), Compose(StepCounter(4), InitTracker())),
            drawing,
            "StepRoad",
            True,
        ),
        (partial(ParallelEnv, 2, cart_pole, mp_start_method="fork"), drawing, "WholeRoad", True),
        (partial(CountingEnv, max_steps=4), None, "StepRoad", False),
        (NestedCountingEnv, None, "StepRoad", False),
        (partial(NestedCountingEnv, nest_done=True, batch_size=(2,)), None, "StepRoad", False),
        (MultiKeyCountingEnv, None, "StepRoad", False),
    ],
)
def test_batches_are_torchrls(make_env: Any, policy: Any, road: str, plain: bool):
    loop = check(make_env, policy)
    assert type(loop._road).__name__ == road
    assert loop._plain.able == plain


class Sevenfold(TransformedEnv):
    """Multiplies rewards in a step of its own."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        arrived = super()._step(tensordict)
        return arrived.set("reward", arrived["reward"] * 7)


class Rewards(gym.Env[Any, Any]):
    """Returns rewards of one kind."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (2,), np.float64), gym.spaces.Discrete(2)

    def __init__(self, reward: Any) -> None:
        self.reward = reward

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.random(2), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self.np_random.random(2), self.reward, self.steps >= 5, False, {}


def rewarding(reward: Any) -> EnvBase:
    return GymWrapper(Rewards(reward))


class Clips(EnvBase):
    """Writes the action that it took, where that is not the one it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded((2,)))
        self.action_spec = Bounded(-1, 1, (2,))
        self.reward_spec = Unbounded((1,))

    def _set_seed(self, seed: int | None) -> None:
        pass

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDict:
        self.steps = 0
        return TensorDict({"observation": torch.zeros(2)}, [])

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        self.steps += 1
        if (tensordict["action"].abs() > 0.8).any():
            tensordict.set("action", tensordict["action"].clamp(-0.8, 0.8))
        done = torch.tensor([self.steps >= 7])
        return TensorDict({"observation": tensordict["action"], "reward": torch.ones(1), "done": done}, [])


@pytest.mark.parametrize(
    "make_env",
    [
        lambda: Sevenfold(cart_pole(), StepCounter(9)),
        *(partial(rewarding, one) for one in (np.array([1.5]), np.float32(0.1), None, 2)),
        Clips,
    ],
    ids=["own step", "array", "float32", "None", "int", "writes now and then"],
)
def test_batches_of_envs_that_do_it_their_own_way_are_torchrls(make_env: Any):
    check(make_env, None)


def test_states_that_a_policy_hands_to_the_next_step_are_torchrls():
    torch.manual_seed(0)
    make_env, policy = recurrent()
    check(make_env, policy)


class Preempts:
    """Stops every fifth step."""

    def __init__(self) -> None:
        self.calls = 0

    def collection_stopped(self) -> bool:
        self.calls += 1
        return self.calls % 5 == 0


def buffer() -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(200))


@pytest.mark.parametrize(
    "options",
    [
        {"max_frames_per_traj": 7},
        {"use_buffers": False},
        {"device": "cpu"},
        {"storing_device": "cpu"},
        {"reset_at_each_iter": True},
        {"track_traj_ids": False},
        {"init_random_frames": 48},
        {"set_truncated": True},
        {"split_trajs": True},
        {"return_same_td": True},
        {"compact_obs": True},
        {"exploration_type": ExplorationType.DETERMINISTIC},
        {"interruptor": Preempts},
        {"replay_buffer": buffer},
        {"replay_buffer": buffer, "init_random_frames": 30, "policy": Greedy},
        {"pre_collect_hook": lambda: torch.rand(1)},
        {"track_policy_version": True},
        {"trajs_per_batch": 2, "max_frames_per_traj": 5},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("envs", [cart_pole, *slow(Drifts)], ids=["one", "two"])
def test_options_mean_what_they_mean_in_torchrl(envs: Any, options: dict[str, Any]):
    check(envs, **options)


@pytest.mark.parametrize("envs", [cart_pole, Drifts], ids=["one", "two"])
def test_what_happens_between_batches_is_as_in_torchrl(envs: Any):
    def between(collector: Collector) -> None:
        done = state["done"] = state.get("done", 0) + 1
        if done % 4 == 1:
            collector.reset()
        elif done % 4 == 2:
            collector.load_state_dict(collector.state_dict())
        elif done % 4 == 3:
            Collector.rollout(collector)  # TorchRL's loop goes on where this one was, and the other way round
        elif collector.n_env > 1:
            collector.reset(index=torch.tensor([1]))

    state: dict[str, int] = {}
    check(envs, batches=8, between=between)


def test_changes_of_env_and_policy_are_noticed():
    def between(collector: Collector) -> None:
        base = collector.env.base_env
        if collector._iter == 0:
            base.set_info_dict_reader(default_info_dict_reader([]))
        if collector._iter == 1:
            collector.env.append_transform(RewardScaling(0.0, 3.0))
        if collector._iter == 2:
            collector.policy.module[0].module[0].register_forward_hook(lambda *args: args[2] * 2)
        if collector._iter == 3:
            collector._wrapped_policy = Writes()

    loop = check(partial(cart_pole, StepCounter), batches=6, between=between)
    assert type(loop._road).__name__ == "StepRoad"


def test_a_user_s_error_leaves_a_collector_that_goes_on():
    class Fails(nn.Module):
        fails = False

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            if Fails.fails:
                raise LookupError("no way")
            return torch.tensor([1, 0])

    collector = collector_of(Ours, cart_pole, Fails)
    iterator = iter(collector)
    next(iterator)
    Fails.fails = True
    with pytest.raises(LookupError):
        collector.rollout()
    Fails.fails = False
    assert collector.rollout()["observation"].shape == (24, 4)
    collector.shutdown()


class Lies(CountingEnv):
    """Observes something else after its third step."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        stepped = super()._step(tensordict)
        if self.count > 3:
            stepped["observation"] = torch.zeros(7)
        return stepped


def test_a_spec_that_lies_is_told_by_key():
    collector = collector_of(Ours, partial(Lies, max_steps=9), None)
    with pytest.raises(SpecMismatch, match=r"'observation'.*\[7\].*expected \[1\]"):
        collector.rollout()
    collector.shutdown()


@pytest.mark.parametrize(
    ("make_env", "options", "words"),
    [
        (cart_pole, {"replay_buffer": buffer, "extend_buffer": False}, "each frame into the replay buffer"),
        (EnvWithDynamicSpec, {}, "shapes that change"),
        (HeterogeneousCountingEnv, {}, "stacked lazily"),
        (CountingEnvWithString, {}, "is a NonTensor"),
    ],
)
def test_the_reason_is_told_where_torchrls_loop_runs(make_env: Any, options: Any, words: str):
    options = {name: make() if name == "replay_buffer" else make for name, make in options.items()}
    collector = collector_of(Ours, make_env, None, **options)
    collector.rollout()
    assert words in collector.loop_reason
    assert collector.stats()["fast_loop"] is False
    collector.shutdown()
