"""A pytest plugin (``-p swap_gymnasium``) that puts Muster's drop-ins in the place of Gymnasium's before collection."""

import gymnasium  # the modules that it loads hold the names, too
from gymnasium.vector.async_vector_env import AsyncVectorEnv as TheirAsync
from gymnasium.vector.sync_vector_env import SyncVectorEnv as TheirSync
from rebinding import rebind

from muster.interop.gymnasium import AsyncVectorEnv, SyncVectorEnv, make_vec

rebind({TheirAsync: AsyncVectorEnv, TheirSync: SyncVectorEnv, gymnasium.make_vec: make_vec}, "gymnasium")
