"""Each way to give a mask, for each discrete space: masks are obeyed, or a sentence names their shape and the space."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.testing import assert_close

import muster
from command import muster as command
from muster.algorithms import MAPPO, PPO, MAPPOConfig, PPOConfig
from muster.errors import SpecMismatch
from muster.rollout.collector import Collector

SPACES: dict[str, tuple[gym.Space[Any], list[int]]] = {  # and the number of choices in each part of an action
    "Discrete": (spaces.Discrete(4, start=2), [4]),
    "MultiDiscrete": (spaces.MultiDiscrete([3, 4]), [3, 4]),
    "MultiDiscrete of rows": (spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[1, 0], [0, 5]]), [2, 3, 4, 2]),
    "MultiBinary": (spaces.MultiBinary(3), [2, 2, 2]),
}
BOX = spaces.Box(-1, 1, (2,), np.float32)
OBEYED = ["right", "nothing", "one part of nothing", "floats", "lists"]
REFUSED = ["short", "long", "late", "strings", "fractions", "none but objects"]


class Rules:
    """The masks of one agent. `kind`: one of those above. An assert meets what the last mask forbids."""

    def __init__(self, space: str, kind: str) -> None:
        (self.space, self.counts), self.kind, self.first = SPACES[space], kind, True
        self.length = sum(self.counts) + {"short": -1, "long": 1}.get(kind, 0)
        self.parts = np.cumsum(self.counts)[:-1]

    def mask(self, rng: np.random.Generator) -> Any:
        flags = rng.random(self.length) < 0.5
        if self.kind == "nothing":
            flags[:] = False
        elif self.kind == "one part of nothing":
            flags[: self.counts[0]] = False
        self.allowed, self.first = flags, False
        dtype = {"floats": np.float32, "strings": str, "none but objects": object}.get(self.kind, np.int8)
        if self.kind == "none but objects":
            return np.array([self] * self.length, object)
        return (
            flags / 2 if self.kind == "fractions" else flags.tolist() if self.kind == "lists" else flags.astype(dtype)
        )

    def check(self, action: Any) -> None:
        if self.kind not in OBEYED:
            return
        chosen = (np.asarray(action) - getattr(self.space, "start", 0)).reshape(-1)
        for part, one in zip(np.split(self.allowed, self.parts), chosen, strict=True):
            assert part[one] or not part.any(), f"{action} of {self.allowed}"


class Alone(gym.Env[Any, Any]):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012  # as all envs have it

    def __init__(self, space: str, kind: str, where: str, render_mode: str | None = None) -> None:
        self.rules, self.where, self.steps, self.render_mode = Rules(space, kind), where, 0, render_mode
        self.action_space, self.observation_space = self.rules.space, BOX
        if where == "obs":
            self.observation_space = spaces.Dict(observation=BOX, action_mask=spaces.Box(0, 1, (self.rules.length,)))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._row(self.rules.kind != "late")

    def step(self, action: Any) -> Any:
        self.rules.check(action)
        self.steps += 1
        obs, info = self._row()
        return obs, 0.0, self.steps % 5 == 0, False, info

    def _row(self, masked: bool = True) -> Any:
        obs, mask = np.zeros(2, np.float32), self.rules.mask(self.np_random)
        if self.where == "obs":
            return {"observation": obs, "action_mask": np.asarray(mask, np.float32)}, {}
        return obs, {"action_mask": mask} if masked else {}

    def render(self) -> Any:
        return np.zeros((32, 32, 3), np.uint8)


class Several:
    """The same for two agents, as a parallel env of PettingZoo's."""

    metadata, possible_agents, render_mode = {"name": "several"}, ["a_0", "a_1"], None

    def __init__(self, space: str, kind: str, where: str) -> None:
        self.envs = {agent: Alone(space, kind, where) for agent in self.possible_agents}

    def observation_space(self, agent: str) -> Any:
        return self.envs[agent].observation_space

    def action_space(self, agent: str) -> Any:
        return self.envs[agent].action_space

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(self.possible_agents)
        rows = {agent: env.reset(seed=seed) for agent, env in self.envs.items()}
        return tuple({agent: row[i] for agent, row in rows.items()} for i in range(2))

    def step(self, actions: dict[str, Any]) -> Any:
        rows = {agent: self.envs[agent].step(action) for agent, action in actions.items()}
        self.agents = [agent for agent in self.agents if not rows[agent][2]]
        return tuple({agent: row[i] for agent, row in rows.items()} for i in range(5))

    def close(self) -> None:
        pass


def trained(envs: Any) -> Any:
    algorithm, config = (MAPPO, MAPPOConfig) if hasattr(envs, "groups") else (PPO, PPOConfig)
    trainer: Any = algorithm(envs, config(num_envs=2, num_steps=8, total_steps=16, num_minibatches=1, update_epochs=1))
    for metrics in trainer.train():
        losses = metrics.losses if algorithm is PPO else metrics.teams["a"].losses
        assert np.isfinite(losses.entropy)


