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
from tensordict import LazyStackedTensorDict, TensorDict  # noqa: E402
from tensordict.nn import TensorDictModule  # noqa: E402
from torch import nn  # noqa: E402
from torchrl.collectors import _multi_base  # noqa: E402
from torchrl.data import LazyTensorStorage, ListStorage, ReplayBuffer  # noqa: E402
from torchrl.envs import EnvCreator, SerialEnv, StepCounter, Transform, TransformedEnv  # noqa: E402
from torchrl.envs.libs.gym import GymEnv  # noqa: E402
from torchrl.modules import RandomPolicy  # noqa: E402
from torchrl.testing.mocking_classes import (  # noqa: E402
    CountingEnv,
    CountingEnvWithString,
    EnvWithDynamicSpec,
    NestedCountingEnv,
)
from torchrl.weight_update import SharedMemWeightSyncScheme, WeightSyncScheme  # noqa: E402

from muster.errors import CannotTravel, ClosedError, ConfigError, SpecMismatch, UsageError, WorkerDied  # noqa: E402
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


def batches_of(collector, seed=3):
    try:
        if seed is not None:
            torch.manual_seed(seed)
            collector.set_seed(seed)
        if seed is not None and isinstance(collector, theirs.Collector):
            collector.reset()
        return [batch.clone() for batch in collector]
    finally:
        collector.shutdown()


def same(mine, other, *, with_ids=True):
    assert len(mine) == len(other)
    for one, two in zip(mine, other, strict=True):
        if isinstance(two, LazyStackedTensorDict):
            same(one.tensordicts, two.tensordicts, with_ids=with_ids)
            continue
        assert (one.batch_size, one.names, one.device) == (two.batch_size, two.names, two.device)
        assert set(one.keys(True, True)) == set(two.keys(True, True))
        for key in two.keys(True, True):  # its iteration is over the batch
            value, expected = one.get(key), two.get(key)
            if not isinstance(expected, torch.Tensor):
                assert value.tolist() == expected.tolist()
            elif with_ids or key != ("collector", "traj_ids"):
                assert value.dtype == expected.dtype
                torch.testing.assert_close(value, expected, rtol=0, atol=0)


# ---- the same batches as TorchRL's


def both(name, *args, with_ids=True, seed=3, **kwargs):
    """Batches of Muster's class and of TorchRL's, which must be equal bit for bit."""
    mine = batches_of(getattr(ours, name)(*args, **kwargs), seed)
    same(mine, batches_of(getattr(theirs, name)(*args, **kwargs), seed), with_ids=with_ids)
    return mine


@pytest.mark.parametrize("cat_results", ["stack", 0, *slow(-1)])
def test_batches_of_several_workers_are_joined_as_torchrls(cat_results):
    # The workers draw trajectory ids in whatever order they come.
    options = {"frames_per_batch": 60, "total_frames": 180, "cat_results": cat_results}
    found = both("MultiSyncCollector", [cart_pole] * 2, greedy_policy(), with_ids=False, **options)
    assert found[0].shape == ((2, 30) if cat_results == "stack" else (60,))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (KINDS[1], {"init_random_frames": 40, "reset_at_each_iter": True, "use_buffers": False}),
        (KINDS[0], {"split_trajs": True, "create_env_kwargs": [{"max_episode_steps": 9}]}),
        (KINDS[1], {"postproc": lambda batch: batch.exclude(("next", "reward")), "compact_obs": True}),
    ],
)
def test_one_worker_gives_torchrls_batches(name, options):
    make = partial(GymEnv, "CartPole-v1")
    both(name, [make], greedy_policy(), frames_per_batch=40, total_frames=160, **options)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        (KINDS[0], NestedCountingEnv),
        (KINDS[1], NestedCountingEnv),
        (KINDS[0], CountingEnvWithString),
        (KINDS[1], EnvWithDynamicSpec),
        (KINDS[0], partial(SerialEnv, 2, counting)),
    ],
)
def test_nested_keys_objects_and_shapes_that_change_arrive(name, make):
    env = make()
    policy = RandomPolicy(env.full_action_spec)
    seed = None if make is NestedCountingEnv else 3  # TorchRL's collectors cannot reset this one
    seeding = partial(torch.manual_seed, 0)
    both(name, [make], policy, frames_per_batch=20, total_frames=60, seed=seed, init_fn=seeding)
    env.close(raise_if_closed=False)


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


@pytest.mark.parametrize(
    ("name", "extends"),
    [
        *((KINDS[0], True), (KINDS[1], False)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((KINDS[0], False), (KINDS[1], True))),
    ],
)
def test_workers_fill_a_replay_buffer(name, extends):
    buffer = ReplayBuffer(storage=LazyTensorStorage(64), batch_size=4)
    options = {"frames_per_batch": 16, "total_frames": 64, "extend_buffer": extends}
    collector = getattr(ours, name)([EnvCreator(counting)] * 2, replay_buffer=buffer, **options)
    assert all(batch is None for batch in collector)
    collector.shutdown()
    assert len(buffer) == 64
    assert (buffer["next", "step_count"] == buffer["step_count"] + 1).all()
    assert buffer["step_count"].max() > 0


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


