import gc
import inspect
import multiprocessing
import os
import pickle
import signal
import time
from functools import partial
from pathlib import Path
from typing import ClassVar

import cloudpickle
import pytest
import torch

from slow import slow

torchrl = pytest.importorskip("torchrl")

from tensordict import TensorDict  # noqa: E402
from torchrl.data import Bounded, Composite, Unbounded  # noqa: E402
from torchrl.envs import (  # noqa: E402
    CatFrames,
    EnvBase,
    EnvCreator,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    VecNormV2,
    batched_envs,
)
from torchrl.envs import ParallelEnv as TheirParallelEnv  # noqa: E402
from torchrl.envs.libs.gym import GymEnv  # noqa: E402
from torchrl.testing.mocking_classes import (  # noqa: E402
    ContinuousActionVecMockEnv,
    CountingEnv,
    CountingEnvWithString,
    EnvWithDynamicSpec,
    HeterogeneousCountingEnv,
    MultiKeyCountingEnv,
    NestedCountingEnv,
)

import muster.interop.torchrl  # noqa: E402
from muster.errors import ClosedError, SpecMismatch, WorkerDied  # noqa: E402
from muster.interop.torchrl import ParallelEnv  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
# A fork has TorchRL loaded already.
Forked = partial(ParallelEnv, mp_start_method="fork")


class Walker(EnvBase):
    """Observes its position, which actions and its seed move; ends after `length` steps."""

    built_in: ClassVar[list[int]] = []

    def __init__(self, length=5, size=3, lie=None):
        super().__init__()
        self.built_in.append(os.getpid())
        self.length, self.lie = length, lie
        self.observation_spec = Composite(position=Unbounded((size,)), inner=Composite(steps=Unbounded((1,))))
        self.action_spec = Bounded(-1, 1, (size,))
        self.reward_spec = Unbounded((1,))
        self.position = torch.zeros(size)
        self.random = torch.Generator()

    def _set_seed(self, seed):
        self.random.manual_seed(seed)

    def _reset(self, tensordict=None, **kwargs):
        self.steps = 0
        self.position = torch.rand(self.position.shape, generator=self.random)
        return self._observed()

    def _step(self, tensordict):
        if self.lie == "raise":
            raise LookupError("no way")
        if self.lie == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        self.steps += 1
        self.position = self.position + tensordict["action"]
        out = self._observed().update({"reward": self.position.sum(0, keepdim=True)})
        if self.lie == "shape":
            out["position"] = torch.zeros(9)
        if self.lie == "dtype":
            out["position"] = self.position.double()
        if self.lie == "key":
            del out["inner", "steps"]
        return out

    def _observed(self):
        done = torch.tensor([self.steps >= self.length])
        inner = {"steps": torch.tensor([float(self.steps)])}
        return TensorDict({"position": self.position.clone(), "inner": inner, "done": done, "terminated": done}, [])

    def where(self):
        return os.getpid()


def transformed():
    return TransformedEnv(
        TransformedEnv(Walker(), CatFrames(3, dim=-1, in_keys=["position"])), RewardSum()
    ).append_transform(StepCounter(4))


def both(fn, count=3, **options):
    """The env on Muster's workers and the one on none, with the same seed."""
    envs = Forked(count, fn, **options), SerialEnv(count, fn)
    for env in envs:
        env.set_seed(3)
    return envs


def same(ours, theirs):
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    assert ours.batch_size == theirs.batch_size
    for key in theirs.keys(True, True):
        assert (ours[key] == theirs[key]).all(), key
        assert ours[key].dtype == theirs[key].dtype


@pytest.mark.parametrize(
    "fn",
    [Walker, transformed, NestedCountingEnv, MultiKeyCountingEnv, partial(CountingEnv, batch_size=[2])],
    ids=["nested", "transformed", "nested_done", "several_agents", "batched"],
)
def test_rows_are_those_of_a_serial_env(fn):
    ours, theirs = both(fn)
    rows = []
    for env in (ours, theirs):
        data = env.reset()
        rows.append([data.clone()])
        for i in range(12):
            torch.manual_seed(i)
            data = env.rand_action(data)
            if i % 4 == 3 and fn is Walker:  # some envs only
                data["_step"] = torch.tensor([True, i % 8 == 3, False])
            stepped, data = env.step_and_maybe_reset(data)
            data = data.select(*env.observation_keys, *env.done_keys)  # of the rest, SerialEnv gives less
            rows[-1] += [stepped["next"].clone(), data.clone()]
    for mine, other in zip(*rows, strict=True):
        same(mine, other)
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("CartPole-v1", {"categorical_action_encoding": True}),
        pytest.param("Pendulum-v1", {"device": "cpu"}, marks=pytest.mark.slow),
        pytest.param("FrozenLake-v1", {}, marks=pytest.mark.slow),
    ],
)
def test_rows_of_plain_gym_envs_are_those_of_a_serial_env(name, options):
    ours, theirs = both(partial(GymEnv, name, **options))
    rows = []
    for env in (ours, theirs):
        env.set_seed(5)
        torch.manual_seed(2)
        rows.append(env.rollout(250, break_when_any_done=False))
        rows.append(TransformedEnv(env, StepCounter(30)).rollout(60, break_when_any_done=False))
    same(rows[0], rows[2])
    same(rows[1], rows[3])
    assert rows[0]["next", "done"].any()
    ours.close()
    theirs.close()