def sampled(envs: Any) -> None:
    envs.reset(seed=0)
    for _ in range(12):
        envs.step(envs.sample_actions())


def random_frames(envs: Any) -> None:
    with Collector(envs, None, frames_per_batch=24, seed=0) as collector:
        collector.rollout()


USES = [trained, sampled, random_frames]
WAYS: list[tuple[Any, str]] = [(Alone, "infos"), (Alone, "obs"), (Several, "infos"), (Several, "obs")]


def use(how: Callable[[Any], Any], make: Callable[[], Any]) -> None:
    with muster.make_vec(make, 2, backend="serial", autoreset_mode="same_step") as envs:
        how(envs)


@pytest.mark.parametrize("how", USES)
@pytest.mark.parametrize(("env", "where"), WAYS)
@pytest.mark.parametrize("space", SPACES)
def test_masks_are_obeyed(space: str, env: Any, where: str, how: Any) -> None:
    for kind in OBEYED if where == "infos" else OBEYED[:3]:
        if kind != "lists" or how is not sampled or env is Several:
            use(how, functools.partial(env, space, kind, where))


@pytest.mark.parametrize("how", USES)
@pytest.mark.parametrize(("env", "where"), WAYS)
@pytest.mark.parametrize("space", SPACES)
def test_other_masks_are_refused_with_their_shape_and_the_space(space: str, env: Any, where: str, how: Any) -> None:
    for kind in REFUSED:
        make = functools.partial(env, space, kind, where)
        may_begin = kind == "late" and (env is Several or how is sampled)  # there is room for them from the start
        if may_begin or (where == "obs" and kind in ("late", "strings", "none but objects")):
            continue
        length = sum(SPACES[space][1]) + {"short": -1, "long": 1}.get(kind, 0)
        with pytest.raises(SpecMismatch) as caught:
            use(how, make)
        said = str(caught.value)
        sent = how is sampled and env is Alone and where == "infos" and kind in ("strings", "none but objects")
        assert sent or re.search(rf"\b{length},?\)", said), said  # the mail has carried those, and they are not kept
        assert " ".join(str(SPACES[space][0]).split()) in said
        assert "\n" not in said


def test_lists_in_infos_are_no_arrays_that_sampled_actions_could_obey() -> None:
    with pytest.raises(SpecMismatch, match="action mask of env 0"):
        use(sampled, functools.partial(Alone, "Discrete", "lists", "infos"))


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("where", ["infos", "obs"])
def test_a_mask_for_continuous_actions_is_refused_by_who_would_obey_it(where: str, deep: bool) -> None:
    class Continuous(Alone):
        def __init__(self) -> None:
            super().__init__("Discrete", "late", where)
            self.action_space = BOX
            if deep and where == "obs":
                self.observation_space = spaces.Dict(deep=self.observation_space)

        def _row(self, masked: bool = True) -> Any:
            obs, info = super()._row(masked)
            return ({"deep": obs} if deep and where == "obs" else obs), info

    with pytest.raises(SpecMismatch, match=r"action_mask.* has shape \(4,\).*Box|action mask has shape \(4,\).*Box"):
        use(trained, Continuous)
    with muster.make_vec(Continuous, 2, backend="serial", autoreset_mode="same_step") as envs:
        policy = lambda obs: torch.zeros(2, 2)  # noqa: E731
        with Collector(envs, policy, frames_per_batch=8) as collector:  # to which it is data
            assert ("action_mask" in collector.rollout().keys(True)) is False or where == "obs"


@pytest.mark.parametrize("space", SPACES)
def test_sampled_actions_refuse_a_mask_below_another_key(space: str) -> None:
    class Deep(Alone):
        def __init__(self) -> None:
            super().__init__(space, "right", "obs")
            self.observation_space = spaces.Dict(deep=self.observation_space)

        def _row(self, masked: bool = True) -> Any:
            return {"deep": super()._row(masked)[0]}, {}

    for who in (sampled, trained):
        with pytest.raises(SpecMismatch, match=r"\['deep', 'action_mask'\] has shape .* not below another key"):
            use(who, Deep)


def test_sampled_actions_refuse_masks_of_agents_that_act_by_a_box() -> None:
    class Continuous(Several):
        def action_space(self, agent: str) -> gym.Space[Any]:
            return BOX

    with pytest.raises(SpecMismatch, match=r"observation's \['action_mask'\] of '.*has shape \(4,\).*Box"):
        use(sampled, functools.partial(Continuous, "Discrete", "right", "obs"))


