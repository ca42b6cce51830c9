"""A Ray cluster for tests, which runs until stdin ends. A line of stdin is a command; each is answered by a line.

``metadata JSON``: what the head says of the cluster's versions.  ``no raylet``: kills the head's raylet.
"""

from __future__ import annotations

import sys

from ray._raylet import GcsClient
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
head = GcsClient(address=cluster.address)
print(cluster.address, flush=True)
for line in sys.stdin:
    verb, _, content = line.strip().partition(" ")
    if verb == "metadata":
        head.internal_kv_put(b"CLUSTER_METADATA", content.encode(), True, b"cluster")
    elif verb == "no":
        cluster.head_node.kill_raylet()
        while any(one.state == 0 for one in head.get_all_node_info(timeout=10).values()):
            pass
    print("done", flush=True)
cluster.shutdown()
