import gc
import inspect
import multiprocessing
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch

torchrl = pytest.importorskip("torchrl")

from tensordict import TensorDict  # noqa: E402
from torchrl.data import Bounded, Composite, Unbounded  # noqa: E402
from torchrl.envs import (  # noqa: E402
    EnvBase,
    SerialEnv,
)
from torchrl.envs import ParallelEnv as TheirParallelEnv  # noqa: E402
from torchrl.testing.mocking_classes import (  # noqa: E402
    ContinuousActionVecMockEnv,
    CountingEnv,
)

import muster.interop.torchrl  # noqa: E402
from muster.errors import ClosedError, WorkerDied  # noqa: E402
from muster.interop.torchrl import ParallelEnv  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
# A fork has TorchRL loaded already.
Forked = partial(ParallelEnv, mp_start_method="fork")


class Walker(EnvBase):
    """Observes its position, which actions and its seed move; ends after `length` steps."""

    def __init__(self, length=5, dies=False):
        super().__init__()
        self.length, self.dies = length, dies
        self.observation_spec = Composite(position=Unbounded((3,)), inner=Composite(steps=Unbounded((1,))))
        self.action_spec = Bounded(-1, 1, (3,))
        self.reward_spec = Unbounded((1,))
        self.position = torch.zeros(3)
        self.random = torch.Generator()

    def _set_seed(self, seed):
        self.random.manual_seed(seed)

    def _reset(self, tensordict=None, **kwargs):
        self.steps = 0
        self.position = torch.rand(self.position.shape, generator=self.random)
        return self._observed()

    def _step(self, tensordict):
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        self.steps += 1
        self.position = self.position + tensordict["action"]
        return self._observed().update({"reward": self.position.sum(0, keepdim=True)})

    def _observed(self):
        done = torch.tensor([self.steps >= self.length])
        inner = {"steps": torch.tensor([float(self.steps)])}
        return TensorDict({"position": self.position.clone(), "inner": inner, "done": done, "terminated": done}, [])

    def where(self):
        return os.getpid()


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


def test_after_a_death_a_reset_begins_anew_once_it_is_closed():
    env = Forked(2, [Walker, partial(Walker, dies=True)])
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


def test_who_is_forgotten_leaves_nothing():
    env = Forked(2, Walker)
    pids = [worker["pid"] for worker in env.vector_env.stats()["workers"]]
    del env
    gc.collect()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


class Starting(CountingEnv):
    def __init__(self):
        super().__init__()
        self.start_method = multiprocessing.get_start_method(allow_none=True)


def choose_fork():
    multiprocessing.set_start_method("fork", force=True)


@pytest.mark.parametrize(("init", "expected"), [(None, "spawn"), (choose_fork, "fork")])
def test_the_start_method_in_fresh_workers_is_torchrls_unless_worker_init_forces_one(init, expected, capfd):
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
