"""One collector of a `MultiCollector`, in its process: its share of the envs and a replica of the policy."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from muster._core import map_fd
from muster.errors import EnvError
from muster.hosts.failures import Failure
from muster.hosts.questions import Again, EnvQuestion, Pack, sent
from muster.hosts.recipe_plans import RecipeResident
from muster.pickling.main_module import Init
from muster.pool.messages import Failed, Message
from muster.pool.resources import own_memory_bytes
from muster.pool.worker import Here, seed_globals
from muster.rollout.beside_weights import apply_changes
from muster.rollout.collector import Collector
from muster.rollout.replicas.batch_memory import BatchLayout, stop_flag
from muster.rollout.replicas.plans import ReplicaFields, ReplicaPlan, collector_nouns
from muster.rollout.replicas.shared_weights import SharedWeights, shapes_of
from muster.rollout.storage import Final, LastInfos, Loss
from muster.rollout.weights import named_weights
from muster.vector.assemble import serial_vec

# The counts of a replica's envs, since the replica was built.
COUNTS = ("env_steps", "resets", "restarts")


# ---- questions


@dataclass(eq=False)
class Begin(Message):
    """Begins again with this seed: with a new collector, and new episodes. A message, too."""

    seed: int | None


@dataclass(eq=False)
class AskFields(Message):
    """Asks for the fields of the replica's rollouts, which are known once it has begun."""


@dataclass(eq=False)
class AskWeights(Message):
    """Asks for the policy's weights, by name."""


@dataclass(eq=False)
class AskShapes(Message):
    """Asks for the shapes and dtypes of the weights that each policy takes, by name: a list by collector."""


@dataclass(eq=False)
class AskEnvStates(EnvQuestion):
    """Asks for `Collector.env_states`; the first env of a collector has its generators."""


@dataclass(eq=False)
class LoadEnvStates(EnvQuestion):
    """Has collectors go on from these states, by env. The first envs answer with errors of those that differ."""

    states: Mapping[int, Any]

    def packed(self, pack: Pack) -> LoadEnvStates:
        return LoadEnvStates({env: pack(one, {f"envs[{env}]": one}) for env, one in self.states.items()})

    def to(self, envs: Collection[int]) -> LoadEnvStates:
        return LoadEnvStates({env: self.states[env] for env in envs})


@dataclass(eq=False)
class Collect(Message):
    """Collects a batch into the block of memory at `offset`.

    frames: number that this collector has collected before, in this or earlier processes.  afresh: whether to begin new
    episodes.  until_end: whether to end with the first episode that ends.
    """

    offset: int
    frames: int
    afresh: bool
    until_end: bool = False


# ---- answers


@dataclass(eq=False)
class Collected(Message):
    """A batch that lies in its block. version: of the weights that acted.

    counts: see `COUNTS`.  waiting: the share of the replica's time that it has waited for the caller.
    lost: attributes that could not be set again, and why, in words.
    has_ended: whether it has ended with an episode, as the order has asked for.
    """

    version: int
    counts: tuple[int, int, int]
    waiting: float
    finals: list[Final]
    losses: list[Loss]
    infos: LastInfos
    lost: str
    has_ended: bool


@dataclass(eq=False)
class Raised(Message):
    """The exception that a question has ended with. is_final: restarting the replica's envs did not help."""

    failed: Failed
    is_final: bool


