"""What `muster train` starts with, by family of envs."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

import muster
import programs
from command import muster as run_muster
from envs import Scripted
from muster.algorithms import PPO, MAPPOConfig, PPOConfig
from muster.training.presets import PRESETS, Preset, preset_for

NUMBERS, BIG_IMAGE = spaces.Box(-1, 1, (4,), np.float32), spaces.Box(0, 255, (96, 96, 3), np.uint8)
GRID = spaces.Dict({"image": spaces.Box(0, 255, (7, 7, 3), np.uint8), "mission": spaces.Text(9)})
TURNS, TORQUES = spaces.Discrete(2), spaces.Box(-1, 1, (2,), np.float32)


@pytest.mark.parametrize(
    ("entry_point", "observations", "actions", "name"),
    [
        ("gymnasium.envs.classic_control.cartpole:CartPoleEnv", NUMBERS, TURNS, "classic control"),
        ("gymnasium.envs.classic_control:Other", NUMBERS, TORQUES, "classic control, continuous"),
        ("gymnasium.envs.box2d.lunar_lander:LunarLander", NUMBERS, TURNS, "Box2D"),
        ("gymnasium.envs.box2d.bipedal_walker:BipedalWalker", NUMBERS, TORQUES, "Box2D"),
        ("gymnasium.envs.box2d.car_racing:CarRacing", BIG_IMAGE, TORQUES, "images"),
        ("gymnasium.envs.mujoco.ant_v5:AntEnv", NUMBERS, TORQUES, "MuJoCo"),
        ("ale_py.env:AtariEnv", spaces.Box(0, 255, (210, 160, 3), np.uint8), TURNS, "Atari"),
        ("ale_py.env:AtariEnv", spaces.Box(0, 255, (128,), np.uint8), TURNS, "numbers"),
        ("minigrid.envs:DoorKeyEnv", GRID, TURNS, "MiniGrid"),
        (
            "minigrid.envs:DoorKeyEnv",
            spaces.Box(0, 255, (2835,), np.uint8),
            TURNS,
            "numbers",
        ),  # as FlatObsWrapper has it
        ("my_game:Game", spaces.Box(0, 255, (64, 64), np.uint8), TURNS, "images"),
        ("minigrid_like.envs:Other", GRID, TURNS, "mixed observations"),  # the mission is flattened
        ("minigrid_like.envs:Other", spaces.Dict(image=GRID["image"], at=NUMBERS), TURNS, "images among others"),
        ("minigrid.envs:Other", spaces.Dict(image=GRID["image"], at=NUMBERS), TURNS, "MiniGrid"),
        ("my_game:Game", spaces.Tuple([TURNS, spaces.Dict(a=BIG_IMAGE)]), TORQUES, "images among others"),
        ("my_game:Game", spaces.Dict(a=NUMBERS, b=spaces.Box(0, 9, (9, 9), np.uint8)), TURNS, "mixed observations"),
        ("my_game:Game", spaces.Dict(a=NUMBERS, b=spaces.Sequence(TURNS)), TURNS, "mixed observations"),
        ("gymnasium.envs.toy_text.blackjack:BlackjackEnv", spaces.Tuple([TURNS, TURNS]), TURNS, "mixed observations"),
        ("gymnasium.envs.toy_text.taxi:TaxiEnv", spaces.Discrete(500), TURNS, "codes"),
        ("my_game:Game", NUMBERS, TURNS, "numbers"),
        ("my_game:Game", NUMBERS, TORQUES, "numbers, continuous"),
        (None, NUMBERS, TURNS, "numbers"),
    ],
)
def test_an_env_has_the_row_of_its_family(entry_point: str | None, observations: Any, actions: Any, name: str):
    spec = EnvSpec("Some-v0", entry_point=entry_point) if entry_point else None
    assert preset_for(spec, observations, actions).name == name


def test_there_are_few_rows_of_valid_options_and_sources():
    assert len([preset for preset in PRESETS if not preset.agents]) <= 14
    assert len([preset for preset in PRESETS if preset.agents]) <= 6
    assert len({preset.name for preset in PRESETS}) == len(PRESETS)
    for preset in PRESETS:
        (MAPPOConfig if preset.agents else PPOConfig)(**preset.config)
        assert preset.source
        assert "-v" not in preset.package


def row(name: str) -> Preset:
    return next(preset for preset in PRESETS if preset.name == name)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("MiniGrid", GRID, GRID["image"]),
        ("MiniGrid", GRID["image"], GRID["image"]),
        ("mixed observations", spaces.Dict({"a": NUMBERS, "b": spaces.Discrete(3)}), spaces.Box(-1, 1, (7,))),
        ("images", spaces.Box(0, 255, (64, 64, 3), np.uint8), spaces.Box(0, 255, (64, 64, 3), np.uint8)),
        ("images", spaces.Box(0, 255, (3, 96, 96), np.uint8), spaces.Box(0, 255, (3, 96, 96), np.uint8)),
        ("images", spaces.Box(0, 200, (96, 96, 3), np.uint8), spaces.Box(0, 200, (96, 96, 3), np.uint8)),
        ("images", spaces.Box(0, 255, (2, 96, 96, 3), np.uint8), spaces.Box(0, 255, (2, 96, 96, 3), np.uint8)),
        ("images", BIG_IMAGE, spaces.Box(0, 255, (84, 84, 3), np.uint8)),
        ("images", spaces.Box(0, 255, (100, 90), np.uint8), spaces.Box(0, 255, (84, 84), np.uint8)),
    ],
    ids=str,
)
def test_wrappers_make_what_ppo_takes(name: str, before: Any, after: Any):
    with muster.make_vec(Scripted, 2, backend="serial", env_kwargs={"obs_space": before},
                         wrappers=row(name).wrappers) as envs:  # fmt: skip
        assert envs.single_observation_space.shape == after.shape
        obs, _ = envs.reset(seed=0)
        assert obs.shape == (2, *after.shape)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Tuple([spaces.Discrete(3), spaces.MultiBinary(2)]),  # codes alone
        spaces.Dict(at=spaces.Box(-1000, 1000, (2,), np.float64), key=spaces.Discrete(2)),
        spaces.Dict(image=spaces.Box(0, 255, (3, 3), np.uint8)),
    ],
    ids=str,
)
def test_mixed_observations_are_trained_on_normalised(space: Any):
    preset = row("mixed observations")
    options = {**preset.config, "num_envs": 2, "num_steps": 16, "num_minibatches": 2}
    with muster.make_vec(Scripted, 2, backend="serial", env_kwargs={"obs_space": space},
                         wrappers=preset.wrappers, autoreset_mode="same_step") as envs:  # fmt: skip
        ppo = PPO(envs, PPOConfig(**options))
        ppo.iterate()
        assert ppo.observations is not None
        assert ppo.observations.moments.count == 32


@pytest.mark.parametrize("env_id", ["ALE/Pong-v5", "PongNoFrameskip-v4"])
def test_atari_has_four_grey_frames_of_four_steps_each(env_id: str):
    pytest.importorskip("cv2")
    importlib.import_module("ale_py")
    with muster.make_vec(env_id, 1, backend="serial") as envs:
        preset = preset_for(envs.spec, envs.single_observation_space, envs.single_action_space)
    assert preset.name == "Atari"
    with muster.make_vec(env_id, 1, backend="serial", env_kwargs=preset.env_kwargs, wrappers=preset.wrappers) as envs:
        obs, infos = envs.reset(seed=0)
        assert obs.shape == (1, 4, 84, 84)
        before = infos["episode_frame_number"][0]
        for _ in range(3):
            *_, infos = envs.step(np.array([0]))
        assert infos["episode_frame_number"][0] - before == 12


@pytest.mark.slow
def test_the_preset_makes_the_same_env_of_all_names_of_a_game():
    pytest.importorskip("cv2")
    done = programs.run("-c", GAME_BY_ITS_NAMES, imports=programs.TORCH, check=True)
    assert done.stdout == "the same\n"


GAME_BY_ITS_NAMES = """
import numpy as np, muster
from muster.training.presets import preset_for
def frames(env_id):
    with muster.make_vec(env_id, 2, backend="serial") as envs:
        preset = preset_for(envs.spec, envs.single_observation_space, envs.single_action_space)
    assert preset.name == "Atari"
    with muster.make_vec(env_id, 2, backend="serial", env_kwargs=preset.env_kwargs, wrappers=preset.wrappers) as envs:
        seen = [envs.reset(seed=5)[0]]
        for actions in np.random.default_rng(0).integers(envs.single_action_space.n, size=(60, 2)):
            seen.append(envs.step(actions)[0])
    return np.array(seen)
