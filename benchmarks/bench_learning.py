"""How long does PPO take to a reference return, against Stable-Baselines3 and CleanRL?

Muster with its preset; SB3 with the values of its zoo (the package ``rl_zoo3``), in a DummyVecEnv as the zoo has it;
CleanRL's ``ppo.py`` as it stands, with its own values, from the checkout that MUSTER_CLEANRL_CHECKOUT names. The
return is the mean of the last 100 training episodes. Seconds begin with the building of the envs, without imports. Each
run is a process of its own, with torch's threads as each library sets them; contenders take turns, seed by seed.

Of CleanRL the vector env alone is made to fit this Gymnasium: ended envs are reset in the same step, and infos of final
steps are listed by env, as in the version that CleanRL names.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import runpy
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results import heading, table, write_section

_CHECKOUT = "MUSTER_CLEANRL_CHECKOUT"
_GOALS = {"CartPole-v1": 475.0, "LunarLander-v3": 200.0}
_WINDOW = 100  # episodes
_TIMEOUT_S = 3600.0


@dataclass
class Watch:
    """Ends the process with a line of JSON once the goal is reached, or after ``most`` env steps."""

    goal: float
    most: int
    begun: float = 0.0

    def begin(self) -> None:
        """The envs are about to be built."""
        self.begun = time.perf_counter()

    def see(self, steps: int, mean_return: float) -> None:
        """mean_return: of the last 100 episodes, nan before."""
        reached = mean_return >= self.goal
        if reached or steps >= self.most:
            seconds = time.perf_counter() - self.begun
            line = json.dumps({"steps": steps, "seconds": seconds, "reached": reached, "mean_return": mean_return})
            os.write(1, f"\n{line}\n".encode())
            os._exit(0)


def learn_with_muster(env_id: str, seed: int, watch: Watch) -> None:
    """As ``muster train env_id --seed seed`` does."""
    import gymnasium

    import muster
    from muster.algorithms import PPO, PPOConfig
    from muster.training.presets import preset_for

    watch.begin()
    with muster.make_vec(env_id, 1) as probe:
        preset = preset_for(gymnasium.spec(env_id), probe.single_observation_space, probe.single_action_space)
    config = PPOConfig(**{**preset.config, "total_steps": watch.most, "seed": seed})
    made = {"env_kwargs": preset.env_kwargs, "wrappers": preset.wrappers}
    with muster.make_vec(env_id, config.num_envs, autoreset_mode="same_step", **made) as envs:
        ppo = PPO(envs, config)
        for metrics in ppo.train():
            full = ppo.episodes.ended >= _WINDOW
            watch.see(metrics.steps, metrics.episodes.mean_return if full else float("nan"))


def learn_with_sb3(env_id: str, seed: int, watch: Watch) -> None:
    """With the zoo's values."""
    import yaml
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    class Watching(BaseCallback):
        def _on_step(self) -> bool:
            returns = [episode["r"] for episode in self.model.ep_info_buffer or ()]
            watch.see(self.num_timesteps, statistics.fmean(returns) if len(returns) >= _WINDOW else float("nan"))
            return True

    zoo = importlib.util.find_spec("rl_zoo3")
    assert zoo is not None
    path = Path(str(zoo.origin)).parent / "hyperparams" / "ppo.yml"
    values: dict[str, Any] = dict(yaml.safe_load(path.read_text(encoding="utf-8"))[env_id])
    num_envs, policy, normalize = values.pop("n_envs"), values.pop("policy"), values.pop("normalize", False)
    values.pop("n_timesteps")
    options = {name: _scheduled(value) for name, value in values.items()}
    watch.begin()
    envs: Any = make_vec_env(env_id, num_envs, seed=seed)
    if normalize:
        envs = VecNormalize(envs, gamma=values.get("gamma", 0.99))
    PPO(policy, envs, seed=seed, device="cpu", **options).learn(watch.most, callback=Watching())


def _scheduled(value: Any) -> Any:
    """The zoo writes ``lin_0.001`` for a rate that falls in a line to 0."""
    if not isinstance(value, str) or not value.startswith("lin_"):
        return value
    start = float(value.removeprefix("lin_"))
    return lambda left: left * start


