"""`Collector`: what a batch holds, row by row, in every autoreset mode and with every kind of policy."""

from __future__ import annotations

import io
from typing import ClassVar

import pytest
import torch
from collecting import SERIAL, Noisy, batches_equal, collect, count_env, zeros_policy
from counting_env import CountingEnv, DictEnv, NoisyEnv
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

import muster
from muster.errors import ConfigError, EnvError, SpecMismatch
from muster.rollout.collector import Collector
from muster.rollout.storage import next_observations

# ---- rows


def test_batch_has_torchrls_keys_and_shapes():
    batch, _ = collect(count_env(), zeros_policy)
    assert batch.batch_size == (2, 8)
    assert batch.names == [None, "time"]
    shapes = {key: tuple(batch[key].shape) for key in batch.keys(True, True)}
    assert shapes == {
        "observation": (2, 8, 2),
        "action": (2, 8),
        ("next", "observation"): (2, 8, 2),
        ("next", "reward"): (2, 8, 1),
        ("next", "terminated"): (2, 8, 1),
        ("next", "truncated"): (2, 8, 1),
        ("next", "done"): (2, 8, 1),
        ("collector", "traj_ids"): (2, 8),
        ("collector", "mask"): (2, 8),
    }
    assert batch["next", "reward"].dtype == torch.float32
    assert batch["next", "done"].dtype == torch.bool


@pytest.mark.parametrize("overlap", [False, True])
def test_same_step_rows_hold_the_final_observation_once(overlap):
    batch, collector = collect(count_env(length=3, truncates=True), zeros_policy, overlap=overlap)
    steps = batch["observation"][0].tolist()
    assert steps == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1]]
    after = batch["next", "observation"][0].tolist()
    assert after == [[0, 1], [0, 2], [0, 3], [1, 1], [1, 2], [1, 3], [2, 1], [2, 2]]
    assert batch["next", "truncated"][0, :, 0].tolist() == [False, False, True] * 2 + [False] * 2
    assert not batch["next", "terminated"].any()
    assert batch["next", "done"].equal(batch["next", "truncated"])
    assert batch["next", "reward"][0, :, 0].tolist() == [1, 2, 3, 1, 2, 3, 1, 2]
    assert batch["collector", "mask"].all()
    assert batch["collector", "traj_ids"].tolist() == [[0, 0, 0, 2, 2, 2, 4, 4], [1, 1, 1, 3, 3, 3, 5, 5]]
    assert collector.last_episodes.returns.tolist() == [6.0] * 4
    assert collector.last_episodes.lengths.tolist() == [3] * 4
    assert collector.last_episodes.env_ids.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("overlap", [False, True])
def test_next_step_reset_rows_are_masked(overlap):
    envs = muster.make_vec(count_env(length=3), 2, backend="serial", autoreset_mode="next_step")
    with envs:
        collector = Collector(envs, zeros_policy, frames_per_batch=16, overlap=overlap)
        batch = collector.rollout()
        assert batch["observation"][1].tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1], [1, 2], [1, 3]]
        assert batch["next", "observation"][1, 2].tolist() == [0, 3]
        assert batch["collector", "mask"][1].tolist() == [True, True, True, False] * 2
        assert batch["next", "done"][1, :, 0].tolist() == [False, False, True, False] * 2
        assert batch["collector", "traj_ids"][0, [0, 1, 2, 4, 5, 6]].tolist() == [0] * 3 + [2] * 3
        assert collector.frames == 12
        assert collector.last_episodes.returns.tolist() == [6.0] * 4
        second = collector.rollout()
        assert second["observation"][0, 0].tolist() == [2, 0]
        assert second["collector", "mask"][:, 0].all()


def test_disabled_autoreset_is_refused():
    with (
        muster.make_vec(CountingEnv, 2, backend="serial", autoreset_mode="disabled") as envs,
        pytest.raises(ConfigError, match="same_step"),
    ):
        Collector(envs, zeros_policy, frames_per_batch=16)


