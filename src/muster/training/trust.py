"""Which fields of a run folder's config.json need trust, since the folder may be a stranger's."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from muster.algorithms.ppo_config import POLICIES
from muster.recipes.known_envs import is_of_known_library, not_installed
from muster.recipes.named import split_name

IN_FOLDER = ("csv", "tensorboard")  # the loggers that write into the run's folder alone

# Numbers, flags, words of Muster's own, and the folder that a run was begun from, which resuming does not read:
# whatever their values. A field that is neither here nor judged below needs trust wherever it is not empty: a new one
# has to be judged.
_HARMLESS = (
    "algorithm preset total_steps seed num_envs num_steps num_minibatches update_epochs learning_rate anneal_lr gamma "
    "gae_lambda norm_adv clip_coef anneal_clip clip_vloss ent_coef vf_coef max_grad_norm target_kl clip_rewards "
    "normalize_observations normalize_rewards memory_size sequence_length hidden_sizes sprite activation log_std_init "
    "torch_threads critic share_params episode_info make_vec.num_workers make_vec.backend make_vec.context "
    "make_vec.caller_steps make_vec.one_env_per_process make_vec.threads_per_worker make_vec.start_timeout "
    "make_vec.step_timeout make_vec.close_timeout make_vec.on_failure make_vec.max_restarts make_vec.memory_check "
    "collectors.num_collectors collectors.nodes collectors.collect_timeout collectors.preemptive_threshold "
    "collectors.threads_per_collector run.eval_every run.eval_episodes run.checkpoint_every run.keep run.init_from "
    "with spaces"
)
NEED_NO_TRUST = frozenset(_HARMLESS.split())


def reaching(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that reach out of the folder: to code, files, devices, machines or servers.

    fields: of config.json, by names such as "env" and "run.log".
    """
    needing = {name: value for name, value in fields.items() if name not in NEED_NO_TRUST}
    return {name: value for name, value in needing.items() if not JUDGED.get(name, operator.not_)(value)}


def is_known_id(env: str) -> bool:
    """True for an env id of a known library, which may not be installed."""
    module, name = split_name(env)
    is_module = all(map(str.isidentifier, module.split("."))) and not module.endswith(".py")
    # A function is called, with arguments from the folder: that of a known library may do anything.
    return module == "" or (is_module and is_of_known_library(module) and not name.isidentifier())


def are_words(value: Any) -> bool:
    """True if all that JSON holds there are numbers, flags, None, and words that are no path, address or module."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str) and set(one) & set("/\\:"):
            return False
        left += [*one, *one.values()] if isinstance(one, dict) else one if isinstance(one, (list, tuple)) else []
    return True


JUDGED: Mapping[str, Callable[[Any], bool]] = {
    "env": lambda env: is_known_id(env) and not not_installed(env),
    "env_kwargs": are_words,
    "policy": POLICIES.__contains__,
    "run.device": lambda device: re.fullmatch(r"auto|cpu|mps|cuda(:[0-9]+)?", device) is not None,
    "run.log": set(IN_FOLDER).issuperset,
}
"""Says for a value of the field if it needs no trust."""
