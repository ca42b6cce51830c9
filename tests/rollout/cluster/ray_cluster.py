"""A Ray cluster for tests, which runs until stdin ends. A line of stdin is a command; each is answered by a line.

The argument is the number of raylets, of 1 CPU each; the first one is the head's, and with several has none.
``metadata JSON``: what the head says of the cluster's versions.  ``no raylet``: kills the head's raylet.
``no head``: kills the head.  ``no head+hosts``: the head and all node hosts.  ``signal NUMBER``: that to all of Ray.
``remove NODE_ID``: kills that node's raylet.  ``add``: starts one more.
"""

from __future__ import annotations

import sys

import psutil
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster

raylets = int(sys.argv[1]) if len(sys.argv) > 1 else 1
of_head = {"num_cpus": int(raylets == 1), "include_dashboard": False, "object_store_memory": 100 << 20}
cluster = Cluster(initialize_head=True, head_node_args=of_head)
of_node = {"num_cpus": 1, "object_store_memory": 100 << 20, "resources": {"slot": 1}, "labels": {"kind": "worker"}}
for _ in range(raylets - 1):
    cluster.add_node(wait=False, **of_node)
head = GcsClient(address=cluster.address)
while sum(one.state == 0 for one in head.get_all_node_info(timeout=10).values()) < raylets:
    pass
print(cluster.address, flush=True)
for line in sys.stdin:
    verb, _, content = line.strip().partition(" ")
    if verb == "metadata":
        head.internal_kv_put(b"CLUSTER_METADATA", content.encode(), True, b"cluster")
    elif content == "raylet":
        cluster.head_node.kill_raylet()
        while sum(one.state == 0 for one in head.get_all_node_info(timeout=10).values()) == raylets:
            pass
    elif content == "head":
        cluster.head_node.kill_gcs_server()
    elif content == "head+hosts":
        for one in psutil.Process().children(recursive=True):
            if one.name() == "gcs_server" or "NodeActor" in " ".join(one.cmdline()):
                one.kill()
    elif verb == "signal":
        for one in psutil.Process().children(recursive=True):
            one.send_signal(int(content))
    elif verb == "remove":
        cluster.remove_node(next(one for one in cluster.worker_nodes if one.node_id == content), allow_graceful=False)
    elif verb == "add":
        cluster.add_node(wait=False, **of_node)
    print("done", flush=True)
cluster.shutdown()
