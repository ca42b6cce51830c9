import gc
import inspect
import multiprocessing
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from interrupting import Interruption
from slow import slow

torchrl = pytest.importorskip("torchrl")
ours = pytest.importorskip("muster.interop.torchrl")  # first: TorchRL's collectors warn while they are imported

import torchrl.collectors as theirs  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from tensordict.nn import TensorDictModule  # noqa: E402
from torch import nn  # noqa: E402
from torchrl.collectors import _multi_base  # noqa: E402
from torchrl.data import LazyTensorStorage, ListStorage, ReplayBuffer  # noqa: E402
from torchrl.envs import SerialEnv, StepCounter, Transform, TransformedEnv  # noqa: E402
from torchrl.envs.libs.gym import GymEnv  # noqa: E402
from torchrl.testing.mocking_classes import (  # noqa: E402
    CountingEnv,
)
from torchrl.weight_update import SharedMemWeightSyncScheme, WeightSyncScheme  # noqa: E402

from muster.errors import CannotTravel, ConfigError, SpecMismatch, UsageError, WorkerDied  # noqa: E402
from muster.interop.torchrl import multi_collectors  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
KINDS = ("MultiSyncCollector", "MultiAsyncCollector")


@pytest.fixture(autouse=True)
def forked():
    """A fork has TorchRL loaded already."""
    before = multiprocessing.get_start_method(allow_none=True)
    threads = torch.get_num_threads()
    multiprocessing.set_start_method("fork", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)
    torch.set_num_threads(threads)


class Slow(CountingEnv):
    def _step(self, tensordict):
        threading.Event().wait(0.02)
        return super()._step(tensordict)


class Greedy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, observation):
        return nn.functional.one_hot(self.net(observation).argmax(-1), 2)


class Bias(nn.Module):
    def __init__(self, value=0.0):
        super().__init__()
        self.value = nn.Parameter(torch.tensor([value]))

    def forward(self, observation):
        return self.value.expand(*observation.shape[:-1], 1)


