"""Melting Pot: envs of dm_env's API with timesteps that are lists, one entry for each player."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from muster.envs.agents import AgentsEnv, AgentSpecs, Row, Step
from muster.envs.attributes import chain
from muster.envs.dm_env import DISCOUNTS, seed_generators, space_of
from muster.envs.groups import Agent
from muster.envs.light_melting_pot import load_substrates, melting_pot_package
from muster.errors import ConfigError, RecipeError, WrongType
from muster.recipes.known_envs import OfKnownLibrary

_MAX_SEED = 2**32 - 1
_WORLD = "WORLD.RGB"


def is_list_shaped(env: Any) -> bool:
    """Returns whether a dm_env env has several players."""
    return isinstance(env.action_spec(), (list, tuple)) and isinstance(env.observation_spec(), (list, tuple))


class Players(AgentsEnv):
    """A Melting Pot substrate. Its players are ``player_0``, ``player_1``, ...; none ever leaves before the end.

    Observations that are equal for all players (``WORLD.RGB``, ``COLLECTIVE_REWARD``) are kept once, as shared ones.
    Discounts are one for all players, or one for each: the last step terminates the episode where all are 0. Where one
    differs from what this says (see `DmEnv`), all are reported as ``info["discount"]``: by group, float64 ``[A]``.
    Seeds reach the substrate's own generators; a substrate that draws from others as well is not reproducible.
    """

    def __init__(self, env: Any, groups: Mapping[Agent, str] | None) -> None:
        self._players: list[Agent] = [f"player_{i}" for i in range(len(env.action_spec()))]
        observed = [dict(spec) for spec in env.observation_spec()]
        shared = {
            key: one for key, one in observed[0].items() if key.startswith("WORLD.") or key == "COLLECTIVE_REWARD"
        }
        own = [{key: one for key, one in spec.items() if key not in shared} for spec in observed]
        specs = AgentSpecs(
            self._players,
            {player: space_of(one, f"observation[{player!r}]") for player, one in zip(self._players, own, strict=True)},
            {
                player: space_of(one, f"action[{player!r}]")
                for player, one in zip(self._players, env.action_spec(), strict=True)
            },
            shared_space=spaces.Dict([(key, space_of(shared[key], "observation")) for key in sorted(shared)]),
        )
        super().__init__(env, specs, groups)
        self.metadata[DISCOUNTS] = True
        self._members = {
            name: [self._players.index(player) for player in players] for name, players in self.layout.groups.items()
        }
        self._shared_keys = tuple(shared)
        self._world: Any = None  # the last picture of envs that have no `observation`
        self._started = False
        is_substrate = any(hasattr(one, "_rebuild_environment") for one in chain(env))
        if is_substrate and all(isinstance(space, spaces.Discrete) for space in self.layout.action_spaces.values()):
            # Melting Pot looks actions up in tables, which takes longer with NumPy's numbers.
            self._splits = [(name, np.ndarray.tolist) for name in self.layout.action_spaces]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Row, dict[str, Any]]:
        if seed is not None and not _seed_rebuilds(self.env, seed):
            seed_generators(self.env, seed)
        timestep = self.env.reset()
        self._start_episode()
        return self._row_of(timestep, [0.0] * len(self._players)), {}

    def step(self, actions: dict[str, Any]) -> Step:
        timestep = self.env.step(list(self._chosen(actions, self._players).values()))
        over, discount = timestep.last(), timestep.discount
        terminated = over and bool(np.all(np.equal(discount, 0.0)))
        row = self._row_of(timestep, timestep.reward, over=over, terminated=terminated)
        return self._end_of_step(row, over, self._discount_info(discount, 0.0 if terminated else 1.0))

    def render(self) -> Any:
        """The whole world as it is now, uint8 ``[H, W, 3]``; None where the env does not provide it."""
        observation = getattr(self.env, "observation", None)
        return observation()[0].get(_WORLD) if self._started and callable(observation) else self._world

    def _discount_info(self, discount: Any, expected: float) -> dict[str, Any]:
        """The info about discounts; empty where all are as `expected`. discount: one for all players, or one for each.

        None stands for the discount that is expected.
        """
        if discount is None or (isinstance(discount, float) and discount == expected):
            return {}
        each = [discount] * len(self._players) if np.ndim(discount) == 0 else discount
        by_player = np.array([expected if one is None else one for one in each], np.float64)
        if (by_player == expected).all():
            return {}
        return {"discount": {name: by_player[players] for name, players in self._members.items()}}

    def _row_of(self, timestep: Any, rewards: Sequence[Any], *, over: bool = False, terminated: bool = False) -> Row:
        self._start_row()
        self._started = True
        observations, truncated = list(timestep.observation), over and not terminated
        first = observations[0]
        # Keeping a picture makes the env write the next ones to other memory, which is not in the CPU's caches.
        if not hasattr(self.env, "observation"):
            self._world = first.get(_WORLD)
        if self._masked:
            observations = list(self._unmasked(dict(zip(self._players, observations, strict=True))).values())
        self._agents_row.put_alike(self._players, observations, list(rewards), terminated, truncated)
        return self._row({key: first[key] for key in self._shared_keys})


def _seed_rebuilds(env: Any, seed: int) -> bool:
    """Makes the seeds of a substrate count from `seed`; returns whether `env` is such a substrate.

    Substrates are rebuilt for each episode, with seeds that count up.
    """
    for one in chain(env):
        rebuild = getattr(one, "_rebuild_environment", None)
        cells = dict(zip(rebuild.__code__.co_freevars, rebuild.__closure__ or (), strict=True)) if rebuild else {}
        if "env_seeds" in cells:
            # Not 0, which Melting Pot never uses itself.
            start = seed % (_MAX_SEED + 1) or _MAX_SEED
            cells["env_seeds"].cell_contents = (n % (_MAX_SEED + 1) for n in itertools.count(start))
            one._reset = True  # the first episode is rebuilt as well
            return True
    return False


@dataclass(frozen=True)
class MakeSubstrate(OfKnownLibrary):
    """The factory behind ``meltingpot/<substrate>``."""

    name: str

    def __call__(self, roles: Sequence[str] | None = None, num_players: int | None = None, **config: Any) -> Any:
        """Builds the substrate.

        roles: a role for each player, the substrate's default roles if None.  num_players: that many players, with
        the default roles, repeated where there are not enough.  config: replaces entries of the substrate's
        config.
        """
        substrate = load_substrates()
        chosen = substrate.get_config(self.name)
        if roles is not None and num_players is not None:
            raise ConfigError("give roles or num_players, not both: there is a role for each player")
        if roles is None:
            roles = tuple(chosen.default_player_roles)
        if num_players is not None:
            roles = tuple(itertools.islice(itertools.cycle(roles), num_players))
        if unknown := [name for name in config if name not in chosen]:
            raise WrongType(
                f"the substrate {self.name!r} has no option {unknown[0]!r}; it has: "
                f"{', '.join(['roles', 'num_players', *sorted(chosen)])}"
            )
        if config:
            with chosen.unlocked():
                chosen.update(config)
        return substrate.build_from_config(chosen, roles=tuple(roles))


def check_substrate(name: str) -> MakeSubstrate:
    """The factory of ``meltingpot/<name>``. Raises RecipeError, ModuleNotFoundError."""
    folders = melting_pot_package(f"'meltingpot/{name}' needs").submodule_search_locations or [""]
    listing = Path(folders[0], "configs", "substrates", "__init__.py")
    known = re.findall(r"^    '(\w+)',$", listing.read_text(encoding="utf-8"), re.MULTILINE)
    if name not in known:
        raise RecipeError(f"Melting Pot has no substrate {name!r}. It has: {', '.join(known)}")
    return MakeSubstrate(name)
