"""Envs of TorchRL's that lie, raise, or take their process with them: who, where, which key, expected and got."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import programs
from interrupting import Interruption
from processes import is_alive

torchrl = pytest.importorskip("torchrl")

from tensordict import TensorDict, TensorDictBase  # noqa: E402
from torchrl.data import Bounded, Composite, Unbounded  # noqa: E402
from torchrl.envs import CatFrames, EnvBase, RewardSum, StepCounter, Transform, TransformedEnv  # noqa: E402

from muster.errors import ClosedError, EnvError, SpecMismatch, WorkerDied  # noqa: E402
from muster.interop.torchrl import ParallelEnv  # noqa: E402
from slow import slow  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
METHODS = ["fork", pytest.param("forkserver", marks=pytest.mark.slow), pytest.param("spawn", marks=pytest.mark.slow)]


def changed(key: Any, value: Any) -> Callable[[Any], Any]:
    return lambda rows: rows.set(key, value)


def without(*keys: Any) -> Callable[[Any], Any]:
    return lambda rows: rows.exclude(*keys)


def ends_by(end: Callable[[], Any]) -> Callable[[Any], Any]:
    return lambda rows: end()


class Liar(EnvBase):
    """Returns what `lie` makes of its rows, from step `at` on (0 = in reset)."""

    def __init__(self, lie: Any = None, at: int = 2, size: int = 3) -> None:
        super().__init__()
        self.lie, self.at, self.size, self.steps = lie, at, size, 0
        self.observation_spec = Composite(position=Unbounded((size,)), inner=Composite(steps=Unbounded((1,))))
        self.action_spec = Bounded(-1, 1, (size,))
        self.reward_spec = Unbounded((1,))

    def _set_seed(self, seed: int | None) -> None:
        pass

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> Any:
        self.steps = 0
        return self._told(self._rows())

    def _step(self, tensordict: TensorDictBase) -> Any:
        self.steps += 1
        return self._told(self._rows().set("reward", torch.ones(1)))

    def _told(self, rows: TensorDictBase) -> Any:
        return self.lie(rows) if self.lie is not None and self.steps == self.at else rows

    def _rows(self) -> TensorDictBase:
        ended = torch.tensor([self.steps >= 5])
        rows = {"position": torch.full((self.size,), float(self.steps)), "inner": {"steps": torch.zeros(1)}}
        return TensorDict({**rows, "done": ended, "terminated": ended.clone()}, [])


LIES: dict[str, tuple[Any, str]] = {
    "shape": (changed("position", torch.zeros(9)), r"'position' is \[9\] torch.float32, expected \[3\] torch.float32"),
    "dtype": (changed("position", torch.zeros(3).double()), r"'position' is \[3\] torch.float64, expected \[3\] torch"),
    "key": (without("position"), r"tensordict has no 'position', expected \[3\] torch.float32; it has \["),
    "group": (without("inner"), r"tensordict has no \('inner', 'steps'\), expected \[1\] torch.float32"),
    "done": (changed("done", torch.zeros(4).bool()), r"'done' is \[4\] torch.bool, expected \[1\] torch.bool"),
    "reward": (without("reward"), r"tensordict has no 'reward', expected \[1\] torch.float32"),
    "no tensordict": (lambda rows: dict(rows.items()), r"returned a dict, expected a TensorDict"),
}


def two(lie: Any, at: int = 2, around: Callable[[EnvBase], EnvBase] = lambda env: env, **options: Any) -> ParallelEnv:
    """An honest env, and one that lies; `around` each of them."""
    return ParallelEnv(
        2, [lambda: around(Liar()), lambda: around(Liar(lie, at))], **{"mp_start_method": "fork", **options}
    )


@pytest.mark.parametrize(
    ("name", "at", "around"),
    [
        *((name, 2, "") for name in LIES),
        *(("shape", 0, "packed"), ("key", 0, ""), ("dtype", 2, "transforms")),
    ],
)
def test_a_row_that_is_not_as_promised_is_told_by_env_worker_and_key(name: str, at: int, around: str):
    lie, words = LIES[name]
    transforms = transformed if around == "transforms" else lambda env: env
    env = two(lie, at, transforms, num_processes=1 if around == "packed" else None)
    verb = "step" if at else "reset"
    worker = 0 if around == "packed" else 1
    with pytest.raises(
        SpecMismatch, match=rf"^env 1 \(worker {worker}, step {at}\): the {verb}('s)? {words}"
    ) as caught:
        env.rollout(4)
    assert (caught.value.env_index, caught.value.worker_index, caught.value.step) == (1, worker, at)
    env.close()


@pytest.mark.parametrize(("name", "at", "around"), [("shape", 2, "transforms"), ("done", 0, "")])
def test_where_torchrls_code_fails_first_its_exception_says_where_and_what_to_call(name: str, at: int, around: str):
    env = two(LIES[name][0], at, transformed if around else lambda env: env)
    with pytest.raises(RuntimeError, match=r"must match the size|is invalid for input of size") as caught:
        env.rollout(4)
    assert not isinstance(caught.value, SpecMismatch)
    verb = "step" if at else "reset"
    notes = "\n".join(caught.value.__notes__)
    assert f"Raised in {verb} of env 1 (worker 1)." in notes
    assert "check_env_specs(env) of torchrl.envs.utils" in notes
    env.close()


def transformed(env: EnvBase) -> EnvBase:
    for transform in (CatFrames(2, dim=-1, in_keys=["position"], out_keys=["both"]), StepCounter(), RewardSum()):
        env = TransformedEnv(env, transform)
    return env


class Raising(Transform):
    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        if next_tensordict["position"][0] == 2:
            raise ZeroDivisionError("in a transform")
        return next_tensordict

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return tensordict_reset


@pytest.mark.parametrize("method", METHODS)
def test_a_transform_that_raises_is_told_by_env_and_line(method: str):
    env = ParallelEnv(2, [Liar, lambda: TransformedEnv(Liar(), Raising())], mp_start_method=method)
    with pytest.raises(ZeroDivisionError, match="in a transform") as caught:
        env.rollout(4)
    notes = "\n".join(caught.value.__notes__)
    assert "The traceback of env 1 (worker 1):" in notes
    assert 'raise ZeroDivisionError("in a transform")' in notes
    env.reset()
    env.close()


def test_an_env_that_raises_where_a_lie_could_be_is_no_liar():
    env = two(ends_by(lambda: {}["missing"]))
    with pytest.raises(KeyError, match="missing"):
        env.rollout(4)
    env.close()


@pytest.mark.parametrize("method", METHODS)
def test_a_constructor_that_raises_is_told_by_env(method: str):
    before = psutil.Process().children(recursive=True)
    with pytest.raises(ZeroDivisionError) as caught:
        ParallelEnv(2, [Liar, lambda: 1 / 0], mp_start_method=method)
    assert "The traceback of env 1 (worker 1):" in caught.value.__notes__[0]
    assert set(psutil.Process().children(recursive=True)) <= set(before)


ENDS: dict[str, tuple[Callable[[], Any], str]] = {
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by SIGKILL"),
    "segfault": (lambda: ctypes.string_at(0), "killed by SIGSEGV"),
    "exit": (lambda: os._exit(3), "exit code 3"),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("name", "at"),
    [
        *(("killed", 2), ("exit", 0)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("killed", 0), ("exit", 2), ("segfault", 0), ("segfault", 2))
        ),
    ],
)
def test_a_worker_that_ends_is_explained_and_nothing_stays(name: str, at: int, method: str):
    end, words = ENDS[name]
    env = two(ends_by(end), at, mp_start_method=method)
    pids = [worker["pid"] for worker in env.vector_env.stats()["workers"]]
    with pytest.raises(WorkerDied, match=rf"^worker 1 \(env 1\) died: {words}"):
        env.rollout(4)
    env.close(raise_if_closed=False)
    assert not any(map(is_alive, pids))


def test_after_a_death_a_reset_begins_anew_once_it_is_closed():
    env = two(ends_by(ENDS["killed"][0]))
    with pytest.raises(WorkerDied, match="killed by SIGKILL"):
        env.rollout(2)
    with pytest.raises(ClosedError):
        env.reset()
    env.close()
    assert env.reset().batch_size == (2,)  # by new processes
    env.close()


def test_ctrl_c_leaves_an_env_that_can_be_reset():
    def interrupted(rows: Any) -> Any:
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(0.3)
        return rows

    env = two(interrupted)
    with pytest.raises(KeyboardInterrupt):
        env.rollout(4)
    assert env.reset()["position"].eq(0).all()
    env.close()


def test_who_is_forgotten_leaves_nothing():
    env = two(None)
    pids = [worker["pid"] for worker in env.vector_env.stats()["workers"]]
    del env
    gc.collect()
    assert not any(map(is_alive, pids))


def test_an_env_that_exits_python_does_not_end_the_caller():
    env = two(ends_by(lambda: sys.exit(3)))
    with pytest.raises(EnvError, match=r"^env 1 \(worker 1, step 2\): SystemExit: 3"):
        env.rollout(4)
    env.close()


def test_envs_that_differ_are_told_by_key_and_argument():
    before = psutil.Process().children(recursive=True)
    words = r"""env 2 differs from env 0: 'position' has shape and dtype \[4\] torch.float32, expected \[3\] .*"""
    kwargs: list[dict[str, Any]] = [{"size": 3}, {"at": 1}, {"at": 1, "size": 4}]
    arguments = r"""\(create_env_kwargs\[2\] is {'at': 1, 'size': 4}, and create_env_kwargs\[0\] {'size': 3}\)\. Pass"""
    with pytest.raises(RuntimeError, match=words + arguments):
        ParallelEnv(3, Liar, create_env_kwargs=kwargs, mp_start_method="fork")
    with pytest.raises(RuntimeError, match="env 1 differs from env 0: 'position'"):
        ParallelEnv(2, Liar, create_env_kwargs=kwargs[::2], mp_start_method="fork")
    assert set(psutil.Process().children(recursive=True)) <= set(before)


def reset_first(env: ParallelEnv) -> None:
    """What TorchRL's verb sends and waits for, in a few hundred moments in place of thousands."""
    env.parent_channels[0].send(("reset", (None, {})))
    env._wait_for_workers([0])


