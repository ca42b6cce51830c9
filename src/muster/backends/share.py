"""The share of envs that one worker, or the caller itself, builds and steps."""

from __future__ import annotations

import dataclasses
import gc
import pickle
import random
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from muster import _core
from muster.backends.resources import own_memory_bytes
from muster.envs.agents import AgentsEnv
from muster.envs.attributes import get_attribute, set_attribute
from muster.envs.layout import AgentLayout, RowNode, layout_difference
from muster.errors import CannotTravel, EnvError, MusterError, OneEnvPerProcess, SpecMismatch, UsageError
from muster.introspection import type_name
from muster.pickling import find_culprits
from muster.recipe import BuiltEnv, Recipe, WorkerInfo, worker_info_context
from muster.spec import Space, first_difference
from muster.transport.infos import info_object_names
from muster.transport.mail import Mail
from muster.transport.slab import Slab
from muster.worker_info import ask_for_running

_RELEASE_TIMEOUT_S = 2.0

# What `Share.call` may be given in place of a name: called with each env and its index.
EnvCall = Callable[[Any, int], Any]


@dataclass(frozen=True)
class EnvFacts:
    """What the caller has to know of an env that it never builds."""

    observation_space: Space
    action_space: Space
    metadata: dict[str, Any]
    render_mode: str | None
    spec: Any
    agents: AgentLayout | None = None


@dataclass(frozen=True)
class Failure:
    """An exception on its way to the caller.

    exception: the original, pickled for another process, or None where it cannot be rebuilt there.
    step: env steps into the episode, None while building.
    """

    env_index: int
    worker_index: int
    step: int | None
    type_name: str
    message: str
    worker_traceback: str
    exception: BaseException | bytes | None

    def original(self) -> BaseException | None:
        """The original exception, where it can be rebuilt."""
        if not isinstance(self.exception, bytes):
            return self.exception
        try:
            error = pickle.loads(self.exception)
        except Exception:
            return None
        return error if isinstance(error, BaseException) else None


class Patience(NamedTuple):
    """How long to wait awake before sleeping, see `Patience` in _core/doorbell.hpp."""

    pauses: int
    yields: int
    spreads: bool


@dataclass(frozen=True)
class ShareOptions:
    """How a share is stepped; the same for all shares of a vector env."""

    autoreset_mode: int  # index into vector.AUTORESET_MODES
    check_finite: bool
    patience: Patience


