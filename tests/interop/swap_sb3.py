"""A pytest plugin (``-p swap_sb3``) that puts Muster's classes in the place of SB3's before collection."""

import stable_baselines3  # noqa: F401  # the modules that it loads hold the names, too
from rebinding import rebind
from stable_baselines3.common.env_util import make_vec_env as their_make_vec_env
from stable_baselines3.common.vec_env.dummy_vec_env import DummyVecEnv as TheirDummy
from stable_baselines3.common.vec_env.subproc_vec_env import SubprocVecEnv as TheirSubproc

from muster.interop.sb3 import DummyVecEnv, SubprocVecEnv, make_vec_env

rebind({TheirDummy: DummyVecEnv, TheirSubproc: SubprocVecEnv, their_make_vec_env: make_vec_env}, "stable_baselines3")
