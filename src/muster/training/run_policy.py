"""`load_policy`: what a run has learnt, as a function from observations to actions."""

from __future__ import annotations

import itertools
import math
import operator
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from muster.errors import SpecMismatch, UsageError, printable
from muster.extras import imports_for
from muster.spaces.plain import from_plain
from muster.training.plan import plan_of
from muster.training.run_envs import open_run_envs
from muster.training.run_folder import read_config, reading, require_room
from muster.vector.vector_env import VectorEnv

with imports_for("muster.load_policy needs", "muster-rl[torch]", "torch", "tensordict"):
    import torch

    from muster.algorithms.actor_critic import ActorCritic, act
    from muster.algorithms.normalization import ObservationNormalizer
    from muster.training.checkpoints import find_checkpoint, read_checkpoint


def load_policy(
    run: str | os.PathLike[str],
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    sample: bool = False,
    trust: bool = False,
) -> RunPolicy:
    """The policy that the run in the folder ``run`` has trained.

    ``policy(obs)`` acts for a vector env, for a single env, and as the policy of `Collector` and `MultiCollector`, as
    ``muster eval`` does: observations are normalised as in training, by statistics that stay as they are.
    ``policy.make_vec(num_envs)`` makes the run's envs.

    checkpoint: another one than the newest: the steps of a copy that ``--checkpoint-every`` has made, such as "51200",
    "best" of a run with ``--eval-every``, or a path.
    sample: draws actions by torch's global generator, which collectors seed, instead of taking the likeliest.
    trust: lets ``policy.make_vec`` import modules, files and wrappers that the folder names, also from the working
    directory. Loading imports nothing, makes no env, and executes no code of the folder.

    Raises UsageError where ``run`` is no folder of a run of this version of Muster, and has no such checkpoint.
    """
    return RunPolicy(Path(run), checkpoint, sample=sample, trust=trust)


class RunPolicy:
    """A trained policy: ``policy(obs)`` gives actions. It can be pickled, and computes on the CPU.

    observation_space, action_space: of one env, as the run had them.  steps: env steps of its training.
    """

    def __init__(self, run: Path, checkpoint: str | os.PathLike[str] | None, *, sample: bool, trust: bool) -> None:
        plan, (folder, file) = plan_of(run), find_checkpoint(run, checkpoint)
        state = read_checkpoint(folder, file)
        self.run, self.plan, self.sample, self.trust = run, plan, sample, trust
        config = plan.config
        self.observation_space, self.action_space = _spaces_of(run, config.hidden_sizes)
        self._policy = ActorCritic(self.observation_space, self.action_space, torch.Generator(), **config.network)
        self._normalizer = None
        with reading(folder / file):
            self.steps = int(state["steps"])
            self._policy.load_state_dict(state["policy"])
            if config.normalize_observations:
                self._normalizer = ObservationNormalizer(self.observation_space.shape or ())
                self._normalizer.moments.load(state["normalizers"]["observations"])

    def __call__(self, obs: Any) -> Any:
        """Actions for observations [B, *obs_shape], or the action for a single one [*obs_shape].

        obs: an array, or what NumPy makes one of, or a tensor; of the space's dtype, or one that it holds all kinds of
        numbers of, such as float64 for float32.
        Returns an array of the action space's dtype, a tensor for a tensor. Raises SpecMismatch for other shapes and
        dtypes.
        """
        rows, is_single = self._rows(obs)
        threads = self.plan.config.torch_threads
        actions = act(self._policy, self._normalizer, rows, sample=self.sample, threads=threads)
        if is_single:
            actions = actions[0]
        if isinstance(obs, torch.Tensor):
            return actions.to(obs.device)
        array = actions.numpy()
        return array[()] if isinstance(self.action_space, spaces.Discrete) else array  # a number, not an array of one

    def make_vec(self, num_envs: int = 1, **options: Any) -> VectorEnv:
        """The run's envs, with the arguments and wrappers of the run and its preset; they are the caller's to close.

        options: of `muster.make_vec`. ``env_kwargs`` and ``wrappers`` are added to the run's; ``autoreset_mode`` is
        "same_step" unless it is given.
        Raises ConfigError where the folder names code and is not trusted, and what `make_vec` raises.
        """
        with self.plan.trusting(self.run, self.trust):
            return open_run_envs(self.plan, num_envs, **options)

    def __repr__(self) -> str:
        return f"<policy of {str(self.run)!r}: {printable(self.plan.env)}, PPO after {self.steps:,} steps>"

    def _rows(self, obs: Any) -> tuple[torch.Tensor, bool]:
        """Observations as a batch of the space's dtype, and whether it was a single one."""
        shape, dtype = self.observation_space.shape or (), np.dtype(self.observation_space.dtype)
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


def _spaces_of(run: Path, hidden_sizes: Sequence[int]) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
    """The spaces of the run's envs. Raises UsageError, also where no memory holds a network of theirs."""
    path, kept = run / "config.json", read_config(run).get("spaces")
    if not isinstance(kept, Mapping) or not {"observations", "actions"} <= kept.keys():
        raise UsageError(
            f"{path} says nothing of spaces; muster train --resume writes them for runs of older versions."
        )
    observations, actions = kept["observations"], kept["actions"]
    widths = _width_of(observations), *hidden_sizes, _width_of(actions)
    weights = sum(itertools.starmap(operator.mul, itertools.pairwise(widths)))
    # Of actor and critic, whose layers are objects of 20 KB; bounds of the spaces.
    require_room(path, 8 * weights + 20_000 * len(widths) + 40 * (widths[0] + widths[-1]))
    try:
        return from_plain(observations), from_plain(actions)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _width_of(plain: object) -> int:
    """The numbers that a network has for a space as `to_plain` describes it; 0 for what `from_plain` refuses."""
    match plain:
        case {"kind": "Box", "shape": [*sizes]} if all(isinstance(size, int) for size in sizes):
            return math.prod(sizes)
        case {"kind": "Discrete" | "MultiBinary", "n": int(n)}:
            return n
        case {"kind": "MultiBinary", "n": [*sizes]} if all(isinstance(size, int) for size in sizes):
            return math.prod(sizes)
        case {"kind": "MultiDiscrete", "nvec": [*choices]} if all(isinstance(n, int) for n in choices):
            return sum(choices)
    return 0
