"""Nodes that are lost: their columns are masked, or NodeLost is raised; another takes their place meanwhile."""

from __future__ import annotations

import collections
import functools
import logging
import os
import pickle
import re
import signal
import sys
import threading
import time

import pytest
import torch
from collecting import Constant, count_env
from counting_env import CountingEnv

import muster
import programs
from local_nodes import LocalNodes, content_of, with_content
from muster.errors import ConfigError, NodeLost, UnknownMessage
from muster.pool import far_pool
from muster.pool.far_worker import Met, Report, parcel_of
from muster.pool.messages import Answer, Ready
from muster.rollout.multi_collector import MultiCollector
from muster.rollout.replicas.carriers import CollectFor, Stop, TakeWeights
from muster.rollout.replicas.replica import AskFields
from processes import descendants

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:node . .local:RuntimeWarning")]


def collecting(cluster, **options):
    options = {"num_collectors": 2, "frames_per_batch": 16, "on_failure": "restart", "policy": Constant(), **options}
    return MultiCollector(count_env(), cluster=cluster, seed=3, **options)


def masks(collector):
    """A batch, and for each env whether it is there."""
    batch = collector.rollout()
    return batch, batch["collector", "mask"].all(1).tolist()


def until_back(collector):
    """Batches until none is masked; the last one of them."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        batch, there = masks(collector)
        if all(there):
            return batch
        assert there[0]
        time.sleep(0.1)
    raise AssertionError(collector.nodes())


def test_a_killed_node_is_masked_until_its_successor_has_weights_and_attributes():
    cluster, policy = LocalNodes(), Constant()
    with collecting(cluster, policy=policy, init_random_frames=16) as collector:
        collector.rollout()
        collector.set_attr("told", ["a", "b"])
        with torch.no_grad():
            policy.best.fill_(7)
        collector.update_policy_weights_()
        cluster.hosts[1].process.kill()
        cluster.hosts[1].process.wait()
        with pytest.warns(RuntimeWarning, match=r"node 1 \(local-1\) is lost: its process has ended \(exit code -9\)"):
            batch, there = masks(collector)
        assert there == [True, False]
        assert batch["next", "truncated"][1].squeeze(-1).tolist() == [True] + [False] * 7
        assert collector.nodes()[1]["state"] == "starting"
        asked = collector._collectors._pool._pool.round()
        asked.ask({1: AskFields()}, "answering")
        asked.wait(timeout_s=5.0)
        assert "another is starting" in str(asked.answers[1].error)
        with pytest.raises(NodeLost, match="node 1"):
            collector.get_attr("told")
        collector.set_attr("later", ["c", "d"])
        batch = until_back(collector)
        assert batch["action"].unique().tolist() == [7]
        assert batch["collector", "policy_version"].unique().tolist() == [2]
        assert collector.get_attr("told") == ("a", "b")
        assert collector.get_attr("later") == ("c", "d")
        assert [node["state"] for node in collector.nodes()] == ["up", "up"]
        assert [worker["node"] for worker in collector.stats()["collectors"]["workers"]] == [0, 1]


@pytest.mark.parametrize("options", [{"on_failure": "raise"}, pytest.param({}, marks=pytest.mark.slow)])
def test_a_loss_is_an_error_where_nodes_are_not_replaced_or_too_few(options):
    cluster = LocalNodes(min_nodes=1 if options else 2)
    with collecting(cluster, **options) as collector:
        collector.rollout()
        cluster.hosts[1].process.kill()
        with pytest.raises(NodeLost) as raised:
            collector.rollout()
    assert (raised.value.host, raised.value.env_indices) == ("local-1", (1,))
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
    assert all(host.process.poll() is not None for host in cluster.hosts)


@pytest.mark.slow
def test_a_node_that_is_silent_is_lost_and_what_it_says_later_is_ignored():
    cluster = LocalNodes(node_timeout=2.0)
    with collecting(cluster) as collector:
        collector.rollout()
        os.kill(cluster.hosts[1].process.pid, signal.SIGSTOP)
        with pytest.warns(RuntimeWarning, match="nothing was heard from it for 2"):
            _, there = masks(collector)
        assert there == [True, False]
        until_back(collector)
        assert len(cluster.hosts) == 3


@pytest.mark.slow
def test_batches_of_single_collectors_go_on_without_a_lost_node():
    cluster, policy = LocalNodes(), Constant()
    with collecting(cluster, policy=policy, sync=False) as collector:
        seen = {int(collector.rollout()["collector", "policy_version"][0, 0]) for _ in range(4)}
        assert seen == {1}
        with torch.no_grad():
            policy.best.fill_(3)
        collector.update_policy_weights_()
        late = [collector.rollout() for _ in range(8)][-1]
        assert late["action"].unique().tolist() == [3]
        cluster.hosts[0].process.kill()
        deadline = time.monotonic() + 60
        while collector.nodes()[0]["reason"] == "" or collector.nodes()[0]["state"] != "up":
            assert collector.rollout()["action"].unique().tolist() == [3]
            assert time.monotonic() < deadline
        assert collector.call(node_of) == (0, 1)


def node_of(env, i):
    return muster.get_worker_info().node_index


class Garbled(LocalNodes):
    """Hands out what came before once more, and `bad` in the place of the ``at``-th answer of node 1."""

    def __init__(self, bad, at):
        super().__init__()
        self.bad, self.at, self.before = bad, at, {}

    def wait(self, tickets, timeout_s):
        came = dict(super().wait(tickets, timeout_s))
        for ticket in [one for one in came if one[1].index == 1]:
            self.at -= 1
            came[ticket] = self.bad if self.at == 0 else came[ticket]
        self.before, again = came, self.before
        return {**again, **came}


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 5])
@pytest.mark.parametrize(
    "bad", [[], [b"no pickle"], parcel_of("no report"), parcel_of(Report()), parcel_of(Report(Ready(None)))], ids=repr
)
def test_a_host_that_answers_with_something_else_is_lost(bad, at):
    with (
        pytest.raises(NodeLost, match=r"node 1 .* is lost: it has sent what is no answer here"),
        collecting(Garbled(bad, at), on_failure="raise") as collector,
    ):
        while True:
            collector.rollout()


@pytest.mark.parametrize(("ask", "bad"), [("get_attr", None), ("get_attr", 7), ("get_attr", [1, 2]), ("rollout", None)])
def test_an_answer_of_another_kind_is_named_and_costs_no_node(ask, bad, monkeypatch):
    monkeypatch.setattr(far_pool, "_PING_S", 60.0)  # on a busy machine the first answer may be a ping's
    cluster = Garbled(parcel_of(Report(Answer(bad))), -1)
    with collecting(cluster) as collector:
        collector.rollout()
        cluster.at = 1
        with pytest.raises(UnknownMessage, match=f"node 1 .* has sent what is no answer: {re.escape(repr(bad))}"):
            collector.get_attr("spec") if ask == "get_attr" else collector.rollout()
        cluster.bad = None
        assert collector.rollout()["collector", "mask"].all()


def test_a_greeting_without_versions_is_named():
    greeting = parcel_of(Report(Met("elsewhere", "id", None)))
    with pytest.raises(ConfigError, match=r"node 1 .* has Python \(none\) instead of"):
        collecting(Garbled(greeting, 1), on_failure="raise")


class Interrupting:
    """A socket that has its process interrupted after the first part of what is sent."""

    def __init__(self, end):
        self.end, self.parts = end, 0

    def sendall(self, data):
        self.end.sendall(data)
        self.parts += 1
        if self.parts == 1:
            signal.raise_signal(signal.SIGINT)

    def __getattr__(self, name):
        return getattr(self.end, name)


def test_ctrl_c_while_stats_is_asked_costs_no_node():
    cluster = LocalNodes(node_timeout=2.0)
    with collecting(cluster) as collector:
        collector.rollout()
        for host in cluster.hosts:
            end, host.end = host.end, Interrupting(host.end)
            with pytest.raises(KeyboardInterrupt):
                collector.stats()
            host.end = end
        time.sleep(2.5)
        assert collector.rollout()["collector", "mask"].all()
        assert [node["state"] for node in collector.nodes()] == ["up", "up"]


def test_an_answer_that_comes_twice_counts_once():
    with collecting(LocalNodes()) as home, collecting(Garbled(None, -1)) as collector:
        for _ in range(3):
            assert (collector.rollout() == home.rollout()).all()


class OldWeights(LocalNodes):
    """Loses the weights on their way to node 1 from the second version on."""

    def start(self, index, collectors):
        host = super().start(index, collectors)
        ask = host.ask

        def drop(order, *, beside=False):
            content = content_of(order)
            if index == 1 and isinstance(content, CollectFor) and content.weights and content.weights.version > 1:
                order = with_content(order, CollectFor(content.number, None))
            return ask(order, beside=beside)

        host.ask = drop
        return host


@pytest.mark.slow
def test_rows_of_other_weights_than_those_ordered_are_an_error():
    with collecting(OldWeights()) as collector:
        collector.rollout()
        collector.update_policy_weights_()
        with pytest.raises(NodeLost, match=r"node 1 .*acted with weights \[1\], ordered were 2"):
            collector.rollout()


@pytest.mark.slow
def test_nothing_stays_when_the_collector_is_dropped():
    before = descendants(os.getpid())
    collector = collecting(LocalNodes())
    collector.rollout()
    del collector
    deadline = time.monotonic() + 20
    while descendants(os.getpid()).keys() - before.keys() and time.monotonic() < deadline:
        time.sleep(0.1)
    left = descendants(os.getpid()).keys() - before.keys()
    assert not {name for name in left if "launcher" not in name}


def test_the_error_of_an_env_is_that_of_home():
    with collecting(LocalNodes(1), on_failure="raise") as collector:
        with pytest.raises(muster.errors.EnvError) as raised:
            collector.call(functools.partial(divide, by=0))
        assert raised.value.env_index == 0
        assert "ZeroDivisionError: division by zero" in raised.value.__notes__[0]
        assert collector.call(functools.partial(divide, by=1)) == (0.0, 1.0)


def divide(env, i, by):
    return i / by


class LateStops(LocalNodes):
    """Holds back what ends a batch early until the next batch is under way."""

    def start(self, index, collectors):
        host = super().start(index, collectors)
        ask, held = host.ask, []

        def hold(order, *, beside=False):
            content = content_of(order)
            if isinstance(content, Stop):
                held.append(order)
                return ask(with_content(order, Stop(-1)), beside=True)
            ticket = ask(order, beside=beside)
            while isinstance(content, CollectFor) and held:
                ask(held.pop(), beside=True)
            return ticket

        host.ask = hold
        return host


@pytest.mark.slow
def test_a_stop_that_comes_late_does_not_end_the_next_batch():
    with collecting(LateStops(), preemptive_threshold=0.5) as collector:
        for _ in range(20):
            assert collector.rollout()["collector", "mask"].all()


SCRIPT = """
import sys
sys.path += {path!r}
import os, warnings
from collecting import Constant, count_env
from counting_env import CountingEnv
from local_nodes import LocalNodes, content_of, with_content
from muster.rollout.multi_collector import MultiCollector
STATE = ["top level"]