class HandingOn(Walker):
    """Its step hands on what it got, under other keys, and leaves out the flag that TorchRL adds."""

    def __init__(self):
        super().__init__()
        for name in ("last", "before"):
            self.observation_spec[name] = Unbounded((3,))

    def _reset(self, tensordict=None, **kwargs):
        return super()._reset().update({"last": self.position * 0, "before": self.position * 0})

    def _step(self, tensordict):
        handed = {"last": tensordict["position"], "before": tensordict["last"]}
        return super()._step(tensordict).exclude("terminated").update(handed)


def test_what_an_env_hands_on_of_its_input_is_what_it_got():
    env = Forked(2, HandingOn)
    data, seen = env.reset(), []
    for _ in range(4):
        seen.append(data["position"].clone())
        data["action"] = torch.ones(2, 3)
        stepped, data = env.step_and_maybe_reset(data)
        for key, expected in (("last", seen[-1]), ("before", seen[-2] if len(seen) > 1 else seen[-1] * 0)):
            assert (stepped["next", key] == expected).all()
            assert (data[key] == expected).all()
        assert (stepped["next", "terminated"] == stepped["next", "done"]).all()
    env.close()


def test_partial_resets_reset_whom_they_name():
    ours, theirs = both(transformed)
    results = []
    for env in (ours, theirs):
        torch.manual_seed(1)
        data = env.rollout(3, break_when_any_done=False)[:, -1]["next"]
        data["_reset"] = torch.tensor([[False], [True], [False]])
        results.append(env.reset(data))
    same(*results)
    ours.close()
    theirs.close()


def test_envs_that_differ_are_stacked_lazily():
    ours, theirs = both([partial(Walker, size=2), partial(Walker, size=4)], 2)
    for mine, other in zip(ours.reset().unbind(0), theirs.reset().unbind(0), strict=True):
        same(mine, other)
    rollout = ours.rollout(3)
    assert [one["position"].shape[-1] for one in rollout.unbind(0)] == [2, 4]
    ours.close()
    theirs.close()


@pytest.mark.parametrize("fn", [CountingEnvWithString, EnvWithDynamicSpec, HeterogeneousCountingEnv])
def test_objects_dynamic_shapes_and_groups_that_differ_travel(fn):
    ours, theirs = both(fn, 2)
    rollouts = []
    for env in (ours, theirs):
        torch.manual_seed(1)
        rollouts.append(env.rollout(3, return_contiguous=fn is not EnvWithDynamicSpec))
    mine, other = rollouts
    assert mine.batch_size == other.batch_size
    assert type(mine[0, 0]) is type(other[0, 0])
    assert set(mine[0, 0].keys(True, True)) == set(other[0, 0].keys(True, True))
    ours.close()
    theirs.close()


@pytest.mark.parametrize("creator", [partial(Walker, 7), *slow(Walker, lambda: Walker())])
def test_no_env_is_built_in_the_caller(creator):
    before = len(Walker.built_in)
    env = Forked(2, creator)
    env.rollout(2)
    assert len(Walker.built_in) == before
    assert [len(built) - before for built in env.built_in] == [1, 1]
    env.close()


def test_nothing_is_pickled_on_a_step_of_tensors_and_no_worker_of_torchrls_runs(monkeypatch):
    for name in ("_run_worker_pipe_shared_mem", "_run_worker_pipe_direct"):
        monkeypatch.setattr(batched_envs, name, None)
    env = Forked(2, MultiKeyCountingEnv)
    data = env.rand_action(env.reset())
    env.step(env.step(data))  # the workers learn once which keys of `next` come back to them
    counted = []

    def refuse(*args, **kwargs):
        counted.append(args)
        raise AssertionError("pickled")

    for module, name in ((pickle, "dumps"), (pickle, "loads"), (cloudpickle, "dumps")):
        monkeypatch.setattr(module, name, refuse)
    for _ in range(100):
        _, data = env.step_and_maybe_reset(env.rand_action(data))
        env.step(data)
    monkeypatch.undo()
    assert counted == []
    env.close()


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ("shape", r"env 0 \(worker 0, step 1\): the step's 'position' is \[9\] torch.float32, expected \[3\]"),
        ("dtype", r"'position' is \[3\] torch.float64, expected \[3\] torch.float32"),
        ("key", r"no \('inner', 'steps'\), expected \[1\] torch.float32"),
    ],
)
def test_a_spec_that_lies_is_told_by_key(lie, words):
    env = Forked(2, partial(Walker, lie=lie))
    with pytest.raises(SpecMismatch, match=words):
        env.rollout(2)
    env.close()


