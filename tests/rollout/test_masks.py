"""Masks reach policies and batches: those of agents, and of single agents from infos and observations."""

from __future__ import annotations

import functools

import gymnasium as gym
import numpy as np
import pytest
import torch
from collecting import count_env
from gymnasium import spaces
from labelled_env import KINDS
from tensordict.nn import TensorDictModule
from torch import nn

import muster
from muster.rollout.collector import Collector
from muster.rollout.evaluation import evaluate
from muster.rollout.multi_collector import MultiCollector
from muster.rollout.storage import next_observations

pytest.importorskip("pettingzoo.classic")
# SWIG's modules crash the interpreter where their warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore")
SERIAL = {"backend": "serial"}
CONNECT_FOUR = "pettingzoo/classic/connect_four_v3"


def collector_of(kind, envs, policy=None, *, num_envs=2, T=100, **options):
    options = {"num_envs": num_envs, "frames_per_batch": num_envs * T, "seed": 0, **options}
    if kind == "Collector":
        return Collector(envs, policy, make_vec_options=SERIAL, **options)
    return MultiCollector(envs, policy, num_collectors=2, context="fork", **options)


def drawn(masks):
    return torch.multinomial(masks.flatten(0, -2).float(), 1).view(masks.shape[:-1])


def of_player(obs, masks):
    return {"player": drawn(masks["player"])}


class OfPlayer(nn.Module):
    def forward(self, obs, *, masks=None):
        return of_player(obs, masks)


def remembering(obs, memory, masks):
    return of_player(obs, masks), {"steps": memory["steps"] + 1}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", [of_player, OfPlayer(), remembering])
def test_a_plain_policy_that_obeys_masks_makes_no_illegal_move(kind, policy):
    state = {"steps": torch.zeros(1)} if policy is remembering else None
    with collector_of(kind, CONNECT_FOUR, policy, initial_state=state) as collector:
        batch = collector.rollout()
        lengths = collector.last_episodes.lengths
    action, masks = batch["player", "action"].unsqueeze(-1), batch["player", "action_mask"]
    assert masks.gather(-1, action).squeeze(-1)[batch["player", "acting"]].all()
    ends = batch["next", "player", "reward"][batch["next", "done"].squeeze(-1)].flatten(1)
    assert len(ends)
    assert (ends.sum(1) == 0).all()  # a winner and a loser; an illegal move costs one player 1 and gives nobody any
    assert (lengths >= 7).all()


def test_an_evaluation_gives_masks_to_the_policy():
    with muster.make_vec(CONNECT_FOUR, 2, backend="serial", autoreset_mode="same_step") as envs:
        played = evaluate(envs, of_player, episodes=6, seed=0)
    assert (played.returns.sum(1) == 0).all()


def test_a_plain_policy_gets_by_name_what_agents_have():
    seen = {}

    def policy(obs, env_state, alive, masks, **others):
        seen.update(others, env_state=env_state, alive=alive, masks=masks)
        return {group: torch.zeros(*alive[group].shape, 5) for group in alive}

    options = {**SERIAL, "env_kwargs": {"continuous_actions": True}}
    with Collector(
        "pettingzoo/mpe2/simple_tag_v3", policy, num_envs=2, frames_per_batch=4, make_vec_options=options
    ) as collector:
        batch = collector.rollout()
    assert seen.keys() == {"env_state", "alive", "masks"}
    assert seen["env_state"].equal(batch["state"][:, 1])
    assert {group: rows.shape for group, rows in seen["alive"].items()} == {"adversary": (2, 3), "agent": (2, 1)}
    assert all(rows.dtype is torch.bool for rows in seen["alive"].values())
    assert seen["masks"] == {}


class Compiled(nn.Module):
    """As torch.compile wraps a module."""

    def __init__(self, module):
        super().__init__()
        self._orig_mod = module

    def forward(self, *args, **kwargs):
        return self._orig_mod(*args, **kwargs)


