"""Presets of `muster train` by family of envs: the rows of presets.toml, and which of them fits."""

from __future__ import annotations

import functools
import operator
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from muster.algorithms.encoder import kind_of, leaves_of
from muster.errors import ConfigError, UsageError
from muster.training import preset_wrappers
from muster.vector.multi_agent import MultiAgentVectorEnv
from muster.vector.vector_env import VectorEnv

Actions = Literal["discrete", "continuous"]


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


def _rows() -> Iterator[Preset]:
    file = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    for row in file["preset"]:
        shared = [file["options"][name] for name in row.pop("as", ())]
        config = functools.reduce(operator.or_, [*shared, row.pop("config", {})])
        wrappers = [getattr(preset_wrappers, name) for name in row.pop("wrappers", ())]
        yield Preset(config=config, wrappers=wrappers, **row)


PRESETS = tuple(_rows())


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


def _first_fit(package: str, seen: Sequence[Any], acts: Sequence[Any], *, agents: bool) -> Preset:
    kinds = set(map(_kind_of, seen))
    observations = "mixed" if len(kinds) > 1 else kinds.pop()
    actions: Actions = "continuous" if any(isinstance(space, spaces.Box) for space in acts) else "discrete"
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