old, sticky, skipping, new = map(frames, ("PongNoFrameskip-v4", "PongNoFrameskip-v0", "Pong-v4", "ALE/Pong-v5"))
assert len(np.unique(new)) > 3
assert all(np.array_equal(one, new) for one in (old, sticky, skipping))
print("the same")
"""


def test_envs_in_a_presets_wrappers_share_processes_as_they_do_without():
    counts = []
    for wrappers in ((), row("mixed observations").wrappers):
        with muster.make_vec("CartPole-v1", 9, wrappers=wrappers) as envs:
            counts.append(len(envs.stats()["workers"]))
    assert counts[0] == counts[1] < 9


def test_a_missing_package_of_a_preset_is_named_before_any_env_is_made(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cv2", None)
    importlib.import_module("ale_py")
    result = run_muster("train", "ALE/Pong-v5", "--num-workers", "1")
    assert result.exit_code == 1
    assert "Training ALE/Pong-v5 needs OpenCV. Install it with: pip install 'muster-rl[train]'" in result.output
    assert "Traceback" not in result.output


def test_a_preset_that_is_gone_is_named(tmp_path: Path):
    run = tmp_path / "run"
    run_muster("train", "CartPole-v1", "--total-steps", "1", "--backend", "serial", "--run-dir", str(run))
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "preset": "tea"}))
    result = run_muster("eval", str(run))
    assert result.exit_code == 1
    assert "has no preset 'tea'" in result.output