def state(env, i):
    return sys.modules["__main__"].STATE, sys.argv

if __name__ == "__main__":
    cluster = LocalNodes()
    options = {{"num_collectors": 2, "frames_per_batch": 16, "make_vec_options": {{"worker_init": "script"}}}}
    with MultiCollector(count_env(), Constant(), cluster=cluster, on_failure="restart", **options) as collector:
        os.unlink(__file__)
        cluster.hosts[1].process.kill()
        warnings.simplefilter("ignore")
        while len(cluster.hosts) < 3 or collector.nodes()[1]["state"] != "up":
            collector.rollout()
        print(collector.call(state))
"""


@pytest.mark.slow
def test_a_script_runs_where_its_file_is_not(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(path=[folder for folder in sys.path if "tests" in folder]))
    done = programs.run(script, "--fast", imports=programs.TORCH, check=True)
    assert done.stdout.strip() == str(((["top level"], [str(script), "--fast"]),) * 2)


class Talking(CountingEnv):
    """Logs each step."""

    total = 0

    def step(self, action):
        self.total += 1
        logging.getLogger("talking").warning("a step")
        return super().step(action)


def test_log_records_come_once_also_those_of_answers_that_nobody_takes(caplog):
    cluster = LocalNodes()
    with MultiCollector(
        Talking, Constant(), num_collectors=2, frames_per_batch=32, sync=False, seed=1, cluster=cluster
    ) as collector:
        for _ in range(4):
            collector.rollout()
            collector.update_policy_weights_()
            collector.reset()
        steps = sum(collector.call(steps_of))
    assert len([record for record in caplog.records if record.name == "talking"]) == steps


def steps_of(env, i):
    return env.unwrapped.total


@pytest.mark.slow
def test_figures_may_be_asked_for_by_another_thread():
    at_home = collecting(None, policy=None, frames_per_batch=64)
    expected = [at_home.rollout() for _ in range(40)]
    at_home.shutdown()
    with collecting(LocalNodes(), policy=None, frames_per_batch=64) as collector:
        ends = threading.Event()

        def look():
            while not ends.is_set():
                collector.stats()

        thread = threading.Thread(target=look)
        thread.start()
        batches = [collector.rollout() for _ in range(40)]
        ends.set()
        thread.join()
    for own, other in zip(expected, batches, strict=True):
        assert torch.equal(own["observation"], other["observation"])


@pytest.mark.slow
def test_a_fork_that_ends_leaves_the_nodes():
    with collecting(LocalNodes()) as collector:
        collector.rollout()
        pid = os.fork()
        if not pid:
            try:
                collector.shutdown()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        assert collector.rollout()["collector", "mask"].all()


@pytest.mark.slow
def test_a_successor_whose_env_cannot_be_built_says_why(tmp_path):
    there = tmp_path / "there"
    there.touch()
    cluster = LocalNodes()
    with MultiCollector(
        functools.partial(Device, there),
        Constant(),
        num_collectors=2,
        frames_per_batch=16,
        on_failure="restart",
        max_restarts=2,
        cluster=cluster,
    ) as collector:
        collector.rollout()
        there.unlink()
        cluster.hosts[0].process.kill()
        assert collector.single_action_space.n == 100
        with pytest.raises(muster.errors.WorkerError, match=r"the collectors are closed.*the device is busy"):
            while True:
                collector.rollout()


class Device(CountingEnv):
    def __init__(self, there):
        if not there.exists():
            raise OSError("the device is busy")
        super().__init__()


class Counted(LocalNodes):
    """Counts orders by the classes of their contents."""

    def __init__(self):
        super().__init__()
        self.orders = collections.Counter()

    def start(self, index, collectors):
        host = super().start(index, collectors)
        ask = host.ask

        def count(order, *, beside=False):
            self.orders[type(content_of(order))] += 1
            return ask(order, beside=beside)

        host.ask = count
        return host


@pytest.mark.slow
def test_weights_are_pushed_one_at_a_time_and_a_batch_is_stopped_once():
    cluster, policy = Counted(), Constant()
    with collecting(cluster, policy=policy, sync=False) as collector:
        collector.rollout()
        for action in range(50):
            policy.best.data.fill_(action)
            collector.update_policy_weights_()
        assert cluster.orders[TakeWeights] <= 2
        assert [collector.rollout() for _ in range(6)][-1]["action"].unique().tolist() == [49]
    with collecting(cluster, preemptive_threshold=0.5) as collector:
        cluster.orders.clear()
        collector.rollout()
    assert cluster.orders[Stop] <= 1
