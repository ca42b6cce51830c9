"""`MultiCollector`: replicas in processes of their own, weights that follow, faults that are named."""

from __future__ import annotations

import functools
import threading

import gymnasium as gym
import numpy as np
import pytest
import torch
from collecting import Constant, Noisy, batches_equal, zeros_policy
from counting_env import CountingEnv, NoisyEnv
from gymnasium import spaces
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from envs import Scripted
from muster.errors import (
    CannotTravel,
    ClosedError,
    CollectorError,
    ConfigError,
    RecipeError,
    SpecMismatch,
    UsageError,
    WorkerDied,
    WorkerTimeout,
)
from muster.rollout.multi_collector import MultiCollector as AnyMultiCollector
from slow import slow

# A forked process has PyTorch already; the default, a fresh one, takes seconds to import it.
MultiCollector = functools.partial(AnyMultiCollector, context="fork")


class Refusing(nn.Module):
    def forward(self, obs):
        raise ZeroDivisionError("no action is good enough")


def test_reset_at_each_iter_resets_once_before_the_first_batch():
    make, options = functools.partial(CountingEnv, length=50), {"frames_per_batch": 6, "reset_at_each_iter": True}
    with MultiCollector(make, zeros_policy, num_envs=2, num_collectors=1, **options) as collector:
        batches = [collector.rollout() for _ in range(2)]
    assert [batch["observation"][:, 0].tolist() for batch in batches] == [[[0, 0]] * 2, [[1, 0]] * 2]


def test_sync_batches_hold_all_envs_and_weights_follow():
    policy = Constant(3)
    with MultiCollector(
        functools.partial(CountingEnv, length=3), policy, num_collectors=2, num_envs=3, frames_per_batch=12
    ) as collector:
        first = collector.rollout()
        policy.best.data.fill_(8.0)
        kept = collector.rollout()
        collector.update_policy_weights_()
        after = collector.rollout()
        collector.update_policy_weights_({"best": torch.tensor(9.0)})
        last = collector.rollout()
        assert policy.best.item() == 9.0
        with pytest.raises(SpecMismatch, match="missing"):
            collector.update_policy_weights_({"worst": torch.tensor(1.0)})
    assert first.batch_size == (3, 4)
    assert first.names == [None, "time"]
    assert first["observation"][2].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0]]
    assert first["next", "observation"][0].tolist() == [[0, 1], [0, 2], [0, 3], [1, 1]]
    assert first["collector", "traj_ids"].tolist() == [[0] * 3 + [3], [1] * 3 + [4], [2] * 3 + [5]]
    assert [int(batch["action"].unique()) for batch in (first, kept, after, last)] == [3, 3, 8, 9]
    versions = [int(batch["collector", "policy_version"].unique()) for batch in (first, kept, after, last)]
    assert versions == [1, 1, 2, 3]
    assert kept["observation"][0, 0].tolist() == [1, 1]
    assert collector.frames == 48
    assert collector.last_episodes.returns.tolist() == [6.0] * 3


def test_same_seed_gives_the_same_batches_and_other_seeds_others():
    def run(seed):
        with MultiCollector(NoisyEnv, Noisy(), num_collectors=2, frames_per_batch=40, seed=seed) as collector:
            return [collector.rollout(), collector.rollout()]

    first, second, other = run(4), run(4), run(5)
    assert all(batches_equal(a, b) for a, b in zip(first, second, strict=True))
    assert not other[0]["action"].equal(first[0]["action"])
    # Neither do the two collectors of one run share anything.
    assert not first[0]["action"][0].equal(first[0]["action"][1])


@pytest.mark.parametrize("context", ["auto", pytest.param("spawn", marks=pytest.mark.slow)])
def test_fresh_processes_collect_what_forked_ones_do(context):
    def run(context):
        with AnyMultiCollector(
            NoisyEnv, Noisy(), num_collectors=2, frames_per_batch=40, seed=4, context=context
        ) as collector:
            return collector.rollout()

    assert batches_equal(run("fork"), run(context))


