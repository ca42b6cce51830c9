"""`MultiCollector`: several collector processes, each with its share of the envs and a replica of the policy."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from tensordict import TensorDict  # type: ignore[import-untyped]  # ships no types
from tensordict.nn import InteractionType  # type: ignore[import-untyped]  # ships no types
from torch import Tensor

from muster.arguments import explains_keywords, flags, whole
from muster.envs.adapt import adapted_recipes, with_torchrl
from muster.errors import UNCOPYABLE_PAGE, CannotTravel, ConfigError, ReplayDiffers, UsageError
from muster.hosts.questions import Call, EnvQuestion, SetAttr, Spaces
from muster.introspection import caller_stacklevel
from muster.pickling import called_as
from muster.pool.engine import Engine
from muster.pool.environment import changes_of
from muster.pool.limits import CLOSE_S, Limits
from muster.pool.set_up import Processes, choose_init
from muster.recipes.recipe import Recipe
from muster.rollout.batch_source import BatchSource, packed_envs
from muster.rollout.cluster.node_hooks import on_nodes
from muster.rollout.cluster.nodes import RayCluster
from muster.rollout.collector import Collector
from muster.rollout.episodes import EPISODE_INFO
from muster.rollout.replicas.plans import Filled, collector_nouns
from muster.rollout.replicas.policy_travel import PolicyFacts, PolicyObstacle
from muster.rollout.replicas.replica_pool import in_processes
from muster.rollout.replicas.replicas import Replicas, pool_plan
from muster.rollout.single_agent_side import COLLECTOR
from muster.rollout.weights import Device, require_shapes
from muster.vector.checks import values_of

MULTI_COLLECTOR = replace(
    COLLECTOR,
    name="muster.MultiCollector",
    context='context="{method}"',
    in_process='muster.Collector with make_vec_options={"backend": "serial"}',
    one_each="num_collectors=num_envs",
)
ENV_OPTIONS = ("env_kwargs", "wrappers", "groups", "state", "replayable", "worker_env", "worker_init")
_ON_NODES = replace(MULTI_COLLECTOR, in_process="", context="", far=True)


class MultiCollector(BatchSource):
    """Iterates batches that several processes collect: TensorDicts ``[N, T]``, neither copied nor pickled on their way.

    Each fork of this process copies the batches that are held, 0.4 GB in about 0.5 s.

    envs: what `muster.make_vec` takes as its first argument. The envs are split evenly.
    num_collectors: the number of processes.
    frames_per_batch: env steps of all collectors together.
    num_envs: number of envs; None for one for each collector, or for the length of the list that `envs` is.
    make_vec_options: those of make_vec's other options that concern single envs, as a dict: ``env_kwargs``,
        ``wrappers``, ``groups``, ``state`` and ``replayable``; and ``worker_env``, the environment variables of the
        collectors' processes: one dict, one per collector, or a function of the collector's index. They are set before
        a collector imports what its policy and envs need, so that ``CUDA_VISIBLE_DEVICES`` deals out GPUs to both; and
        ``worker_init``, which each of these processes calls, or runs, before that.
    policy: as for `Collector`, and copied to each collector. A policy that cannot be copied stays here, with a warning,
        and acts for all.
    policy_factory: builds the policy in each collector; `policy` then only says where weights come from. In it
        `muster.get_worker_info` has the collector's ``worker_index``, and no ``env_index``.
    sync: True yields batches of `frames_per_batch` frames of all envs; False batches of the envs of one collector,
        whichever is ready first. Each collector then begins its next batch while the caller learns from the last one.
    preemptive_threshold: with `sync`: once this share of the collectors is done, the others stop; the rows that are
        missing are False in ``("collector", "mask")``. It does nothing for a policy that stays here.
    context, start_timeout, threads_per_collector: as the options of `make_vec` for workers.
    on_failure: "restart" replaces an env that raised, in one masked row that is truncated; and, with all its envs, a
        collector that died or timed out, or with a policy that raised: its part of that batch is masked. Both with a
        RuntimeWarning.
    max_restarts: how often within a minute one collector's envs may raise, or the collector may be replaced, before an
        error is raised after all.
    max_concurrent_starts: how many collectors, on each node, build their envs at the same time, see `make_vec`.
    recycle_after: with ``on_failure="restart"``, for envs that leak: when a collector is replaced, see `make_vec`. It
        is looked at before each batch; one that is due ends its part of the next batch with the first episode that
        ends, the rest of the part is masked, and another collector goes on with the batch after it.
    collect_timeout: seconds that a collector may take for a batch, with the resets in it, before it is killed.
    cluster: None for collectors on this machine; a `muster.RayCluster`, or "ray" for its defaults, for collectors on
        the nodes of a Ray cluster, split between them in the order of their indices. Batches are those of home. A node
        that is lost is not waited for: its rows are masked until another is in its place, see `on_failure`.
    close_timeout: seconds that `shutdown` waits for each env's own ``close()``, see `make_vec`.
    seed: as for `Collector`; also seeds the generators of `random`, NumPy and torch in each collector's process, before
        `worker_init` is called.

    Other options are `Collector`'s. ``("collector", "policy_version")``, int64 ``[N, T]``, says which weights acted.
    Raises ConfigError, CannotTravel, what `make_vec` raises, and while collecting EnvError, CollectorError, WorkerDied,
    WorkerTimeout.

    >>> import muster
    >>> policy = lambda obs: (obs[:, 2] > 0).long()
    >>> with muster.MultiCollector(
    ...     "CartPole-v1", policy, num_collectors=2, num_envs=4, frames_per_batch=32, total_frames=64
    ... ) as collector:
    ...     [batch.shape for batch in collector]
    [torch.Size([4, 8]), torch.Size([4, 8])]
    """

    @explains_keywords('make_vec_options={{"env_kwargs": {}}}', ENV_OPTIONS, "make_vec_options={}")
    def __init__(
        self,
        envs: Any,
        policy: Callable[..., Any] | None = None,
        *,
        num_collectors: int,
        frames_per_batch: int,
        total_frames: int = -1,
        num_envs: int | None = None,
        make_vec_options: Mapping[str, Any] | None = None,
        policy_factory: Callable[[], Callable[..., Any]] | None = None,
        sync: bool = True,
        preemptive_threshold: float | None = None,
        device: Device = None,
        policy_device: Device = None,
        storing_device: Device = None,
        seed: int | None = None,
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
        context: str = "auto",
        start_timeout: float = 300.0,
        collect_timeout: float | None = None,
        close_timeout: float | None = CLOSE_S,
        on_failure: str = "raise",
        max_restarts: int = 10,
        max_concurrent_starts: int | None = None,
        recycle_after: Mapping[str, float] | None = None,
        threads_per_collector: int = 1,
        cluster: RayCluster | Engine | str | None = None,
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
        self._threshold, self._cluster = _threshold_of(preemptive_threshold, sync), _checked(cluster, context)
        self._sync = sync
        self.policy, self._num_collectors = policy, whole("num_collectors", num_collectors, 1)
        failing = on_failure, max_restarts, collector_nouns(()), None, max_concurrent_starts, recycle_after
        limits = Limits(start_timeout, collect_timeout, close_timeout, *failing)
        recipes = _understood(envs, num_envs, self._num_collectors, make_vec_options, far=cluster is not None)
        (self._replayable,) = flags(replayable=(make_vec_options or {}).get("replayable", False))
        how = sync, limits, _with_users(context, threads_per_collector, self._num_collectors, make_vec_options or {})
        for_each = {"reset_at_each_iter": reset_at_each_iter, "exploration": exploration, **self._limits}
        acts_on = device if policy_device is None else policy_device
        for_each |= {"policy_device": acts_on, "initial_state": dict(initial_state or {})}
        self._collectors = self._begin(envs, recipes, make_vec_options, policy_factory, *how, for_each)

    def _begin(
        self,
        envs: Any,
        recipes: list[Recipe],
        make_vec_options: Mapping[str, Any] | None,
        policy_factory: Callable[[], Callable[..., Any]] | None,
        sync: bool,
        limits: Limits,
        processes: Processes,
        for_each: dict[str, Any],
    ) -> CollectorSet:
        """Starts the collectors, or the one that acts for all where the policy stays here. for_each: their options."""
        require_shapes(self.policy)
        self._count_envs(len(recipes))
        with called_as(recipes[0].call):
            facts = PolicyFacts.of(self.policy, is_built_there=policy_factory is not None)
        if (obstacle := facts.obstacle) is None:
            plan = pool_plan(
                recipes,
                facts,
                policy_factory,
                sync=sync,
                threshold=self._threshold,
                replayable=self._replayable,
                collector_options=for_each,
                count=self._num_collectors,
                limits=limits,
                processes=processes,
            )
            runs = in_processes if self._cluster is None else partial(on_nodes, cluster=self._cluster)
            return Replicas(plan, facts, recipes[0].call, self._seed, runs)
        if self._cluster is not None:
            said = _explained(obstacle, stays="cannot act for envs on other machines while it stays here")
            raise CannotTravel(said, UNCOPYABLE_PAGE)
        warnings.warn(_explained(obstacle, threshold=self._threshold), UserWarning, stacklevel=caller_stacklevel())
        for_each |= {
            "num_envs": len(recipes),
            "make_vec_options": {
                **(make_vec_options or {}),
                **limits.options(),
                "num_workers": self._num_collectors,
                "context": processes.context,
                "threads_per_worker": processes.threads,
                "worker_env": processes.worker_env,
            },
            "seed": self._seed,
            "overlap": not sync and len(recipes) > 1,
        }
        return StayingCollector(Collector(envs, self.policy, **for_each))

    def nodes(self) -> list[dict[str, Any]]:
        """For each node its ``index``, ``host``, ``node_id``, ``state`` ("up", "starting" or "lost"), ``collectors``.

        Also the ``policy_version`` that it was sent last, and the ``reason`` why its last node host was lost, if any.
        ``collectors`` is a range. Without a cluster this machine is the one node.
        """
        if self._cluster is not None and isinstance(self._collectors, Replicas):
            return self._collectors.nodes()
        here = {"index": 0, "host": socket.gethostname(), "node_id": "", "state": "up"}
        return [here | {"collectors": range(self._num_collectors), "policy_version": self.policy_version, "reason": ""}]

    def update_policy_weights_(self, weights: Any = None) -> None:
        """Makes each collector act with these weights, all of them at once, from the next batch that it begins.

        weights: None for the current ones of `policy`, else a module, a state dict or a TensorDict of parameters; they
        are copied into `policy` as well, if there is one. Raises SpecMismatch, UsageError.
        """
        self._collectors.update_weights(weights)

    @property
    def policy_version(self) -> int:
        """Version of the weights that collectors take for their next batch; 1 for those they started with."""
        return self._collectors.version

    @property
    def single_observation_space(self) -> Space[Any]:
        """One env's observation space; for multi-agent envs a Dict by group."""
        return self._spaces[0]

    @property
    def single_action_space(self) -> Space[Any]:
        """One env's action space; for multi-agent envs a Dict by group."""
        return self._spaces[1]

    def call(self, name: str | Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The results of ``env.name(*args, **kwargs)``, or of ``name(env, env_index, *args, **kwargs)`` for a function.

        Envs are called between batches, in the order of their indices among all. With ``sync=False`` each collector
        first ends the batch that it has begun, which the next iterations return. Raises EnvError, UsageError.
        """
        results: tuple[Any, ...] = self.ask(Call.of(name, args, kwargs))
        return results

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """The attribute `name` of every env, looked up through wrappers; see `call`."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Sets the attribute `name` of every env, to ``values[i]`` where `values` is a list or tuple; see `call`.

        With ``on_failure="restart"`` it is set again in an env that is built again.
        """
        self.ask(SetAttr(name, values_of(name, values, range(self._num_envs))))

    def reset(self) -> None:
        """Starts new episodes in all envs with the next batch."""
        with self._afresh():
            self._collectors.reset(self.batches + 1, self.frames)

    def stats(self) -> dict[str, Any]:
        """Counts of frames and batches; ``collectors``: counts of the collectors' envs, and shares of their time.

        In ``collectors``: ``env_steps``, ``restarts`` (envs that were built again), ``recycled`` (collectors that were
        replaced by `recycle_after`), the number of ``processes``, and for each of ``workers`` the shares of its time
        that it spent ``collecting`` and ``waiting`` for the caller, its env steps, resets and restarts, and the figures
        of its process (``pid``, ``memory_bytes``, ``handles``, ``children`` and their growth) that `VectorEnv.stats`
        has. Counts are of the batches that have arrived. With a policy that stays here ``collectors`` is
        `VectorEnv.stats`.
        """
        return {"frames": self.frames, "batches": self.batches, "collectors": self._collectors.stats()}

    def state_dict(self, *, envs: bool = False) -> dict[str, Any]:
        """Counters and the policy's weights.

        envs: also the states of envs that are ``replayable=True``, from which `load_state_dict` goes on bit for bit
        with as many collectors, with others by the same states. Raises UsageError for others, and without `sync`.
        """
        state = self._counters() | self._collectors.state_dict()
        return state | packed_envs(self.going_on()) if envs else state

    def env_states(self) -> list[dict[str, Any]] | None:
        """For each env its own part of a state, with an `EnvState`; None where the next batch starts new episodes."""
        if not (self._replayable and self._sync):
            raise UsageError('states of envs need sync=True and make_vec_options={"replayable": True}')
        with self._between_batches():
            return self._collectors.env_states()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`, which `state_dict` returned: where it has them, in the envs' states.

        Else, and with other envs, in new episodes with seeds of their own. An env that differs begins a new one, too,
        with a RuntimeWarning.
        """
        with self._afresh():
            self._load_counters(state)
            # States of earlier versions count the trajectories of a policy that stays in "staying" alone.
            self._trajectories.next_id = max(self._trajectories.next_id, state.get("staying", state)["next_traj_id"])
            self._collectors.load_state_dict(state)
            self._collectors.reset(self.batches + 1, self.frames)
            if self._replayable:
                self._load_envs(state, self._collectors.load_env_states)

    def shutdown(self) -> None:
        """Closes the envs and ends the processes. A batch that is under way ends after the step that it is in."""
        self._closed = True
        self._collectors.close()

    @cached_property
    def _spaces(self) -> tuple[Space[Any], Space[Any]]:
        spaces: tuple[Space[Any], Space[Any]] = self.ask(Spaces())
        return spaces

    def ask(self, question: EnvQuestion) -> Any:
        """The joined answers of all envs to a `question`, between batches; see `call`."""
        with self._between_batches():
            return self._collectors.ask(question)

    def _give_up(self) -> None:
        self._collectors.give_up()

    def _collect(self) -> TensorDict:
        storage, first_env, versions, notes = self._collectors.collect()
        for note in notes:
            warnings.warn(note, RuntimeWarning, stacklevel=caller_stacklevel())
        self.frames += int(storage.mask.sum())
        batch = self._batch_over(storage, first_env)
        batch["collector", "policy_version"] = torch.from_numpy(versions).unsqueeze(1).repeat(1, storage.T)
        self.batches += 1
        return batch


def _checked(cluster: RayCluster | Engine | str | None, context: str) -> RayCluster | Engine | None:
    if cluster == "ray":
        cluster = RayCluster()
    if not (cluster is None or isinstance(cluster, RayCluster | Engine)):
        raise ConfigError("cluster", "None, 'ray' or a muster.RayCluster", cluster)
    if cluster is None or context != "fork":
        return cluster
    raise ConfigError(
        'context="fork" has collectors inherit what this process holds, and those of cluster= start on other machines; '
        'leave context out, or use "forkserver" or "spawn"'
    )


def _with_users(context: str, threads: int, num_collectors: int, make_vec_options: Mapping[str, Any]) -> Processes:
    """The options of the collectors' processes, with what users set for each of them."""
    processes = Processes(context, threads, worker="collector")
    changes = changes_of(make_vec_options.get("worker_env"), num_collectors, worker="collector")
    init = choose_init(make_vec_options.get("worker_init"), starts_fresh=processes.context != "fork")
    return replace(processes, worker_env=changes, init=init)


def _understood(
    envs: Any,
    num_envs: int | None,
    num_collectors: int,
    make_vec_options: Mapping[str, Any] | None,
    *,
    far: bool,
) -> list[Recipe]:
    options = env_options(make_vec_options)
    if num_envs is None and not isinstance(envs, (list, tuple)):
        num_envs = num_collectors
    with called_as(_ON_NODES if far else MULTI_COLLECTOR):
        recipes = adapted_recipes(
            envs,
            num_envs,
            env_kwargs=options.get("env_kwargs"),
            wrappers=with_torchrl(options.get("wrappers")),
            groups=options.get("groups"),
            state=options.get("state", True),
        )
    if len(recipes) < num_collectors:
        raise ConfigError(f"num_collectors={num_collectors}, but there are only {len(recipes)} envs; each needs one")
    return recipes


def env_options(make_vec_options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options of `make_vec` that collectors have. Raises ConfigError for others."""
    options = dict(make_vec_options or {})
    if unknown := sorted(options.keys() - set(ENV_OPTIONS)):
        raise ConfigError(
            f"make_vec_options: collectors step their envs themselves, so of make_vec's options only "
            f"{', '.join(ENV_OPTIONS)} are theirs, got {', '.join(unknown)}"
        )
    return options


def _threshold_of(threshold: float | None, sync: bool) -> float:
    """The fraction of the collectors that a batch waits for."""
    if threshold is not None and not (sync and 0 < threshold <= 1):
        raise ConfigError(f"preemptive_threshold must lie in (0, 1], with sync=True, got {threshold!r}")
    return 1.0 if threshold is None else threshold


def _explained(
    obstacle: PolicyObstacle,
    *,
    stays: str = "stays in this process and acts for all envs, which are stepped in workers",
    threshold: float = 1.0,
) -> str:
    ways_out = "; or\n  ".join(obstacle.ways_out())
    if obstacle.marked:
        what = f"the policy {stays}, as it asks: {obstacle}."
    else:
        what = f"the policy cannot be copied to collector processes, because of {obstacle}. It {stays}."
    ignored = f" preemptive_threshold={threshold:g} is ignored: batches wait for all envs." if threshold < 1 else ""
    return f"{what}{ignored} Ways out:\n  {ways_out}."


class StayingCollector:
    """A `Collector` that acts for all envs. Its own seeds go on from reset to reset."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    @property
    def version(self) -> int:
        """Version of the weights that collectors take for their next batch; 1 for those they started with."""
        return self._collector.policy_version

    def update_weights(self, weights: Any) -> None:
        """Updates weights, see `MultiCollector.update_policy_weights_`. Another thread may be collecting."""
        self._collector.update_policy_weights_(weights)

    def collect(self) -> Filled:
        """Waits for the next batch. After an error the caller calls `give_up` first."""
        storage = self._collector.collect_storage()
        return Filled(storage, 0, np.full(storage.N, self._collector.acting_version))

    def ask(self, question: EnvQuestion) -> Any:
        """The joined answers of all envs to a question, between batches."""
        return self._collector.envs.ask(question)

    def give_up(self) -> None:
        """Drops what is under way: the next batches begin new episodes in all envs."""
        self._collector.reset()

    def reset(self, round_number: int, frames: int) -> None:
        """Begins new episodes in all envs, and drops what is under way.

        round_number: a new one for each reset, so that seeds may differ.
        frames: number that all collectors together have collected before.
        """
        self._collector.reset()

    def stats(self) -> dict[str, Any]:
        """Counts and shares of time, see `MultiCollector.stats`."""
        return dict(self._collector.stats()["envs"])

    def state_dict(self) -> dict[str, Any]:
        """The policy's weights, and all else that collectors need to go on."""
        return {"staying": self._collector.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what `state_dict` returned; the caller calls `reset` next."""
        self._collector.load_state_dict(state["staying"])

    def env_states(self) -> list[dict[str, Any]] | None:
        """For each env its own part of a state; None where the next batch starts new episodes anyway."""
        return self._collector.env_states()

    def load_env_states(self, states: Sequence[Mapping[str, Any]]) -> list[ReplayDiffers]:
        """Goes on from `env_states`; returns the errors of envs that differ, and have begun new episodes."""
        return self._collector.load_env_states(states)

    def close(self) -> None:
        """Ends processes and closes envs."""
        self._collector.shutdown()


CollectorSet = Replicas | StayingCollector
"""Collectors that share all envs, with a policy that each of them has, or that acts for all.

A set is made for batches of all envs, or for batches of the one collector that is ready first. Where the policy is a
module, the caller has it too: updates go into that module, and states hold its weights.
"""
