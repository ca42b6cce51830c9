"""`load_policy`: what a run has learnt, as a function from observations to actions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from muster.arguments import whole
from muster.errors import SpecMismatch
from muster.extras import imports_for
from muster.spaces.masks import MASK, mask_length
from muster.training.plan import plan_of
from muster.training.run_envs import RunEnvs, open_run_envs
from muster.training.run_folder import reading

with imports_for("muster.load_policy needs", "muster-rl[torch]", "torch", "tensordict", "safetensors"):
    import torch

    from muster.algorithms.action_network import ActionNetwork, action_networks
    from muster.algorithms.actor_critic import as_allowed
    from muster.algorithms.encoder import as_observation
    from muster.rollout.episodes import Episodes
    from muster.rollout.evaluation import STEPS_PER_EPISODE, evaluate
    from muster.training.checkpoints import find_checkpoint, read_checkpoint
    from muster.training.run_networks import facts_in, networks_in


def load_policy(
    run: str | os.PathLike[str],
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    sample: bool = False,
    trust: bool = False,
    policy: Any = None,
) -> RunPolicy:
    """The policy that a run has trained, as a `RunPolicy`.

    ``policy(obs)`` acts for a vector env, for a single env, and as the policy of `Collector` and `MultiCollector`, as
    ``muster eval`` does: observations are normalised as in training, by statistics that stay as they are.
    ``policy.make_vec(num_envs)`` makes the run's envs.

    run: the run's folder.
    checkpoint: another one than the newest: the steps of a copy that ``--checkpoint-every`` has made, such as "51200",
        "best" of a run with ``--eval-every``, or a path.
    sample: draws actions by torch's global generator, which collectors seed, instead of taking the likeliest.
    trust: lets ``policy.make_vec`` import modules, files and wrappers that the folder names, also from the working
        directory, and hand over paths among the env's arguments. Loading makes no env, and executes no code of the
        folder; but where ``--policy`` has named a function, it takes trust, and calls that.
    policy: the network, or the function that makes one, that `muster.train` had. A copy of a network is loaded.

    Raises UsageError where ``run`` is no folder of a run of this version of Muster, and has no such checkpoint, and
    ConfigError for a named policy without trust.

    >>> import muster, numpy, tempfile
    >>> options = {"total_steps": 128, "num_envs": 4, "num_steps": 32}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = muster.train("CartPole-v1", run_dir=f"{folder}/run", **options)
    ...     policy = muster.load_policy(run.path)
    CartPole-v1  PPO, 128 steps, seed 0, 4 envs...
    >>> policy(numpy.zeros((8, 4), "float32")).shape
    (8,)
    """
    objects = {} if policy is None else {"policy": policy}
    return RunPolicy(Path(run), checkpoint, sample=sample, trust=trust, objects=objects)


class RunPolicy:
    """A trained policy: ``policy(obs)`` gives actions. It can be pickled, and computes on the CPU.

    observation_space, action_space: of one env, as the run had them; with agents by group, those of one agent.
    groups: the names of the agents of each group; empty for envs with one agent.  steps: env steps of its training.
    """

    def __init__(
        self, run: Path, checkpoint: str | os.PathLike[str] | None = None, *,
        sample: bool = False, trust: bool = False, objects: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        own = objects or {}
        plan, (folder, file) = replace(plan_of(run), **own, given=set(own)), find_checkpoint(run, checkpoint)
        state = read_checkpoint(folder, file)
        self.run, self.plan, self.sample, self.trust = run, plan, sample, trust
        if "policy" in plan.names and "policy" not in own and not trust:
            plan.require_trust(run)
        facts = facts_in(run, plan.config)
        self.observation_space, self.action_space = facts.observation_space, facts.action_space
        self.groups = facts.groups
        with reading(folder / file):
            self.steps = int(state["steps"])
            self._networks = networks_in(state, facts, plan)

    def __getstate__(self) -> dict[str, Any]:
        """A copy acts without what its run was handed over."""
        return {**vars(self), "plan": self.plan.without_objects}

    @property
    def initial_state(self) -> dict[Any, torch.Tensor] | None:
        """The memory that one env begins with, which collectors take from here; None for a policy without memory."""
        return self._networks.initial_state

    @property
    def network(self) -> ActionNetwork | dict[str, ActionNetwork]:
        """The policy as a `torch.nn.Module` to deploy: observations in, the likeliest actions out; by group of agents.

        Observations are normalised inside. `torch.jit.trace`, `torch.export.export` and `torch.onnx.export` take it. It
        has the policy's own weights. Raises UsageError for a head that makes actions by a function of its own.
        """
        return action_networks(self._networks)

    def __call__(self, obs: Any, state: Any = None, *, masks: Any = None, alive: Any = None) -> Any:
        """Actions for observations [B, *obs_shape], or the action for a single one [*obs_shape].

        obs: an array, or what NumPy makes one of, or a tensor; of the space's dtype, or one that it holds all kinds of
        numbers of, such as float64 for float32.  masks: bool [B, n] or [n], the choices that are allowed; None: all.
        Returns an array of the action space's dtype, a tensor for a tensor. A policy with memory also returns its
        state: hand it over with the next observations, and None where episodes begin. Raises SpecMismatch for other
        shapes and dtypes.

        With agents, all of these are dicts by group, [B, A, ...] or [A, ...], and alive is bool [B, A] or [A]; or they
        are by agent, as PettingZoo's envs have them, where an observation may have its mask in it.
        """
        if not self.groups:
            actions, after = self._act_alone(obs, state, masks)
        elif isinstance(obs, Mapping) and obs.keys() >= self.groups.keys() >= (masks or {}).keys():
            actions, after = self._act_by_group(obs, state, masks or {}, alive or {})
        else:
            places = {agent: (group, i) for group, agents in self.groups.items() for i, agent in enumerate(agents)}
            if not isinstance(obs, Mapping) or not places.keys() >= set(map(str, [*obs, *(masks or {})])):
                got = [*obs, *(masks or {})] if isinstance(obs, Mapping) else type(obs).__name__
                expected = f"by group, {list(self.groups)}, or by agent, {list(places)}"
                raise SpecMismatch(f"policy: expected observations and masks {expected}, got {got}.")
            rows, allowed, there = self._by_agent(obs, masks or {})
            by_group, after = self._act_by_group(rows, state, allowed, there)
            at = {agent: places[str(agent)] for agent in obs}
            actions = {agent: by_group[group][i] for agent, (group, i) in at.items()}
        return actions if after is None else (actions, after)

    def _act_alone(self, obs: Any, state: Any, masks: Any) -> tuple[Any, Any]:
        rows, is_single = _rows(obs, self.observation_space)
        if masks is None and isinstance(obs, Mapping):
            masks = obs.get(MASK)
        allowed = as_allowed(masks, self.action_space, len(rows))
        actions, after = self._act(rows, state, masks=allowed)
        return _as_given(actions[0] if is_single else actions, obs, self.action_space), after

    def _act_by_group(
        self, obs: Mapping[str, Any], state: Any, masks: Mapping[str, Any], alive: Mapping[str, Any]
    ) -> tuple[dict[str, Any], Any]:
        found = {
            group: _rows(obs[group], self.observation_space[group], len(agents))
            for group, agents in self.groups.items()
        }
        rows = {group: one for group, (one, _) in found.items()}
        if len(counts := {(len(one), is_single) for one, is_single in found.values()}) > 1:
            raise SpecMismatch(
                f"policy: expected as many observations of each group, got {[len(one) for one in rows.values()]}."
            )
        ((_, are_single),) = counts
        there = {group: torch.as_tensor(one).bool().reshape(rows[group].shape[:2]) for group, one in alive.items()}
        by_group, after = self._act(rows, state, masks=masks, alive=there)
        actions = {
            group: _as_given(one[0] if are_single else one, obs[group], self.action_space[group], is_group=True)
            for group, one in by_group.items()
        }
        return actions, after

    def _act(self, rows: Any, state: Any, **besides: Any) -> tuple[Any, Any]:
        return self._networks.act(rows, state, **besides, sample=self.sample, threads=self.plan.config.torch_threads)

    def _by_agent(self, obs: Mapping[Any, Any], masks: Mapping[Any, Any]) -> tuple[dict[str, Any], ...]:
        """Observations [A, *obs_shape], masks [A, n] and alive [A] by group; zeros for who is not there."""
        rows, allowed, alive = {}, {}, {}
        by_name, masks_by_name = ({str(agent): one for agent, one in of.items()} for of in (obs, masks))
        for group, agents in self.groups.items():
            space, acts = self.observation_space[group], self.action_space[group]
            alive[group] = np.array([agent in by_name for agent in agents])
            seen, own_masks = ([of.get(str(agent)) for agent in agents] for of in (by_name, masks_by_name))
            for i, one in enumerate(seen):
                if isinstance(one, Mapping):
                    own_masks[i] = one.get(MASK, own_masks[i])
                    seen[i] = one["observation"] if one.keys() == {"observation", MASK} else one
            try:
                rows[group] = _stacked(seen, space)
            except (LookupError, TypeError, ValueError) as error:
                raise SpecMismatch(
                    f"policy: expected observations of {space} of the agents {agents}: {error}."
                ) from None
            if any(mask is not None for mask in own_masks):
                everything = np.ones(mask_length(acts), np.bool_)
                checked: list[Any] = [everything if mask is None else as_allowed(mask, acts) for mask in own_masks]
                allowed[group] = np.stack(checked)
        return rows, allowed, alive

    def evaluate(self, episodes: int = 20, *, seed: int = 0, episode_info: Sequence[str] | None = None) -> Episodes:
        """Whole episodes in the run's envs, as ``muster eval`` plays them: their ``returns`` and ``lengths``, ``[K]``.

        episodes: how many; those that last too long are left out.  seed: of the envs.
        episode_info: names of numbers in last infos, which ``infos`` has then, and ``figures`` their means; None for
            those of the run.
        Raises as `make_vec`, ConfigError, and UsageError where no episode ends.
        """
        episodes = whole("episodes", episodes, 1)
        with self.make_vec(min(self.plan.config.num_envs, episodes)) as envs:
            options: dict[str, Any] = {"seed": seed, "max_steps": episodes * STEPS_PER_EPISODE}
            names = self.plan.config.episode_info if episode_info is None else episode_info
            return evaluate(envs, self, episodes=episodes, episode_info=names, **options)

    def make_vec(self, num_envs: int = 1, **options: Any) -> RunEnvs:
        """The run's envs, with the arguments and wrappers of the run and its preset; they are the caller's to close.

        options: of `muster.make_vec`. ``env_kwargs`` and ``wrappers`` are added to the run's; ``autoreset_mode`` is
        "same_step" unless it is given.
        Raises ConfigError where the folder reaches out of itself for them, by code that it names or arguments that are
        paths, and is not trusted; and what `make_vec` raises.
        """
        with self.plan.trusting(self.run, self.trust):
            return open_run_envs(self.plan, num_envs, **options)

    def __repr__(self) -> str:
        trained = f"{self.plan.algorithm} after {self.steps:,} steps"
        return f"<policy of {str(self.run)!r}: {self.plan.name}, {trained}>"


def _stacked(seen: Sequence[Any], space: spaces.Space[Any]) -> Any:
    """The agents' observations [A, *shape]; zeros for None."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        return {
            name: _stacked([None if one is None else one[name] for one in seen], part)
            for name, part in _parts_of(space).items()
        }
    return np.stack([np.zeros(space.shape or (), space.dtype) if one is None else one for one in seen])