def test_batches_of_collectors_with_unequal_shares_keep_their_memory():
    class Frames(gym.Env):
        observation_space, action_space = spaces.Box(0, 255, (84, 84), np.uint8), spaces.Discrete(100)
        count = 0

        def reset(self, *, seed=None, options=None):
            return np.zeros((84, 84), np.uint8), {}

        def step(self, action):
            self.count += 1
            return np.full((84, 84), self.count % 256, np.uint8), 0.0, False, False, {}

    held = []
    with MultiCollector(Frames, Constant(), num_envs=3, num_collectors=2, frames_per_batch=10, sync=False) as collector:
        for i in range(60):
            batch = collector.rollout()
            held.append((batch, batch["observation"].clone()))
            assert all(torch.equal(kept["observation"], copy) for kept, copy in held)
            if len(held) > 3:
                del held[i % 3]


def test_policy_that_raises_is_told_with_its_collector():
    with (
        pytest.raises(CollectorError, match=r"collector 0 \(env 0\): ZeroDivisionError: no action is good enough"),
        MultiCollector(CountingEnv, Refusing(), num_collectors=2, frames_per_batch=4) as collector,
    ):
        collector.rollout()


def test_dead_collector_is_named(tmp_path):
    env = functools.partial(Scripted, dies_at=3, env=1, once=tmp_path / "died", action_space=spaces.Discrete(9))
    with MultiCollector(env, Constant(), num_collectors=2, frames_per_batch=10) as collector:
        with pytest.raises(WorkerDied, match=r"collector 1 \(env 1\) died: exit code 3") as caught:
            collector.rollout()
        assert caught.value.env_indices == (1,)
        with pytest.raises(ClosedError, match="make another MultiCollector"):
            collector.rollout()


def test_hanging_collector_is_named_with_the_option_that_ended_it():
    with (
        MultiCollector(
            functools.partial(Scripted, hangs_at=1, env=1),
            Constant(),
            num_collectors=2,
            frames_per_batch=10,
            collect_timeout=0.5,
        ) as collector,
        pytest.raises(WorkerTimeout, match=r"(?s)collector 1 \(env 1\).*collect_timeout=0.5.*in step"),
    ):
        collector.rollout()


def test_dead_collector_is_replaced_and_its_rows_masked(tmp_path):
    env = functools.partial(Scripted, dies_at=3, env=1, once=tmp_path / "died", action_space=spaces.Discrete(9))
    with MultiCollector(env, Constant(4), num_collectors=2, frames_per_batch=10, on_failure="restart") as collector:
        with pytest.warns(RuntimeWarning, match=r"(?s)collector 1 \(env 1\) was replaced.*exit code 3"):
            first = collector.rollout()
        second = collector.rollout()
        stats = collector.stats()["collectors"]
    assert first["collector", "mask"].tolist() == [[True] * 5, [False] * 5]
    assert first["next", "truncated"][..., 0].tolist() == [[False] * 5, [True] + [False] * 4]
    assert (stats["restarts"], stats["env_steps"]) == (1, 15)
    assert second["collector", "mask"].all()
    assert second["observation"][1, :, 2].tolist() == [0, 1, 2, 3, 4]
    assert (second["action"] == 4).all()


def test_random_batches_have_zeros_for_what_the_policy_would_give():
    policy = TensorDictSequential(
        TensorDictModule(nn.Linear(2, 1), ["observation"], ["value"]),
        TensorDictModule(zeros_policy, ["observation"], ["action"]),
    )
    with MultiCollector(
        CountingEnv, policy, num_collectors=2, frames_per_batch=8, init_random_frames=1000
    ) as collector:
        for _ in range(4):
            batch = collector.rollout()
            assert batch["value"].eq(0).all()
            batch["value"] += 5


@pytest.mark.parametrize("sync", [False, *slow(True)])
def test_random_frames_do_not_begin_again_in_a_restarted_collector(tmp_path, sync):
    with MultiCollector(
        functools.partial(Scripted, dies_at=3, once=tmp_path / "died", action_space=spaces.Discrete(9)),
        Constant(4),
        num_collectors=1,
        frames_per_batch=2,
        init_random_frames=2,
        on_failure="restart",
        sync=sync,
        seed=0,
    ) as collector:
        begun = collector.rollout()
        with pytest.warns(RuntimeWarning, match=r"collector 0 \(env 0\) was replaced"):
            died = collector.rollout()
        after = collector.rollout()
    assert (begun["action"] != 4).any()
    assert not died["collector", "mask"].any()
    assert (after["action"] == 4).all()
    assert collector.frames == 4