def learn_with_cleanrl(env_id: str, seed: int, watch: Watch) -> None:
    """CleanRL's file, run as a program whose printed returns are read."""
    import gymnasium

    class Envs(gymnasium.vector.SyncVectorEnv):
        def __init__(self, env_fns: Any) -> None:
            watch.begin()
            super().__init__(env_fns, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP)

        def step(self, actions: Any) -> Any:
            *rest, infos = super().step(actions)
            final = infos.get("final_info")
            if final is not None and "episode" in final:
                returns, ended = final["episode"]["r"], final["_episode"]
                lengths = final["episode"]["l"]
                infos["final_info"] = [
                    {"episode": {"r": returns[i], "l": lengths[i]}} if ended[i] else None for i in range(self.num_envs)
                ]
            return (*rest, infos)

    gymnasium.vector.SyncVectorEnv = Envs  # type: ignore[misc]  # for the program below alone
    path = Path(os.environ[_CHECKOUT], "cleanrl", "ppo.py")
    options = ["--env-id", env_id, "--seed", str(seed), "--total-timesteps", str(watch.most)]
    sys.argv = [str(path), *options]
    with contextlib.redirect_stdout(_Returns(watch)):  # type: ignore[type-var]  # it is only written to
        runpy.run_path(str(path), run_name="__main__")
    watch.see(watch.most, float("nan"))


class _Returns:
    """Reads ``global_step=1234, episodic_return=[21.]`` from what is printed."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._last: deque[float] = deque(maxlen=_WINDOW)

    def write(self, text: str) -> int:
        found = re.search(r"global_step=(\d+), episodic_return=\[?(-?[\d.]+(?:e[-+]?\d+)?)", text)
        if found:
            self._last.append(float(found.group(2)))
            full = len(self._last) == _WINDOW
            self._watch.see(int(found.group(1)), statistics.fmean(self._last) if full else float("nan"))
        return len(text)

    def flush(self) -> None:
        pass


_LEARNERS: dict[str, Callable[[str, int, Watch], None]] = {
    "Muster": learn_with_muster,
    "SB3": learn_with_sb3,
    "CleanRL": learn_with_cleanrl,
}


def contenders() -> list[str]:
    """Those whose packages, or checkout, are here."""
    missing = {"SB3": importlib.util.find_spec("rl_zoo3") is None, "CleanRL": _CHECKOUT not in os.environ}
    return [name for name in _LEARNERS if not missing.get(name)]


def one_run(name: str, env_id: str, seed: int, most: int) -> dict[str, Any]:
    """The last line of JSON that a process of its own writes."""
    command = [sys.executable, __file__, "--one", name, "--envs", env_id, "--seeds", str(seed), "--most", str(most)]
    with contextlib.ExitStack() as stack:
        import tempfile

        folder = stack.enter_context(tempfile.TemporaryDirectory())  # CleanRL writes runs/ where it is called
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"steps"')]
    if not lines:
        raise RuntimeError(f"{name} on {env_id} ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def measure(env_ids: list[str], seeds: list[int], most: int) -> list[list[str]]:
    """The table's rows, a line for each env and contender; every run is printed."""
    rows = []
    for env_id in env_ids:
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders()}
        for turn, seed in enumerate(seeds):
            names = list(runs)[turn % len(runs) :] + list(runs)[: turn % len(runs)]
            for name in names:
                run = one_run(name, env_id, seed, most)
                runs[name].append(run)
                print(f"{env_id} seed {seed} {name}: {run}", flush=True)
        for name, own in runs.items():
            reached = [run for run in own if run["reached"]]
            ratios = [mine["seconds"] / theirs["seconds"] for mine, theirs in zip(runs["Muster"], own, strict=True)]
            rows.append(
                [
                    f"{env_id}, {name}",
                    f"{len(reached)} of {len(own)}",
                    f"{statistics.median(run['steps'] for run in own):,.0f}",
                    f"{statistics.median(run['seconds'] for run in own):.1f}",
                    f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                ]
            )
    return rows


def main() -> None:
    """Measures and prints; with ``--write`` also into RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--envs", nargs="+", choices=_GOALS, default=list(_GOALS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--most", type=int, default=1_000_000, help="env steps after which a run is given up")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--one", choices=_LEARNERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        (env_id,), (seed,) = arguments.envs, arguments.seeds
        _LEARNERS[arguments.one](env_id, seed, Watch(_GOALS[env_id], arguments.most))
        return
    header = ["env, PPO", "reached", "steps", "seconds", "Muster's seconds / this"]
    rows = measure(arguments.envs, arguments.seeds, arguments.most)
    goals = ", ".join(f"{_GOALS[env_id]:g} in {env_id}" for env_id in arguments.envs)
    text = f"{heading('PPO to a reference return')}\nMedians; the return is {goals}.\n\n{table(header, rows)}"
    print(text)
    if arguments.write:
        write_section("PPO to a reference return", text)


if __name__ == "__main__":
    main()