class Replica(RecipeResident):
    """A collector in its process.

    An env that raises is replaced here, so that the others keep their episodes. All else that raises is an answer: the
    caller may replace the replica.
    """

    @classmethod
    def unpack(cls, data: bytes, here: Here, initialise: Callable[[Init], None]) -> Any:
        plan = super().unpack(data, here, initialise)
        return replace(plan, policy=here.big_arrays[len(here.big_arrays) - plan.policy :])

    def __init__(self, plan: ReplicaPlan, here: Here) -> None:
        # A forked process has none of the threads that torch's pool expects, and would wait for them forever. The
        # worker sets the number that the user asked for once everything is built.
        torch.set_num_threads(1)
        assert not isinstance(plan.recipes, bytes)
        assert not isinstance(plan.policy, int)
        self._plan, self._here = plan, here
        before_bytes = own_memory_bytes() if here.is_judged else 0
        envs = range(plan.first_env, plan.first_env + len(plan.recipes))
        nouns = collector_nouns([envs], first_worker=here.info.worker_index)
        self._envs = serial_vec(
            *(plan.recipes, here.info),
            max_restarts=plan.max_restarts,
            replayable=plan.replayable,
            nouns=nouns,
            activity=here.activity,
        )
        try:
            policy: Any = pickle.loads(plan.policy[0], buffers=plan.policy[1:]) if plan.policy else None
            self._policy = policy() if plan.policy_is_factory else policy
        except BaseException:
            self._envs.close()
            raise
        self._weights: SharedWeights | None = None
        self._version = 0
        self._lost: list[str] = []
        self._collector: Collector | None = None
        self._layout: BatchLayout | None = None
        self._built_at = self._idle_since = time.monotonic()
        self._waiting_s = 0.0
        if here.is_judged:
            here.report((before_bytes, own_memory_bytes()))

    def answer(self, question: Any) -> Any:
        self._waiting_s += time.monotonic() - self._idle_since
        try:
            return self._answer(question)
        except BaseException as error:
            if isinstance(error, EnvError):
                error.batch = None  # the rows of the other envs are dropped, too
            return Raised(Failed.of(error, self._here.dumps), self._envs.closed)
        finally:
            self._idle_since = time.monotonic()

    def take(self, message: Any) -> None:
        match message:
            case Begin():
                self._answer(message)
            case Again(questions):
                for question in (one for of_env in questions.values() for one in of_env):
                    failed = [one for one in self._envs.answers_to(question) if isinstance(one, Failure)]
                    self._lost += [f"{question.key!r} ({one.type_name}: {one.message})" for one in failed]
            case _:
                super().take(message)

    def close(self, closes: Callable[[int], None]) -> None:
        closes(0)
        self._envs.close()

    def _answer(self, question: Any) -> Any:
        match question:
            case Collect():
                return self._collect(question)
            case Begin(seed):
                # At first they are as the process has seeded them by the same seed, before `worker_init`.
                if seed is not None and self._collector is not None:
                    seed_globals([seed, self._here.info.worker_index])
                self._collector = Collector(self._envs, self._policy, seed=seed, **self._plan.options)
                return None
            case AskFields():
                return self._fields()
            case AskWeights():
                return {name: tensor.detach().cpu() for name, tensor in named_weights(self._policy).items()}
            case AskShapes():
                return [shapes_of(named_weights(self._policy))]
            case AskEnvStates():
                states = self._started().env_states()
                if states is None:
                    return [None] * self._envs.num_envs
                states[0]["generators"] = self._started().generators()
                return self._sent(states)
            case LoadEnvStates(states):
                self._lay_out()  # first: it may draw from the generators
                first, *rest = states.values()
                if "generators" in first:
                    self._started().load_generators(first["generators"])
                errors = self._started().load_env_states([first, *rest])
                for error in errors:
                    error.result = None
                return self._sent([errors, *[None] * len(rest)])
            case EnvQuestion():
                return self._sent(self._envs.answers_to(question))
        return super().answer(question)

    def _sent(self, answers: list[Any]) -> list[Any]:
        """The answers of the envs as they leave this process; their failures were made within it."""
        dumps, recipes, worker = self._here.dumps, self._plan.recipes, self._here.info.worker_index
        assert dumps is not None
        assert not isinstance(recipes, bytes)

        def fail(i: int, error: BaseException) -> Failure:
            return Failure.of(error, recipes[i].env_index, worker, None, dumps, worker_noun="collector")

        answers = sent(answers, dumps, recipes[0].call, fail)
        return [one.portable(dumps) if isinstance(one, Failure) else one for one in answers]

    def _fields(self) -> ReplicaFields:
        collector = self._started()
        return ReplicaFields(*collector.fields, tuple(collector.output_fields()))

    def _collect(self, order: Collect) -> Collected:
        """Fills the block at the order's offset."""
        collector, layout = self._started(), self._lay_out()
        if order.afresh:
            collector.reset()
        collector.frames = order.frames
        named = named_weights(self._policy)
        if self._weights is None:
            self._weights = SharedWeights(named, self._here.files["weights"])
        self._version, beside = self._weights.read_into(named, self._version)
        if beside:
            apply_changes(self._policy, beside)
        block = map_fd(fd=self._here.files["batches"], size=layout.block_bytes, offset=order.offset)
        storage = layout.storage(block, slice(*self._plan.part))
        storage.clear_flags()
        steps = collector.fill(storage, stop_flag(block), until_end=order.until_end)
        has_ended = order.until_end and bool((storage.terminated | storage.truncated)[steps - 1].any())
        if has_ended:  # the others go on in another process, from their resets
            storage.truncated[steps - 1] |= ~storage.terminated[steps - 1]
        waiting = self._waiting_s / (time.monotonic() - self._built_at)
        lost, self._lost = ", ".join(self._lost), []
        ends = storage.finals, storage.losses, storage.infos
        return Collected(self._version, self._envs.counts(), waiting, *ends, lost, has_ended)

    def _lay_out(self) -> BatchLayout:
        if self._layout is None:
            self._layout = self._plan.layout(self._fields())
        return self._layout

    def _started(self) -> Collector:
        assert self._collector is not None
        return self._collector
