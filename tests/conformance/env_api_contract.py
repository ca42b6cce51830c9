"""The contract of env APIs. A subclass of `EnvApiContract` names one env of an API:

    class TestMine(EnvApiContract):
        def env(self):
            return "mine/walk"

        def bare_loop(self):
            return BareMine(mine.make("walk"))  # a BareLoop: how the env is reset and stepped by its own API

Name a quick env that does what is hard for an adapter: it reuses the arrays that it returns.
"""

from __future__ import annotations

import copy
import functools
import os
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from bare_loops import BareLoop, assert_rows_equal_bare_loops
from gymnasium.utils.env_checker import data_equivalence
from row_checks import at, sample

import muster
import programs
from muster.errors import EnvError, UsageError
from slow import slow

TESTS = Path(__file__).parent.parent

MakeLoops = Callable[[int], list[BareLoop]]


class Around:
    """A user's wrapper that does nothing, and belongs to no API."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)


class EnvApiContract:
    """The tests that envs of every API have to pass unchanged."""

    # The number of steps with random actions that are compared.
    steps: ClassVar[int] = 30
    # Whether an episode ends within these steps.
    ends: ClassVar[bool] = True
    # Whether the env, made as `env` makes it, can render.
    renders: ClassVar[bool] = True
    # An attribute that may be set, and its value before the first reset.
    attribute: ClassVar[tuple[str, Any]]
    # The packages of the API, which callers need not import, and `env` as an expression for a caller without them.
    packages: ClassVar[tuple[str, ...]] = ()
    env_expression: ClassVar[str] = ""

    def env(self) -> Any:
        """The env argument of `muster.make_vec`: an id or a factory."""
        raise NotImplementedError

    def bare_loop(self) -> BareLoop:
        """The env of `env`, made without Muster and stepped by its own API."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _leaves_nothing(self, leaves_nothing: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
        monkeypatch.setenv("PYGAME_HIDE_SUPPORT_PROMPT", "1")

    @pytest.fixture
    def make_loops(self) -> Iterator[MakeLoops]:
        """Provides a number of bare loops, which are closed after the test."""
        made: list[BareLoop] = []

        def make_loops(count: int) -> list[BareLoop]:
            made.extend(self.bare_loop() for _ in range(count))
            return made[-count:]

        yield make_loops
        for loop in made:
            loop.env.close()
        made.clear()

    def test_rows_equal_a_bare_loop(self, make_loops: MakeLoops) -> None:
        with muster.make_vec(self.env(), 2, backend="serial") as envs:
            ended = assert_rows_equal_bare_loops(envs, make_loops(2), self.steps)
            assert bool(ended) == self.ends

    def test_rows_equal_a_bare_loop_through_wrappers(self, make_loops: MakeLoops) -> None:
        with muster.make_vec(self.env(), 2, backend="serial", wrappers=[Around, Around]) as envs:
            assert_rows_equal_bare_loops(envs, make_loops(2), self.steps)

    @pytest.mark.parametrize("backend", ["serial", *slow("process")])
    def test_same_step_keeps_the_last_rows_of_episodes(self, make_loops: MakeLoops, backend: str) -> None:
        if not self.ends:
            pytest.skip("no episode ends")
        loops = make_loops(2)
        rng = np.random.default_rng(0)
        with muster.make_vec(self.env(), 2, backend=backend, autoreset_mode="same_step") as envs:
            obs, infos = envs.reset(seed=8)
            for i, loop in enumerate(loops):
                loop.start_alike(8 + i, functools.partial(loop.assert_row, envs, i, obs, None, infos))
            for _ in range(self.steps):
                actions = sample(envs, infos.get("action_mask"), rng)
                obs, rewards, terminated, truncated, infos = envs.step(actions)
                for i, loop in enumerate(loops):
                    loop.step(loop.own_action(envs, actions, i))
                    assert (terminated[i], truncated[i]) == (loop.terminated, loop.truncated)
                    if not loop.over:
                        loop.assert_row(envs, i, obs, rewards, infos)
                        continue
                    assert infos["_final_obs"][i]
                    loop.assert_row(envs, i, infos["final_obs"], rewards, infos["final_info"])
                    if not loop.repeats:
                        return
                    loop.reset(None)
                    loop.assert_row(envs, i, obs, None, infos, has_ended=False)

    def test_a_step_after_the_end_is_refused_until_a_reset_where_nothing_resets(self, make_loops: MakeLoops) -> None:
        if not self.ends:
            pytest.skip("no episode ends")
        loops = make_loops(2)
        rng = np.random.default_rng(0)
        with muster.make_vec(self.env(), 2, backend="serial", autoreset_mode="disabled") as envs:
            obs, infos = envs.reset(seed=8)
            for i, loop in enumerate(loops):
                loop.start_alike(8 + i, functools.partial(loop.assert_row, envs, i, obs, None, infos))
            while not any(loop.over for loop in loops):
                actions = sample(envs, infos.get("action_mask"), rng)
                obs, *_, infos = envs.step(actions)
                for i, loop in enumerate(loops):
                    loop.step(loop.own_action(envs, actions, i))
            over = np.array([loop.over for loop in loops])
            with pytest.raises(UsageError, match="reset_mask"):
                envs.step(actions)
            before = copy.deepcopy(obs)
            obs, infos = envs.reset(options={"reset_mask": over})
            for i, loop in enumerate(loops):
                if not loop.over:
                    assert data_equivalence(at(obs, i), at(before, i))
                elif loop.repeats:
                    loop.reset(None)
                    loop.assert_row(envs, i, obs, None, infos)
            actions = sample(envs, infos.get("action_mask"), rng)
            obs, rewards, *_, infos = envs.step(actions)
            for i, loop in enumerate(loops):
                if not loop.over:
                    loop.step(loop.own_action(envs, actions, i))
                    loop.assert_row(envs, i, obs, rewards, infos)

    def test_rows_stay_as_they_were_handed_out_and_repeat_in_processes(self, make_loops: MakeLoops) -> None:
        runs, spaces = {}, {}
        for backend in ("serial", "process"):
            with muster.make_vec(self.env(), 2, backend=backend) as envs:
                runs[backend] = self._run(envs)
                spaces[backend] = envs.observation_space, envs.action_space, envs.single_observation_space
        assert spaces["serial"] == spaces["process"]
        for rows, copied in (*runs["serial"], *runs["process"]):
            assert data_equivalence(rows, copied)
        if make_loops(1)[0].repeats:
            for (ours, _), (theirs, _) in zip(runs["serial"], runs["process"], strict=True):
                assert data_equivalence(ours, theirs)

    def test_spaces_are_the_envs_and_hold_what_it_gives(self, make_loops: MakeLoops) -> None:
        with muster.make_vec(self.env(), 2, backend="serial") as envs:
            make_loops(1)[0].assert_spaces(envs)
            obs, infos = envs.reset(seed=1)
            for _ in range(3):
                assert envs.observation_space.contains(obs)
                obs, *_, infos = envs.step(sample(envs, infos.get("action_mask"), np.random.default_rng(1)))

    def test_the_caller_imports_none_of_it(self) -> None:
        if not self.packages:
            pytest.skip("needs no package of its own")
        code = f"""
            import sys, muster
            envs = muster.make_vec({self.env_expression}, 2)
            envs.reset(seed=0)
            envs.step(envs.action_space.sample())
            envs.close()
            print([name for name in sys.modules if name.split(".")[0] in {self.packages}])
        """
        folders = [TESTS, TESTS / "conformance", TESTS / "envs"]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
        done = programs.run("-c", textwrap.dedent(code), env=environ, check=True)
        assert done.stdout.strip() == "[]"

    def test_render_draws_the_env_or_says_that_it_cannot(self, make_loops: MakeLoops) -> None:
        with muster.make_vec(self.env(), 1, backend="serial") as envs:
            loop = make_loops(1)[0]
            assert_rows_equal_bare_loops(envs, [loop], 2)
            if self.renders:
                frame = loop.render()
                assert frame is not None
                np.testing.assert_array_equal(envs.render()[0], frame)
            else:
                try:
                    frames = envs.render()
                except EnvError as error:
                    frames = {0: None}[error.env_index]
                assert frames in (None, (None,))

    def test_attributes_are_reached_through_wrappers(self) -> None:
        with muster.make_vec(self.env(), 2, backend="serial", wrappers=[Around, Around]) as envs:
            name, value = self.attribute
            assert envs.get_attr(name) == (value, value)
            envs.set_attr(name, [3, 4])
            assert envs.get_attr(name) == (3, 4)
            with pytest.raises(EnvError, match="no_such_thing"):
                envs.get_attr("no_such_thing")

    def test_close_reaches_the_env_once(self) -> None:
        closed: list[int] = []

        def make_env() -> Any:
            env = self.bare_loop().env
            close = env.close
            env.close = lambda: (closed.append(1), close())
            return env

        envs = muster.make_vec(make_env, 2, backend="serial")
        envs.reset(seed=0)
        assert closed == []
        envs.close()
        envs.close()
        assert closed == [1, 1]

    def _run(self, envs: Any) -> list[tuple[Any, Any]]:
        """The results of a reset and of steps, each with a copy made at once."""
        rng = np.random.default_rng(2)
        envs.action_space.seed(2)
        rows: list[Any] = [envs.reset(seed=7)]
        copied = [copy.deepcopy(rows[0])]
        for _ in range(self.steps):
            rows.append(envs.step(sample(envs, rows[-1][-1].get("action_mask"), rng)))
            copied.append(copy.deepcopy(rows[-1]))
        return list(zip(rows, copied, strict=True))
