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
from muster.errors import ClosedError, SpecMismatch
from muster.hosts.failures import failures_of, to_one_exception
from muster.hosts.questions import EnvQuestion, Kept, opened, packer
from muster.hosts.recipe_plans import Recipes, plans_of
from muster.pickling import called_as
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
from muster.rollout.replicas.replica_pool import ReplicaPool, in_processes
from muster.rollout.replicas.shared_weights import SharedWeights, WeightShapes, shapes_of
from muster.rollout.weights import Copies, weights_to_send
from muster.transport.big_arrays import memfd
from muster.transport.slab import split_evenly

# The first word of the spawn keys for replicas' seeds; Collector uses smaller ones.
_REPLICAS = 3


class Replicas:
    """A `CollectorSet` of replicas of a policy with shares of envs, which a `ReplicaPool` runs.

    threshold: a share of the collectors.  runs: makes the pool.
    The others: see `MultiCollector`, and `ReplicaPool`.
    """

    def __init__(
        self,
        recipes: Sequence[Recipe],
        facts: PolicyFacts,
        policy_factory: Callable[[], Any] | None,
        *,
        sync: bool,
        threshold: float,
        seed: int | None,
        collector_options: Mapping[str, Any],
        count: int,
        limits: Limits,
        processes: Processes,
        runs: Callable[[PoolPlan, int, Kept], ReplicaPool] = in_processes,
    ) -> None:
        self._firsts = split_evenly(len(recipes), count)
        self._facts = facts
        self._seed, self._call_words = seed, recipes[0].call
        self._count, self._forks = count, processes.context == "fork"
        self._pack = packer(self._call_words, forked=self._forks)
        self._envs = range(len(recipes))
        self._updating = threading.Lock()
        plan = self._planned(recipes, policy_factory, sync, threshold, collector_options, limits, processes)
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

    def _planned(
        self,
        recipes: Sequence[Recipe],
        policy_factory: Callable[[], Any] | None,
        sync: bool,
        threshold: float,
        collector_options: Mapping[str, Any],
        limits: Limits,
        processes: Processes,
    ) -> PoolPlan:
        """Raises CannotTravel."""
        set_up = SetUp.of_this_process(processes.init)
        processes = replace(
            processes,
            preloads=() if any(changes_of(processes.worker_env, self._count)) else PRELOADS,
            set_up=set_up.elsewhere() if self._call_words.far else set_up,
        )
        envs = [range(*ends) for ends in itertools.pairwise(self._firsts)]
        nouns = collector_nouns(envs, limited=limits.step_timeout is not None)
        policy: list[Any] = []  # its pickle, and big buffers, which collectors that are no forks read where they lie
        big: list[pickle.PickleBuffer] | None = None if self._forks else []
        with called_as(self._call_words):
            if policy_factory is not None:
                policy = [pack_factory(policy_factory, processes.context, big)]
            elif self._facts.policy is not None:
                policy = [pack_policy(self._facts.policy, big)]
        if big is not None:
            policy = [*map(pickle.PickleBuffer, policy), *big]

        def content(own: Recipes, envs: range) -> ReplicaPlan:
            batch_envs = len(recipes) if sync else len(envs)
            T = -(-collector_options["frames_per_batch"] // batch_envs)
            return ReplicaPlan(
                own,
                envs.start,
                policy if self._forks else len(policy),
                policy_is_factory=policy_factory is not None,
                part=(envs.start, envs.stop) if sync else (0, len(envs)),
                batch_envs=batch_envs,
                max_restarts=limits.restarts,
                options={
                    **collector_options,
                    "frames_per_batch": T * len(envs),
                    "init_random_frames": -(-collector_options["init_random_frames"] // self._count),
                },
            )

        plans = plans_of(recipes, self._firsts, processes, content)
        for plan in () if self._forks else plans:
            plan.big += policy
        return PoolPlan(
            plans,
            processes,
            with_hints(nouns, self._call_words, len(recipes), self._count),
            limits,
            sync,
            threshold * self._count,
        )

    def _begin(self) -> None:
        self._pool.launch(self._seeds(0))
        self._pool.reset(self._seeds(0))
        self._pool.lay_out()
        # Factories may draw different weights in each process; all collectors take those of the first.
        weights = self._facts.weights() or self._pool.weights()
        expected = shapes_of(weights)
        for k, built in enumerate(self._pool.shapes()):
            _require_same(k, expected, built)
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


def _require_same(collector: int, expected: WeightShapes, built: WeightShapes) -> None:
    if built == expected:
        return
    differing = sorted(name for name in expected.keys() | built.keys() if expected.get(name) != built.get(name))[:5]
    raise SpecMismatch(
        f"the policy of collector {collector} has other weights than those it is to follow: {differing} are "
        f"{[built.get(name) for name in differing]}, expected {[expected.get(name) for name in differing]}. "
        "policy_factory, and what rebuild_with was given, must build what they stand for"
    )
