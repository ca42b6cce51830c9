"""The learner's side of a `MultiCollector`'s replicas: the policy and its weights, seeds, and what users hand over."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from muster.backends.process import with_hints
from muster.errors import ClosedError, ReplayDiffers, SpecMismatch
from muster.hosts.failures import failures_of, to_one_exception
from muster.hosts.questions import EnvQuestion, Kept, opened, packer
from muster.hosts.recipe_plans import Recipes, about_of, plans_of
from muster.pickling import UserCall, called_as
from muster.pool.environment import changes_of
from muster.pool.launcher_client import standard_fds
from muster.pool.limits import Limits
from muster.pool.resources import naming_limits
from muster.pool.set_up import Processes, SetUp
from muster.recipes.recipe import Recipe
from muster.rollout.beside_weights import BesideWeights
from muster.rollout.replicas.hooks import ReplicaFailed
from muster.rollout.replicas.plans import PRELOADS, Filled, PoolPlan, ReplicaPlan, collector_nouns
from muster.rollout.replicas.policy_travel import PolicyFacts, pack_factory, pack_policy
from muster.rollout.replicas.replica import AskEnvStates, LoadEnvStates
from muster.rollout.replicas.replica_pool import ReplicaPool, in_processes
from muster.rollout.replicas.shared_weights import SharedWeights, shapes_of
from muster.rollout.weights import Copies, weights_to_send
from muster.transport.big_arrays import memfd
from muster.transport.slab import split_evenly

# The first word of the spawn keys for replicas' seeds; Collector uses smaller ones.
_REPLICAS = 3


def pool_plan(
    recipes: Sequence[Recipe],
    facts: PolicyFacts,
    policy_factory: Callable[[], Any] | None,
    *,
    sync: bool,
    threshold: float,
    replayable: bool,
    collector_options: Mapping[str, Any],
    count: int,
    limits: Limits,
    processes: Processes,
) -> PoolPlan:
    """The plan for `count` replicas. threshold: a share of them.  Raises CannotTravel."""
    firsts, call, forks = split_evenly(len(recipes), count), recipes[0].call, processes.context == "fork"
    set_up = SetUp.of_this_process(processes.init)
    processes = replace(
        processes,
        preloads=() if any(changes_of(processes.worker_env, count)) else PRELOADS,
        set_up=set_up.elsewhere() if call.far else set_up,
    )
    envs = [range(*ends) for ends in itertools.pairwise(firsts)]
    nouns = collector_nouns(envs, limited=limits.step_timeout is not None)
    policy: list[Any] = []  # its pickle, and big buffers, which collectors that are no forks read where they lie
    big: list[pickle.PickleBuffer] | None = None if forks else []
    with called_as(call):
        if policy_factory is not None:
            policy = [pack_factory(policy_factory, processes.context, big)]
        elif facts.policy is not None:
            policy = [pack_policy(facts.policy, big)]
    if big is not None:
        policy = [*map(pickle.PickleBuffer, policy), *big]

    def content(own: Recipes, envs: range) -> ReplicaPlan:
        batch_envs = len(recipes) if sync else len(envs)
        T = -(-collector_options["frames_per_batch"] // batch_envs)
        return ReplicaPlan(
            own,
            envs.start,
            policy if forks else len(policy),
            policy_is_factory=policy_factory is not None,
            part=(envs.start, envs.stop) if sync else (0, len(envs)),
            batch_envs=batch_envs,
            max_restarts=limits.restarts,
            replayable=replayable,
            options={
                **collector_options,
                "frames_per_batch": T * len(envs),
                "init_random_frames": -(-collector_options["init_random_frames"] // count),
            },
        )

    plans = plans_of(recipes, firsts, processes, content)
    for plan in () if forks else plans:
        plan.big += policy
    hinted, about = with_hints(nouns, call, len(recipes), count), about_of(recipes, firsts, own_indices=True)
    return PoolPlan(plans, processes, hinted, limits, sync, threshold * count, about)


class Replicas:
    """A `CollectorSet` of replicas of a policy with shares of envs, which a `ReplicaPool` runs.

    call: that of the user.  runs: makes the pool.
    """

    def __init__(
        self,
        plan: PoolPlan,
        facts: PolicyFacts,
        call: UserCall,
        seed: int | None,
        runs: Callable[[PoolPlan, int, Kept], ReplicaPool] = in_processes,
    ) -> None:
        self._facts, self._seed, self._count = facts, seed, len(plan.plans)
        self._pack = packer(call, forked=plan.processes.context == "fork")
        self._envs = range(plan.plans[-1].envs.stop)
        self._updating = threading.Lock()
        with naming_limits("the collectors could not start"), standard_fds():
            self._weights_fd = memfd("weights")
        weakref.finalize(self, os.close, self._weights_fd)
        self._pool = runs(plan, self._weights_fd, Kept(self._envs, self._pack))
        try:
            with naming_limits("the collectors could not start"), self._rebuilding():
                self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        self._pool.launch(self._seeds(0))
        self._pool.reset(self._seeds(0))
        self._pool.lay_out()
        # Factories may draw different weights in each process; all collectors take those of the first.
        weights = self._facts.weights() or self._pool.weights()
        expected = shapes_of(weights)
        for k, built in enumerate(self._pool.shapes()):
            if built != expected:
                names = sorted(name for name in expected.keys() | built.keys() if expected.get(name) != built.get(name))
                raise SpecMismatch(
                    f"the policy of collector {k} has other weights than those it is to follow: {names[:5]} are "
                    f"{[built.get(name) for name in names[:5]]}, expected {[expected.get(name) for name in names[:5]]}."
                    " policy_factory, and what rebuild_with was given, must build what they stand for"
                )
        self._weights = SharedWeights(weights, self._weights_fd)
        self._weights.write(weights)
        self._pool.follow(self._weights)
        self._beside = BesideWeights(self._facts.policy)

    # ---- weights

    @property
    def version(self) -> int:
        return self._weights.version

    def update_weights(self, weights: Any) -> None:
        with self._updating:
            self._publish(*weights_to_send(self._facts.policy, weights))

    def state_dict(self) -> dict[str, Any]:
        """State of the policy, under ``policy``: the module's, or copies of the weights published last, if any."""
        module = self._facts.module
        weights = self._weights.read() if module is None else module.state_dict()
        return {} if module is None and not weights else {"policy": weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "policy" not in state:
            return
        weights = state["policy"]
        with self._updating:
            if (module := self._facts.module) is not None:
                module.load_state_dict(weights)
                weights = self._facts.weights()
            if weights:
                self._publish(weights)

    def _publish(self, weights: Mapping[str, Tensor], copies: Copies = ()) -> None:
        if missing := sorted(self._weights.names - weights.keys()):
            raise SpecMismatch(f"the weights are not the replicas': missing {missing[:5]}")
        self._weights.write(weights, self._beside.changes(), copies)
        self._pool.follow(self._weights)

    # ---- what the pool is asked for

    def collect(self) -> Filled:
        with self._rebuilding():
            return self._pool.collect()

    def give_up(self) -> None:
        with self._rebuilding():
            self._pool.give_up()

    def reset(self, round_number: int, frames: int = 0) -> None:
        with self._rebuilding():
            self._pool.reset(self._seeds(round_number), frames)

    def ask(self, question: EnvQuestion) -> Any:
        with self._rebuilding():
            answers = opened(self._pool.ask(question.packed(self._pack)), self._envs)
        if failures := [*failures_of(answers).values()]:
            raise to_one_exception(failures)
        return question.joined(answers)

    def env_states(self) -> list[dict[str, Any]] | None:
        states = [*self.ask(AskEnvStates())]
        return None if None in states else states

    def load_env_states(self, states: Sequence[Mapping[str, Any]]) -> list[ReplayDiffers]:
        answers = self.ask(LoadEnvStates(dict(zip(self._envs, states, strict=True))))
        return [error for of_collector in answers for error in of_collector or ()]

    def stats(self) -> dict[str, Any]:
        return self._pool.stats()

    def nodes(self) -> list[dict[str, Any]]:
        return self._pool.nodes()

    def close(self) -> None:
        self._pool.close()

    def _seeds(self, round_number: int) -> list[int | None]:
        """One for each collector."""
        if self._seed is None:
            return [None] * self._count
        sequence = np.random.SeedSequence(self._seed, spawn_key=(_REPLICAS, round_number))
        return [int(word) for word in sequence.generate_state(self._count)]

    @contextlib.contextmanager
    def _rebuilding(self) -> Iterator[None]:
        """Raises the user's errors in place of what the pool raises."""
        try:
            yield
        except ReplicaFailed as failed:
            error = failed.error()
            raise error from error.__cause__
        except ClosedError:
            raise ClosedError("the collector processes have ended; make another MultiCollector") from None
