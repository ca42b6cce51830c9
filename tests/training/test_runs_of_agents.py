"""Runs of envs with agents, and policies with memory or of one's own, from `muster train` to `load_policy`."""

from __future__ import annotations

import csv
import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch

from command import muster
from muster import load_policy
from muster.algorithms.ppo_config import EpisodeWindow
from muster.envs.pettingzoo import check_env
from muster.errors import SpecMismatch, UsageError
from muster.rollout.episodes import Episodes
from muster.rollout.evaluation import evaluate
from muster.training import run_folder
from muster.training.checkpoints import read_checkpoint
from muster.training.picture import Picture, learning_curve
from muster.training.run_folder import read_columns
from slow import slow

SMALL = ("--backend=serial", "--num-envs=2", "--num-steps=32", "--num-minibatches=1", "--update-epochs=1")
GRU = ("--policy=gru", "--memory-size=8", "--sequence-length=16")

HUNT = """
import numpy as np
from gymnasium import spaces

class Hunt:
    '''Two wolves of one group and a sheep; each step a wolf gets 1 for its choice 1, the sheep 10 for its choice 0.'''

    metadata = {"name": "hunt", "render_modes": ["rgb_array"], "render_fps": 5}
    possible_agents = ["sheep_0", "wolf_0", "wolf_1"]

    def __init__(self, length=8, render_mode=None):
        self.length, self.render_mode = length, render_mode

    def observation_space(self, agent):
        return spaces.Box(-9, 9, (2 if agent == "sheep_0" else 3,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.agents, self.t = list(self.possible_agents), 0
        return self._obs(), {agent: {} for agent in self.agents}

    def _obs(self):
        return {one: self.rng.normal(0, 1, self.observation_space(one).shape).clip(-9, 9).astype(np.float32)
                for one in self.agents}

    def step(self, actions):
        self.t += 1
        obs, over = self._obs(), dict.fromkeys(self.agents, self.t == self.length)
        rewards = {one: 10.0 * (act == 0) if one == "sheep_0" else 1.0 * (act == 1) for one, act in actions.items()}
        infos, self.agents = {one: {} for one in self.agents}, [] if self.t == self.length else self.agents
        return obs, rewards, dict.fromkeys(over, False), over, infos

    def render(self):
        return np.full((32, 32, 3), 20 * self.t, np.uint8) if self.render_mode else None

    def close(self):
        pass

def make(**kwargs):
    return Hunt(**kwargs)
"""


def train(run: Path, env: str, *words: str) -> Path:
    result = muster("train", env, "--run-dir", str(run), *SMALL, *words)
    assert result.exit_code == 0, result.output
    return run


def rows_in(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def config_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "config.json").read_text())


