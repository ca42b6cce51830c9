"""Random programs on a vector env of `make_vec`, checked row by row against the model."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import gymnasium as gym
import numpy as np
from drawn_envs import Planned, draw_agents_plans, draw_plans, where
from drawn_spaces import batch_of, difference, has_objects, value_of
from model import AgentsSide, Model, Row

import muster
from muster.errors import (
    ActionError,
    ClosedError,
    EnvError,
    MusterError,
    NotPendingError,
    PendingError,
    UsageError,
    WaitTimeout,
)
from sample_envs import Awaited

MODES = ["next_step", "same_step", "disabled"]
LONG_S = 60.0  # for waits that end at once where nothing is wrong
LENT_BYTES = 1 << 16  # bigger arrays repeat what the caller has written into them, where other envs alone are reset


@dataclass
class Tally:
    """What programs have done. faults: errors of envs, deaths of workers, and wrong calls."""

    programs: int = 0
    rows: int = 0
    faults: int = 0


class Slow(gym.Wrapper[Any, Any, Any, Any]):
    """An env that waits now and then."""

    def step(self, action: Any) -> Any:
        row = self.env.step(action)
        time.sleep(random.choice([0, 0, 0.002]))
        return row


class Difference(AssertionError):
    """A result is not what it has to be."""


def require_same(ours: Any, theirs: Any, what: str, *, loose: bool = False) -> None:
    """Raises Difference where two results differ. loose: see `difference`."""
    if found := difference(ours, theirs, what, loose=loose):
        raise Difference(found)


def draw_backend(draw: Random, names: list[str], num_envs: int) -> dict[str, Any]:
    """Options of `make_vec` that choose who steps the envs."""
    name = draw.choice(names)
    if name == "serial":
        return {"backend": "serial"}
    caller_steps = name == "process" and draw.random() < 0.15
    workers = draw.choice([None, None, 1, 2])
    if workers is not None:
        workers = min(workers, num_envs - caller_steps) or None
    concurrent = not caller_steps and draw.random() < 0.3
    if name == "thread":
        return {"backend": "thread", "num_workers": workers, "concurrent": concurrent}
    context = "fork" if name == "fork" else "auto"
    return {"num_workers": workers, "caller_steps": caller_steps, "concurrent": concurrent, "context": context}


def run(draw: Random, tally: Tally, backends: list[str], *, agents: bool = False, size: int = 7) -> None:
    """Draws envs, options and a program, and runs it. Raises Difference."""
    num_envs, mode = draw.choice([1, 2, 3, 5]), draw.choice(MODES)
    options = {**draw_backend(draw, backends, num_envs), "copy": draw.random() < 0.7, "autoreset_mode": mode}
    faults: dict[str, float] = {}
    if draw.random() < 0.4:
        faults["raises"] = 0.1
    if not options.get("caller_steps") and draw.random() < 0.4:
        options |= {"on_failure": "restart", "max_restarts": 1_000_000}
        if "backend" not in options and draw.random() < 0.6:
            options["num_workers"], options["concurrent"], faults["kills"] = None, False, 0.06
    if agents:
        plans: Any = draw_agents_plans(draw, num_envs, **faults)
        options["state"] = draw.random() < 0.5
    else:
        plans = draw_plans(draw, num_envs, size=size, **faults)
        if options.get("backend") != "serial" and not faults.get("kills") and draw.random() < 0.3:
            options["wrappers"] = [draw.choice([Awaited, Slow])]
    model = Model(plans, mode, restarts="on_failure" in options, state=options.get("state", False))
    with muster.make_vec([plan.env for plan in plans], **options) as envs:
        _Program(draw, envs, model, tally, faultless=not faults).run(draw.choice([3, 10, 10, 25, 60]))
    try:
        envs.reset()
    except ClosedError:
        tally.programs += 1
    else:
        raise Difference("reset after close raises nothing")


class _Program:
    def __init__(self, draw: Random, envs: Any, model: Model, tally: Tally, *, faultless: bool) -> None:
        self.draw, self.envs, self.model, self.tally, self.faultless = draw, envs, model, tally, faultless
        self.rng = np.random.default_rng(draw.getrandbits(32))
        self.pending: dict[int, Row | Planned] = {}
        # Objects repeat what the caller has written into them, where other envs alone are reset.
        self.writes = isinstance(model.side, AgentsSide) or not has_objects(model.side.space)
        self.kept: list[tuple[Any, Any]] = []  # results, and copies of them as they arrived

    def run(self, length: int) -> None:
        self.wrongly(UsageError, self.envs.step, self.actions(range(self.model.num_envs))[1])
        self.reset()
        acts = [self.step] * 6 + [self.send_and_recv] * 4 + [self.step_async] * 2 + [self.call] * 2
        acts += [self.attributes, self.reset, self.reset_some, self.reset_some, self.wrong_calls]
        for _ in range(length):
            self.draw.choice(acts)()
        for result, kept in self.kept:
            require_same(result, kept, "a result that was kept")
        if self.faultless:
            require_same(self.envs.episode_lengths, self.model.lengths, "episode_lengths")
            if not isinstance(self.model.side, AgentsSide):
                require_same(self.envs.episode_returns, self.model.returns, "episode_returns")
            require_same(self.envs.counts(), (self.model.env_steps, self.model.resets, 0), "counts()")

    # ---- what programs are made of

    def step(self) -> None:
        if ids := self.ended():
            return self.reset_these(ids)
        actions, batch = self.actions(range(self.model.num_envs))
        sent, rows = copy.deepcopy(batch), self.model.step(actions)
        self.check(rows, lambda: self.take(rows, self.envs.step(batch)))
        return require_same(batch, sent, "the caller's actions")

    def step_async(self) -> None:
        if ids := self.ended():
            return self.reset_these(ids)
        actions, batch = self.actions(range(self.model.num_envs))
        self.envs.step_async(batch)
        _written_over(batch)
        rows = self.model.step(actions)
        if self.draw.random() < 0.5:
            self.wrongly(PendingError, self.draw.choice([self.envs.reset, self.envs.render]))
        if self.draw.random() < 0.3:
            self.pending = rows
            return self.recv_all()
        return self.check(rows, lambda: self.take(rows, self.envs.step_wait(timeout=LONG_S)))

    def send_and_recv(self) -> None:
        """Sends to some envs, takes what is ready, sends to others meanwhile, and at last takes what is left."""
        for _ in range(self.draw.randint(1, 4)):
            free = [i for i in range(self.model.num_envs) if i not in self.pending and i not in self.ended()]
            if free:
                ids = self.draw.sample(free, self.draw.randint(1, len(free)))
                actions, batch = self.actions(ids)
                if len(ids) == self.model.num_envs and ids == sorted(ids):
                    self.envs.send(batch)
                else:
                    self.envs.send(batch, self.draw.choice([ids, np.array(ids, np.int32)]))
                _written_over(batch)
                self.pending |= self.model.step(actions)
            if self.pending:
                self.recv(self.draw.randint(1, len(self.pending)))
        self.recv_all()

    def reset(self) -> None:
        seed = self.draw.choice([None, self.draw.getrandbits(30), [self.draw.getrandbits(20)] * self.model.num_envs])
        n = self.model.num_envs
        seeds = [None] * n if seed is None else seed if isinstance(seed, list) else [seed + i for i in range(n)]
        options = self.draw.choice([None, {"level": self.draw.randint(0, 9)}])
        rows = self.model.reset(dict(enumerate(seeds)), options)
        if self.draw.random() < 0.7:
            self.check_reset(rows, lambda: self.envs.reset(seed=seed, options=options))
        else:
            self.envs.reset_async(seed=seed, options=options)
            self.check_reset(rows, lambda: self.envs.reset_wait(timeout=LONG_S))

    def reset_some(self) -> None:
        n = self.model.num_envs
        self.reset_these(self.draw.sample(range(n), self.draw.randint(1, n)))

    def reset_these(self, ids: list[int]) -> None:
        mask = np.isin(np.arange(self.model.num_envs), ids)
        seed = self.draw.choice([None, self.draw.getrandbits(20)])
        level = self.draw.choice([{}, {"level": 3}])
        rows = self.model.reset({i: None if seed is None else seed + i for i in sorted(ids)}, level)
        self.check_reset(rows, lambda: self.envs.reset(seed=seed, options={"reset_mask": mask, **level}))

    def call(self) -> None:
        word = self.draw.choice(["yes", 7, [1, {"x": 2}], None])
        envs = [env.unwrapped for env in self.model.envs]
        match self.draw.randint(0, 4):
            case 0:
                got, expected = self.envs.call("said", word), [env.said(word) for env in envs]
            case 1:
                got, expected = self.envs.call(where, word), [(i, word, env.count) for i, env in enumerate(envs)]
            case 2:
                got, expected = self.envs.get_attr("crc"), [env.crc for env in envs]
            case 3:
                got, expected = self.envs.render(), [env.render() for env in envs]
            case _:
                self.envs.call_async("said", word, more=1)
                self.wrongly(PendingError, self.envs.reset)
                got, expected = self.envs.call_wait(timeout=LONG_S), [env.said(word, more=1) for env in envs]
        require_same(got, tuple(expected), "a call")

    def attributes(self) -> None:
        values = [float(self.draw.randint(0, 9)) for _ in self.model.envs]
        if self.draw.random() < 0.3:
            values = values[:1] * len(values)
            self.envs.set_attr("bonus", values[0])
        else:
            self.envs.set_attr("bonus", values)
        self.model.set_attr("bonus", values)
        require_same(self.envs.get_attr("bonus"), tuple(values), "get_attr")

    def wrong_calls(self) -> None:
        """Calls that are refused, each with its own error, and change nothing."""
        n = self.model.num_envs
        batch = self.actions(range(n))[1]
        self.wrongly(NotPendingError, self.envs.recv)
        self.wrongly(NotPendingError, self.envs.step_wait)
        self.wrongly(ActionError, self.envs.send, batch, self.draw.choice([[n], [0, 0], [-1], []]))
        self.wrongly(EnvError, self.envs.get_attr, "no_such_thing")
        self.wrongly(ValueError, self.envs.set_attr, "bonus", [1.0] * (n + 1))
        self.wrongly(ValueError, self.envs.reset, options={"reset_mask": np.zeros(n, bool)})
        if self.ended():
            self.wrongly(UsageError, self.envs.step, batch)
        else:
            self.wrongly(ActionError, self.envs.step, self.draw.choice([None, self.actions([*range(n), 0])[1]]))

    # ---- parts of these

    def ended(self) -> list[int]:
        """The envs that have to be reset before they are stepped again."""
        over = self.model.over if self.model.mode == "disabled" else ()
        return [i for i, one in enumerate(over) if one]

    def actions(self, ids: Any) -> tuple[dict[int, Any], Any]:
        """Random actions for envs, one by one and batched."""
        side = self.model.side
        if not isinstance(side, AgentsSide):
            values = [value_of(side.action_space, self.rng) for _ in ids]
            batch = batch_of(side.action_space, copy.deepcopy(values))  # an env may write into its action
            return dict(zip(ids, values, strict=True)), batch
        values, batch = [{} for _ in ids], {}
        for group, agents in side.groups.items():
            space = side.action_space[group]
            for one in values:
                one[group] = [value_of(space, self.rng) for _ in agents]
            flat = [value for one in values for value in one[group]]
            batch[group] = _unflattened(batch_of(space, flat), len(values), len(agents))
        return dict(zip(ids, values, strict=True)), batch

    def check(self, rows: dict[int, Any], act: Callable[[], None]) -> None:
        """Runs `act`, which compares a result with `rows`; with an EnvError where one of them is an exception."""
        raised = [i for i, row in rows.items() if isinstance(row, Exception)]
        try:
            act()
        except EnvError as error:
            if error.env_index not in raised or error.original_type.rpartition(".")[2] != "Planned":
                raise
            self.tally.faults += 1
            fine = {i: row for i, row in rows.items() if i not in raised}
            require_same(error.batch.env_ids.tolist(), list(fine), "env_ids of the error's batch")
            if fine:
                self.take(fine, error.batch[1:])
        else:
            if raised:
                raise Difference(f"envs {raised} have raised, but no EnvError came")

    def check_reset(self, rows: dict[int, Any], reset: Callable[[], Any]) -> None:
        """Compares the result of a reset; envs whose reset has raised are reset again."""
        again = [i for i, row in rows.items() if isinstance(row, Exception)]

        def take() -> None:
            every = [self.model.last[i] for i in range(self.model.num_envs)]
            self.compare(reset(), self.model.side.first(every, set(rows)), every, "reset")

        self.check(rows, take)
        if again:
            mask = np.isin(np.arange(self.model.num_envs), again)
            rows = self.model.reset(dict.fromkeys(again), {})
            self.check_reset(rows, lambda: self.envs.reset(options={"reset_mask": mask}))

    def take(self, rows: dict[int, Row], result: Any) -> None:
        ordered = [rows[i] for i in sorted(rows)]
        self.compare(tuple(result), self.model.side.batch(ordered), ordered, "step")

    def compare(self, result: Any, expected: Any, rows: list[Row], what: str) -> None:
        *fields, infos = result
        restarted = [row.restarted for row in rows] if what == "step" else []
        if any(restarted):
            infos = dict(infos)
            reasons = infos.pop("restarted")
            require_same(infos.pop("_restarted").tolist(), restarted, "_restarted")
            if any(
                ("Planned" in str(why) or "SIGKILL" in str(why)) != is_there
                for why, is_there in zip(reasons, restarted, strict=True)
            ):
                raise Difference(f"reasons of restarts: {reasons}")
            self.tally.faults += sum(restarted)
        elif what == "reset":
            infos = {key: one for key, one in infos.items() if key.lstrip("_") != "restarted"}
        require_same((*fields, infos), expected, what)
        self.tally.rows += len(rows)
        if not self.envs.copy:
            return
        if self.writes and self.draw.random() < 0.3 and _bytes(fields[0]) < LENT_BYTES:
            _written_over(fields[0])  # it is the caller's own
        else:
            self.kept.append((result, copy.deepcopy(result)))

    def recv(self, min_envs: int) -> None:
        for timeout in (0, LONG_S) if self.draw.random() < 0.1 else (LONG_S,):
            try:
                batch = self.envs.recv(min_envs, timeout=timeout)
            except WaitTimeout:
                continue
            except EnvError as error:
                return self.after(error)
            if len(batch.env_ids) < min_envs:
                raise Difference(f"recv({min_envs}) returned {batch}")
            return self.received(batch)
        raise Difference(f"recv({min_envs}) has waited for {LONG_S} s")

    def recv_all(self) -> None:
        while self.pending:
            self.recv(len(self.pending))

    def received(self, batch: Any) -> None:
        ids = batch.env_ids.tolist()
        rows = {i: self.pending.pop(i) for i in ids}
        if ids != sorted(rows) or any(isinstance(row, Exception) for row in rows.values()):
            raise Difference(f"recv returned {batch}, which raised or was not asked for")
        if rows:
            self.take(rows, batch[1:])

    def after(self, error: EnvError) -> None:
        """Takes the rows that came with an error, and all that are left: other envs may have raised, too."""
        raised = {i for i, row in self.pending.items() if isinstance(row, Exception)}
        while True:
            if error.env_index not in raised:
                raise error
            self.tally.faults += 1
            self.received(error.batch)
            try:
                while self.envs.num_pending:
                    self.received(self.envs.recv(timeout=LONG_S))
                break
            except EnvError as another:
                error = another
        if left := self.pending.keys() - raised:
            raise Difference(f"envs {left} were lost beside an error")
        self.pending.clear()

    def wrongly(self, error: type[Exception], act: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Asserts that a call raises an error of this class, which is one of Muster's."""
        try:
            act(*args, **kwargs)
        except error as raised:
            if not isinstance(raised, MusterError):
                raise
            self.tally.faults += 1
        else:
            raise Difference(f"{act.__name__}{args} {kwargs} raised nothing, expected {error.__name__}")


def _unflattened(value: Any, *shape: int) -> Any:
    if isinstance(value, dict):
        return {key: _unflattened(one, *shape) for key, one in value.items()}
    if isinstance(value, tuple):
        return tuple(_unflattened(one, *shape) for one in value)
    return value.reshape(*shape, *value.shape[1:])


def _arrays(value: Any) -> list[Any]:
    if isinstance(value, np.ndarray):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    return [array for part in parts for array in _arrays(part)]


def _bytes(value: Any) -> int:
    return sum(array.nbytes for array in _arrays(value))


def _written_over(value: Any) -> None:
    """Writes over actions that were sent, or over a result: they are the caller's own."""
    for array in _arrays(value):
        array[...] = 0
