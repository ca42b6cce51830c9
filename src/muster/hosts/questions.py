"""The table of questions to envs: a row says all about one. `EnvHost.answer` carries each out, and nothing else does.

On its way a question passes `ask` of vector envs, backends, replica pools and nodes. None of them knows which one it
is. Its envs have the numbers that users know. Answers are a list by env: a value, a `Failure` where the env has raised,
None where it was not asked. Values that leave a process are pickled one by one, and opened by who asked.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self, TypeVar

from muster._core import Stepper
from muster.envs.attributes import get_attribute, set_attribute
from muster.errors import CannotTravel, ReplayDiffers
from muster.hosts.env_facts import EnvFacts
from muster.hosts.env_states import EnvState
from muster.hosts.failures import Failure, not_rebuilt_here, not_sent_there
from muster.introspection import type_name
from muster.pickling import UserCall, copied_if_plain, is_plain, named_arguments, not_rebuilt
from muster.pickling import dumps as dumps_carefully
from muster.pickling.travel import Unpickler
from muster.pool.messages import Message, stays_packed
from muster.pool.thread_pool import outcome_of
from muster.pool.watch import Activity
from muster.recipes.recipe import Recipe
from muster.spaces.compare import handed_out
from muster.transport.mail import dumps
from muster.worker_info import WorkerInfo, worker_info_context

EnvCall = Callable[..., Any]
"""A function in the place of a method's name: called with each env, its number and the arguments."""

Pack = Callable[[Any, dict[str, Any]], Any]
"""Makes of a user's value what travels. The dict has names of its parts, for errors. May raise CannotTravel."""


class AskedHost(Protocol):
    """The part of an `EnvHost` that questions need."""

    envs: list[Any]
    numbers: list[int]
    replayed: dict[int, ReplayDiffers | bool]

    def facts_of(self, i: int) -> EnvFacts: ...
    def seed_globals(self, seeds: Sequence[int]) -> None: ...
    def reset_env(self, i: int, seed: int | None, options: Any, passes_options: bool) -> BaseException | None: ...
    def replay(self, i: int, state: EnvState, again: Sequence[EnvQuestion]) -> BaseException | None: ...


class EnvQuestion(Message):
    """A row of the table.

    by_row: answered by a row that the core delivers, as a reset is; the envs that are asked are pending until then.
    needs_all: an env that is out of reach is an error, before any is asked.
    """

    by_row: ClassVar[bool] = False
    needs_all: ClassVar[bool] = True

    @property
    def words(self) -> str:
        """The words for what a worker does meanwhile."""
        return f"answering {type(self).__name__}"

    @property
    def key(self) -> Hashable:
        """The name under which an env that is built again is asked this again; None for a question of today alone."""
        return None

    def packed(self, pack: Pack) -> Self:
        """The question with the user's values as they travel. Raises CannotTravel."""
        return self

    def asks(self, env: int) -> bool:
        """True if this env is asked."""
        return True

    def to(self, envs: Collection[int]) -> Self:
        """The part for these envs."""
        return self

    def begins(self, host: AskedHost) -> None:
        """Prepares a host, once, before its envs are asked."""

    def on(self, host: AskedHost, i: int) -> Any:
        """The answer of a host's i-th env. May raise; of a question by row, the caller's own Ctrl-C is returned."""
        raise NotImplementedError

    def joined(self, answers: list[Any]) -> Any:
        """The result for the user, from the answers of all envs."""
        return tuple(answers)

    def again(self, env: int) -> Self | None:
        """The question to an env that is built again, before its first reset."""
        return None if self.key is None or not self.asks(env) else self.to([env])