def test_batches_go_on_where_the_last_one_ended_and_keep_their_memory():
    with Collector(
        count_env(length=5), zeros_policy, num_envs=1, frames_per_batch=3, total_frames=7, make_vec_options=SERIAL
    ) as collector:
        batches = list(collector)
    assert [batch["observation"][0, :, 1].tolist() for batch in batches] == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]
    assert [batch["collector", "traj_ids"][0].tolist() for batch in batches] == [[0, 0, 0], [0, 0, 1], [1, 1, 1]]
    assert collector.frames == 9


# ---- options


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mode", ["same_step", "next_step"])
def test_max_frames_per_traj_truncates_and_resets(mode, overlap):
    batch, collector = collect(
        count_env(length=5),
        zeros_policy,
        options={"autoreset_mode": mode},
        max_frames_per_traj=2,
        overlap=overlap,
    )
    assert batch["observation"][0].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1], [3, 0], [3, 1]]
    assert batch["next", "observation"][1, :, 1].tolist() == [1, 2] * 4
    assert batch["next", "truncated"][1, :, 0].tolist() == [False, True] * 4
    assert batch["collector", "mask"].all()
    assert batch["collector", "traj_ids"][0].tolist() == [0, 0, 2, 2, 4, 4, 6, 6]
    assert collector.last_episodes.lengths.tolist() == [2] * 8


def test_max_frames_per_traj_does_not_cut_what_ended_by_itself():
    batch, _ = collect(count_env(length=2), zeros_policy, max_frames_per_traj=2, T=4)
    assert batch["next", "terminated"][0, :, 0].tolist() == [False, True] * 2
    assert not batch["next", "truncated"].any()
    assert batch["observation"][0, :, 0].tolist() == [0, 0, 1, 1]


def test_compact_batches_rebuild_next_observations():
    whole, _ = collect(count_env(length=3), zeros_policy, max_frames_per_traj=2)
    compact, _ = collect(count_env(length=3), zeros_policy, max_frames_per_traj=2, compact=True)
    assert ("next", "observation") not in compact.keys(True)
    assert next_observations(compact)["observation"].equal(whole["next", "observation"])
    assert compact["collector", "last", "observation"].shape == (2, 2)


def test_init_random_frames_come_before_the_policy():
    with Collector(
        count_env(),
        zeros_policy,
        num_envs=2,
        frames_per_batch=40,
        total_frames=120,
        init_random_frames=60,
        seed=3,
        make_vec_options=SERIAL,
    ) as collector:
        sums = [int(batch["action"].sum()) for batch in collector]
    assert sums[0] > 0
    assert sums[1] > 0
    assert sums[2] == 0


def test_random_batches_have_the_keys_of_the_policys():
    class Aware(nn.Module):
        def forward(self, obs, is_init):
            return torch.zeros(len(obs), dtype=torch.int64), obs.sum(-1) + torch.rand(())

    policy = TensorDictModule(Aware(), in_keys=["observation", "is_init"], out_keys=["action", "total"])
    options = {"num_envs": 2, "frames_per_batch": 16, "total_frames": 32, "init_random_frames": 16}
    callers = torch.get_rng_state()
    with Collector(count_env(), policy, make_vec_options=SERIAL, **options) as collector:
        drawn = collector.rollout()
        assert torch.get_rng_state().equal(callers)
        acted = collector.rollout()
    assert set(drawn.keys(True, True)) == set(acted.keys(True, True))
    assert drawn["total"].eq(0).all()
    assert drawn["is_init"][..., 0].equal(drawn["observation"][..., 1] == 0)


def test_dict_spaces_nest_and_actions_go_back_as_dicts():
    batch, _ = collect(DictEnv, None, T=3, seed=0)
    assert batch["eyes", "left"].shape == (2, 3, 2, 2)
    assert batch["eyes", "left"].dtype == torch.uint8
    assert batch["eyes", "right"].tolist() == [[3] * 3] * 2
    assert batch["next", "speed"].dtype == torch.float64
    expected = batch["action", "gear"] + batch["action", "steer"].sum(-1)
    assert torch.allclose(batch["next", "reward"].squeeze(-1), expected)
    assert batch["action", "lights"].shape == (2, 3, 3)


