"""A pytest plugin (``-p melting_pot_alone``) that lets tests import Melting Pot without its bots, which need JAX."""

from muster.envs.light_melting_pot import import_without_bots

import_without_bots()