@pytest.mark.parametrize(("masks", "got"), [
    (np.ones((3, 4)), r"\(3, 4\), expected \(2, 4\)"), (np.ones((2, 5)), r"\(2, 5\)"), ([["a"] * 4] * 2, r"\(2, 4\)"),
    ([[1], [1, 0]], r"\(2,\)"), (torch.full((2, 4), 0.5), r"\(2, 4\)"),
])  # fmt: skip
def test_who_acts_by_hand_is_refused_other_masks_too(masks: Any, got: str) -> None:
    make = functools.partial(Alone, "Discrete", "right", "infos")
    with muster.make_vec(make, 2, backend="serial", autoreset_mode="same_step") as envs:
        ppo = PPO(envs, PPOConfig(num_envs=2, num_steps=8, total_steps=16, num_minibatches=1))
        assert ppo.act(torch.zeros(2, 2), masks=torch.eye(4)[[1, 3]]).tolist() == [3, 5]
        with pytest.raises(SpecMismatch, match=rf"masks has shape {got}.*Discrete\(4, start=2\)"):
            ppo.act(torch.zeros(2, 2), masks=masks)


def test_masks_of_another_number_of_envs_are_refused() -> None:
    class Fewer(gym.vector.SyncVectorEnv):
        def reset(self, **arguments: Any) -> Any:
            obs, infos = super().reset(**arguments)
            return obs, {"action_mask": infos["action_mask"][:1]}

    envs = Fewer([functools.partial(Alone, "Discrete", "right", "infos")] * 2, autoreset_mode="SameStep")
    with pytest.raises(SpecMismatch, match=r"shape \(1, 4\), expected \(2, 4\)"):
        PPO(envs, PPOConfig(num_envs=2, num_steps=8, total_steps=16, num_minibatches=1)).iterate()


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
@pytest.mark.parametrize("policy", ["feedforward", "gru"])
@pytest.mark.parametrize("where", ["infos", "obs"])
def test_log_probabilities_are_those_of_the_allowed_choices(where: str, policy: str, mode: str) -> None:
    sizes: dict[str, Any] = {"num_envs": 2, "num_steps": 32, "num_minibatches": 1, "update_epochs": 2}
    make = functools.partial(Alone, "Discrete", "right", where)
    with muster.make_vec(make, 2, backend="serial", autoreset_mode=mode) as envs:
        ppo = PPO(envs, PPOConfig(**sizes, learning_rate=0.05, policy=policy, memory_size=8))
        ppo.iterate()
        rollout = ppo.collect_rollout()
        with torch.no_grad():
            logits = ppo.policy(rollout.observations, None, *([rollout.memory] if policy == "gru" else []))[0]
        figures = ppo.learner.loss(rollout, 0.2)[1]
    kept = torch.ones(len(logits), dtype=torch.bool) if rollout.counts is None else rollout.counts
    odds = logits.exp() * rollout.masks
    assert_close(rollout.log_probs[kept], (odds.gather(-1, rollout.actions).squeeze(-1) / odds.sum(-1)).log()[kept])
    assert not rollout.masks[kept].all()
    assert abs(figures[3]) < 1e-6


@pytest.mark.parametrize("where", ["infos", "obs"])
def test_a_run_obeys_masks_in_evaluation_film_and_as_a_policy(where: str, tmp_path: Path) -> None:
    run, given = tmp_path / "run", f'--kwargs={{"space": "MultiDiscrete", "kind": "right", "where": "{where}"}}'
    sizes = ("--num-envs=2", "--num-steps=32", "--num-minibatches=1", "--update-epochs=2", "--total-steps=128")
    evaluated = ("--backend=serial", "--eval-every=64", "--eval-episodes=3", "--run-dir", str(run))
    result = command("train", f"{__file__}:Alone", given, *evaluated, *sizes)
    assert result.exit_code == 0, result.output
    result = command("eval", str(run), "--trust", "--episodes=6", "--video", str(tmp_path / "out.mp4"))
    assert result.exit_code == 0, result.output
    assert "Filmed an episode of 5 steps" in result.output
    policy = muster.load_policy(run, trust=True)
    env = Alone("MultiDiscrete", "right", where)
    obs, info = env.reset(seed=0)
    for _ in range(40):
        obs, *_, info = env.step(policy(obs, masks=info.get("action_mask")))
    with policy.make_vec(3, backend="serial") as envs:
        obs, infos = envs.reset(seed=0)
        for _ in range(20):
            obs, *_, infos = envs.step(policy(obs, masks=np.stack(infos["action_mask"]) if where == "infos" else None))
    seen = np.random.default_rng(0).uniform(-1, 1, (50, 2)).astype(np.float32)
    masks = [np.full((50, 7), allowed, np.float32) for allowed in (0, 1)]
    if where == "infos":
        none, every = (policy(seen, masks=mask) for mask in masks)
    else:
        none, every = (policy({"observation": seen, "action_mask": mask}) for mask in masks)
    np.testing.assert_array_equal(none, every)  # a mask that allows nothing allows all