def test_envs_of_one_function_that_differ_are_told_by_key():
    with pytest.raises(RuntimeError, match=r"env 1 differs from env 0: 'position' has shape and dtype \[4\]"):
        Forked(2, Walker, create_env_kwargs=[{"size": 3}, {"size": 4}])


def test_an_envs_exception_is_raised_and_a_death_explained():
    env = Forked(2, [partial(Walker, lie="raise"), Walker])
    with pytest.raises(LookupError, match="no way"):
        env.rollout(2)
    assert env.reset().batch_size == (2,)
    env.close()
    env = Forked(2, [Walker, partial(Walker, lie="die")])
    with pytest.raises(WorkerDied, match="killed by SIGKILL"):
        env.rollout(2)
    with pytest.raises(ClosedError):
        env.reset()
    env.close()
    assert env.reset().batch_size == (2,)  # by new processes
    env.close()


class Interrupting(Walker):
    """Has the caller receive a Ctrl-C in its second step, which goes on."""

    def _step(self, tensordict):
        if self.steps == 1:
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(0.3)
        return super()._step(tensordict)


def test_ctrl_c_leaves_an_env_that_can_be_reset():
    env = Forked(2, [Interrupting, Walker])
    with pytest.raises(KeyboardInterrupt):
        env.rollout(4)
    assert env.reset()["inner", "steps"].tolist() == [[0.0], [0.0]]
    env.close()


def test_calls_that_are_no_step_are_torchrls():
    env = Forked(2, Walker)
    env.reset()
    assert len({*env.where(), os.getpid()}) == 3
    assert list(env.position.shape) == [torch.Size([3])] * 2
    assert env.set_seed(1) is not None
    state = env.state_dict()
    assert list(state) == ["worker0", "worker1"]
    env.load_state_dict(state)
    assert env[1:].reset().batch_size == (1,)
    env.update_kwargs({"length": 2})
    env.close()
    env.rollout(2)
    assert list(env.length) == [2, 2]
    copied = pickle.loads(pickle.dumps(env))
    assert env.is_closed
    assert copied.rollout(2).batch_size == (2, 2)
    copied.close()
    with pytest.raises(RuntimeError, match="closed environment"):
        copied.close()


def test_who_is_forgotten_leaves_nothing():
    env = Forked(2, Walker)
    pids = [worker["pid"] for worker in env.vector_env.stats()["workers"]]
    del env
    gc.collect()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def normalised():
    return TransformedEnv(Walker(), VecNormV2(in_keys=["position"]))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_envs_of_a_creator_share_its_statistics(method):
    creator = EnvCreator(normalised)
    env = ParallelEnv(2, creator, mp_start_method=method)
    env.rollout(4)
    states = [state["_extra_state"] for state in (creator.state_dict(), *env.state_dict().values())]
    counts = [next(value for key, value in state.items() if "count" in key) for state in states]
    assert counts == [counts[0]] * 3
    assert counts[0] >= 2 + 2 * 5  # those of the creator's own env, and each worker's
    env.close()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", *slow("spawn")])
def test_fresh_processes_take_the_same(method):
    env = ParallelEnv(3, EnvCreator(transformed), mp_start_method=method, num_processes=2)
    assert env.rollout(9, break_when_any_done=False).batch_size == (3, 9)
    assert len({worker["pid"] for worker in env.vector_env.stats()["workers"]}) == 2
    env.close()


class Starting(CountingEnv):
    def __init__(self):
        super().__init__()
        self.start_method = multiprocessing.get_start_method(allow_none=True)


def choose_fork():
    multiprocessing.set_start_method("fork")


@pytest.mark.parametrize(("init", "expected"), [(None, "spawn"), (choose_fork, "fork")])
def test_the_start_method_in_fresh_workers_is_torchrls_unless_worker_init_chooses_one(init, expected, capfd):
    # TorchRL is imported before workers are forked from what has imported it, and chooses one then.
    env = ParallelEnv(1, Starting, mp_start_method="forkserver", worker_init=init)
    env.reset()
    assert env.vector_env.call("start_method") == (expected,)
    env.close()
    assert "without preloaded modules" not in capfd.readouterr().err


def test_every_argument_of_torchrls_is_taken():
    theirs = inspect.signature(TheirParallelEnv.__init__).parameters
    ours = inspect.signature(ParallelEnv.__init__).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert all(ours[name].default == theirs[name].default for name in theirs)
    options = {"daemon": True, "consolidate": False, "non_blocking": True, "auto_wrap_envs": False}
    env = Forked(1, ContinuousActionVecMockEnv, shared_memory=False, memmap=True, device="cpu", **options)
    assert env.rollout(2).device == torch.device("cpu")
    env.close()
    with pytest.raises(ValueError, match="pin_memory"):
        ParallelEnv(1, Walker, pin_memory=True)
    assert isinstance(ParallelEnv(1, Walker, serial_for_single=True, num_processes=1), SerialEnv)
    assert muster.interop.torchrl.SerialEnv is SerialEnv