# ---- policies


def test_tensordict_policy_reads_and_writes_its_keys():
    policy = TensorDictSequential(
        TensorDictModule(lambda obs: obs * 2, in_keys=["observation"], out_keys=[("hidden", "twice")]),
        TensorDictModule(lambda h: h[:, 1].long(), in_keys=[("hidden", "twice")], out_keys=["action"]),
    )
    batch, _ = collect(count_env(length=4), policy)
    assert batch["hidden", "twice"].equal(batch["observation"] * 2)
    assert batch["action"][0].tolist() == [0, 2, 4, 6] * 2


def test_what_a_plain_policy_gives_besides_actions_is_stored():
    batch, _ = collect(count_env(length=4), Noisy())
    assert torch.allclose(batch["mean"], batch["observation"].mean(-1))


def test_recurrent_state_is_carried_and_reset_by_env():
    class Counter(nn.Module):
        in_keys = ("observation", "seen")
        out_keys = ("action", ("next", "seen"))

        def forward(self, td):
            td["action"] = td["seen"][:, 0].long()
            td["next", "seen"] = td["seen"] + 1
            return td

    lengths = [count_env(length=3), count_env(length=5)]
    with Collector(
        lengths, Counter(), frames_per_batch=14, initial_state={"seen": torch.full((1,), 10.0)}, make_vec_options=SERIAL
    ) as collector:
        first, second = collector.rollout(), collector.rollout()
    assert first["action"].tolist() == [[10, 11, 12, 10, 11, 12, 10], [10, 11, 12, 13, 14, 10, 11]]
    assert second["action"][:, 0].tolist() == [11, 12]
    assert first["next", "seen"][0, 0].item() == 11


def test_noise_that_reads_is_init_starts_afresh_with_each_episode():
    class Growing(nn.Module):
        """Reads a key that is not among its keys, as TorchRL's noise does."""

        in_keys: ClassVar = ["action"]
        out_keys: ClassVar = ["action"]
        is_init_key = "is_init"

        def forward(self, td):
            steps = td.get("_steps", torch.zeros(2, dtype=torch.int64))
            steps = torch.where(td["is_init"].squeeze(-1), 0, steps) + 1
            return td.set("_steps", steps).set("action", steps)

    policy = TensorDictSequential(TensorDictModule(zeros_policy, ["observation"], ["action"]), Growing())
    batch, _ = collect(count_env(length=3), policy)
    assert batch["action"][0].tolist() == [1, 2, 3, 1, 2, 3, 1, 2]


def test_plain_recurrent_policy_gets_and_gives_its_state():
    def policy(obs, state):
        return state["h"][:, 0].long(), {"h": state["h"] + 1}

    batch, _ = collect(count_env(length=3), policy, initial_state={"h": torch.zeros(1)})
    assert batch["action"][0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert batch["h"][0, :, 0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


def test_missing_initial_state_is_named():
    policy = TensorDictModule(lambda o, h: (h.long(), h), ["observation", "h"], ["action", ("next", "h")])
    with pytest.raises(ConfigError, match=r"initial_state=.*'h'"):
        collect(count_env(), policy)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (lambda obs: {"move": obs}, "gave 'move'; the envs need 'action'"),
        (lambda obs: torch.zeros(3, dtype=torch.int64), "2 rows"),
        (lambda obs: None, "NoneType"),
        (TensorDictModule(nn.Identity(), in_keys=["camera"], out_keys=["action"]), "camera"),
    ],
)
def test_wrong_policies_are_told_what_is_wrong(policy, message):
    with pytest.raises(SpecMismatch, match=message):
        collect(count_env(), policy)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (lambda obs, state: zeros_policy(obs), r"must return \(outputs, state\), state a dict; got Tensor"),
        (lambda obs, state: (zeros_policy(obs), {}), "the policy's next state lacks 'h'"),
    ],
)
def test_a_policy_that_gives_no_state_is_told_so(policy, message):
    with pytest.raises(SpecMismatch, match=message):
        collect(count_env(), policy, initial_state={"h": torch.zeros(4)})