@pytest.fixture(scope="module")
def hunt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run by MAPPO on a factory in a file, evaluated meanwhile, with statistics of observations."""
    folder = tmp_path_factory.mktemp("hunt")
    (folder / "hunting.py").write_text(HUNT)
    kept = ("--eval-every=64", "--eval-episodes=2", "--normalize-observations", "--learning-rate=0.01")
    return train(folder / "run", f"{folder / 'hunting.py'}:make", "--total-steps=192", *kept)


def test_a_factory_of_agents_is_trained_by_mappo_with_figures_for_each_group(hunt: Path):
    config, rows = config_of(hunt), rows_in(hunt)
    assert (config["algorithm"], config["critic"], config["share_params"]) == ("MAPPO", "centralised", True)
    assert config["spaces"]["groups"] == {"sheep": ["sheep_0"], "wolf": ["wolf_0", "wolf_1"]}
    assert [int(row["steps"]) for row in rows] == [64, 128, 192]
    of_team = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "explained_variance")
    for group in ("sheep", "wolf"):
        assert {f"{name}/{group}" for name in (*of_team, "mean_return")} <= rows[0].keys()
    assert not set(of_team) & rows[0].keys()
    for row in rows:
        mean, sheep, wolf = (float(row[name]) for name in ("mean_return", "mean_return/sheep", "mean_return/wolf"))
        assert mean == pytest.approx((sheep + 2 * wolf) / 3)
        assert wolf == pytest.approx(np.mean([float(row[f"mean_return/wolf/wolf_{i}"]) for i in range(2)]))
        assert "mean_return/sheep/sheep_0" not in row
        assert row["eval_return"]
    best = read_checkpoint(hunt, "best.safetensors")["evaluation"]["mean_return"]
    assert max(float(row["eval_return"]) for row in rows) == best


def test_agents_with_the_same_returns_have_columns_if_each_has_a_network():
    def returns(*rows: list[float]) -> Episodes:
        return Episodes(np.array(rows), np.ones(len(rows), np.int64), np.zeros(len(rows), np.int64))

    groups = {"wolf": ["wolf_0", "wolf_1"], "sheep": ["sheep_0"]}
    shared, apart = EpisodeWindow(groups), EpisodeWindow(groups, apart=["wolf"])
    assert np.isnan(list(apart.by_agent().values())).all()
    for window in (shared, apart):
        window.add(returns([2.0, 2.0, 5.0]))
    assert (shared.by_agent(), apart.by_agent()) == ({}, {"wolf/wolf_0": 2.0, "wolf/wolf_1": 2.0})
    shared.add(returns([0.0, 4.0, 5.0]))
    assert shared.by_agent() == {"wolf/wolf_0": 1.0, "wolf/wolf_1": 3.0}
    resumed = EpisodeWindow(groups)
    resumed.load_state_dict(shared.state_dict())
    assert resumed.by_agent() == shared.by_agent()
    assert (resumed.mean_of("wolf"), resumed.mean_of("sheep")) == (2.0, 5.0)


def test_the_curve_has_a_line_for_each_group(hunt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drawn = dict[str, list[Any]]()
    monkeypatch.setattr(
        Picture,
        "draw",
        lambda self, steps, values, *band, label, **options: drawn.update({label: [steps.tolist(), values.tolist()]}),
    )
    learning_curve(hunt, title="hunt").save(tmp_path / "curve.png")
    assert list(drawn) == ["mean of the last 100 episodes", "mean of sheep", "mean of wolf"]
    of_wolf = [[float(row[name]) for row in rows_in(hunt)] for name in ("steps", "mean_return/wolf")]
    assert drawn["mean of wolf"] == of_wolf
    assert (hunt / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_of_agents_goes_on_is_evaluated_and_filmed(hunt: Path, tmp_path: Path):
    run = Path(shutil.copytree(hunt, tmp_path / "run"))
    refused = muster("train", "--resume", str(run), "--total-steps=320")
    assert (refused.exit_code, len(refused.stderr.splitlines())) == (2, 1)
    assert "hunting.py:make. With --resume, name it anew: env by ENV." in refused.stderr
    result = muster("train", "--resume", str(run), "--total-steps=320", "--trust")
    assert result.exit_code == 0, result.output
    assert "The centralised critic sees all agents' observations: the envs give no state." in result.stdout
    assert [int(row["steps"]) for row in rows_in(run)] == [64, 128, 192, 256, 320]
    assert rows_in(run)[:3] == rows_in(hunt)
    assert rows_in(run)[4].keys() == rows_in(hunt)[0].keys()
    assert all(row["mean_return/wolf/wolf_1"] for row in rows_in(run))
    result = muster("eval", str(run), "--trust", "--episodes=3", "--video", str(tmp_path / "out.mp4"))
    assert result.exit_code == 0, result.output
    assert "MAPPO after 320 steps" in result.output
    assert "8.0 steps" in result.output
    with av.open(str(tmp_path / "out.mp4")) as film:
        assert sum(1 for _ in film.decode(video=0)) == 9


@pytest.mark.parametrize(
    "words", [(), GRU, *slow(("--share-params=false", *GRU))], ids=["feedforward", "gru", "a network each"]
)
def test_a_loaded_policy_plays_as_muster_eval_does(tmp_path: Path, words: tuple[str, ...]):
    run = train(tmp_path / "run", "pettingzoo/mpe/simple_spread_v3", "--total-steps=128", *words)
    assert "mean_return/agent" not in read_columns(run)  # there is one group
    policy = load_policy(run)
    with policy.make_vec(2, backend="serial") as envs:
        played = evaluate(envs, pickle.loads(pickle.dumps(policy)), episodes=3, seed=5)
    said = muster("eval", str(run), "--episodes=3", "--seed=5").output
    assert float(re.search(r"mean return\s+│ (-[\d.,]+),", said)[1].replace(",", "")) == pytest.approx(
        played.means.mean(), abs=0.051
    )
    # A loop over the env itself, by agent, and by group, meets the same.
    env = check_env("mpe/simple_spread_v3")()
    obs, _ = env.reset(seed=1)
    state: list[Any] = []
    for t in range(25):
        acted, *state = found if isinstance(found := policy(obs, *state), tuple) else (found,)
        assert acted.keys() == obs.keys()
        if t == 0:
            rows = {"agent": np.stack(list(obs.values()))}
            single, batch = (policy(one) for one in (rows, {"agent": rows["agent"][None]}))
            if words:
                (single, _), (batch, after) = single, batch
                assert [tensor.shape for tensor in after.values()] == [(1, 3, 8)]
            assert single["agent"].tolist() == batch["agent"][0].tolist() == list(acted.values())
            assert single["agent"].dtype == env.action_space("agent_0").dtype
        obs, *_ = env.step(acted)
    assert not env.agents


def test_a_policy_with_memory_recalls_by_its_state(tmp_path: Path):
    """Of one env, and of several; None begins an episode."""
    policy = load_policy(train(tmp_path / "run", "CartPole-v1", "--total-steps=64", *GRU, "--normalize-observations"))
    obs = np.random.default_rng(0).normal(0, 1, (6, 2, 4)).astype(np.float32)
    states: list[Any] = [None]
    for seen in obs:
        actions, state = policy(seen, states[-1])
        assert actions.shape == (2,)
        states.append(state)
    for env in range(2):
        state = None
        for t, seen in enumerate(obs[:, env]):
            action, state = policy(seen, state)
            assert action in (0, 1)
            for of_one, of_all in zip(state.values(), states[t + 1].values(), strict=True):
                torch.testing.assert_close(of_one[0], of_all[env])
    anew, kept = (next(iter(policy(obs[5], state)[1].values())) for state in (None, states[5]))
    assert not torch.allclose(anew, kept)


@pytest.mark.parametrize("words", [(), GRU], ids=["feedforward", "gru"])
def test_players_in_turn_make_no_illegal_move(tmp_path: Path, words: tuple[str, ...]):
    """Of connect four, whose observations hold masks: an illegal move ends the game, and costs 1."""
    run = train(tmp_path / "run", "pettingzoo/classic/connect_four_v3", "--total-steps=128", *words)
    policy, env = load_policy(run), check_env("classic/connect_four_v3")()
    drawing = load_policy(run, sample=True)
    for play in (policy, drawing):
        env.reset(seed=1)
        state: list[Any] = []
        for agent in env.agent_iter():
            _, _, terminated, truncated, _ = env.last()
            if terminated or truncated:
                env.step(None)
                continue
            # Who waits observes, too, as in training, and so remembers.
            found = play({one: env.observe(one) for one in env.agents}, *state)
            acted, *state = found if isinstance(found, tuple) else (found,)
            assert env.observe(agent)["action_mask"][acted[agent]]
            env.step(int(acted[agent]))
    # Of the agent alone, with its mask inside or handed over.
    env.reset()
    seen = env.observe("player_0")
    for column in range(7):
        mask = np.eye(7, dtype=np.int8)[column]
        inside = policy({"player_0": {**seen, "action_mask": mask}})
        beside = policy({"player_0": seen["observation"]}, masks={"player_0": mask})
        for found in (inside, beside):
            acted = found[0] if words else found
            assert acted == {"player_0": column}


def test_who_is_not_there_forgets_and_the_others_do_not(tmp_path: Path):
    policy = load_policy(train(tmp_path / "run", "pettingzoo/mpe/simple_spread_v3", "--total-steps=64", *GRU))
    assert {key: one.shape for key, one in policy.initial_state.items()}.popitem()[1] == (3, 8)
    obs = {f"agent_{i}": np.full(18, 0.1 * (1 + i), np.float32) for i in range(3)}
    _, state = policy(obs)
    (before,) = state.values()
    _, state = policy({name: one for name, one in obs.items() if name != "agent_1"}, state)
    (after,) = state.values()
    assert before.abs().sum(-1).gt(0).all()
    assert after.abs().sum(-1).gt(0).tolist() == [[True, False, True]]
    by_group = policy({"agent": np.stack(list(obs.values()))}, None, alive={"agent": [True, False, True]})[1]
    (after,) = by_group.values()
    assert after.abs().sum(-1).gt(0).tolist() == [[True, False, True]]


@pytest.mark.parametrize(
    ("obs", "message"),
    [
        (np.zeros(3), "expected observations and masks by group, ['sheep', 'wolf'], or by agent, ['sheep_0', 'wolf_0'"),
        ({"wolf": np.zeros((2, 3))}, "got ['wolf']."),
        ({"cow_0": np.zeros(3)}, "got ['cow_0']."),
        ({"wolf_0": np.zeros(3), "wolf_1": np.zeros(2)}, "of the agents ['wolf_0', 'wolf_1']: "),
        ({"wolf_0": np.zeros(4), "wolf_1": np.zeros(4)}, "expected observations of shape [2, 3]"),
        ({"wolf_0": {"other": np.zeros(3)}}, "expected observations of "),
        ({"sheep": np.zeros((2, 1, 2)), "wolf": np.zeros((1, 2, 3))}, "expected as many"),
    ],
    ids=["an array", "a group", "a stranger", "unequal", "another shape", "a dict", "unequal batches"],
)
def test_other_observations_of_agents_are_refused_in_one_line(hunt: Path, obs: Any, message: str):
    with pytest.raises(SpecMismatch) as caught:
        load_policy(hunt)(obs)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("obs", "stranger"),
    [({"wolf_0": np.zeros(3)}, "wolf_7"), ({"sheep": np.zeros((1, 2)), "wolf": np.zeros((2, 3))}, "cow")],
    ids=["by agent", "by group"],
)
def test_masks_of_nobody_are_refused(hunt: Path, obs: Any, stranger: str):
    with pytest.raises(SpecMismatch, match=f"expected .*masks .*{stranger}"):
        load_policy(hunt)(obs, masks={stranger: np.ones(2, bool)})


# ---- folders of strangers


@pytest.mark.parametrize(
    "groups",
    [None, [], {"wolf": "wolf_0"}, {"sheep": [], "wolf": []}, {"sheep": [[1]], "wolf": [{}]}, {"sheep": ["sheep_0"]}],
    ids=str,
)  # fmt: skip
def test_odd_groups_are_refused_in_one_line(hunt: Path, tmp_path: Path, groups: Any):
    run = Path(shutil.copytree(hunt, tmp_path / "run"))
    config = config_of(run)
    config["spaces"]["groups"] = groups
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"config\.json: (its|each of its) groups") as caught:
        load_policy(run)
    assert "\n" not in str(caught.value)


def test_sizes_of_agents_that_no_memory_holds_are_refused(hunt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = Path(shutil.copytree(hunt, tmp_path / "run"))
    kept = config_of(run)
    box = {"kind": "Box", "shape": [10**7, 10**7], "dtype": "float32", "low": 0, "high": 1}
    many = {**kept["spaces"]["groups"], "wolf": [f"wolf_{i}" for i in range(20_000)]}
    changes: list[dict[str, Any]] = [
        {"policy": "gru", "memory_size": 10**7},
        {"spaces": {**kept["spaces"], "state": {"kind": "Dict", "spaces": {"deep": box}}}},
        {"spaces": {**kept["spaces"], "groups": many}, "share_params": False},
        {"spaces": {**kept["spaces"], "groups": many}, "hidden_sizes": [64]},
    ]
    monkeypatch.setattr(run_folder, "memory_left", lambda: (4_000_000, "of a small machine"))
    for change in changes:
        (run / "config.json").write_text(json.dumps({**kept, **change}))
        with pytest.raises(UsageError, match=r"config\.json(: .*MemoryError| asks for more memory than there is)"):
            load_policy(run)