@dataclass(eq=False)
class Call(EnvQuestion):
    """Calls a method, or a function with the env and its number; or reads an attribute. what: name, args, kwargs."""

    what: Any
    said: str = ""

    @classmethod
    def of(cls, name: str | EnvCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """The call in which `name` gets these arguments."""
        return cls((name, args, dict(kwargs)), f"answering call({repr(name) if isinstance(name, str) else ''})")

    @property
    def words(self) -> str:
        return self.said

    def packed(self, pack: Pack) -> Call:
        name, args, kwargs = self.what
        parts = name.sent_parts() if hasattr(name, "sent_parts") else {"the function": name}
        return Call(pack(self.what, parts | named_arguments(args, kwargs)), self.said)

    def on(self, host: AskedHost, i: int) -> Any:
        name, args, kwargs = _here(self.what)
        if not isinstance(name, str):
            return name(host.envs[i], host.numbers[i], *args, **kwargs)
        value = get_attribute(host.envs[i], name)
        return value(*args, **kwargs) if callable(value) else value


@dataclass(eq=False)
class SetAttr(EnvQuestion):
    """Sets an attribute of envs. values: by env."""

    name: str
    values: Mapping[int, Any]
    needs_all = False

    @property
    def words(self) -> str:
        return f"answering set_attr({self.name!r})"

    @property
    def key(self) -> str:
        return self.name

    def packed(self, pack: Pack) -> SetAttr:
        known: dict[int, Any] = {}  # by identity: one value may be big, and that of all envs
        for env, value in self.values.items():
            if id(value) not in known:
                known[id(value)] = pack(value, {f"values[{env}]": value})
        return SetAttr(self.name, {env: known[id(value)] for env, value in self.values.items()})

    def asks(self, env: int) -> bool:
        return env in self.values

    def to(self, envs: Collection[int]) -> SetAttr:
        return SetAttr(self.name, {env: self.values[env] for env in envs if env in self.values})

    def on(self, host: AskedHost, i: int) -> None:
        set_attribute(host.envs[i], self.name, _here(self.values[host.numbers[i]]))

    def joined(self, answers: list[Any]) -> None:
        return None


@dataclass(eq=False)
class Spaces(EnvQuestion):
    """Asks for the observation and action spaces of one env, of agents by group."""

    needs_all = False

    def on(self, host: AskedHost, i: int) -> Any:
        if i:
            return None
        facts = host.facts_of(i)
        agents = facts.agents
        return (
            (facts.observation_space, facts.action_space)
            if agents is None
            else (agents.observation_space(), agents.action_space())
        )

    def joined(self, answers: list[Any]) -> Any:
        observation, action = next(one for one in answers if one is not None)
        return handed_out(observation), handed_out(action)


@dataclass(eq=False)
class Reset(EnvQuestion):
    """Resets envs. seeds: by env.  passes_options: whether ``env.reset`` gets the keyword `options` at all."""

    seeds: Mapping[int, int | None]
    options: Any = None
    passes_options: bool = True
    by_row = True

    def packed(self, pack: Pack) -> Reset:
        return replace(self, options=pack(self.options, {"options": self.options}))

    def asks(self, env: int) -> bool:
        return env in self.seeds

    def to(self, envs: Collection[int]) -> Reset:
        return replace(self, seeds={env: self.seeds[env] for env in envs if env in self.seeds})

    def begins(self, host: AskedHost) -> None:
        if not isinstance(self.options, CannotTravel):
            # Neighbouring seeds, and neighbouring workers, must not share random numbers.
            host.seed_globals([seed for seed in self.seeds.values() if seed is not None])

    def on(self, host: AskedHost, i: int) -> BaseException | None:
        return host.reset_env(i, self.seeds[host.numbers[i]], _here(self.options), self.passes_options)


@dataclass(eq=False)
class Replay(EnvQuestion):
    """Sets envs to states. states: by env.  of_new: by env, what one that is built anew for that is asked first."""

    states: Mapping[int, EnvState]
    of_new: Mapping[int, Sequence[EnvQuestion]]
    by_row = True

    def asks(self, env: int) -> bool:
        return env in self.states

    def to(self, envs: Collection[int]) -> Replay:
        mine = [env for env in envs if env in self.states]
        return Replay({env: self.states[env] for env in mine}, {env: self.of_new[env] for env in mine})

    def on(self, host: AskedHost, i: int) -> BaseException | None:
        env = host.numbers[i]
        return host.replay(i, self.states[env], self.of_new[env])


@dataclass(eq=False)
class HowReplayed(EnvQuestion):
    """Asks envs that were to be set: True where that has been done, else why not; None where nothing is known of it."""

    def on(self, host: AskedHost, i: int) -> Any:
        return host.replayed.pop(i, None)


@dataclass(eq=False)
class Again(Message):
    """The questions to the envs of a new worker, by env. There is no reply, see `EnvHost.again`."""

    questions: Mapping[int, Sequence[EnvQuestion]]


class Kept:
    """By env, the questions that it is asked again where it is built again, in the order in which they were asked.

    pack: makes of a user's value what can be sent again as it was.
    """

    def __init__(self, envs: Iterable[int], pack: Pack) -> None:
        self._by_env: dict[int, dict[Hashable, EnvQuestion]] = {env: {} for env in envs}
        self._pack = pack

    def of(self, envs: Iterable[int]) -> dict[int, list[EnvQuestion]]:
        """Those of these envs."""
        return {env: [*self._by_env[env].values()] for env in envs}

    def keep(self, questions: Mapping[int, Sequence[EnvQuestion]]) -> None:
        """Keeps what `of` of another has returned."""
        for env, of_env in questions.items():
            self._by_env[env] |= {(type(one), one.key): one for one in of_env}

    def while_asking(self, question: EnvQuestion, ask: Callable[[], list[Any]]) -> list[Any]:
        """Keeps a question, then asks it: a worker may die meanwhile. Envs that refuse keep what they had.

        ask: returns the answers, in the order of the envs.
        """
        if question.key is None:
            return ask()
        kept, before, key = question.packed(self._pack), dict(self._by_env), (type(question), question.key)
        for env, of_env in before.items():
            if (again := kept.again(env)) is not None:  # the last, as it was asked last: setters may touch others
                self._by_env[env] = {other: one for other, one in of_env.items() if other != key} | {key: again}
        answers = ask()
        for env, answer in zip(before, answers, strict=True):
            if isinstance(answer, Failure):
                self._by_env[env] = before[env]
        return answers


def shared(value: Any, parts: dict[str, Any]) -> Any:
    """The `Pack` for envs of this process: an object that is no plain data may be meant to be shared, and is."""
    return copied_if_plain(value)


# ---- how a host carries out what it does with its envs


T = TypeVar("T")
Deed = Generator[Any, Any, T]
"""Something that a host does with its envs, written once for all ways. A coroutine that a Ctrl-C keeps from beginning
would give a warning."""


class CalledHost(Protocol):
    """The part of an `EnvHost` that ways need."""

    recipes: list[Recipe]
    envs: list[Any]
    numbers: list[int]
    first_env: int
    info: WorkerInfo
    worker_noun: str
    activity: Activity
    stepper: Stepper

    def info_of(self, i: int) -> WorkerInfo: ...
    def rebuilt(self, i: int, again: Sequence[EnvQuestion]) -> Deed[BaseException | None]: ...


class InTurn:
    """One env after the other, in the thread that asks.

    closes_together: whether the closes of all envs are reported as one.
    """

    closes_together = False

    def run(self, deed: Deed[T]) -> T:
        """The result of a deed, which in turn waits for nothing."""
        try:
            while True:
                deed.send(None)
        except StopIteration as ended:
            result: T = ended.value
            return result

    def begun(self, deeds: Iterable[Deed[T]]) -> Iterable[Any]:
        """Several of these, to be awaited in their order."""
        return deeds

    def within(self, host: CalledHost, i: int, doing: int, function: Callable[..., Any], *args: Any) -> Any:
        """A deed: calls a function of env i's own code where that runs, and awaits the result where it can be."""
        yield from ()
        with host.activity.of(doing, host.first_env + i), worker_info_context(host.info_of(i)):
            return outcome_of(function, *args)

    def until_message(self, host: CalledHost) -> None:
        """Steps the envs that the caller asks for, until the caller has sent a message."""
        host.stepper.run()

    def notes(self, i: int, question: EnvQuestion) -> None:
        """Notes that env i has answered a question, for an env that is built again without the caller's knowledge."""

    def to_step(self, host: CalledHost, i: int) -> Any:
        """The object that the core steps for env i."""
        return host.envs[i]

    def reset_env(
        self, host: CalledHost, i: int, seed: Any, options: Any, passes_options: bool
    ) -> BaseException | None:
        """Resets env i, or begins to; its row is the answer. Returns the Ctrl-C with which that has ended."""
        return host.stepper.reset_env(i, seed, options, passes_options)

    def restart(self, deed: Deed[None]) -> None:
        """Carries out a restart, or begins to."""
        self.run(deed)

    def stop(self, host: CalledHost) -> Any:
        """A deed: ends what envs are in, since they are closed next."""
        yield from ()

    def settle(self, envs: Iterable[int]) -> Any:
        """A deed: waits until the threads of these envs have ended what they were in."""
        yield from ()

    def end(self) -> None:
        """Releases what this way has."""


# ---- travelling


@dataclass(eq=False)
class Packed:
    """A user's value on its way to another process, pickled apart from its message and once for all workers.

    Unpickling gives the value itself, or where `stays_packed` was set this again. Where the value cannot be rebuilt it
    gives a CannotTravel, so that the worker can still read the message and answer it.
    """

    data: bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return (Packed if stays_packed.get() else _rebuilt), (self.data,)


def packer(call: UserCall, *, forked: bool) -> Pack:
    """The `Pack` for other processes, in under 5 s a value. forked: whether it goes to forks of this process."""

    def pack(value: Any, parts: dict[str, Any]) -> Packed:
        if isinstance(value, Packed):
            return value
        if is_plain(value):
            return Packed(dumps(value))
        return Packed(dumps_carefully(value, parts, start_method=None, forks=forked, call=call))

    return pack


def sent(answers: Sequence[Any], send: Callable[[object], bytes], call: UserCall, fail: Any) -> list[Any]:
    """The answers of envs as they leave their process: failures as they are, all else pickled one by one.

    send: pickles.  fail: makes the failure of the i-th env from an exception.
    """

    def one(i: int, answer: Any) -> Any:
        if answer is None or isinstance(answer, Failure):
            return answer
        try:
            return send(answer)
        except Exception as error:
            return fail(i, not_sent_there(answer, error, call))

    return [one(i, answer) for i, answer in enumerate(answers)]


def opened(answers: Sequence[Any], numbers: Sequence[int], worker: int = 0) -> list[Any]:
    """The answers that `sent` has returned elsewhere. numbers: of their envs.  worker: the one that has sent them."""

    def one(env: int, answer: Any) -> Any:
        if not isinstance(answer, bytes):
            return answer
        try:
            return pickle.loads(answer)
        except Exception as error:
            refusal = not_rebuilt_here(error)
            return Failure(env, worker, None, type_name(refusal), str(refusal), "", refusal)

    return [one(env, answer) for env, answer in zip(numbers, answers, strict=True)]


def _rebuilt(data: bytes) -> Any:
    try:
        return Unpickler(io.BytesIO(data)).load()
    except Exception as error:
        send = "Send what it is made of instead, and make it there: envs.call(function) calls function(env, env_index)"
        refusal = not_rebuilt("what was sent to the worker", error, send)
        refusal.__cause__ = error
        return refusal


def _here(value: Any) -> Any:
    """A value that has come. Raises the CannotTravel that came in its place."""
    if isinstance(value, CannotTravel):
        raise value
    return value