class Asks(nn.Module):
    def forward(self, obs, masks="none", env_state=None, alive=None):
        return {"action": torch.zeros(len(obs), dtype=torch.int64), "alive": alive}


@pytest.mark.parametrize("policy", [Asks(), Compiled(Asks()), Asks().forward, functools.partial(Asks().forward)])
def test_a_single_agent_is_alive(policy):
    with Collector(count_env(), policy, num_envs=2, frames_per_batch=4, make_vec_options=SERIAL) as collector:
        assert collector.rollout()["alive"].tolist() == [[True, True]] * 2


@pytest.mark.parametrize(
    "policy",
    [
        lambda obs, **masks: obs.argmax(-1) + len(masks),
        lambda obs, *masks: obs.argmax(-1) + len(masks),
        lambda obs, alive=None, /: obs.argmax(-1) + (alive is not None),
        lambda masks: masks.argmax(-1),
        functools.partial(torch.argmax, dim=-1),  # of a builtin, which has no signature
    ],
)
def test_what_no_parameter_takes_by_name_is_not_given(policy):
    with Collector(count_env(), policy, num_envs=2, frames_per_batch=4, make_vec_options=SERIAL) as collector:
        batch = collector.rollout()
    assert batch["action"].equal(batch["observation"].argmax(-1))


# ---- single agents

TAXI = next(name for name in ("Taxi-v4", "Taxi-v3") if name in gym.registry)  # of whatever Gymnasium is installed


class Masked(gym.Env):
    """Observes [number, episode, step] and, in the infos or the observation, a mask that `allowed` computes from these.

    Episodes end after 3 to 5 steps. `gives`: "infos", "lists" of Python in the infos, "sometimes" in the infos, "obs".
    The step of number `fails` raises, in the first episode.
    """

    def __init__(self, gives: str, number: int, fails: int = -1) -> None:
        self.gives, self.number, self.fails, self.episode, self.count = gives, number, fails, -1, 0
        self.action_space = spaces.Discrete(4, start=2)
        self.observation_space = spaces.Box(-1, 99, (3,), np.float32)
        if gives == "obs":
            parts = {"action_mask": spaces.MultiBinary(4), "observation": self.observation_space}
            self.observation_space = spaces.Dict(parts)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.count = self.episode + 1, 0
        return self._row()

    def step(self, action):
        self.count += 1
        if self.count == self.fails and self.episode == 0:
            raise RuntimeError("the motor is stuck")
        obs, info = self._row()
        return obs, 0.0, self.count >= 3 + (self.number + self.episode) % 3, False, info

    def _row(self):
        obs = np.array([self.number, self.episode, self.count], np.float32)
        mask = bits_of(torch.from_numpy(obs)).numpy().astype(np.int8)
        if self.gives == "obs":
            return {"observation": obs, "action_mask": mask}, {}
        if self.gives == "sometimes" and mask[0]:
            return obs, {"other": 1}
        return obs, {"action_mask": mask.tolist() if self.gives == "lists" else mask}