INTERRUPTED: dict[str, Callable[[ParallelEnv], object]] = {
    "state_dict": lambda env: env.state_dict(),
    "load_state_dict": lambda env: env.load_state_dict({}),
    "set_seed": lambda env: env.set_seed(3),
    "attribute": lambda env: list(env.at),
    "reset of some": reset_first,
}


@pytest.mark.parametrize("every", [3, *slow(1)])
@pytest.mark.parametrize("verb", INTERRUPTED)
def test_after_a_ctrl_c_at_any_moment_answers_are_those_to_what_was_asked(verb: str, every: int):
    call = INTERRUPTED[verb]
    with torch.no_grad():  # TorchRL's own code leaves gradients off
        env = ParallelEnv(2, Liar, mp_start_method="fork")
        env.reset()
        call(env)  # with all that is imported at the first call
        for moment in itertools.count(0, 1 if call is reset_first else every):
            interruption = Interruption(moment)
            if not interruption.run(call, env):
                break
            assert env.reset()["position"].eq(0).all(), interruption.where
            assert list(env.steps) == [0, 0], interruption.where
        assert moment > 50
        env.close()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "end",
    [
        "",
        pytest.param("raise LookupError", marks=pytest.mark.slow),
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", marks=pytest.mark.slow),
        "signal.pause()",
    ],
    ids=["forgotten", "raises", "killed", "Ctrl-C"],
)
def test_who_ends_without_closing_leaves_nothing(end: str, method: str, tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import os, signal
        from torchrl.testing.mocking_classes import CountingEnv
        from muster.interop.torchrl import ParallelEnv

        if __name__ == "__main__":
            env = ParallelEnv(2, CountingEnv, mp_start_method="{method}")
            env.rollout(3)
            print(*[worker["pid"] for worker in env.vector_env.stats()["workers"]], flush=True)
            {end}
        """)
    )
    with programs.start(script, imports=programs.TORCHRL) as run:
        assert run.stdout is not None
        pids = [int(pid) for pid in run.stdout.readline().split()]
        assert len(pids) == 2
        if end == "signal.pause()":
            run.send_signal(signal.SIGINT)
        run.wait(60)
    deadline = time.monotonic() + 20
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_alive, pids))
