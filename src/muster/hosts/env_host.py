"""An env host: the envs that one worker, or the caller itself, builds and steps."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import coroutine
from typing import Any

import numpy as np

from muster._core import Autoreset, Doing, Stepper
from muster.errors import CannotTravel, MusterError, ReplayDiffers, SpecMismatch
from muster.hosts.env_facts import EnvFacts, check_one_per_process, facts_of, is_awaited, misfit, same_facts
from muster.hosts.env_states import EnvState, difference, seed_of_episode
from muster.hosts.failures import AttributesLost, Failure, about_error, about_gym, reset_note
from muster.hosts.questions import Deed, EnvQuestion, InTurn, shared
from muster.hosts.requests import HostOptions, Restart
from muster.hosts.stand_ins import NotBuiltAgain, Permitted
from muster.introspection import type_name
from muster.pickling import find_culprits
from muster.pickling.main_module import ABOUT_INIT, Init
from muster.pool.resources import own_memory_bytes
from muster.pool.set_up import about_script
from muster.pool.thread_pool import Outcome
from muster.pool.watch import Activity
from muster.pool.worker import seed_globals
from muster.recipes.known_envs import advise_apart
from muster.recipes.recipe import BuiltEnv, Recipe
from muster.transport.infos import info_object_names
from muster.transport.mail import Mail
from muster.transport.slab import Slab
from muster.worker_info import WorkerInfo, worker_info_context

_RELEASE_TIMEOUT_S = 2.0


class EnvHost:
    """Builds the envs of `recipes`, and steps them by a `Stepper`, which calls back the methods that it needs.

    dumps: pickles for the caller; None where the caller is in this process.  worker_noun: for a worker, in failures.
    together: the recipes of all hosts in this process; None where there is no other host.
    activity: where it says which env it builds or calls.  way: how it calls its envs.
    awaits: makes the way for coroutine envs, where `way` is in turn.
    """

    def __init__(
        self,
        recipes: Sequence[Recipe],
        info: WorkerInfo,
        first_env: int,
        *,
        dumps: Callable[[object], bytes] | None = None,
        worker_noun: str = "worker",
        together: Sequence[Recipe] | None = None,
        activity: Activity | None = None,
        way: InTurn | None = None,
        awaits: Callable[[], InTurn] = InTurn,
    ) -> None:
        self.activity = activity or Activity()
        self.way, self._awaits = way or InTurn(), awaits
        self._together = together
        self.worker_noun = worker_noun
        self.recipes = list(recipes)
        self.info = info
        self.first_env = first_env
        self.numbers = [recipe.env_index for recipe in self.recipes]  # those that users know: a collector's begin later
        self.dumps = dumps
        self.envs: list[Any] = []
        self._stepped: list[Any] = []  # what the stepper calls for each env: most often the same list
        self._built: list[BuiltEnv] = []
        self._unset: dict[int, AttributesLost] = {}  # what could not be set again, until the env's next request
        self.replayed: dict[int, ReplayDiffers | bool] = {}  # how it went, by env, until somebody asks
        self._slab: Slab | None = None

    # ---- building

    def initialise(self, init: Init | None) -> Failure | None:
        """Calls `worker_init` in the caller's own process; returns the failure where it raises."""
        try:
            with worker_info_context(self.info):
                if init is not None:
                    init()
        except BaseException as error:
            return dataclasses.replace(self.failure(0, error), hint=ABOUT_INIT)
        return None

    def build(self, on_built: Callable[[tuple[int, ...]], None] | None = None) -> Failure | None:
        """Builds the envs, in order. Where one fails, releases the others and returns the failure.

        on_built: called after each of the first two envs with the bytes of memory that this process held before the
        first env and after each env so far.
        """
        memory_bytes = [own_memory_bytes()] if on_built is not None else []
        for i in range(len(self.recipes)):
            try:
                built, error = self.way.run(self._build_one(i))
                if error is not None:
                    raise error
                self._built.append(built)
                self.envs.append(built.env)
                check_one_per_process(built.env, len(self._together or self.recipes), self.recipes[i].call)
                if on_built is not None and len(self.envs) <= 2:
                    memory_bytes.append(own_memory_bytes())
                    on_built(tuple(memory_bytes))
            except BaseException as error:
                failure = self.failure(i, error)
                self.close()
                return failure
        if type(self.way) is InTurn and any(map(is_awaited, self.envs)):
            self.way = self._awaits()
        return None

    def info_of(self, i: int) -> WorkerInfo:
        """The WorkerInfo that code of env i sees, see `muster.get_worker_info`."""
        own = self.info.unique_indices[i : i + 1]
        return dataclasses.replace(self.info, env_index=self.numbers[i], unique_indices=own)

    @coroutine
    def _build_one(self, i: int) -> Deed[Outcome]:
        def build() -> BuiltEnv:
            built = self.recipes[i].build()
            facts_of(built.env)
            return built

        outcome: Outcome = yield from self.way.within(self, i, Doing.BUILDING, build)
        return outcome

    def facts(self) -> list[EnvFacts]:
        """The facts of each env. Where they equal the first env's, they are the same object: big spaces travel once."""
        first = facts_of(self.envs[0])
        rest = [facts_of(env) for env in self.envs[1:]]
        return [first, *(first if same_facts(first, facts) else facts for facts in rest)]

    def attach(self, slab: Slab, host: int, mail: Mail, options: HostOptions) -> None:
        """Makes this host ready to step into `slab`."""
        self._slab = slab
        self._mail = mail
        self._schemas_mailed = self._schema_mail_end = 0
        self._host, self._same_step = host, options.autoreset_mode == Autoreset.SAME_STEP
        self._misfits = [self._misfit(i) for i in range(len(self.envs))]
        self._stepped = [self._to_step(i) for i in range(len(self.envs))]
        self.stepper = Stepper(
            slab=slab.layout,
            host=host,
            first_env=self.first_env,
            envs=self._stepped,
            obs=slab.plan.obs.obs_node(slab.obs, slab.final_obs),
            action=slab.plan.action.action_node(slab.actions),
            autoreset=options.autoreset_mode,
            check_finite=options.check_finite,
            lenient=options.lenient,
            reward_key=options.reward_key,
            actions_by_mail=slab.plan.action.has_objects,
            seeds_episodes=options.seeds_episodes,
            env_host=self,
            wait_budget=options.wait_budget,
        )

    def _to_step(self, i: int) -> Any:
        env, permits = self.way.to_step(self, i), self.recipes[i].permits
        return env if permits is None else Permitted(env, permits)

    def _misfit(self, i: int) -> SpecMismatch | None:
        assert self._slab is not None
        return misfit(self._slab.plan, self.envs[i], self.first_env + i)

    # ---- what the stepper calls, rarely

    def on_error(self, i: int, error: BaseException) -> int:
        """Mails the failure of env i; returns its bytes in the mail."""
        return self._mail.put(self.first_env + i, self.failure(i, error))

    def own(self, objects: list[Any]) -> list[Any]:
        """Copies of objects of an env, which the env might change before they are mailed or read."""
        return self._mail.own(objects)

    def put_mail(self, i: int, objects: list[Any], final_objects: list[Any]) -> int:
        """Mails the objects in env i's observation and infos that are no numbers; returns their bytes in the mail."""
        if self._mail.lends_objects:  # the env may go on changing them
            objects = self._mail.own(objects)
        try:
            return self._mail.put(self.first_env + i, (objects, final_objects))
        except Exception as error:
            culprits = self._culprits(i, objects, final_objects)
            if self.dumps is None or not culprits:
                raise
            raise CannotTravel(
                f"env {self.first_env + i}: {culprits}. Leave it out, or put something plain in its place"
            ) from error

    def _culprits(self, i: int, objects: list[Any], final_objects: list[Any]) -> str:
        """The names of the objects of env i that cannot be sent to the caller, and the reasons."""
        assert self._slab is not None
        record, found = self._slab.records[self.first_env + i], []
        for sent, schema in ((objects, record["info_schema"]), (final_objects, record["final_schema"])):
            if not sent:
                continue
            names = info_object_names(self.stepper.describe_schemas(), int(schema))
            # The objects of the info follow those of the observation.
            names = ["the observation"] * (len(sent) - len(names)) + names
            for name, value in zip(names, sent, strict=True):
                found += [f"{one.path} ({one.type}) cannot be sent: {one.reason}" for one in find_culprits(value, name)]
        return "; ".join(found)

    def take_actions(self, i: int) -> Iterator[Any]:
        """An iterator over those parts of env i's action that came through the mail."""
        assert self._slab is not None
        env = self.first_env + i
        length = int(self._slab.action_mail_bytes[env])
        return iter(self._mail.get(self._slab.plan.num_envs + env, length) or ())

    def on_new_schema(self) -> int:
        """Mails the layouts of infos that are new, behind those mailed before, which the caller may be reading.

        Returns where they end now; only then the caller hears of them.
        """
        assert self._slab is not None
        box, schemas = 2 * self._slab.plan.num_envs + self._host, self.stepper.describe_schemas()
        end = self._mail.append(box, schemas[self._schemas_mailed :], self._schema_mail_end)
        self._schemas_mailed, self._schema_mail_end = len(schemas), end
        return end

    def next_seed(self, i: int) -> int:
        """The seed of env i's next reset, where each has the one of its episode."""
        assert self._slab is not None
        own, begun = self._slab.episodes[self.first_env + i].tolist()
        self._slab.episodes[self.first_env + i, 1] = begun + 1
        seed = seed_of_episode(own, begun)
        if len(self.numbers) == 1 and self.dumps is not None:
            seed_globals([seed])
        return seed

    # ---- commands

    def answer(self, question: EnvQuestion) -> list[Any]:
        """Carries out a question: the answer of each env, a Failure where it raised, None where it is not asked.

        A question by row is answered by rows instead, each published as soon as it is there.
        """
        question.begins(self)
        if question.by_row:
            self._answer_by_rows(question)
            return []
        return self.way.run(self._answers(question))

    @coroutine
    def _answers(self, question: EnvQuestion) -> Deed[list[Any]]:
        asked = [i for i, env in enumerate(self.numbers) if question.asks(env)]
        answers: list[Any] = [None] * len(self.numbers)
        for i, answer in zip(asked, self.way.begun(self._carried_out(question, i) for i in asked), strict=True):
            answers[i] = yield from answer
        return answers

    @coroutine
    def _carried_out(self, question: EnvQuestion, i: int) -> Deed[Any]:
        answer, error = yield from self.way.within(self, i, Doing.TALKING, question.on, self, i)
        if isinstance(error, KeyboardInterrupt) and self.dumps is None:
            raise error  # the caller's own Ctrl-C
        if error is not None:
            return self.failure(i, error)
        self.way.notes(i, question)
        return answer

    def _answer_by_rows(self, question: EnvQuestion) -> None:
        interrupt: BaseException | None = None
        for i in [i for i, env in enumerate(self.numbers) if question.asks(env)]:
            if (refusal := interrupt or self._misfits[i] or self._unset.pop(i, None)) is not None:
                self.stepper.refuse(i, refusal)
                continue
            try:
                error = question.on(self, i)
            except Exception as refused:
                self.stepper.refuse(i, refused)
                continue
            interrupt = error if self.dumps is None else None  # the caller's own Ctrl-C: the rest fail with it

    def facts_of(self, i: int) -> EnvFacts:
        """The facts of env i as it is now."""
        return facts_of(self.envs[i])

    def seed_globals(self, seeds: Sequence[int]) -> None:
        """Seeds the global generators by these, if any; in the caller's own process they belong to the user."""
        if seeds and self.dumps is not None:
            seed_globals([*seeds, self.info.worker_index])

    def reset_env(self, i: int, seed: int | None, options: Any, passes_options: bool) -> BaseException | None:
        """Resets env i, and publishes its row; returns the Ctrl-C with which that has ended."""
        return self.way.reset_env(self, i, seed, options, passes_options)

    def replay(self, i: int, state: EnvState, again: Sequence[EnvQuestion]) -> BaseException | None:
        """Sets env i to a state; its last row is the answer. Returns the Ctrl-C with which that has ended.

        An env that does not come to that state is built anew, asked `again`, and tried once more. In the end it is
        reset; so is one that has come to the end of an episode, where such a row is not returned (same_step).
        """
        assert self._slab is not None
        record, episodes = self._slab.records[self.first_env + i], self._slab.episodes[self.first_env + i]
        before, self.replayed[i] = episodes.copy(), True
        try:
            try:
                self._replay(i, state, built_anew=False)
            except ReplayDiffers:
                if self.facts_of(i).metadata.get("one_per_process"):
                    raise
                if (error := self.way.run(self.rebuilt(i, again))) is not None:
                    self.stepper.replace_env(i, NotBuiltAgain(error), None)
                    raise error from None
                self.stepper.replace_env(i, self._to_step(i), None)
                self._replay(i, state, built_anew=True)
        except ReplayDiffers as differs:
            self.replayed[i], episodes[:] = differs, before
            return self.reset_env(i, None, None, True)
        except BaseException as error:
            record["needs_reset"] = True  # it may be in the middle of an episode that nobody has seen
            self.stepper.refuse(i, error)
            return error if isinstance(error, KeyboardInterrupt) else None
        if state.is_over and self._same_step:
            return self.reset_env(i, None, None, False)
        self.stepper.publish(i)
        return None

    def _step_again(self, i: int, state: EnvState, action: bytes) -> None:
        """Sets env i to a state, and steps it by an action; that it does not come to that state is its answer, too."""
        assert self._slab is not None
        try:
            self._replay(i, state, built_anew=True)
        except BaseException as error:
            return self.stepper.refuse(i, error)
        for rows in self._slab.actions.arrays:
            own = rows[self.first_env + i : self.first_env + i + 1]
            own[...] = np.frombuffer(action, own.dtype, own.size).reshape(own.shape)
            action = action[own.nbytes :]
        return self.stepper.step_env(i)

    def _replay(self, i: int, state: EnvState, *, built_anew: bool) -> None:
        assert self._slab is not None
        slab, env = self._slab, self.first_env + i
        slab.episodes[env], slab.records["episode_length"][env] = (state.seed, state.episode), 0
        about = self.numbers[i], state.episode, state.steps, built_anew
        try:
            self.stepper.replay(i, json.loads(state.options), state.steps, state.actions, slab.actions.arrays)
        except Exception as error:
            after = f"{type_name(error)} was raised after step {slab.records['episode_length'][env]}: {error}"
            raise ReplayDiffers(*about, after) from error
        if (differs := difference(state, slab, env)) is not None:
            raise ReplayDiffers(*about, *differs)

    def refuse(self, env_ids: Sequence[int], error: Exception) -> None:
        """Answers the pending requests of some envs with an exception."""
        for env in env_ids:
            self.stepper.refuse(env - self.first_env, error)

    def restart(self, restart: Restart) -> None:
        """Answers the pending request of an env with a new episode."""
        self.way.restart(self.restarted(restart))

    @coroutine
    def restarted(self, restart: Restart) -> Deed[None]:
        """Carries out a restart, until the env is about to be reset."""
        i = restart.env - self.first_env
        if not restart.rebuilds and restart.seed is not None:  # in a new process
            self.seed_globals([restart.seed])
        if restart.rebuilds and (error := (yield from self.rebuilt(i, restart.again))) is not None:
            return self.stepper.refuse(i, error)
        if (refusal := self._misfits[i] or self._unset.pop(i, None)) is not None:
            return self.stepper.refuse(i, refusal)
        self.stepper.replace_env(i, self._to_step(i), restart.seed)
        if restart.replay is not None:
            self._step_again(i, restart.replay, restart.action)
        elif restart.resets_now:
            self.way.reset_env(self, i, restart.seed, restart.options, True)
        else:
            self.stepper.acknowledge(i)
        return None

    @coroutine
    def rebuilt(self, i: int, again: Sequence[EnvQuestion]) -> Deed[BaseException | None]:
        """Closes env i, builds it anew and asks it `again`; returns what has prevented that."""
        error = yield from self._close_one(i, self._built[i], Doing.TALKING)
        if isinstance(error, KeyboardInterrupt):
            return error
        built, error = yield from self._build_one(i)
        if error is not None:
            return error
        self._built[i], self.envs[i] = built, built.env
        self._misfits[i] = self._misfit(i)
        try:
            yield from self._again({self.numbers[i]: again})
        except BaseException as raised:
            return raised
        return self._misfits[i]

    def again(self, questions: Mapping[int, Sequence[EnvQuestion]]) -> None:
        """Asks new envs again, by number. Where one refuses, that is the answer to its next request."""
        self.way.run(self._again(questions))

    @coroutine
    def _again(self, questions: Mapping[int, Sequence[EnvQuestion]]) -> Deed[None]:
        for env, of_env in questions.items():
            i, reasons = self.numbers.index(env), {}
            for question in of_env:
                # An env of the caller's process may change the value.
                answer = yield from self._carried_out(question if self.dumps else question.packed(shared), i)
                if isinstance(answer, Failure):
                    reasons[f"{question.key}"] = f"{answer.type_name}: {answer.message}"
            if reasons:
                self._unset[i] = AttributesLost(reasons)

    def close(self, on_closing: Callable[[int], None] | None = None) -> list[Failure]:
        """Closes the envs and releases what was built for them. Raises nothing; returns what was raised.

        Each in the thread that has built it: what it holds may be bound to that. The caller's own Ctrl-C, in the close
        of one, leaves those after it unclosed.
        on_closing: called with the number of each env, from 0, before that env is waited for.
        """
        try:
            return self.way.run(self._closed(on_closing))
        finally:
            self.way.end()

    @coroutine
    def _closed(self, on_closing: Callable[[int], None] | None) -> Deed[list[Failure]]:
        all_built, self._built = self._built, []
        errors: list[BaseException | None] = []
        yield from self.way.stop(self)
        closing = iter(self.way.begun(self._close_one(i, built, Doing.NOTHING) for i, built in enumerate(all_built)))
        try:
            for i in range(len(all_built)):
                if on_closing is not None and not (i and self.way.closes_together):
                    yield from self.way.settle(range(i, len(all_built)))
                    on_closing(i)
                errors.append((yield from next(closing)))
                if isinstance(errors[-1], KeyboardInterrupt) and self.dumps is None:
                    break
        finally:  # also when a Ctrl-C comes between two closes
            deadline = time.monotonic() + _RELEASE_TIMEOUT_S
            for built in all_built[len(errors) :]:
                built.release(max(0.0, deadline - time.monotonic()))
        failures = [self.failure(i, error) for i, error in enumerate(errors) if error is not None]
        self.envs.clear()
        self._stepped.clear()
        return failures

    @coroutine
    def _close_one(self, i: int, built: BuiltEnv, doing: int) -> Deed[BaseException | None]:
        def close() -> Any:
            return built.env.close()

        yield from self.way.settle([i])
        error: BaseException | None
        _, error = yield from self.way.within(self, i, doing, close)
        with worker_info_context(self.info_of(i)):
            built.release(_RELEASE_TIMEOUT_S)
        return error

    def failure(self, i: int, error: BaseException) -> Failure:
        """The report of `error`, raised by env i, for the caller."""
        step = None if self._slab is None else int(self._slab.records["episode_length"][self.first_env + i])
        advice = "" if isinstance(error, MusterError) else self._hint(i)
        in_process = "" if self.dumps is None or not self.recipes else self.recipes[i].call.in_process
        of_gym = about_gym(self.envs[i]) if isinstance(error, TypeError) and self.envs else ""
        hints = advice, about_script(error, begins=not step), about_error(error, in_process), of_gym
        return Failure.of(
            error,
            self.numbers[i] if self.numbers else self.first_env + i,
            self.info.worker_index,
            step,
            self.dumps,
            note=reset_note(self.envs[i], error) if step == 0 and self.envs else None,
            worker_noun=self.worker_noun,
            hint="\n".join(filter(None, hints)),
            lost_attributes=error.reasons if isinstance(error, AttributesLost) else None,
        )

    def _hint(self, i: int) -> str:
        """The sentence that says how to give each env a process, where env i shared this one with others."""
        together, place = (self.recipes, i) if self._together is None else (self._together, self.first_env + i)
        return advise_apart(together[: place + 1] if self._slab is None else together)