class Held(Bias):
    """Cannot be copied."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


def cart_pole():
    return GymEnv("CartPole-v1")


def counting(**kwargs):
    return TransformedEnv(CountingEnv(max_steps=7, **kwargs), StepCounter())


def greedy_policy():
    torch.manual_seed(0)
    return TensorDictModule(Greedy(), in_keys=["observation"], out_keys=["action"])


def bias_policy(value=0.0, module=Bias):
    return TensorDictModule(module(value) if module is Bias else module(), ["observation"], ["action"])


def int_bias_policy(value=0.0):
    class Rounded(Bias):
        def forward(self, observation):
            return super().forward(observation).round().to(torch.int32)

    return TensorDictModule(Rounded(value), ["observation"], ["action"])


def batches_of(collector):
    try:
        torch.manual_seed(3)
        collector.set_seed(3)
        return [batch.clone() for batch in collector]
    finally:
        collector.shutdown()


# ---- the same batches as TorchRL's


@pytest.mark.parametrize("cat_results", ["stack", 0])
def test_batches_of_several_workers_are_joined_as_torchrls(cat_results):
    # The workers draw trajectory ids in whatever order they come.
    options = {"frames_per_batch": 60, "total_frames": 180, "cat_results": cat_results}
    found = [
        batches_of(kind([cart_pole] * 2, greedy_policy(), **options))
        for kind in (ours.MultiSyncCollector, theirs.MultiSyncCollector)
    ]
    for mine, other in zip(*found, strict=True):
        assert (mine.batch_size, mine.names, mine.device) == (other.batch_size, other.names, other.device)
        assert set(mine.keys(True, True)) == set(other.keys(True, True))
        for key in set(other.keys(True, True)) - {("collector", "traj_ids")}:
            assert mine.get(key).dtype == other.get(key).dtype
            assert mine.get(key).equal(other.get(key))
    assert found[0][0].shape == ((2, 30) if cat_results == "stack" else (60,))


@pytest.mark.parametrize("name", [KINDS[0], *slow(KINDS[1])])
def test_the_loop_of_torchrls_workers_does_not_run(name, monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("TorchRL's worker runs")

    monkeypatch.setattr(_multi_base, "_main_async_collector", fail)
    collector = getattr(ours, name)([counting] * 2, frames_per_batch=16, total_frames=32)
    assert sum(batch.numel() for batch in collector) == 32
    assert multiprocessing.active_children() == []
    collector.shutdown()


# ---- replay buffers, hooks, states


class Breaks(Transform):
    """Raises at the 40th reward."""

    calls = 0

    def _step(self, tensordict, next_tensordict):
        self.calls += 1
        if self.calls == 40:
            raise LookupError("no more of it")
        return next_tensordict


def test_what_fails_in_a_free_run_is_told_by_the_next_call(capfd):
    buffer = ReplayBuffer(storage=LazyTensorStorage(50_000), batch_size=4)
    collector = ours.MultiAsyncCollector(
        [lambda: TransformedEnv(counting(), Breaks())], frames_per_batch=16, total_frames=-1, replay_buffer=buffer
    )
    collector.start()
    try:
        with pytest.raises(LookupError, match="no more of it"):
            for _ in range(1000):
                time.sleep(0.01)
                collector.stats()
        assert "no more of it" in capfd.readouterr().err
    finally:
        collector.shutdown()


def test_a_buffer_that_cannot_be_shared_is_refused_as_torchrl_does(monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none=False: "spawn")
    buffer = ReplayBuffer(storage=ListStorage(10))
    with pytest.raises(RuntimeError, match="replay_buffer: Cannot share a storage of type ListStorage"):
        ours.MultiSyncCollector([counting], frames_per_batch=4, total_frames=8, replay_buffer=buffer)


def wait_until_written(buffer, count):
    for _ in range(1000):
        if buffer.write_count >= count:
            return
        time.sleep(0.01)
    raise AssertionError


@pytest.mark.parametrize("name", KINDS)
def test_free_runs_pause_go_on_and_take_messages(name):
    buffer = ReplayBuffer(storage=LazyTensorStorage(50_000), batch_size=4)
    collector = getattr(ours, name)([counting] * 2, frames_per_batch=16, total_frames=-1, replay_buffer=buffer)
    collector.start()
    try:
        wait_until_written(buffer, 32)
        with collector.pause():
            count = buffer.write_count
            assert collector.get_distant_attr("replay_buffer.write_count") == [count] * 2
        assert set(collector.state_dict()) >= {"worker0", "worker1"}  # while they run
        wait_until_written(buffer, count + 1)
    finally:
        collector.shutdown()


def test_a_forked_child_that_drops_a_collector_leaves_its_free_run_alone():
    buffer = ReplayBuffer(storage=LazyTensorStorage(50_000), batch_size=4)
    collector = ours.MultiSyncCollector([counting], frames_per_batch=16, total_frames=-1, replay_buffer=buffer)
    collector.start()
    try:
        if (child := os.fork()) == 0:
            del collector
            gc.collect()
            os._exit(0)
        os.waitpid(child, 0)
        wait_until_written(buffer, buffer.write_count + 65)
    finally:
        collector.shutdown()


def test_a_collector_goes_on_after_a_ctrl_c():
    collector = ours.MultiSyncCollector([counting, Slow], frames_per_batch=40, total_frames=-1)
    try:
        with pytest.raises(KeyboardInterrupt):
            for _ in collector:
                threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        collector.set_seed(1)
        assert next(iter(collector)).numel() == 40
    finally:
        collector.shutdown()


# ---- weights


@pytest.mark.parametrize(("name", "way"), [(KINDS[0], "in place"), (KINDS[0], "none"), (KINDS[1], "state_dict")])
def test_workers_act_with_new_weights(name, way):
    policy = int_bias_policy()
    collector = getattr(ours, name)([counting], policy, frames_per_batch=8, total_frames=80)
    batches = iter(collector)
    try:
        assert (next(batches)["action"] == 0).all()
        if way in ("in place", "none"):
            policy.module.value.data += 1
        if way != "in place":
            collector.update_policy_weights_({"state_dict": int_bias_policy(1.0).state_dict()}.get(way))
        next(batches)  # it may have begun before
        assert (next(batches)["action"] == 1).all()
        assert policy.module.value.item() == 1
    finally:
        collector.shutdown()


def test_an_update_that_is_interrupted_reaches_the_policy_and_all_workers_or_none():
    policy = int_bias_policy()
    collector = ours.MultiSyncCollector(
        [counting] * 2, policy, frames_per_batch=2, total_frames=-1, track_policy_version=True
    )
    batches, acting, version = iter(collector), 0, 0
    try:
        next(batches)
        for place in range(10_000):
            update = partial(collector.update_policy_weights_, int_bias_policy(float(place + 1)))
            is_over = not Interruption(place).run(update)
            if (mine := policy.module.value.item()) == place + 1:
                acting, version = mine, version + 1
            if mine == place + 1 or place % 20 == 0:
                batch = next(batches)
                assert (mine, batch["action"].unique().tolist()) == (acting, [acting])
                assert batch["next", "policy_version"].unique().tolist() == [version]
            if is_over:
                break
        assert place > 100
        assert is_over
    finally:
        collector.shutdown()


def test_weights_come_after_a_policy_factory_and_to_some_workers():
    collector = ours.MultiSyncCollector(
        [counting] * 2, policy_factory=int_bias_policy, frames_per_batch=16, total_frames=160, track_policy_version=True
    )
    batches = iter(collector)
    try:
        with pytest.raises(UsageError, match="no weights to send"):
            collector.update_policy_weights_()
        with pytest.raises(SpecMismatch, match="unknown"):
            collector.update_policy_weights_(nn.Linear(2, 2))
        next(batches)
        collector.update_policy_weights_(int_bias_policy(1.0))
        batch = next(batches)
        assert (batch["action"] == 1).all()
        assert (batch["next", "policy_version"] == 1).all()
        collector.update_policy_weights_({1: TensorDict.from_module(int_bias_policy(2.0))})
        assert next(batches)["action"].view(2, -1).float().mean(1).tolist() == [1, 2]
        collector.update_policy_weights_(int_bias_policy(3.0), worker_ids=[0])
        assert next(batches)["action"].view(2, -1).float().mean(1).tolist() == [3, 2]
    finally:
        collector.shutdown()


def test_a_policy_beside_a_factory_says_the_weights():
    policy = TensorDictModule(Held(), ["observation"], ["action"])
    policy.module.value.data += 1
    collector = ours.MultiSyncCollector(
        [counting] * 2, policy, policy_factory=int_bias_policy, frames_per_batch=16, total_frames=32
    )
    try:
        assert (next(iter(collector))["action"] == 1).all()
    finally:
        collector.shutdown()


@pytest.mark.parametrize("device", ["cpu:0", *slow(None, "cpu")])
def test_a_policy_that_cannot_be_copied_acts_in_a_collector(device):
    policy = TensorDictModule(Held(), ["observation"], ["action"])
    collector = ours.SyncDataCollector(
        partial(GymEnv, "Pendulum-v1"), policy, frames_per_batch=8, total_frames=16, policy_device=device
    )
    batches = list(collector)
    assert (batches[0]["action"] == 0).all()
    assert isinstance(policy.module.lock, type(threading.Lock()))
    collector.shutdown()


def test_a_policy_that_cannot_be_copied_is_refused_by_name():
    multiprocessing.set_start_method("spawn", force=True)
    policy = TensorDictModule(Held(), ["observation"], ["action"])
    with pytest.raises(CannotTravel, match=r"policy\.module\.lock.*(\n.*)*policy_factory=") as caught:
        ours.MultiSyncCollector([counting], policy, frames_per_batch=8, total_frames=16)
    assert "muster.rebuild_with" in str(caught.value)
    assert "muster.interop.torchrl.Collector" in str(caught.value)


# ---- other processes, faults


def test_fresh_processes_take_closures_locks_and_parallel_envs():
    multiprocessing.set_start_method("spawn", force=True)
    buffer = ReplayBuffer(storage=LazyTensorStorage(128, ndim=2), batch_size=4)
    steps = 5
    collector = ours.MultiSyncCollector(
        [lambda: ours.ParallelEnv(2, lambda: counting(start_val=steps - 5), mp_start_method="fork")],
        lambda td: td.set("action", torch.ones(*td.shape, 1, dtype=torch.int8)),
        replay_buffer=buffer,
        frames_per_batch=16,
        total_frames=32,
    )
    list(collector)
    collector.shutdown()
    assert buffer.write_count > 0
    assert buffer["action"].all()


def test_envs_that_exist_travel_to_fresh_processes():
    multiprocessing.set_start_method("spawn", force=True)
    collector = ours.MultiSyncCollector([SerialEnv(2, CountingEnv)], frames_per_batch=16, total_frames=16)
    assert [tuple(batch.shape) for batch in collector] == [(1, 2, 8)]
    collector.shutdown()


class Raises(CountingEnv):
    def _step(self, tensordict):
        if self.count >= 3:
            raise ZeroDivisionError("of the env")
        return super()._step(tensordict)


class Dies(CountingEnv):
    def _step(self, tensordict):
        if self.count >= 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._step(tensordict)


@pytest.mark.parametrize(
    ("name", "env", "error"),
    [
        *((KINDS[0], Raises, ZeroDivisionError), (KINDS[1], Dies, WorkerDied)),
        pytest.param(KINDS[0], Dies, WorkerDied, marks=pytest.mark.slow),
        pytest.param(KINDS[1], Raises, ZeroDivisionError, marks=pytest.mark.slow),
    ],
)
def test_faults_are_named_and_nothing_stays(name, env, error):
    held = []
    for _ in range(2):
        collector = getattr(ours, name)([CountingEnv, env], frames_per_batch=32, total_frames=320)
        with pytest.raises(error):
            list(collector)
        assert collector.closed
        collector.shutdown()
        del collector
        gc.collect()
        mapped = Path("/proc/self/maps").read_text().count("/dev/shm/")  # that folder has those of other tests, too
        held.append((len(os.listdir("/proc/self/fd")), mapped))
    assert held[1] <= held[0]


def test_a_factory_that_raises_is_told_with_its_exception():
    def make():
        raise KeyError("no such task")

    with pytest.raises(KeyError, match="no such task"):
        ours.MultiSyncCollector([counting, make], frames_per_batch=32, total_frames=320)


@pytest.mark.parametrize("name", [KINDS[1], *slow(KINDS[0])])
def test_a_loop_that_was_left_is_begun_again(name):
    collector = getattr(ours, name)([counting] * 2, frames_per_batch=16, total_frames=-1)
    try:
        for _ in range(3):
            for batch in collector:
                assert batch.numel() == 16
                break
        collector.reset()
        assert next(iter(collector)).numel() == 16
    finally:
        collector.shutdown()
        collector.shutdown()


# ---- arguments


def test_backends_are_processes_of_this_machine():
    collector = ours.Collector(counting, num_collectors=2, sync=True, frames_per_batch=16, total_frames=16)
    assert type(collector) is ours.MultiSyncCollector is ours.MultiSyncDataCollector
    collector.shutdown()
    for backend in ("ray", "rpc", "distributed", "submitit"):
        with pytest.raises(ConfigError, match="backend='process'"):
            ours.Collector(counting, backend=backend, frames_per_batch=16, total_frames=16)
    with pytest.raises(ConfigError, match="at most one"):
        ours.Collector(counting, backend="direct", num_collectors=2, frames_per_batch=16)
    with pytest.raises(TypeError, match="positive integer"):
        ours.Collector(counting, num_collectors=True, frames_per_batch=16)


@pytest.mark.parametrize(
    "options",
    [
        {"weight_updater": object()},
        {"weight_sync_schemes": {"policy": WeightSyncScheme}},
        {"weight_sync_schemes": {"value": SharedMemWeightSyncScheme()}},
        {"weight_recv_schemes": {"policy": SharedMemWeightSyncScheme()}},
        pytest.param(
            {"cudagraph_policy": True}, marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")
        ),
    ],
)
def test_what_has_no_use_here_is_refused_with_a_way_out(options):
    with pytest.raises(ConfigError, match=r"update_policy_weights_|leave it out"):
        ours.MultiSyncCollector([counting], bias_policy(), frames_per_batch=16, total_frames=16, **options)


@pytest.mark.parametrize("name", ["Collector", *KINDS])
def test_arguments_are_torchrls(name):
    mine, original = (inspect.signature(getattr(module, name).__init__) for module in (ours, theirs))
    assert mine == original


# ---- guards


def test_every_method_of_torchrls_multi_collectors_that_speaks_to_workers_is_known():
    known = {
        *("_run_processes", "start", "pause", "_install_profile_hooks", "_uninstall_profile_hooks", "_set_worker_attr"),
        *("map_fn", "get_distant_attr", "stats", "_shutdown_main", "set_seed", "reset", "state_dict"),
        *("load_state_dict", "_recv_and_check", "getattr_policy", "getattr_env", "iterator", "_get_from_queue"),
        *("__init__", "_setup_preemptive_threshold"),
    }
    for kind in (theirs.MultiCollector, theirs.MultiSyncCollector, theirs.MultiAsyncCollector):
        for name, member in vars(kind).items():
            if inspect.isfunction(member):
                source = inspect.getsource(member)
                assert name in known or not any(word in source for word in ("self.pipes", "self.procs", "queue_out"))
    assert multi_collectors.MultiSyncCollector._run_processes is not theirs.MultiSyncCollector._run_processes
