"""Workers that are replaced now and then: recycle_after."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import muster
from local_nodes import LocalNodes
from muster.errors import ConfigError, WorkerError
from muster.worker_info import seeds_of_envs
from processes import kill_worker

_CHILD = "import sys; kept = [bytearray(b'x') * (1 << 20) for _ in sys.stdin]"
MB = 1 << 20
RESTART: dict[str, Any] = {"on_failure": "restart"}


class Leaky(gym.Env[Any, Any]):
    """Observes ``[episodes of this instance, step, a random number]``. Leaks `leak_mb` a step, half of it in a child.

    close_s: how long its close takes.  first_mb: of memory that its first reset takes.  fails_in: a folder, in which
    each instance leaves a file; the second and the third one fail.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(
        self, length: int = 5, leak_mb: int = 0, close_s: float = 0.0, first_mb: int = 0, fails_in: str = ""
    ) -> None:
        if fails_in:
            tempfile.mkstemp(dir=fails_in)
            if len(os.listdir(fails_in)) in (2, 3):
                raise RuntimeError("no licence")
        self.first_mb = first_mb
        self.length, self.leak_mb, self.close_s, self.episodes, self.level = length, leak_mb, close_s, 0, 0
        self.kept: list[Any] = []
        if leak_mb:
            self.child = subprocess.Popen([sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, text=True, bufsize=1)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.first = bytearray(b"x") * (self.first_mb * MB)
        self.episodes, self.t = self.episodes + 1, 0
        return np.array([self.episodes, 0, self.np_random.random()]), {"level": self.level, "pid": os.getpid()}

    def step(self, action: Any) -> Any:
        self.t += 1
        if self.leak_mb:
            self.kept.append(bytearray(b"x") * (self.leak_mb * MB // 2))
            assert self.child.stdin is not None
            self.child.stdin.write("\n" * (self.leak_mb // 2))
        obs = np.array([self.episodes, self.t, self.np_random.random()])
        return obs, float(self.t), self.t >= self.length, False, {"level": self.level, "pid": os.getpid()}

    def close(self) -> None:
        time.sleep(self.close_s)


def by_hand(seed: int, lives: list[int], length: int) -> list[list[float]]:
    """The rows of ``next_step`` after the first, of an env that is replaced after each of `lives` episodes."""
    rows, generator = [], np.random.default_rng(seed)
    for life, episodes in enumerate(lives):
        if life:
            own = seeds_of_envs(np.random.SeedSequence(seed, spawn_key=(life,)))[0]
            generator = np.random.default_rng(own)
        for episode in range(1, episodes + 1):
            rows += [[episode, t, generator.random()] for t in range(length + 1)]
    return rows[1:]


def play(envs: Any, seconds: float, mode: str = "next_step") -> tuple[list[Any], dict[str, Any]]:
    """The observations and what is truncated, with the attribute that was set in each of its infos."""
    obs, infos = envs.reset(seed=0)
    envs.set_attr("level", 3)
    rows, truncated, reported, ends = [obs], 0, 0, time.monotonic() + seconds
    while time.monotonic() < ends:
        obs, _, ended, cut, infos = envs.step(envs.sample_actions())
        assert all(infos["level"][infos["_level"]] == 3)
        rows.append(obs)
        truncated += int(cut.sum())
        reported += sum(one is not None for one in infos.get("restarted", ()))
        if mode == "disabled" and ended.any():
            rows.append(envs.reset(options={"reset_mask": ended})[0])
        time.sleep(0.002)
    return rows, {"truncated": truncated, "reported": reported, **envs.stats()}


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
def test_an_env_is_replaced_where_it_begins_an_episode(mode: str) -> None:
    options: dict[str, Any] = {"recycle_after": {"episodes": 3}, "autoreset_mode": mode, **RESTART}
    with muster.make_vec(Leaky, 3, num_workers=3, **options) as envs:
        rows, said = play(envs, 3.0, mode)
    assert said["recycled"] >= 3
    assert said["restarts"] == 0
    assert said["truncated"] == said["reported"] == (said["recycled"] if mode == "same_step" else 0)
    if mode != "next_step":
        return
    for env in range(3):
        of_env = [row[env].tolist() for row in rows[1:]]
        firsts = [i for i, (episode, t, _) in enumerate(of_env) if (episode, t) == (1, 0)]
        assert all(of_env[i - 1][0] >= 3 for i in firsts)
        lives = [int(of_env[i - 1][0]) for i in (*firsts, len(of_env))]
        assert of_env == by_hand(env, lives, 5)[: len(of_env)]


@pytest.mark.parametrize("after", [{"steps": 30}, {"seconds": 0.6}, {"memory_bytes": 100 * MB, "episodes": 10**6}])
def test_each_trigger_ends_a_worker(after: dict[str, float]) -> None:
    kwargs = {"leak_mb": 2 if "memory_bytes" in after else 0}
    with muster.make_vec(Leaky, 2, num_workers=2, env_kwargs=kwargs, recycle_after=after, **RESTART) as envs:
        _, said = play(envs, 4.0)
        assert said["recycled"] >= 2
        assert said["truncated"] == 0
        if "memory_bytes" in after:
            assert all(worker["memory_bytes"] < 600 * MB for worker in said["workers"])


def test_the_others_of_a_worker_end_truncated() -> None:
    options: dict[str, Any] = {"num_workers": 2, "recycle_after": {"episodes": 4}, **RESTART}
    kwargs = [{"length": 5}, {"length": 10**6}] * 2
    with muster.make_vec(Leaky, 4, env_kwargs=kwargs, **options) as envs:
        envs.reset(seed=0)
        reasons: list[str] = []
        while envs.stats()["recycled"] < 2:
            *_, truncated, infos = envs.step(envs.sample_actions())
            assert not truncated[::2].any()
            reasons += [one for one in infos.get("restarted", ())[1::2] if one]
            time.sleep(0.002)
        *_, infos = envs.step(envs.sample_actions())
        reasons += [one for one in infos.get("restarted", ()) if one]
    assert set(reasons) == {"recycled after 4 episodes"}
    assert len(reasons) >= 2


def test_others_go_on_while_one_closes_and_a_close_that_hangs_is_cut() -> None:
    options: dict[str, Any] = {"num_workers": 2, "recycle_after": {"episodes": 2}, "close_timeout": 1.5, **RESTART}
    envs = muster.make_vec(Leaky, 2, env_kwargs=[{"close_s": 60.0}, {"length": 10**6}], **options)

    def play_both() -> float:
        """Plays until the successor of env 0 has begun; returns for how long env 1 was kept at most."""
        envs.reset(seed=0)
        envs.send(envs.sample_actions())
        worst_s, last, before, life = 0.0, time.monotonic(), 0.0, 0.0
        while life >= before:
            batch = envs.recv(min_envs=1)
            if 0 in batch.env_ids:
                before, life = life, float(batch.obs[0, 0])
            if 1 in batch.env_ids:
                worst_s, last = max(worst_s, time.monotonic() - last), time.monotonic()
            envs.send(envs.sample_actions()[batch.env_ids], batch.env_ids)
            time.sleep(0.002)
        envs.recv()
        return worst_s

    with pytest.warns(RuntimeWarning, match=r"worker 0 \(env 0\) was killed in close\(\) of env 0"):
        assert play_both() < 1.3
    assert envs.stats()["recycled"] == 1
    envs.close(terminate=True)


def test_a_successor_that_fails_at_its_start_is_said(tmp_path: Path) -> None:
    options: dict[str, Any] = {"recycle_after": {"episodes": 3}, "env_kwargs": {"fails_in": str(tmp_path)}, **RESTART}
    with muster.make_vec(Leaky, 1, **options) as envs:
        envs.reset(seed=0)
        said: list[str] = []
        while not said:
            said += [one for one in envs.step([0])[4].get("restarted", ()) if one]
            time.sleep(0.002)
    assert "no licence" in said[0]


def test_a_reset_of_one_env_names_the_reason_to_the_other_that_has_just_ended() -> None:
    options: dict[str, Any] = {"autoreset_mode": "same_step", "recycle_after": {"episodes": 2}, **RESTART}
    kwargs = [{"length": 10**6}, {"length": 5}]
    with muster.make_vec(Leaky, 2, num_workers=1, env_kwargs=kwargs, **options) as envs:
        envs.reset(seed=0)
        for _ in range(10):
            *_, ended, _, _ = envs.step([0, 0])
        assert ended[1]
        time.sleep(0.6)
        envs.send_reset([0])
        envs.recv()
        assert envs.stats()["recycled"] == 1
        *_, truncated, infos = envs.step([0, 0])
    assert truncated.tolist() == [False, True]
    assert infos["restarted"][1] == "recycled after 2 episodes"


@pytest.mark.slow
def test_nodes_recycle_their_own_collectors() -> None:
    pytest.importorskip("tensordict")
    options: dict[str, Any] = {"num_collectors": 2, "frames_per_batch": 40, "cluster": LocalNodes(2), **RESTART}
    with muster.MultiCollector(Leaky, None, num_envs=2, recycle_after={"episodes": 6}, **options) as collector:
        while collector.stats()["collectors"]["recycled"] < 2:
            collector.rollout()


def test_deaths_beside_it_are_restarts() -> None:
    options: dict[str, Any] = {"num_workers": 3, "recycle_after": {"steps": 50}, "max_restarts": 100, **RESTART}
    with muster.make_vec(Leaky, 3, **options) as envs:
        envs.reset(seed=0)
        ends, kills, truncated, kill_at = time.monotonic() + 4.0, 0, 0, time.monotonic() + 0.4
        while time.monotonic() < ends:
            truncated += int(envs.step(envs.sample_actions())[3].sum())
            if time.monotonic() > kill_at:
                kill_worker(envs, kills % 3)
                kills, kill_at = kills + 1, time.monotonic() + 0.4
            time.sleep(0.002)
        stats = envs.stats()
    assert stats["recycled"] >= 3
    assert truncated <= stats["restarts"] <= kills


def test_a_collector_masks_one_row() -> None:
    pytest.importorskip("tensordict")
    make = {"num_workers": 2, "recycle_after": {"episodes": 3}, **RESTART}
    with muster.Collector(Leaky, None, num_envs=2, frames_per_batch=40, make_vec_options=make) as collector:
        masked, ends = 0, time.monotonic() + 3.0
        for batch in collector:
            masked += int((~batch["collector", "mask"]).sum()) if ("collector", "mask") in batch.keys(True) else 0
            time.sleep(0.02)
            if time.monotonic() > ends:
                break
        assert masked == collector.envs.stats()["recycled"] >= 2


@pytest.mark.parametrize("sync", [True, False])
def test_collectors_are_replaced_where_an_episode_ends(sync: bool) -> None:
    pytest.importorskip("tensordict")
    options: dict[str, Any] = {"num_collectors": 2, "frames_per_batch": 36 if sync else 18, "sync": sync, "seed": 0}
    with muster.MultiCollector(
        Leaky, None, num_envs=2, recycle_after={"episodes": 8}, **RESTART, **options
    ) as collector:
        lives: dict[int, int] = {}
        for _, batch in zip(range(60), collector, strict=False):
            episodes, t = batch["observation"][..., 0].long(), batch["observation"][..., 1].long()
            mask = (
                batch["collector", "mask"] if ("collector", "mask") in batch.keys(True) else batch["done"][..., 0] >= 0
            )
            for of_env, steps, counts in zip(episodes.tolist(), t.tolist(), mask.tolist(), strict=True):
                seen = [(episode, step) for episode, step, is_row in zip(of_env, steps, counts, strict=True) if is_row]
                # Rows follow one another; only what ends the batch may be masked.
                assert all(b in ((e, s + 1), (e + 1, 0)) for (e, s), b in itertools.pairwise(seen))
                assert counts == sorted(counts, reverse=True)
                if len(seen) < len(counts):
                    assert seen[-1][1] == 4
                    lives[len(lives)] = seen[-1][0]
        stats = collector.stats()["collectors"]
    assert stats["recycled"] >= 2
    assert stats["restarts"] == 0
    assert len(lives) - stats["recycled"] in (0, 1, 2)
    assert all(episodes >= 8 for episodes in lives.values())
    assert not sync or all(episodes <= 16 for episodes in lives.values())  # else one waits for the other's successor


@pytest.mark.parametrize(("most", "first_mb"), [(1000, 0), (100 * MB, 150)])
def test_a_limit_below_what_an_env_holds_from_its_first_reset_on_is_an_error(
    most: int, first_mb: int, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"num_workers": 1, "recycle_after": {"memory_bytes": most}, "max_restarts": 2, **RESTART}
    said = pytest.raises(WorkerError, match=r"held .* bytes after its first reset")
    with muster.make_vec(Leaky, 1, env_kwargs={"first_mb": first_mb}, **options) as envs, said:
        play(envs, 30.0)
    lines = [
        one for one in caplog.records if one.levelno == logging.WARNING and "Set memory_bytes higher" in one.message
    ]
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"recycle_after": {"episode": 5}}, 'a dict with some of "episodes"'),
        ({"recycle_after": {}}, "a dict with some of"),
        ({"recycle_after": 500}, "a dict with some of"),
        ({"recycle_after": {"steps": -1}}, r"recycle_after\['steps'\] must be a whole number of at least 1"),
        ({"recycle_after": {"seconds": 0}}, r"recycle_after\['seconds'\] must be a number of seconds"),
        ({"recycle_after": {"episodes": 5}, "on_failure": "raise"}, "left out without on_failure"),
        ({"recycle_after": {"episodes": 5}, "backend": "thread"}, "left out with the thread backend"),
        ({"recycle_after": {"episodes": 5}, "backend": "serial"}, "left out with the serial backend"),
        ({"recycle_after": {"episodes": 5}, "concurrent": True}, "left out with concurrent"),
        ({"recycle_after": {"episodes": 5}, "caller_steps": True}, "with caller steps"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        muster.make_vec(Leaky, 2, **{**RESTART, **wrong})
