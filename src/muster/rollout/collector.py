"""`Collector`: a policy and a vector env, joined to an iterator of batches ``[N, T]``.

    collector = muster.Collector("CartPole-v1", policy, num_envs=8, frames_per_batch=1024, total_frames=100_000)
    for batch in collector:
        learn(batch)

Each step computes all envs' actions at once, in the calling process and with the policy object itself.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict  # type: ignore[import-untyped]  # ships no types
from tensordict.nn import InteractionType, set_interaction_type  # type: ignore[import-untyped]  # ships no types
from torch import Tensor

from muster.arguments import explains_keywords
from muster.errors import ConfigError, ReplayDiffers
from muster.nn.turns import generators_kept, turn
from muster.rollout.batch_source import BatchSource, packed_envs
from muster.rollout.episodes import EPISODE_INFO
from muster.rollout.fields import Array, Field, Key
from muster.rollout.policies import (
    IS_INIT,
    Actor,
    PlainActor,
    RandomActor,
    TensorDictActor,
    is_tensordict_policy,
    numpy_dtype,
)
from muster.rollout.single_agent_side import open_envs
from muster.rollout.stepping import Stepping
from muster.rollout.storage import Storage
from muster.rollout.weights import (
    Device,
    copies_into,
    copy_all,
    is_same_memory,
    module_of,
    named_weights,
    place,
    weights_for,
)
from muster.vector.make import make_vec
from muster.worker_info import seeds_of_envs


class Collector(BatchSource):
    """Iterates batches of `frames_per_batch` frames, rounded up to whole steps: TensorDicts ``[N, T]``.

    envs: a vector env, which stays the caller's, or what `muster.make_vec` takes as its first argument; then `shutdown`
        closes the envs.
    num_envs, make_vec_options: of envs that the collector makes: their number, and make_vec's other options, as a dict.
    frames_per_batch: env steps of all envs together; a multi-agent env's step is one frame.
    policy: a module with ``in_keys`` and ``out_keys``; any callable from observation to action, or to a dict with
        "action" in it, for agents from dict to dict by group; a multi-agent network of `muster.nn` or TorchRL, which
        acts for the only group; or None for random actions. It is neither copied nor pickled. Parameters of a callable
        named ``masks``, ``env_state`` and ``alive`` get what docs/migration/from-parallel-env.md has in a table.
    policy_factory: builds the policy, instead of `policy`.
    total_frames: where to end; -1, the default, goes on for ever, until the loop is left.
    device: sets both of the next two, where they are None.
    policy_device: where the policy computes: it is moved there; None: it stays where it is.
    storing_device: where the batches lie that are returned; None: in memory.
    seed: for envs, random actions and torch's generators while the policy acts. None leaves all as they are. Torch's
        are the process's: collectors in several threads take turns, batch by batch, and draw as they do alone, where
        each has a seed; what other code draws from them meanwhile is neither its own nor the collector's.
    overlap: steps one half of the envs while the policy computes for the other.
    init_random_frames: so many frames have random actions before the policy acts. The policy is called once at the
        start, to find its outputs: batches of random frames have their keys, with zeros.
    max_frames_per_traj: resets an env after so many frames; the trajectory ends truncated.
    reset_at_each_iter: starts new trajectories with each batch.
    split_trajs: batches are ``[B, T]``, a trajectory in each row, padded; see `split_trajectories`.
    compact: leaves ``("next", "observation")`` out, see `muster.rollout.next_observations`; not for a `replay_buffer`.
    replay_buffer: takes each batch by ``extend``; the iterator then yields None. A storage of one dim takes the frames
        that ``("collector", "mask")`` keeps, env by env; one of two dims (``ndim=2``) the batch as it is, and its mask.
    observation_dtype: of observations of floating-point numbers, in what the policy sees and in batches: torch.float32
        for a float32 policy and an env that observes float64, as those of MuJoCo do. None: as the envs have them.
    initial_state: by key one env's recurrent state at the start of an episode; a TensorDict policy needs none where
        its modules start without a state, or from zeros. None: the policy's own ``initial_state``, if it has one.
    exploration: how distributions in the policy are drawn from.
    episode_info: names of numbers and flags in the last infos of episodes, of agents in those of any agent:
        ``last_episodes.infos`` has them, and ``last_episodes.figures`` their means, as ``success_rate`` for
        "is_success". None or () for none. A UserWarning says once which name no env has, and which stands for
        something else, such as an array or a text.

    Batches of envs that give an ``"action_mask"`` of a discrete action space, in a Dict observation or the infos of the
    first reset, have it as bool ``[N, T, n]`` under that key. Where it is missing or all False, all is allowed.
    Batches of dm_env's envs also have ``("next", "discount")``, of several players ``("next", group, "discount")``:
    float32, shaped like the reward, 0 where the step terminates the episode and 1 elsewhere, unless the env says
    otherwise.

    acting_version: the version of the weights that acted in the last batch, see `policy_version`.
    A RuntimeWarning reports envs that the vector env replaced; their rows are masked. Raises ConfigError, UsageError,
    and what `make_vec` raises.

    >>> import muster
    >>> def policy(obs):  # a tensor [N, 4], float32
    ...     return (obs[:, 2] > 0).long()
    >>> with muster.Collector("CartPole-v1", policy, num_envs=4, frames_per_batch=32, total_frames=64) as collector:
    ...     for batch in collector:
    ...         print(batch.shape, batch["next", "reward"].shape)
    torch.Size([4, 8]) torch.Size([4, 8, 1])
    torch.Size([4, 8]) torch.Size([4, 8, 1])
    """

    @explains_keywords(
        'make_vec_options={{"env_kwargs": {}}}', inspect.signature(make_vec).parameters, "make_vec_options={}"
    )
    def __init__(
        self,
        envs: Any,
        policy: Callable[..., Any] | None = None,
        *,
        frames_per_batch: int,
        total_frames: int = -1,
        num_envs: int | None = None,
        make_vec_options: Mapping[str, Any] | None = None,
        policy_factory: Callable[[], Callable[..., Any]] | None = None,
        device: Device = None,
        policy_device: Device = None,
        storing_device: Device = None,
        seed: int | None = None,
        overlap: bool = False,
        init_random_frames: int = 0,
        max_frames_per_traj: int | None = None,
        reset_at_each_iter: bool = False,
        split_trajs: bool = False,
        compact: bool = False,
        replay_buffer: Any = None,
        observation_dtype: torch.dtype | None = None,
        initial_state: Mapping[Any, Tensor] | None = None,
        exploration: InteractionType = InteractionType.RANDOM,
        episode_info: Sequence[str] | None = EPISODE_INFO,
    ) -> None:
        super().__init__(
            frames_per_batch=frames_per_batch,
            total_frames=total_frames,
            init_random_frames=init_random_frames,
            max_frames_per_traj=max_frames_per_traj,
            seed=seed,
            storing_device=device if storing_device is None else storing_device,
            split_trajs=split_trajs,
            compact=compact,
            replay_buffer=replay_buffer,
            observation_dtype=observation_dtype,
            episode_info=episode_info,
        )
        if policy is not None and policy_factory is not None:
            raise ConfigError("give policy or policy_factory, not both")
        self.policy = policy_factory() if policy_factory is not None else policy
        self._policy_device = place(self.policy, device if policy_device is None else policy_device)
        self._rng = np.random.default_rng(None if seed is None else np.random.SeedSequence(seed, spawn_key=(0,)))
        self._generators = [] if seed is None else _generators(seed, self._policy_device)
        self._version, self.acting_version, self._acts = np.ones(1, np.int64), 1, False
        self._updating = threading.Lock()
        # Weights that wait for the batch's end, and their version.
        self._staged: tuple[dict[str, Tensor], int] | None = None
        self._own: dict[str, Tensor] = {}  # the policy's own tensors; during a call the policy may hold others
        self._expected: dict[Key, Tensor] = {}  # what the policy will provide; found with the first random frames
        self._reset_at_each_iter = reset_at_each_iter
        self._initial_state = dict(initial_state or getattr(self.policy, "initial_state", None) or {})
        self._exploration = exploration
        self._envs, self._owns_envs = open_envs(envs, num_envs, make_vec_options)
        try:
            self._begin(frames_per_batch, overlap, max_frames_per_traj)
        except BaseException:
            self.shutdown()
            raise

    def _begin(self, frames_per_batch: int, overlap: bool, max_frames_per_traj: int | None) -> None:
        if self._dtype is not None:
            self._envs.cast_observations(self._dtype)
        self.steps_per_batch = math.ceil(frames_per_batch / self._envs.num_envs)
        self._stepping = Stepping(
            self._envs, overlap=overlap, max_frames_per_traj=max_frames_per_traj, names=self._names
        )
        # Envs in this process may draw from torch's global generators, too; and not every kind of device has one here.
        there = self._policy_device.type in [one.device.type for one in self._generators]
        takes_rng = there and getattr(self.policy, "takes_rng", False)
        self._draws_apart = takes_rng and not self._envs.are_stepped_here()
        self._random = RandomActor(self._envs, self._rng)
        self._actors = [self._actor(part) for part in self._stepping.parts]
        self._count_envs(self._envs.num_envs)

    def _give_up(self) -> None:
        self._stepping.start_afresh()

    def _collect(self) -> TensorDict:
        return self._batch_over(self.collect_storage())

    def collect_storage(self) -> Storage:
        """The next storage, full and counted. One set of weights acts; updates wait until the storage is full."""
        storage = self._new_storage(self.steps_per_batch)
        with self._same_weights():
            self.fill(storage)
        return storage

    def fill(self, storage: Storage, stop: Array | None = None, *, until_end: bool = False) -> int:
        """Collects the next steps of all envs into `storage`; returns their number.

        stop, until_end: see `Stepping.fill`.
        """
        random = self.policy is None or self.frames < self._init_random_frames
        if self._reset_at_each_iter and self.batches:  # before the first one a trial may have reset them
            self._stepping.start_afresh()
        if random and self.policy is not None:
            self._blank_outputs(storage)
        with self._acting():
            actors = [self._random] if random else self._actors
            steps = self._stepping.fill(storage, actors, self._env_seeds(), stop, until_end=until_end)
        if random:
            for actor, part in zip(self._actors, self._stepping.parts, strict=True):
                actor.forget(np.ones(part.stop - part.start, np.bool_))
            if IS_INIT in storage.outputs:
                storage.outputs[IS_INIT].copy_(torch.from_numpy(storage.begins).unsqueeze(-1))
        if steps < storage.T:
            storage.leave_out(steps)
        self.frames += int(storage.mask.sum())
        self.batches += 1
        return steps

    def _new_storage(self, T: int) -> Storage:
        return Storage(T, self._envs.num_envs, *self.fields, compact=self._compact)

    def _blank_outputs(self, storage: Storage) -> None:
        """Writes zeros for all that the policy would provide."""
        for rows in storage.outputs.values():
            rows.zero_()
        if not storage.outputs:
            self._expected = self._expected or self._trial_outputs()
            for key, rows in self._expected.items():
                storage.add_output(key, rows[0]).zero_()

    @property
    def fields(self) -> tuple[tuple[Field, ...], tuple[Field, ...]]:
        """The observation fields and the reward fields. Resets the envs where these are not known without."""
        if not self._envs.fields_known:
            with self._acting():
                self._stepping.start(self._actors, self._env_seeds())
        return tuple(self._envs.observation_fields), tuple(self._envs.reward_fields)

    def output_fields(self) -> list[Field]:
        """The fields of the policy's outputs at each step."""
        return [Field(key, tuple(one.shape[2:]), numpy_dtype(key, one)) for key, one in self._trial_outputs().items()]

    def _trial_outputs(self) -> dict[Key, Tensor]:
        """The policy's outputs ``[1, N, ...]``, found by acting once on the envs' observations; no env is stepped."""
        kept = [one.get_state() for one in self._generators]
        with generators_kept(self._policy_device), self._acting():
            rows = self._stepping.start(self._actors, self._env_seeds())
            trial = self._new_storage(1)
            for first, row in zip(trial.observations_before(0), rows, strict=True):
                first[:] = row
            actor = self._actor(slice(0, self._envs.num_envs))
            actor.begin(trial)
            actor.act(0)
        for one, state in zip(self._generators, kept, strict=True):
            one.set_state(state)
        return trial.outputs

    @property
    def envs(self) -> Any:
        """The vector env: `call`, `get_attr` and `set_attr` reach its envs between batches."""
        return self._envs.envs

    def reset(self) -> None:
        """Starts new episodes in all envs with the next batch."""
        self._stepping.start_afresh()

    @property
    def policy_version(self) -> int:
        """Version of the weights that act in the next batch: 1, and 1 more with each update."""
        staged = self._staged
        return int(self._version[0]) if staged is None else staged[1]

    def update_policy_weights_(self, weights: Any = None) -> None:
        """Copies `weights` (a state dict, a TensorDict of parameters or a module) into the policy.

        While another thread collects a batch, the copy waits for the batch's end: the weights that act never change
        within a batch. Without an argument there is nothing to copy: the policy that acts is the caller's own object.
        """
        with self._updating:
            if not self._acts:
                self._load_staged()
            provided, own = {}, self._own if self._acts else named_weights(self.policy)
            if weights is not None:
                provided = weights_for(self.policy, own if weights is self.policy else weights, own)
            version = self.policy_version + 1
            if not self._acts:
                self._load(provided, version)
            elif weights is None and self._staged is not None:
                self._staged = self._staged[0], version
            else:
                # Tensors in the policy's own memory are left out: what a learner writes there meanwhile is newer.
                others = {name: tensor for name, tensor in provided.items() if not is_same_memory(tensor, own[name])}
                self._staged = {name: tensor.detach().clone() for name, tensor in others.items()}, version

    def stats(self) -> dict[str, Any]:
        """Counts of frames and batches; ``envs``: the stats of the envs."""
        own = getattr(self._envs.envs, "stats", None)
        envs = own() if own is not None else {}
        return {"frames": self.frames, "batches": self.batches, "envs": envs}

    def state_dict(self, *, envs: bool = False) -> dict[str, Any]:
        """Counters, generators and the policy's weights.

        envs: also the states of envs that are ``replayable=True``, from which `load_state_dict` goes on bit for bit, in
        the middle of episodes. Raises UsageError for others.
        """
        state = {**self._counters(), **self.generators()}
        if (module := module_of(self.policy)) is not None:
            state["policy"] = module.state_dict()
        return state | packed_envs(self.going_on()) if envs else state

    def generators(self) -> dict[str, Any]:
        """The states of the collector's generators."""
        torchs = {"torch_rng": [one.get_state() for one in self._generators]} if self._generators else {}
        return {"action_rng": self._rng.bit_generator.state, **torchs}

    def load_generators(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`, which `generators` returned."""
        self._rng.bit_generator.state = state["action_rng"]
        # A state of another device has fewer or more of them: those that it lacks stay as seeded.
        for one, saved in zip(self._generators, state.get("torch_rng", ()), strict=False):
            one.set_state(saved)

    def env_states(self) -> list[dict[str, Any]] | None:
        """For each env its own part of a state, with an `EnvState`; None where the next batch starts new episodes."""
        return self._stepping.env_states(self._actors)

    def load_env_states(self, states: Sequence[Mapping[str, Any]]) -> list[ReplayDiffers]:
        """Goes on from `states`; returns the errors of envs that differ, and have begun new episodes."""
        differs = self._stepping.load_env_states(states, self._actors)
        return [] if differs is None else [differs]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`, which `state_dict` returned: where it has them, in the envs' states.

        Else, and with other envs, in new episodes with seeds of their own. An env that differs begins a new one, too,
        with a RuntimeWarning.
        """
        self._load_counters(state)
        self.load_generators(state)
        with self._updating:
            self._version[0], self._staged = self.policy_version + 1, None
            if (module := module_of(self.policy)) is not None and "policy" in state:
                module.load_state_dict(state["policy"])
        self._stepping.start_afresh(seeded=True)
        if getattr(self.envs, "replayable", False):
            self._load_envs(state, self.load_env_states)

    def shutdown(self) -> None:
        """Closes the envs, if the collector made them."""
        self._closed = True
        if self._owns_envs:
            self._envs.envs.close()

    def _actor(self, part: slice) -> Actor:
        if self.policy is None:
            return self._random
        policy: Any = self.policy
        kind = TensorDictActor if is_tensordict_policy(policy) else PlainActor
        if self._draws_apart:
            policy = partial(policy.forward, rng=self._generators[-1])
        return kind(policy, self._envs, part, self._policy_device, self._initial_state)

    def _env_seeds(self) -> list[int] | None:
        """Seeds for the envs' first reset, and for the first one after `load_state_dict`; None without `seed`."""
        if self._seed is None:
            return None
        sequence = np.random.SeedSequence(self._seed, spawn_key=(1, self.batches))
        return seeds_of_envs(sequence, self._envs.num_envs)

    @contextmanager
    def _same_weights(self) -> Iterator[None]:
        """Keeps one set of weights for a batch: updates that arrive meanwhile reach the policy after the batch."""
        try:
            with self._updating:
                self._load_staged()  # Ctrl-C may have ended the last batch before this was done
                self._own = named_weights(self.policy)
                self._acts = True
                self.acting_version = self.policy_version
            yield
        finally:
            with self._updating:
                self._acts = False
                self._load_staged()

    def _load_staged(self) -> None:
        if self._staged is not None:
            self._load(*self._staged)
            self._staged = None

    def _load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Gives the policy weights, and their version, at once."""
        copies = copies_into(self.policy, weights)
        copy_all([*copies, (torch.from_numpy(self._version), torch.tensor([version]))])

    @contextmanager
    def _acting(self) -> Iterator[None]:
        with self._drawing(), torch.no_grad(), set_interaction_type(self._exploration):
            yield

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Sets torch's global generators to the collector's states while the policy acts, then back to the caller's."""
        if self._draws_apart or not self._generators:
            # The kind of interaction is the process's, too.
            with turn() if is_tensordict_policy(self.policy) else nullcontext():
                yield
            return
        own, cuda = self._generators, [self._policy_device] * (len(self._generators) - 1)
        with generators_kept(self._policy_device):
            torch.set_rng_state(own[0].get_state())
            for device, one in zip(cuda, own[1:], strict=True):
                torch.cuda.set_rng_state(one.get_state(), device)
            try:
                yield
            finally:
                own[0].set_state(torch.get_rng_state())
                for device, one in zip(cuda, own[1:], strict=True):
                    one.set_state(torch.cuda.get_rng_state(device))


def _generators(seed: int, device: torch.device) -> list[torch.Generator]:
    words = np.random.SeedSequence(seed, spawn_key=(2,)).generate_state(2, np.uint64)
    devices = [torch.device("cpu"), device] if device.type == "cuda" else [torch.device("cpu")]
    return [torch.Generator(one).manual_seed(int(word)) for one, word in zip(devices, words, strict=False)]