def test_meta_tensors_travel_and_work():
    class WithPlaceholder(Constant):
        def __init__(self):
            super().__init__(6)
            self.placeholder = nn.Parameter(torch.empty(3, device="meta"), requires_grad=False)
            self.hidden = [nn.Linear(2, 2, device="meta")]

    policy = TensorDictModule(WithPlaceholder(), in_keys=["observation"], out_keys=["action"])
    with MultiCollector(CountingEnv, policy, num_collectors=2, frames_per_batch=4, device="cpu") as collector:
        collector.update_policy_weights_()
        assert (collector.rollout()["action"] == 6).all()


def test_state_dict_goes_on_with_weights_and_without_random_frames():
    def make(policy):
        return MultiCollector(
            NoisyEnv, policy, num_collectors=2, frames_per_batch=20, total_frames=60, init_random_frames=20, seed=3
        )

    policy = Constant(5)
    with make(policy) as collector:
        first = collector.rollout()
        state = collector.state_dict()
    resumed = Constant(1)
    with make(resumed) as collector:
        collector.load_state_dict(state)
        rest = list(collector)
    assert len(first["action"].unique()) > 2
    assert [int(batch["action"].unique()) for batch in rest] == [5, 5]
    assert rest[0]["collector", "traj_ids"].min() > first["collector", "traj_ids"].max()
    assert not rest[0]["observation"].equal(first["observation"])


def test_state_dict_has_the_weights_of_a_policy_that_only_replicas_have():
    def make():
        return MultiCollector(CountingEnv, policy_factory=Constant, num_collectors=2, frames_per_batch=4)

    with make() as collector:
        collector.update_policy_weights_({"best": torch.tensor(7.0)})
        state = collector.state_dict()
        collector.update_policy_weights_({"best": torch.tensor(8.0)})
    with make() as collector:
        collector.load_state_dict(state)
        assert (collector.rollout()["action"] == 7).all()