class Share:
    """Builds the envs of `recipes` and steps them by way of `_core.Stepper`, whose host it is.

    dumps: pickles for the caller, where that is another process.
    """

    def __init__(
        self,
        recipes: Sequence[Recipe],
        info: WorkerInfo,
        first_env: int,
        *,
        dumps: Callable[[object], bytes] | None = None,
    ) -> None:
        self.recipes = list(recipes)
        self.info = info
        self.first_env = first_env
        self.dumps = dumps
        self.envs: list[Any] = []
        self._built: list[BuiltEnv] = []
        self._slab: Slab | None = None
        self._attached = False

    # ---- building

    def build(self, on_built: Callable[[Sequence[int]], None] | None = None) -> Failure | None:
        """Builds the envs, in order. Where one fails, releases the others and returns the failure.

        on_built: told after each of the first two what memory this process held before the first, and after each.
        """
        memory_bytes = [own_memory_bytes()] if on_built is not None else []
        for i, recipe in enumerate(self.recipes):
            try:
                built = self._build_one(i)
                self._built.append(built)
                self.envs.append(built.env)
                check_one_per_process(built.env, len(self.recipes))
                if on_built is not None and len(self.envs) <= 2:
                    memory_bytes.append(own_memory_bytes())
                    on_built(memory_bytes)
            except BaseException as error:
                failure = self.failure(recipe.env_index - self.first_env, error)
                self.close()
                return failure
        return None

    def info_of(self, i: int) -> WorkerInfo:
        """What env i is told of where it is."""
        return dataclasses.replace(self.info, env_index=self.recipes[i].env_index)

    def _build_one(self, i: int) -> BuiltEnv:
        with worker_info_context(self.info_of(i)):
            built = self.recipes[i].build()
            facts_of(built.env)
        return built

    def facts(self) -> list[EnvFacts | None]:
        """Each env's facts; None for an env that equals the share's first, so that big spaces travel once."""
        first = facts_of(self.envs[0])
        rest = [facts_of(env) for env in self.envs[1:]]
        return [first, *(None if _same(first, facts) else facts for facts in rest)]

    def attach(self, slab: Slab, line: int, mail: Mail, options: ShareOptions) -> None:
        """Makes the share ready to step into `slab`."""
        self._slab = slab
        self._mail = mail
        self._line = line
        found = ((i, self._misfit(i, env)) for i, env in enumerate(self.envs))
        self._misfits = {i: misfit for i, misfit in found if misfit is not None}
        self.stepper = _core.Stepper(
            slab.description,
            line,
            self.first_env,
            self.envs,
            slab.plan.obs.describe_obs(slab.obs, slab.final_obs),
            slab.plan.action.describe_action(slab.actions),
            autoreset=options.autoreset_mode,
            check_finite=options.check_finite,
            actions_by_mail=slab.plan.action.has_objects,
            lends_objects=mail.lends_objects,
            host=self,
            patience=options.patience,
        )
        self._attached = True

    def _misfit(self, i: int, env: Any) -> SpecMismatch | None:
        """Why a new env cannot use the rows that were laid out when the vector env was made."""
        assert self._slab is not None
        plan, facts = self._slab.plan, facts_of(env)
        layout = plan.obs.layout if isinstance(plan.obs, RowNode) else None
        reason = layout_difference(layout, facts.agents)
        for path, expected, got in (
            ("observation", plan.obs.space if layout is None else layout.observation_space(), facts.observation_space),
            ("action", plan.action.space if layout is None else layout.action_space(), facts.action_space),
        ):
            if reason is None and (found := first_difference(expected, got, path, bounds=False)) is not None:
                reason = f"{found.path}: {found.field} is {found.got}, expected {found.expected}"
        if reason is None:
            return None
        return SpecMismatch(
            f"env {self.first_env + i}, built anew, is laid out otherwise than before: {reason}. Make the factory "
            "build the same spaces and agents every time",
            env_index=self.first_env + i,
        )

    # ---- what the stepper calls, rarely

    def on_error(self, i: int, error: BaseException) -> int:
        """Env i raised: mails the failure."""
        return self._mail.put(self.first_env + i, self.failure(i, error))

    def own(self, objects: list[Any]) -> list[Any]:
        """Copies of what an env has given, which it may change before it is posted or read."""
        return self._mail.own(objects)

    def post(self, i: int, objects: list[Any], final_objects: list[Any]) -> int:
        """Mails what env i's observation and infos hold beside numbers."""
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
        """What env i has given that cannot be sent to the caller, by name."""
        assert self._slab is not None
        record, found = self._slab.records[self.first_env + i], []
        for given, schema in ((objects, record["info_schema"]), (final_objects, record["final_schema"])):
            if not given:
                continue
            names = info_object_names(self.stepper.describe_schemas(), int(schema))
            # Behind the observation's objects come the info's.
            names = ["the observation"] * (len(given) - len(names)) + names
            for name, value in zip(names, given, strict=True):
                found += [f"{one.path} ({one.type}) cannot be sent: {one.reason}" for one in find_culprits(value, name)]
        return "; ".join(found)

    def take_actions(self, i: int) -> Iterator[Any]:
        """The objects among env i's actions."""
        assert self._slab is not None
        env = self.first_env + i
        length = int(self._slab.action_mail_bytes[env])
        return iter(self._mail.get(self._slab.plan.num_envs + env, length) or ())

    def on_new_schema(self) -> None:
        """A new layout of infos: mails them all, in place of the last letter."""
        assert self._slab is not None
        box = 2 * self._slab.plan.num_envs + self._line
        self._slab.schema_mail_bytes[self._line] = self._mail.put(box, self.stepper.describe_schemas())

    # ---- commands

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int | None], options: dict[str, Any] | None) -> None:
        """Resets some envs; each is published as soon as it is done."""
        interrupt: BaseException | None = None
        for env, seed in zip(env_ids, seeds, strict=True):
            i = env - self.first_env
            if (refusal := interrupt or self._misfits.get(i)) is not None:
                self.stepper.refuse(i, refusal)
                continue
            error = self.stepper.reset_env(i, seed, options)
            interrupt = error if self.dumps is None else None  # the caller's own Ctrl-C: the rest fail with it

    def refuse(self, env_ids: Sequence[int], error: Exception) -> None:
        """Answers the requests that are pending for some envs with an exception."""
        for env in env_ids:
            self.stepper.refuse(env - self.first_env, error)

    def restart(self, env: int, seed: int | None, options: Any, resets_now: bool, rebuilds: bool) -> None:
        """Answers the request that is pending for `env` with a new episode; in a new worker the env is new already."""
        i = env - self.first_env
        if rebuilds:
            try:
                error = self._close_one(i, self._built[i])
                if isinstance(error, KeyboardInterrupt):
                    raise error
                self._built[i] = self._build_one(i)
            except BaseException as error:
                self.stepper.refuse(i, error)
                return
            self._misfits.pop(i, None)
            if (misfit := self._misfit(i, self._built[i].env)) is not None:
                self._misfits[i] = misfit
        if i in self._misfits:
            self.stepper.refuse(i, self._misfits[i])
            return
        self.stepper.replace_env(i, self._built[i].env, seed)
        if resets_now:
            self.stepper.reset_env(i, seed, options)
        else:
            self.stepper.acknowledge(i)

    def call(self, name: str | EnvCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """``env.name(*args, **kwargs)``, or the attribute's value, of each env; a Failure where it raised."""
        results: list[Any] = []
        for i, env in enumerate(self.envs):
            try:
                with worker_info_context(self.info_of(i)):
                    results.append(_call(env, self.first_env + i, name, args, kwargs))
            except BaseException as error:
                results.append(self._failed_call(i, error))
        return results

    def set_attr(self, name: str, values: Sequence[Any]) -> list[Failure | None]:
        """Sets an attribute of each env to its own value."""
        results: list[Failure | None] = []
        for i, (env, value) in enumerate(zip(self.envs, values, strict=True)):
            try:
                with worker_info_context(self.info_of(i)):
                    set_attribute(env, name, value)
                results.append(None)
            except BaseException as error:
                results.append(self._failed_call(i, error))
        return results

    def _failed_call(self, i: int, error: BaseException) -> Failure:
        if isinstance(error, KeyboardInterrupt) and self.dumps is None:
            raise error  # the caller's own Ctrl-C
        return self.failure(i, error)

    def close(self) -> list[Failure]:
        """Closes the envs and releases what was built for them. Raises nothing; returns what was raised."""
        failures = []
        all_built, self._built = self._built, []
        for i, built in enumerate(all_built):
            error = self._close_one(i, built)
            if error is not None:
                failures.append(self.failure(i, error))
        self.envs.clear()
        return failures

    def _close_one(self, i: int, built: BuiltEnv) -> BaseException | None:
        error: BaseException | None = None
        with worker_info_context(self.info_of(i)):
            try:
                built.env.close()
            except BaseException as raised:  # Ctrl-C, too: the others are to be closed
                error = raised
            built.release(_RELEASE_TIMEOUT_S)
        return error

    def failure(self, i: int, error: BaseException) -> Failure:
        """What `error`, raised by env i, will tell the caller."""
        env = self.first_env + i
        step = None if self._slab is None else int(self._slab.records["episode_length"][env])
        return Failure(
            env_index=env,
            worker_index=self.info.worker_index,
            step=step,
            type_name=type_name(error),
            message=message_of(error),
            worker_traceback="".join(traceback.format_exception(error)),
            exception=error if self.dumps is None else _portable(error, self.dumps),
        )


def _call(env: Any, index: int, name: str | EnvCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not isinstance(name, str):
        return name(env, index)
    value = get_attribute(env, name)
    return value(*args, **kwargs) if callable(value) else value


# The hosts that the core knows are shares: this is the first place that knows both them and `get_worker_info`.
ask_for_running(_core.running)


def facts_of(env: Any) -> EnvFacts:
    """Raises AttributeError where `env` is no env, SpecMismatch where its spaces are none."""
    for name in ("observation_space", "action_space"):
        space = getattr(env, name)
        if not isinstance(space, spaces.Space):
            hint = " It comes from the package gym: use gymnasium.spaces" if type_name(space).startswith("gym.") else ""
            raise SpecMismatch(f"{type_name(env)}.{name} is {space!r:.200}, expected a gymnasium.spaces.Space.{hint}")
    metadata = getattr(env, "metadata", None) or {}
    return EnvFacts(
        env.observation_space,
        env.action_space,
        dict(metadata),
        getattr(env, "render_mode", None),
        _spec_of(env),
        env.layout if isinstance(env, AgentsEnv) else None,
    )


def _spec_of(env: Any) -> Any:
    try:
        return getattr(env, "spec", None)
    except Exception:  # Gymnasium's wrappers copy the arguments that are in it, which may raise anything
        return None


def check_one_per_process(env: Any, num_envs: int) -> None:
    """Raises OneEnvPerProcess if `env` says that it must be alone, and `num_envs` are to be built in its process."""
    if num_envs > 1 and (getattr(env, "metadata", None) or {}).get("one_per_process"):
        raise OneEnvPerProcess(
            f'{type(getattr(env, "unwrapped", env)).__qualname__} declares metadata["one_per_process"] = True, but '
            f'{num_envs} envs were to be built in one process. Use backend="process" and leave num_workers and '
            "caller_steps out; each env then gets a process of its own."
        )


def _same(a: EnvFacts, b: EnvFacts) -> bool:
    pairs = ((a.observation_space, b.observation_space), (a.action_space, b.action_space))
    return a.agents == b.agents and not any(first_difference(x, y, "", bounds=True) for x, y in pairs)


def to_exception(failure: Failure) -> BaseException:
    """What to raise in the caller: an EnvError, its cause the original where there is one."""
    original = failure.original()
    own = isinstance(original, EnvError)
    if isinstance(failure.exception, KeyboardInterrupt):  # one from another process is no Ctrl-C, but the env's
        return failure.exception
    # A vector env that the env uses itself may raise UsageError: unexplained it would seem to be about this one.
    if isinstance(original, MusterError) and not own and not isinstance(original, UsageError):
        return original
    cls = type(original) if isinstance(original, EnvError) else EnvError
    where = f"env {failure.env_index} (worker {failure.worker_index}"
    where += ", while it was built)" if failure.step is None else f", step {failure.step})"
    error = cls(
        f"{where}: {failure.message}" if own else f"{where}: {failure.type_name}: {failure.message}",
        env_index=failure.env_index,
        worker_index=failure.worker_index,
        step=failure.step,
        original_type=failure.type_name,
        worker_traceback=failure.worker_traceback,
    )
    error.__cause__ = original
    if original is None or original.__traceback__ is None:
        error.add_note(f"The worker's traceback:\n{failure.worker_traceback.rstrip()}")
    if re.search("reset.*unexpected keyword argument '(seed|options)'", failure.message):
        error.add_note("Muster calls it as Gymnasium does: write `def reset(self, *, seed=None, options=None)`.")
    return error


def to_one_exception(failures: Sequence[Failure]) -> BaseException:
    """What to raise where envs failed in the same call: the caller's own Ctrl-C, else the first; it names the rest."""
    first = next((one for one in failures if isinstance(one.exception, KeyboardInterrupt)), failures[0])
    error = to_exception(first)
    # Those that hold the same Ctrl-C were not begun with because of it.
    others = [one for one in failures if one is not first and (one.exception is None or one.exception is not error)]
    if others:
        names = ", ".join(f"env {failure.env_index} ({failure.type_name})" for failure in others)
        error.add_note(f"In the same call failed: {names}")
    return error


def _portable(error: BaseException, dumps: Callable[[object], bytes]) -> bytes | None:
    """Pickled, if it comes back as what it is: exceptions with arguments of their own often don't."""
    try:
        data = dumps(error)
        return data if type(pickle.loads(data)) is type(error) else None
    except Exception:
        return None


def message_of(error: BaseException) -> str:
    """str(error), also where that raises."""
    try:
        return str(error)
    except Exception as broken:
        return f"<no message: its __str__ raised {type(broken).__name__}>"


def seed_globals(seed: int | Sequence[int]) -> None:
    """Seeds the generators that envs share by mistake: `random`, `numpy.random`, and torch where it is loaded."""
    words = np.random.SeedSequence(seed).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))  # noqa: NPY002  # the legacy generator is the one that envs share
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(int(words[2]))


def settle(*, collects: bool) -> None:
    """Takes what exists now out of the garbage collector's way.

    collects: not in a fork of the caller, where a collection would copy every page of the caller's heap.
    """
    if collects:
        gc.collect()
    gc.freeze()
