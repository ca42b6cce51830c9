"""Who gets which collectors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from muster.errors import ConfigError
from muster.rollout.cluster.engine import Place


def shares(num_collectors: int, places: Sequence[Place]) -> list[range]:
    """The collectors of each node, in order: those it wishes for, or a share of the rest in proportion to its CPUs.

    Raises ConfigError.
    """
    wished = sum(place.collectors or 0 for place in places)
    among = [i for i, place in enumerate(places) if place.collectors is None]
    rest = num_collectors - wished
    if not places or rest < len(among) or (rest and not among):
        raise ConfigError(
            f"num_collectors={num_collectors} cannot be split between {len(places)} nodes, of which "
            f"{len(places) - len(among)} ask for {wished} in all: each node needs one, and each collector a node"
        )
    # One for each; the others go one by one to the node whose CPUs have the fewest.
    counts = [1 if place.collectors is None else place.collectors for place in places]
    for _ in range(rest - len(among)):
        _, i = min((counts[i] / max(places[i].cpus, 0.001), i) for i in among)
        counts[i] += 1
    return [range(*ends) for ends in itertools.pairwise(itertools.accumulate(counts, initial=0))]