def test_episodes_of_first_come_batches_bear_the_indices_of_their_collectors_envs():
    makers = [functools.partial(CountingEnv, length=length) for length in (1, 1, 2, 2)]
    with MultiCollector(makers, Constant(), num_collectors=2, frames_per_batch=8, sync=False) as collector:
        for _ in range(6):
            collector.rollout()
            lengths, envs = collector.last_episodes.lengths, collector.last_episodes.env_ids
            assert set(envs.tolist()) in ({0, 1}, {2, 3})
            assert (lengths == envs // 2 + 1).all()


def test_stragglers_are_stopped_at_the_threshold():
    class Slow(CountingEnv):
        def step(self, action):
            import time

            time.sleep(0.05)
            return super().step(action)

    with MultiCollector(
        [functools.partial(CountingEnv, length=1000), functools.partial(Slow, length=1000)],
        Constant(),
        num_collectors=2,
        frames_per_batch=200,
        preemptive_threshold=0.5,
    ) as collector:
        first, second = collector.rollout(), collector.rollout()
    assert first["collector", "mask"][0].all()
    done = int(first["collector", "mask"][1].sum())
    assert 0 < done < 100
    assert second["observation"][1, 0, 1].item() == done
    assert not first["observation"][1, done + 1 :].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_collectors": 3, "num_envs": 2}, "only 2 envs"),
        ({"num_collectors": 1, "make_vec_options": {"backend": "serial"}}, "backend"),
        ({"num_collectors": 1, "make_vec_options": {"groups": ["a", "b"]}}, "groups must be a dict"),
        ({"num_collectors": 1, "make_vec_options": {"wrappers": Constant}}, "wrappers must be a list of callables"),
        ({"num_collectors": 1, "make_vec_options": {"state": "no"}}, "state must be True or False, got 'no'"),
        ({"num_collectors": 0}, "num_collectors"),
        ({"num_collectors": 1, "preemptive_threshold": 2.0}, "preemptive_threshold"),
        ({"num_collectors": 1, "preemptive_threshold": 0.5, "sync": False}, "with sync=True"),
        ({"num_collectors": 1, "collect_timeout": 0}, "collect_timeout must be a number of seconds"),
        ({"num_collectors": 1, "compact": True, "replay_buffer": []}, "replay_buffer"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_starts(options, message):
    with pytest.raises((ConfigError, RecipeError), match=message):
        MultiCollector(CountingEnv, Constant(), frames_per_batch=4, **options)


# ---- policies of other kinds


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(4, dtype=torch.bfloat16)

    def forward(self, obs):
        return self.layer(obs.bfloat16()).argmax(-1)


def test_lazy_weights_are_asked_for_or_built_by_the_factory():
    with pytest.raises(UsageError, match=r"'layer.weight' has no shape yet.*policy_factory"):
        MultiCollector(CountingEnv, Lazy(), num_collectors=2, frames_per_batch=4)
    with MultiCollector(CountingEnv, policy_factory=Lazy, num_collectors=2, frames_per_batch=4) as collector:
        collector.rollout()
        weights = collector.state_dict()["policy"]
        with pytest.raises(SpecMismatch, match=r"the weights are not the replicas': missing \['layer.bias'\]"):
            collector.update_policy_weights_({"layer.weight": weights["layer.weight"]})
    assert {name: (tuple(w.shape), w.dtype) for name, w in weights.items()} == {
        "layer.weight": ((4, 2), torch.bfloat16),
        "layer.bias": ((4,), torch.bfloat16),
    }


def test_a_method_of_a_module_has_the_modules_weights():
    policy = Constant(3)
    with MultiCollector(CountingEnv, policy.forward, num_collectors=2, frames_per_batch=4) as collector:
        assert collector.rollout()["action"].unique().tolist() == [3]
        policy.best.data.fill_(8.0)
        collector.update_policy_weights_()
        assert collector.rollout()["action"].unique().tolist() == [8]


def test_outputs_that_numpy_does_not_know_are_named():
    class Half(Constant):
        def forward(self, obs):
            return {"action": super().forward(obs), "value": obs.mean(-1).bfloat16()}

    with pytest.raises(SpecMismatch, match=r"'value' as torch.bfloat16.*x.float\(\)"):
        MultiCollector(CountingEnv, Half(), num_collectors=2, frames_per_batch=4)


class Twofold(nn.Module):
    """Acts the first of its two weights, which are registered in one or the other order."""

    def __init__(self, backwards: bool = True) -> None:
        super().__init__()
        names = ["first", "second"][:: -1 if backwards else 1]
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros(1)))

    def forward(self, obs):
        return self.first.long().expand(len(obs))


def test_weights_go_by_name_whatever_their_order():
    policy = Twofold(backwards=False)
    with torch.no_grad():
        policy.first.fill_(3.0)
        policy.second.fill_(5.0)
    with MultiCollector(CountingEnv, policy, policy_factory=Twofold, num_collectors=2, frames_per_batch=4) as collector:
        assert collector.rollout()["action"].unique().tolist() == [3]


def test_factories_that_fail_or_build_something_else_are_told_with_their_collector():
    lock = threading.Lock()
    options = {"num_collectors": 2, "frames_per_batch": 4}
    with pytest.raises(CannotTravel, match=r"policy_factory.<closure>.lock.*Let the factory build it"):
        MultiCollector(CountingEnv, policy_factory=lambda: (lock, Constant())[1], **options)
    with pytest.raises(CollectorError, match=r"collector 0 \(env 0\): ZeroDivisionError"):
        MultiCollector(CountingEnv, policy_factory=lambda: 1 / 0, **options)
    with pytest.raises(SpecMismatch, match=r"policy of collector 0 .*'best', 'first', 'second'\] are \[None"):
        MultiCollector(CountingEnv, Constant(), policy_factory=Twofold, **options)
