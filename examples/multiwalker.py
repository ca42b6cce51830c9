"""Four collector processes for PettingZoo's multiwalker, and one policy for its three walkers.

In other libraries a multi-agent network keeps a placeholder on the meta device, and passing it to several processes
ends in "share_fd: only available on CPU". Here the network has ordinary parameters, and the envs need no wrapper.

    pip install "muster-rl[torch,marl]" "pettingzoo[sisl]"
    python examples/multiwalker.py [auto | forkserver | spawn | fork]
"""

import sys

from tensordict.nn import TensorDictModule

import muster
from muster.nn import MultiAgentMLP

context = sys.argv[1] if len(sys.argv) > 1 else "auto"

# 31 numbers in and 4 out for each of 3 walkers; centralised: the network sees all of them.
net = MultiAgentMLP(31, 4, 3, centralised=True, share_params=True)
policy = TensorDictModule(net, in_keys=[("walker", "observation")], out_keys=[("walker", "action")])

collector = muster.MultiCollector(
    "pettingzoo/sisl/multiwalker_v9",
    policy,
    num_collectors=4,
    frames_per_batch=100,
    max_frames_per_traj=50,
    total_frames=200,
    device="cpu",
    reset_at_each_iter=False,
    context=context,
    make_vec_options={"env_kwargs": {"n_walkers": 3, "shared_reward": False, "max_cycles": 1000}},
)
with collector:
    for i, batch in enumerate(collector):
        N, T = batch.batch_size
        print(f"batch {i}: {T} steps of {N} envs, {batch['next', 'walker', 'reward'].shape[2]} walkers")
        # learn here, then: collector.update_policy_weights_()
print("frames:", collector.frames)