def bits_of(obs):
    code = obs @ torch.tensor([5.0, 3.0, 1.0]) + 1
    return torch.stack([code // 2**bit % 2 == 1 for bit in range(4)], -1)


def allowed(obs, gives="infos"):
    """The masks of observations as collectors have them: all True where the env gives none, or allows nothing."""
    bits = bits_of(obs)
    return bits | ~bits.any(-1, keepdim=True) | ((gives == "sometimes") & bits[..., :1])


def masked_envs(gives, **kwargs):
    return [functools.partial(Masked, gives, number, **kwargs) for number in range(3)]


def check_masks(batch, gives):
    kept = batch["collector", "mask"]
    assert batch["action_mask"].dtype is torch.bool
    assert batch["action_mask"][kept].equal(allowed(batch["observation"], gives)[kept])
    assert not batch["action_mask"].all()
    after = batch["next"] if ("next", "observation") in batch.keys(True) else next_observations(batch)
    assert after["action_mask"][kept].equal(allowed(after["observation"], gives)[kept])
    index = batch["action"].unsqueeze(-1) - 2
    assert batch["action_mask"].gather(-1, index).all()


def chosen(obs, masks):
    return drawn(masks) + 2


MODES = ["same_step", "next_step"]


@pytest.mark.parametrize("gives", ["infos", "lists", "sometimes", "obs"])
@pytest.mark.parametrize("policy", [None, chosen])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", [{}, {"compact": True}, {"max_frames_per_traj": 2}, {"overlap": True}])
def test_masks_in_a_batch_are_those_that_the_env_gave(gives, policy, mode, options):
    options = {"make_vec_options": {**SERIAL, "autoreset_mode": mode}, **options}
    with Collector(masked_envs(gives), policy, frames_per_batch=90, seed=0, **options) as collector:
        for _ in range(2):
            check_masks(collector.rollout(), gives)


@pytest.mark.parametrize("gives", ["infos", "sometimes", "obs"])
@pytest.mark.parametrize("mode", MODES)
def test_masks_of_gymnasiums_own_vector_envs(gives, mode):
    envs = gym.vector.SyncVectorEnv(masked_envs(gives), autoreset_mode=gym.vector.AutoresetMode[mode.upper()])
    with Collector(envs, chosen, frames_per_batch=90, seed=0) as collector:
        check_masks(collector.rollout(), gives)
    envs.close()


@pytest.mark.parametrize("gives", ["infos", "obs"])
@pytest.mark.parametrize("policy", [None, chosen])
def test_masks_from_several_processes(gives, policy):
    with collector_of("MultiCollector", masked_envs(gives), policy, num_envs=3, T=20, compact=True) as collector:
        for _ in range(2):
            check_masks(collector.rollout(), gives)
        collector.reset()
        check_masks(collector.rollout(), gives)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", [None, lambda obs, masks=None: drawn(masks)])
def test_a_taxi_drives_through_no_wall(kind, policy):
    with collector_of(kind, TAXI, policy, T=300) as collector:
        batch = collector.rollout()
    assert batch["action_mask"].shape == (2, 300, 6)
    assert batch["action_mask"].gather(-1, batch["action"].unsqueeze(-1)).all()
    assert (batch["next", "reward"] > -10).all()  # of a passenger who gets in or out where none may


def test_tensordict_policies_read_masks():
    policy = TensorDictModule(lambda masks: drawn(masks) + 2, in_keys=["action_mask"], out_keys=["action"])
    with Collector(masked_envs("infos"), policy, frames_per_batch=60, make_vec_options=SERIAL) as collector:
        check_masks(collector.rollout(), "infos")


def test_the_observation_keeps_its_mask_as_the_env_gives_it():
    seen = []

    def policy(obs, masks):
        seen.append((obs["action_mask"], masks))
        return chosen(obs, masks)

    with Collector(masked_envs("obs"), policy, frames_per_batch=6, make_vec_options=SERIAL) as collector:
        collector.rollout()
    assert all(own.dtype is torch.int8 and own.equal(masks.to(torch.int8)) for own, masks in seen)


@pytest.mark.parametrize("mode", MODES)
def test_all_is_allowed_in_the_row_of_a_lost_env(mode):
    options = {**SERIAL, "on_failure": "restart", "autoreset_mode": mode}
    collector = Collector(masked_envs("infos", fails=2), chosen, frames_per_batch=9, make_vec_options=options)
    with collector, pytest.warns(RuntimeWarning, match="the motor is stuck"):
        batch = collector.rollout()
    check_masks(batch, "infos")
    assert batch["next", "action_mask"][:, 1].all()


def test_other_infos_of_that_name_are_no_masks():
    class Other(Masked):
        def _row(self):
            return super()._row()[0], {"action_mask": np.ones(3, np.int8)}

    policy = lambda obs: torch.full((len(obs),), 2)  # noqa: E731
    make = functools.partial(Other, "infos", 0)
    with Collector(make, policy, frames_per_batch=4, make_vec_options=SERIAL) as collector:
        assert "action_mask" not in collector.rollout()
