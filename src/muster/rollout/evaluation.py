"""The returns of whole episodes, which say how good a policy is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from muster.arguments import whole
from muster.errors import UsageError
from muster.rollout.collector import Collector
from muster.rollout.episodes import EPISODE_INFO, Episodes

STEPS_PER_EPISODE = 50_000  # that a run's evaluation waits for; Atari's longest episodes have 27,000
_STEPS = 64  # of each env, between two looks at the episodes that ended


class NoEpisodeEnded(UsageError):
    """Not one episode has ended within the steps that an evaluation may take."""


def evaluate(
    envs: Any,
    policy: Callable[..., Any],
    *,
    episodes: int,
    seed: int | None = None,
    max_steps: int | None = None,
    initial_state: Mapping[Any, Any] | None = None,
    episode_info: Sequence[str] | None = EPISODE_INFO,
    on_progress: Callable[[int, int], None] | None = None,
) -> Episodes:
    """The first K = `episodes` whole episodes that `policy` plays, by env; each of the N envs plays its share of them.

    With shares fixed beforehand, short episodes are not over-represented, as they would be among the first K to end.

    envs: a vector env, which stays the caller's.  policy, seed, initial_state, episode_info: as for `Collector`.
    max_steps: how many steps all envs together may take, roughly; None for no limit. Episodes that have not ended by
        then are left out, and K is smaller.
    on_progress: called now and then with the episodes played and the steps taken so far.

    Raises ConfigError, NoEpisodeEnded where no episode has ended after `max_steps`, and what `Collector` raises.
    """
    episodes = whole("episodes", episodes, 1)
    N = envs.num_envs
    shares = [episodes // N + (env < episodes % N) for env in range(N)]
    played: list[list[Any]] = [[] for _ in range(N)]
    options: dict[str, Any] = {"seed": seed, "initial_state": initial_state, "episode_info": episode_info}
    with Collector(envs, policy, frames_per_batch=_STEPS * N, compact=True, **options) as collector:
        while any(len(one) < share for one, share in zip(played, shares, strict=True)):
            collector.rollout()
            returns, lengths, env_ids, infos = collector.last_episodes
            for env, *episode in zip(env_ids, returns, lengths, *infos.values(), strict=True):
                if len(played[env]) < shares[env]:
                    played[env].append(episode)
            ended = sum(map(len, played))
            if on_progress is not None:
                on_progress(ended, collector.frames)
            if max_steps is not None and collector.frames >= max_steps:
                break
    if not any(played):
        raise NoEpisodeEnded(
            f"none of {episodes} episodes had ended after {collector.frames:,} steps of all envs, and max_steps is "
            f"{max_steps:,}. If episodes of this env never end, register it with max_episode_steps, or wrap it in "
            "gymnasium.wrappers.TimeLimit; if they are long, ask for more steps"
        )
    returns, lengths, *columns = map(np.array, zip(*(episode for one in played for episode in one), strict=True))
    env_ids = np.repeat(np.arange(N), [len(one) for one in played])
    return Episodes(returns, lengths, env_ids, dict(zip(infos, columns, strict=True)))