def test_device_that_cannot_be_used_is_a_clear_error():
    with pytest.raises(ConfigError, match="cannot be used"):
        collect(count_env(), nn.Linear(2, 1), policy_device="xla:7")


# ---- seeds and state


@pytest.mark.parametrize("policy", [None, Noisy()])
@pytest.mark.parametrize("options", [{"backend": "thread"}, {"backend": "process", "num_workers": 2}])
def test_same_seed_gives_the_same_batch_on_every_backend(policy, options):
    expected, _ = collect(NoisyEnv, policy, num_envs=3, T=20, seed=5)
    got, _ = collect(NoisyEnv, policy, num_envs=3, T=20, seed=5, options=options)
    assert batches_equal(expected, got)


def test_other_seeds_give_other_batches_and_torchs_generator_is_left_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, _ = collect(NoisyEnv, Noisy(), seed=5)
    second, _ = collect(NoisyEnv, Noisy(), seed=6)
    assert torch.get_rng_state().equal(before)
    assert not first["action"].equal(second["action"])
    assert not first["observation"].equal(second["observation"])


class CInt(CountingEnv):
    """A simulator in C: its seed is an int."""

    def reset(self, *, seed=None, options=None):
        if seed is not None and seed >= 2**31:
            raise OverflowError("signed integer is greater than maximum")
        return super().reset(seed=seed, options=options)


def test_seeds_of_envs_fit_into_an_int():
    collect(CInt, num_envs=16, seed=0)
    with pytest.raises(EnvError, match="signed integer"), muster.make_vec(CInt, 1, **SERIAL) as envs:
        envs.reset(seed=2**31)  # the user's own seed passes as it is


def test_state_dict_goes_on_with_counters_generators_and_weights():
    def make(policy):
        return Collector(
            NoisyEnv, policy, num_envs=2, frames_per_batch=20, total_frames=60, seed=1, make_vec_options=SERIAL
        )

    class Learned(nn.Module):
        def __init__(self):
            super().__init__()
            self.best = nn.Parameter(torch.zeros(()))

        def forward(self, obs):
            return self.best.long().expand(len(obs)) + torch.randint(0, 2, (len(obs),))

    policy = Learned()
    with make(policy) as collector:
        first = collector.rollout()
        policy.best.data.fill_(7.0)
        file = io.BytesIO()
        torch.save(collector.state_dict(), file)
    file.seek(0)
    resumed = Learned()
    with make(resumed) as collector:
        collector.load_state_dict(torch.load(file, weights_only=True))
        rest = list(collector)
    assert len(rest) == 2
    assert rest[0]["action"].min() >= 7
    assert rest[0]["collector", "traj_ids"].min() > first["collector", "traj_ids"].max()
    assert not rest[0]["observation"].equal(first["observation"])


@pytest.mark.parametrize(
    "later",
    [
        lambda obs: {"action": torch.ones(1, dtype=torch.int64), "value": torch.zeros(len(obs), 3)},
        lambda obs: {"action": torch.ones(len(obs), dtype=torch.int64), "value": torch.zeros(len(obs), 1)},
        lambda obs: {"action": torch.ones(len(obs)), "value": torch.zeros(len(obs), 3)},
        lambda obs: {"action": torch.ones(len(obs), dtype=torch.int64)},
        lambda obs: {"action": torch.ones(len(obs), dtype=torch.int64), "value": None},
    ],
)
def test_outputs_that_change_within_a_batch_are_an_error(later):
    def policy(obs):
        first = {"action": torch.zeros(len(obs), dtype=torch.int64), "value": torch.zeros(len(obs), 3)}
        return first if obs[0, 1] == 0 else later(obs)

    with pytest.raises(
        SpecMismatch, match=r"the policy gave .* at step 1, expected {'action' int64 \[2\], 'value' float"
    ):
        collect(count_env(), policy)


def test_an_action_that_numpy_does_not_know_is_named():
    with pytest.raises(SpecMismatch, match="'action' as torch.bfloat16"):
        collect(count_env(), lambda obs: torch.zeros(len(obs), dtype=torch.bfloat16))
