"""What nodes tell besides batches: errors, warnings, log records and lines, each with the node it comes from."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
import time
import warnings

import pytest
from collecting import Constant, count_env
from counting_env import CountingEnv, FailsWhenTold

import muster
from local_nodes import LocalNodes, content_of
from muster.errors import CollectorError, EnvError
from muster.pool.far_worker import opened, parcel_of
from muster.pool.messages import Answer
from muster.rollout.multi_collector import MultiCollector
from muster.rollout.replicas.carriers import CollectFor, NodeBatch, Stop

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]


def collecting(env, cluster, **options):
    options = {"num_collectors": 2, "frames_per_batch": 8, "policy": Constant(), **options}
    return MultiCollector(env, cluster=cluster, **options)


def refuse():
    if muster.get_worker_info().worker_index == 1:
        raise OSError("no licence here")


def test_an_error_at_the_start_names_the_node():
    with pytest.raises(CollectorError, match=r"collector 1 \(env 1\): OSError: no licence here") as raised:
        collecting(CountingEnv, LocalNodes(), make_vec_options={"worker_init": refuse})
    assert raised.value.__notes__[-1] == "On node 1 (local-1)."


class Leaving(CountingEnv):
    """Closes for so long that others end it."""

    def step(self, action):
        logging.getLogger("leaving").warning("step %s", self.count)
        return super().step(action)

    def close(self):
        time.sleep(60)


def test_envs_that_are_cut_off_are_told_in_one_warning_and_lines(capfd, caplog):
    collector = collecting(functools.partial(Leaving, length=9), LocalNodes(), close_timeout=6.0)
    collector.rollout()
    with pytest.warns(RuntimeWarning, match=r"node 0 \(local-0\): collector 0 \(env 0\) was killed in close") as told:
        collector.shutdown()
    assert len(told) == 1
    assert "node 1 (local-1): collector 1 (env 1) was killed in close() of env 1" in str(told[0].message)
    lines = capfd.readouterr().err.splitlines()
    for i in range(2):
        assert sum(f"muster: node {i} (local-{i}): close(): env {i} is still closing after 5 s" in one for one in lines)
    records = [(one.node_index, one.host, one.getMessage()) for one in caplog.records if one.name == "leaving"]
    assert sorted(records) == [(i, f"local-{i}", f"step {k}") for i in range(2) for k in range(4)]


class Warning_(LocalNodes):
    """Adds a warning to what comes with batches, once `warns`."""

    warns = False

    def wait(self, tickets, timeout_s):
        return {ticket: self._with_warning(data) for ticket, data in super().wait(tickets, timeout_s).items()}

    def _with_warning(self, data):
        report = opened(data)
        if self.warns and isinstance(report.answer, Answer) and isinstance(report.answer.content, NodeBatch):
            report.warned.append(("odd", RuntimeWarning))
        return parcel_of(report)


def test_a_warning_that_is_an_error_loses_no_batch():
    cluster = Warning_(1)
    with collecting(count_env(), cluster, sync=False) as collector:
        collector.rollout()
        cluster.warns = True
        with pytest.raises(RuntimeWarning, match=r"node 0 \(local-0\): odd"):
            collector.get_attr("length")
        cluster.warns = False
        assert collector.rollout()["collector", "mask"].all()


def test_what_a_batch_has_failed_with_is_raised_by_the_next_call():
    options = {"num_collectors": 1, "sync": False, "frames_per_batch": 3}
    with collecting(functools.partial(FailsWhenTold, length=99), LocalNodes(1), **options) as collector:
        collector.rollout()
        collector.set_attr("told", True)
        for _ in range(2):  # were collected before, here and on the node
            assert collector.rollout()["collector", "mask"].all()
        with pytest.raises(EnvError, match="the motor is stuck"):
            collector.get_attr("length")
        collector.set_attr("told", False)
        assert all(collector.rollout()["collector", "mask"].all() for _ in range(3))


class Recording(LocalNodes):
    """Keeps the contents of orders, by node."""

    def start(self, index, plan):
        host = super().start(index, plan)
        ask, host.orders = host.ask, []

        def record(order, *, beside=False):
            host.orders.append(content_of(order))
            return ask(order, beside=beside)

        host.ask = record
        return host


def test_each_node_is_told_to_stop_the_batch_that_it_is_in():
    cluster = Recording()
    with collecting(count_env(), cluster, sync=False) as collector:
        collector.rollout()
        while len({last_orders(host)[-1].number for host in cluster.hosts}) == 1:
            collector.rollout()
        collector.reset()
    for collect, stop in map(last_orders, cluster.hosts):
        assert (type(collect), type(stop), stop.number) == (CollectFor, Stop, collect.number)


def last_orders(host):
    return [one for one in host.orders if isinstance(one, CollectFor | Stop)][-2:]


class Printing(CountingEnv):
    """Prints in each way that there is, to each stream."""

    def __init__(self):
        super().__init__(9)
        print("built", file=sys.stderr)

    def prints(self):
        print("100 %")
        os.write(1, b"raw \xff\x00\n")
        subprocess.run(["echo", "from a child"], check=True)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("too warm", UserWarning, stacklevel=1)
        print("no end", end="", flush=True)

    def floods(self):
        for k in range(30_000):
            os.write(1, b"%05d %b\n" % (k, bytes(300)))

    def dies(self):
        print("last words", flush=True)
        os._exit(3)


def printed_in(caplog):
    """The texts of lines by their streams, and by the indices of the nodes."""
    lines = {}
    for one in caplog.records:
        if one.name in ("muster.stdout", "muster.stderr"):
            place, _, text = one.getMessage().partition("): ")
            assert place == f"node {one.node_index} (local-{one.node_index}"
            assert one.levelname == "WARNING"
            lines.setdefault((one.name.removeprefix("muster."), one.node_index), []).append(text)
    return lines


def test_what_envs_print_comes_as_log_records_with_the_node(caplog, capfd):
    collector = collecting(Printing, LocalNodes())
    collector.call("prints")
    while len(lines := printed_in(caplog)) < 4 or any(len(texts) < 3 for texts in lines.values()):
        collector.get_attr("length")  # stderr takes a while longer
    for node in range(2):
        assert lines["stdout", node] == ["100 %", "raw \ufffd\0", "from a child", "no end"]
        built, warned, *_ = lines["stderr", node]
        assert (built, "UserWarning: too warm" in warned) == ("built", True)
    assert "100 %" not in capfd.readouterr().out
    caplog.clear()
    collector.call("floods")
    for _ in range(2):  # what was taken is not there again
        assert [len(texts) for texts in printed_in(caplog).values()] == [30_000] * 2
        assert all(texts[-1].startswith("29999 ") for texts in printed_in(caplog).values())
        collector.get_attr("length")
    with pytest.raises(muster.errors.WorkerDied):
        collector.call("dies")
    assert any("last words" in texts for texts in printed_in(caplog).values())
    collector.shutdown()


def test_printed_lines_are_switched_off_as_records_are(caplog):
    quiet = logging.getLogger("muster.stdout")
    quiet.setLevel(logging.ERROR)
    try:
        with collecting(Printing, LocalNodes(1)) as collector:
            collector.call("prints")
    finally:
        quiet.setLevel(logging.NOTSET)
    assert {stream for stream, _ in printed_in(caplog)} == {"stderr"}
