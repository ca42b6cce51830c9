"""Programs that collect on a Ray cluster: ``python ray_drivers.py NAME ADDRESS ...``. They print what they have seen.

Each line is JSON. The last one is what the function has returned, or the error that it ended with.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import time
import warnings
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parents[1]
sys.path += map(str, (TESTS, TESTS / "rollout", TESTS / "conformance", TESTS / "envs", HERE))

import gymnasium  # noqa: E402
import psutil  # noqa: E402
import torch  # noqa: E402
from collecting import Constant, count_env  # noqa: E402
from test_nodes import story  # noqa: E402

import muster  # noqa: E402
from processes import is_alive  # noqa: E402


def say(**facts):
    print(json.dumps(facts), flush=True)


def collecting(address, env=None, *, cluster=None, **options):
    cluster = {"nodes": 2, **(cluster or {})}
    options = {"num_collectors": 2, "frames_per_batch": 16, "policy": Constant(), "seed": 3, **options}
    return muster.MultiCollector(env or count_env(), cluster=muster.RayCluster(address, **cluster), **options)


def pids(env, i):
    return os.getpid(), os.environ.get("OMP_NUM_THREADS")


def host_of(pid):
    """The node host above a collector."""
    return next(one for one in psutil.Process(pid).parents() if "NodeActor" in " ".join(one.cmdline()))


def there(collector):
    batch = collector.rollout()
    return batch, batch["collector", "mask"].all(1).tolist()


def until_back(collector, limit_s=60.0):
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        batch, present = there(collector)
        if all(present):
            return batch
        time.sleep(0.1)
    raise AssertionError(collector.nodes())


def equal_to_home(address):
    at_home, told = story(None)
    batches, told_there = story(muster.RayCluster(address, nodes=2))
    keys = [*at_home[0].keys(True, True)]
    same = all(torch.equal(a[key], b[key]) for a, b in zip(at_home, batches, strict=True) for key in keys)
    return {"same": same, "told": told[:-1] == told_there[:-1], "nodes": told_there[-1]}


class Telling(gymnasium.Wrapper):
    """Tells, fails, and takes a while to close, which it writes down."""

    def __init__(self, env, path=""):
        super().__init__(env)
        self.path = path

    def tell(self):
        logging.getLogger("told").info("from %d", muster.get_worker_info().worker_index)
        print("printed")

    def fail(self):
        return 1 / muster.get_worker_info().worker_index

    def close(self):
        time.sleep(1.0)
        with open(self.path, "a") as file:
            file.write(f"{muster.get_worker_info().node_index}\n")


class Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.seen = []

    def emit(self, record):
        self.seen.append((record.getMessage(), record.node_index))


def told_and_lost(address, path):
    """What envs tell, what they raise, and a node host that is killed. The script ends without `shutdown`."""
    records = Records()
    for name in ("told", "muster.stdout"):
        logging.getLogger(name).addHandler(records)
    logging.getLogger("told").setLevel(logging.INFO)
    policy, made = Constant(), count_env()
    collector = collecting(address, lambda: Telling(made(), path), policy=policy, on_failure="restart")
    collector.rollout()
    collector.call("tell")
    try:
        collector.call("fail")
    except muster.errors.EnvError as error:
        failed = [error.env_index, type(error.__cause__).__name__, error.__notes__[-1]]
    collector.rollout()
    collector.set_attr("told", ["a", "b"])
    policy.best.data.fill_(7)
    collector.update_policy_weights_()
    (first, _), (second, threads) = collector.call(pids)
    host_of(second).kill()
    began = time.monotonic()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        present = [True, True]
        while all(present):
            _, present = there(collector)
    noticed_s = time.monotonic() - began
    left = is_alive(second)
    batch = until_back(collector)
    return {
        "records": records.seen,
        "failed": failed,
        "noticed_s": noticed_s,
        "present": present,
        "warned": [str(one.message) for one in warned],
        "left": left and is_alive(second),
        "actions": batch["action"].unique().tolist(),
        "versions": batch["collector", "policy_version"].unique().tolist(),
        "told": collector.get_attr("told"),
        "threads": threads,
        "pid": first,
    }


def node_goes_and_comes(address):
    collector = collecting(address, on_failure="restart")
    collector.rollout()
    say(remove=collector.nodes()[1]["node_id"])
    sys.stdin.readline()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        deadline, present = time.monotonic() + 40, []
        while time.monotonic() < deadline and not any("has not begun" in str(one.message) for one in warned):
            present.append(there(collector)[1])
            time.sleep(0.05)
        say(add=True)
        sys.stdin.readline()
        until_back(collector)
    texts = [str(one.message) for one in warned]
    states = [node["state"] for node in collector.nodes()]
    collector.shutdown()
    return {"others": all(one[0] for one in present), "masked": [True, False] in present, "warned": texts, "up": states}


def goes_on(address, on_failure, connected=""):
    """Collects until an error, whose state it can still save; lives for longer than Ray would let it.

    connected: "user" for a connection that the program has made itself.
    """
    if connected:
        importlib.import_module("ray").init(address, log_to_driver=False)
    collector = collecting(address, on_failure=on_failure)
    collector.rollout()
    say(ready=True)
    began = time.monotonic()
    try:
        while True:
            collector.rollout()
            time.sleep(0.05)
    except muster.errors.NodeLost as error:
        text, noticed_s = str(error), time.monotonic() - began
    state = sorted(collector.state_dict())
    collector.shutdown()
    time.sleep(max(0.0, 90 - noticed_s))
    return {"error": text, "noticed_s": noticed_s, "state": state}


def collects(address):
    """Collects for ever."""
    collector = collecting(address)
    say(pids=[pid for pid, _ in collector.call(pids)])
    while True:
        collector.rollout()


def silent(address):
    collector = collecting(address, on_failure="restart", cluster={"node_timeout": 3.0})
    collector.rollout()
    host_of(collector.call(pids)[1][0]).suspend()
    began = time.monotonic()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        while not warned:
            there(collector)
    noticed_s = time.monotonic() - began
    until_back(collector)
    collector.shutdown()
    return {"noticed_s": noticed_s, "warned": str(warned[0].message)}


def refused(address, wish):
    """What is said of a cluster that has not what is asked for."""
    nodes = {"no room": [muster.Node(resources={"dongle": 1})], "many": 3, "other": 2}[wish]
    options = {"start_timeout": 12.0} if wish == "no room" else {}
    began = time.monotonic()
    try:
        collecting(address, cluster={"nodes": nodes}, **options)
    except muster.MusterError as error:
        return {"error": [type(error).__name__, str(error)], "s": time.monotonic() - began}


def node_of(env, i):
    return muster.get_worker_info().node_index


def wishes(address):
    """Collectors by wishes, in a placement group, one after the other as they are ready; and states between them."""
    first = muster.Node(collectors=1, cpus=0.5, labels={"kind": "worker"}, resources={"slot": 1})
    with collecting(address, num_collectors=3, cluster={"nodes": [first, muster.Node(cpus=0.5)]}) as collector:
        collector.rollout()
        nodes = collector.call(node_of)
        state = collector.state_dict()
    ray = importlib.import_module("ray")
    ray.init(address, log_to_driver=False)
    group = ray.util.placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")
    with collecting(address, cluster={"nodes": None, "placement_group": group}, sync=False) as collector:
        collector.load_state_dict(state)
        shapes = {tuple(collector.rollout().shape) for _ in range(6)}
        in_group = {node["node_id"] for node in collector.nodes()}
        frames = collector.state_dict()["frames"]
    return {"nodes": nodes, "shapes": sorted(shapes), "in_group": len(in_group), "frames": frames}


def lacks_a_module(address, folder):
    """The module lies in an archive, which nodes, though they are on this machine, do not look into."""
    path = f"{folder}/own.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("only_here.py", "import gymnasium\ndef make():\n    return gymnasium.make('CartPole-v1')\n")
    sys.path.insert(0, path)
    import only_here  # type: ignore[import-not-found]

    errors = []
    try:
        collecting(address, only_here.make, policy=None)
    except muster.MusterError as error:
        errors.append(str(error))
    with collecting(address, only_here.make, policy=None, cluster={"runtime_env": {"working_dir": path}}) as one:
        shape = list(one.rollout().shape)
    return {"errors": errors, "shape": shape}


if __name__ == "__main__":
    name, *words = sys.argv[1:]
    say(returned=globals()[name](*words))