@pytest.mark.parametrize("name", KINDS)
def test_free_runs_pause_go_on_and_take_messages(name):
    buffer = ReplayBuffer(storage=LazyTensorStorage(50_000), batch_size=4)
    collector = getattr(ours, name)([counting] * 2, frames_per_batch=16, total_frames=-1, replay_buffer=buffer)

    def fills(count):
        return all(pause.wait(0.01) or buffer.write_count >= count for _ in range(1000)) or buffer.write_count >= count

    pause = threading.Event()
    collector.start()
    try:
        for _ in range(500):
            pause.wait(0.01)
            if buffer.write_count >= 32:
                break
        assert buffer.write_count >= 32
        with collector.pause():
            count = buffer.write_count
            assert collector.get_distant_attr("replay_buffer.write_count") == [count] * 2
        assert set(collector.state_dict()) >= {"worker0", "worker1"}  # while they run
        for _ in range(500):
            pause.wait(0.01)
            if buffer.write_count > count:
                break
        assert buffer.write_count > count
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
        count = buffer.write_count
        for _ in range(1000):
            time.sleep(0.01)
            if buffer.write_count > count + 64:
                break
        assert buffer.write_count > count + 64
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


class Counts:
    def __init__(self):
        self.calls = 0

    def __call__(self, batch=None):
        self.calls += 1


def test_hooks_and_attributes_of_workers():
    collector = ours.MultiSyncCollector(
        [counting] * 2, frames_per_batch=16, total_frames=32, pre_collect_hook=Counts(), init_fn=lambda: None
    )
    try:
        list(collector)
        assert collector.get_distant_attr("pre_collect_hook.fn.calls") == [2, 2]
        collector.post_collect_hook = Counts()
        assert collector.get_distant_attr("post_collect_hook.fn.calls") == [0, 0]
        assert collector.getattr_env("base_env").max_steps == 7
        with pytest.raises(AttributeError):
            collector.getattr_policy("nothing_of_this_name")
        assert collector.stats("both")["workers_alive"] == 2
    finally:
        collector.shutdown()
    with pytest.raises(ClosedError):
        collector.set_seed(1)


@pytest.mark.parametrize("name", [KINDS[0], *slow(KINDS[1])])
def test_a_state_is_loaded_into_other_collectors(name):
    make = partial(getattr(ours, name), [counting], frames_per_batch=16, total_frames=64)
    first, second = make(int_bias_policy(1.0)), make(int_bias_policy(0.0))
    try:
        next(iter(first))
        state = first.state_dict()
        assert state["frames"] == 16
        second.load_state_dict(state)
        batch = next(iter(second))
        assert (batch["action"] == 1).all()
        assert second._frames == 32
    finally:
        first.shutdown()
        second.shutdown()


# ---- weights


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((KINDS[0], way) for way in ("in place", "none", "module", "tensordict", "state_dict")),
        (KINDS[1], "module"),
        *(
            pytest.param(KINDS[1], way, marks=pytest.mark.slow)
            for way in ("in place", "none", "tensordict", "state_dict")
        ),
    ],
)
def test_workers_act_with_new_weights(name, way):
    policy = int_bias_policy()
    collector = getattr(ours, name)([counting], policy, frames_per_batch=8, total_frames=80)
    batches = iter(collector)
    try:
        assert (next(batches)["action"] == 0).all()
        other = int_bias_policy(1.0)
        if way in ("in place", "none"):
            policy.module.value.data += 1
        given = {"module": other, "tensordict": TensorDict.from_module(other), "state_dict": other.state_dict()}
        if way != "in place":
            collector.update_policy_weights_(given.get(way))
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


def test_the_slow_are_cut_off_once_enough_are_done():
    collector = ours.MultiSyncCollector(
        [CountingEnv, Slow], frames_per_batch=200, total_frames=200, cat_results="stack", preemptive_threshold=0.5
    )
    batch = next(iter(collector))
    collector.shutdown()
    mask = batch["collector", "mask"]
    assert mask[0].all()
    assert 0 < mask[1].sum() < 100


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


def test_torchrls_other_names_collect_as_they_do():
    frames = {"frames_per_batch": 16, "total_frames": 32}
    alone = ours.AsyncCollector(counting, None, **frames)
    both = [ours.MultiCollector([counting] * 2, None, sync=sync, **frames) for sync in (True, False)]
    assert isinstance(alone, theirs.AsyncCollector)
    assert [type(one).__name__ for one in both] == [*KINDS]
    for collector in (alone, *both):
        assert [batch.numel() for batch in collector] == [16, 16]
        collector.shutdown()


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
        *(
            "map_fn",
            "get_distant_attr",
            "stats",
            "_shutdown_main",
            "set_seed",
            "reset",
            "state_dict",
            "load_state_dict",
        ),
        *(
            "_recv_and_check",
            "getattr_policy",
            "getattr_env",
            "iterator",
            "_get_from_queue",
            "__init__",
            "_setup_preemptive_threshold",
        ),
    }
    for kind in (theirs.MultiCollector, theirs.MultiSyncCollector, theirs.MultiAsyncCollector):
        for name, member in vars(kind).items():
            if inspect.isfunction(member):
                source = inspect.getsource(member)
                assert name in known or not any(word in source for word in ("self.pipes", "self.procs", "queue_out"))
    assert multi_collectors.MultiSyncCollector._run_processes is not theirs.MultiSyncCollector._run_processes
