"""What `muster train` starts with, by family of envs: values of options, and wrappers. Data, and its reader.

A family is where an env's class comes from, and what its spaces are; no row names an env. The first row that fits
counts. Rows for agents hold options of MAPPO, the others of PPO. Values come from RL Baselines3 Zoo 2.9.2
(hyperparams/ppo.yml), whose ``vf_coef`` is doubled here, or from CleanRL's files; each row's source says what else was
measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import gymnasium as gym
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from muster.algorithms.encoder import kind_of, leaves_of
from muster.errors import ConfigError, UsageError
from muster.training.preset_wrappers import atari_frames, flat, image_alone, small_images
from muster.vector.multi_agent import MultiAgentVectorEnv
from muster.vector.vector_env import VectorEnv

Actions = Literal["discrete", "continuous"]

NORMALIZED = {"normalize_observations": True, "normalize_rewards": True}


@dataclass(frozen=True)
class Preset:
    """One family's row.

    package: of the env's class, with all that lies in it; "" for any.  observations: kinds as `kind_of` has them, and
    "mixed" for Dict and Tuple; none for any.  config: values of `PPOConfig`.  env_kwargs, wrappers: for `make_vec`.
    agents: whether it is for envs with agents, and its values are of `MAPPOConfig`; packages then are as ids have them.
    modules: that the wrappers cannot do without, keys of `muster.extras.PACKAGES`.
    """

    name: str
    source: str
    config: Mapping[str, Any]
    package: str = ""
    observations: Sequence[str] = ()
    actions: Actions | None = None
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    wrappers: Sequence[Callable[[Any], Any]] = ()
    modules: Sequence[str] = ()
    agents: bool = False

    def fits(self, package: str, observations: str, actions: Actions, agents: bool) -> bool:
        return (
            self.agents == agents
            and (not self.package or f"{package}.".startswith(f"{self.package}."))
            and (not self.observations or observations in self.observations)
            and self.actions in (None, actions)
        )


# Two threads: most of the time goes into the gradients of the CNN, while the envs' workers wait.
ATARI_PPO = {
    "num_envs": 8, "num_steps": 128, "num_minibatches": 4, "update_epochs": 4, "learning_rate": 2.5e-4,
    "clip_coef": 0.1, "clip_vloss": True, "ent_coef": 0.01, "torch_threads": 2,
}  # fmt: skip
# 16 envs, many rows a minibatch, a high rate that falls to 0, both normalised: on LunarLander-v3 200 is reached after
# 172,000 steps and 282 after 1M (seed 1), where the zoo's values come to 163.
MANY_ENVS = {
    "num_envs": 16, "num_steps": 256, "num_minibatches": 16, "update_epochs": 6, "learning_rate": 1e-3,
    "gamma": 0.995, "gae_lambda": 0.97, "normalize_rewards": True,
}  # fmt: skip
# The zoo's HalfCheetah-v4 with 8 envs instead of one, 10 passes instead of 20, and a higher rate that falls to 0: 2,518
# after 125,000 steps of HalfCheetah-v5, where CleanRL's values come to 1,831 after 1M (seed 1).
WIDE = {
    "num_envs": 8, "num_steps": 64, "num_minibatches": 8, "update_epochs": 10, "learning_rate": 1e-4, "gamma": 0.98,
    "gae_lambda": 0.92, "clip_coef": 0.1, "vf_coef": 1.0, "hidden_sizes": (256, 256), "activation": "relu",
    "log_std_init": -2.0, "total_steps": 1_000_000, **NORMALIZED,
}  # fmt: skip

# One update for 2,048 env steps, in each of which all agents act.
AGENTS = {
    "num_envs": 16, "num_steps": 128, "num_minibatches": 8, "update_epochs": 10, "learning_rate": 1e-3,
    "total_steps": 1_000_000,
}  # fmt: skip
SISL = {
    "num_envs": 16, "num_steps": 256, "num_minibatches": 16, "update_epochs": 6, "learning_rate": 5e-4,
    "total_steps": 3_000_000, **NORMALIZED,
}  # fmt: skip

MELTING_POT = {
    "num_envs": 4, "num_steps": 128, "num_minibatches": 8, "update_epochs": 2, "learning_rate": 5e-4, "gamma": 0.99,
    "ent_coef": 0.01, "normalize_rewards": True, "torch_threads": 2, "total_steps": 1_000_000,
}  # fmt: skip

PRESETS = (
    Preset(
        "MPE", "measured here, 3 seeds: -13.2 on simple_spread_v3", {**AGENTS, "gamma": 0.95, "total_steps": 500_000},
        package="pettingzoo.mpe", agents=True,
    ),
    Preset("SISL", "as Box2D", SISL, package="pettingzoo.sisl", observations=("numbers",), agents=True),
    Preset(
        "Melting Pot", "IPPO, whose critic sees one agent's image", {**MELTING_POT, "critic": "own", "sprite": 8},
        package="meltingpot", agents=True,
    ),
    Preset("agents", "as SISL", {**SISL, "ent_coef": 0.01}, observations=("numbers", "bytes"), agents=True),
    Preset("agents, codes or images", "as MPE, with entropy", {**AGENTS, "ent_coef": 0.01}, agents=True),
    Preset(
        "classic control",
        "measured here, 3 seeds: CartPole-v1 500, MountainCar-v0 -143, Acrobot-v1 -89; by the zoo's values for "
        "CartPole-v1, MountainCar-v0 stays at -200",
        {"num_envs": 16, "num_steps": 64, "num_minibatches": 4, "update_epochs": 10, "learning_rate": 1e-3,
         "anneal_clip": True, **NORMALIZED, "total_steps": 100_000},
        package="gymnasium.envs.classic_control", observations=("numbers",), actions="discrete",
    ),
    Preset(
        "classic control, continuous",
        "measured here, 3 seeds: Pendulum-v1 -130 by likeliest actions; a first deviation beyond the bounds gets "
        "MountainCarContinuous-v0 out of standing still (94; 0 by the zoo's values for Pendulum-v1)",
        {**MANY_ENVS, "update_epochs": 10, "gamma": 0.99, "gae_lambda": 0.95, "normalize_observations": True,
         "log_std_init": 1.0, "total_steps": 200_000},
        package="gymnasium.envs.classic_control", observations=("numbers",), actions="continuous",
    ),
    Preset(
        "Box2D", "measured here",
        {**MANY_ENVS, "normalize_observations": True, "total_steps": 1_000_000},
        package="gymnasium.envs.box2d", observations=("numbers",),
    ),
    Preset(
        "MuJoCo", "the zoo's HalfCheetah-v4, measured here", WIDE,
        package="gymnasium.envs.mujoco", observations=("numbers",),
    ),
    Preset(
        "Atari",
        "CleanRL's ppo_atari; rewards are clipped to 1 instead of to their sign, games do not end with a life",
        {**ATARI_PPO, "clip_rewards": 1.0, "total_steps": 10_000_000},
        package="ale_py", observations=("images",), actions="discrete",
        env_kwargs={"frameskip": 1, "repeat_action_probability": 0.0}, wrappers=(atari_frames,), modules=("cv2",),
    ),
    Preset(
        "MiniGrid",
        "the zoo's envs and steps; entropy, value loss and advantages as they are: lcswillems/rl-starter-files; the "
        "rest by trial (normalised advantages are noise until a first reward: DoorKey-5x5, seed 2, was at 0 after "
        "147,000 steps, and is at 0.92 after 37,000)",
        {"num_envs": 8, "num_steps": 128, "num_minibatches": 8, "update_epochs": 8, "learning_rate": 7e-4,
         "norm_adv": False, "ent_coef": 0.01, "vf_coef": 1.0, "total_steps": 300_000},
        package="minigrid", observations=("mixed", "mixed with images", "grid", "images"), actions="discrete",
        wrappers=(image_alone,),
    ),
    Preset(
        "images", "CleanRL's ppo_atari, rewards normalised, images of at most 84 x 84",
        {**ATARI_PPO, "normalize_rewards": True, "total_steps": 1_000_000},
        observations=("images",), wrappers=(small_images,),
    ),
    Preset(
        "images among others", "as images; what is a measurement beside them is normalised",
        {**ATARI_PPO, **NORMALIZED, "total_steps": 1_000_000}, observations=("mixed with images",),
    ),
    Preset(
        "mixed observations",
        "as numbers, flattened: with positions of up to 1,000 beside a code, 21 of 22 where it was 5 before they were "
        "normalised; Blackjack-v1, which has codes alone, is as good",
        {**MANY_ENVS, "normalize_observations": True, "ent_coef": 0.01, "total_steps": 500_000},
        observations=("mixed",), wrappers=(flat,),
    ),
    Preset(
        "numbers", "as Box2D, with entropy",
        {**MANY_ENVS, "normalize_observations": True, "ent_coef": 0.01, "total_steps": 500_000},
        observations=("numbers", "bytes"), actions="discrete",
    ),
    Preset(
        "numbers, continuous", "as MuJoCo", WIDE,
        observations=("numbers", "bytes"), actions="continuous",
    ),
    Preset(
        "codes", "as numbers; codes are about 1 already",
        {**MANY_ENVS, "ent_coef": 0.01, "total_steps": 500_000},
    ),
)  # fmt: skip


def preset_for(spec: EnvSpec | None, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> Preset:
    """The row for an env with these spaces.  spec: None for an env that was never registered."""
    entry_point = spec.entry_point if spec is not None else None
    package = entry_point.partition(":")[0] if isinstance(entry_point, str) else getattr(entry_point, "__module__", "")
    return _first_fit(package, [observation_space], [action_space], agents=False)


def preset_of(envs: VectorEnv | MultiAgentVectorEnv, name: str) -> Preset:
    """The row for these envs.  name: of the env, as `env_named` takes it."""
    seen: Any = envs.single_observation_space
    acts: Any = envs.single_action_space
    if not isinstance(envs, MultiAgentVectorEnv):
        return preset_for(envs.spec, seen, acts)
    package = name.replace("pettingzoo/mpe2/", "pettingzoo/mpe/").replace("/", ".")
    return _first_fit(package, [seen[one] for one in envs.groups], [acts[one] for one in envs.groups], agents=True)


def _first_fit(
    package: str, observation_spaces: Sequence[Any], action_spaces: Sequence[Any], *, agents: bool
) -> Preset:
    kinds = set(map(_kind_of, observation_spaces))
    continuous = any(isinstance(space, spaces.Box) for space in action_spaces)
    observations = "mixed" if len(kinds) > 1 else kinds.pop()
    actions: Actions = "continuous" if continuous else "discrete"
    return next(preset for preset in PRESETS if preset.fits(package, observations, actions, agents))


def _kind_of(space: gym.Space[Any]) -> str:
    """As `kind_of`; "mixed with images" where an image or a grid is in it, and nothing that has to be flattened."""
    kind = kind_of(space)
    with suppress(ConfigError, UsageError):  # a text, for one, is flattened
        if kind == "mixed" and any(kind_of(leaf) in ("images", "grid") for leaf in leaves_of(space).values()):
            return "mixed with images"
    return kind


def preset_named(name: str) -> Preset:
    """The row of that name. Raises UsageError where there is none."""
    for preset in PRESETS:
        if preset.name == name:
            return preset
    raise UsageError(f"this version of Muster has no preset {name!r}, which the run was started with.")