def _parts_of(space: Any) -> Mapping[Any, spaces.Space[Any]]:
    parts: Mapping[Any, Any] = space.spaces if isinstance(space, spaces.Dict) else dict(enumerate(space.spaces))
    return parts


def _rows(obs: Any, space: spaces.Space[Any], *agents: int) -> tuple[Any, bool]:
    """Observations as a batch of the space's dtype, and whether it was a single one. agents: how many a group has."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        try:
            found = {str(name): _rows(obs[name], part, *agents) for name, part in _parts_of(space).items()}
        except (LookupError, TypeError):
            raise SpecMismatch(f"policy: expected observations of {space}, got {type(obs).__name__}.") from None
        are_single = [is_single for _, is_single in found.values()]
        if len(counts := {len(rows) for rows, _ in found.values()}) > 1:
            raise SpecMismatch(f"policy: expected as many of each part of {space}, got {sorted(counts)}.")
        return as_observation({name: rows for name, (rows, _) in found.items()}, 1 + len(agents)), all(are_single)
    shape, dtype = (*agents, *(space.shape or ())), np.dtype(space.dtype)
    if isinstance(obs, Mapping):
        raise SpecMismatch(
            f"policy: expected arrays {list(shape)} of {dtype}, got a {type(obs).__name__}. If the run's envs "
            "are wrapped, as its preset may do, policy.make_vec(num_envs) makes such envs; or wrap yours as well, most "
            "often in gymnasium.wrappers.FlattenObservation"
        )
    try:
        given = obs.detach().cpu().numpy() if isinstance(obs, torch.Tensor) else np.asarray(obs)
    except (TypeError, ValueError) as error:
        reason = str(error).partition(".")[0]
        raise SpecMismatch(f"policy: expected an array of {dtype}, and NumPy cannot make one: {reason}.") from None
    dims = given.ndim - len(shape)
    if not np.can_cast(given.dtype, dtype, "same_kind"):
        got = type(obs).__name__ if given.dtype == object else str(given.dtype)
        raise SpecMismatch(f"policy: expected observations of dtype {dtype}, got {got}.")
    if dims not in (0, 1) or given.shape[dims:] != shape:
        batch = ", ".join(map(str, ("B", *shape)))
        raise SpecMismatch(
            f"policy: expected observations of shape {list(shape)}, or a batch [{batch}], got {list(given.shape)}."
        )
    # A copy: torch warns of arrays that cannot be written to.
    return torch.from_numpy(np.array(given, dtype, order="C").reshape(-1, *shape)), dims == 0


def _as_given(actions: torch.Tensor, obs: Any, space: spaces.Space[Any], *, is_group: bool = False) -> Any:
    """Actions as an array, or as a tensor where the observations are some."""
    while isinstance(obs, (Mapping, tuple)):
        obs = next(iter(obs.values() if isinstance(obs, Mapping) else obs))
    if isinstance(obs, torch.Tensor):
        return actions.to(obs.device)
    array = actions.numpy()
    return array[()] if isinstance(space, spaces.Discrete) and not is_group else array  # a number, not an array of one
