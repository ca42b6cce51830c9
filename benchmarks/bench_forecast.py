"""Does the doctor's forecast come true?

For each target, in each round and in a fresh process: `muster.diagnose`, then the line it recommends, stepped with
random actions. The ratio is env steps per second, predicted over measured; at 1.00 the forecast was right. Rows that
only reset an env are no steps. A measurement takes whole episodes of the first env where those last longer than
``--seconds``, since a forecast spreads the cost of resets over episodes.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import muster
from envs import BusyEnv, pong
from muster.doctor import Recommendation
from results import heading, machine, table, versions, write_section

_QUESTION = "Forecasts of the doctor"
_TARGETS: dict[str, str | Callable[[], Any]] = {
    "CartPole-v1": "CartPole-v1",
    "HalfCheetah-v5": "HalfCheetah-v5",
    "ALE/Pong-v5": pong,
    "commons_harvest__open": "meltingpot/commons_harvest__open",
    "busy-1ms": functools.partial(BusyEnv, 1_000),
}
_GOAL = 0.25
_BATCHES = 64
_LONGEST_S = 30.0


def steps_per_s(advice: Recommendation, env: Any, seconds: float) -> float:
    """Env steps per second of the vector env that the recommended line makes."""
    # The line calls an env of no name `make_env`.
    names: dict[str, Any] = {"muster": muster, "make_env": env, "pong": env}
    exec(advice.line, names)
    with names["envs"] as envs:
        envs.reset(seed=0)
        envs.action_space.seed(0)
        batches = [envs.action_space.sample() for _ in range(_BATCHES)]
        over = envs.step(batches[0])[2]
        steps = rows = 0
        ended = False
        start = now = time.perf_counter()
        while now - start < seconds or (not ended and now - start < _LONGEST_S):
            _, _, terminated, truncated, _ = envs.step(batches[rows % _BATCHES])
            rows += 1
            steps += envs.num_envs - int(over.sum())
            ended = bool(over[0])
            over = terminated | truncated
            now = time.perf_counter()
        return steps / (now - start)


def try_here(target: str, seconds: float) -> dict[str, Any]:
    """One forecast and its measurement, in this process, which is fresh."""
    env = _TARGETS[target]
    diagnosis = muster.diagnose(env)
    advice = diagnosis.recommendation
    if advice is None or advice.steps_per_s is None:
        raise RuntimeError(f"the doctor forecasts nothing: {diagnosis}")
    measured = steps_per_s(advice, env, seconds)
    return {"predicted": advice.steps_per_s, "measured": measured, "line": advice.line}


def try_target(target: str, seconds: float) -> dict[str, Any]:
    """`try_here` in a fresh interpreter."""
    command = [sys.executable, __file__, "--here", target, "--seconds", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"trying {target} failed:\n{done.stderr}")
    tried: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return tried


def report(rounds: dict[str, list[dict[str, Any]]]) -> str:
    """The table, a line per target, and what it recommends."""
    rows, lines = [], []
    for target, tried in rounds.items():
        ratios = [one["predicted"] / one["measured"] for one in tried]
        median = statistics.median(ratios)
        holds = "holds" if abs(median - 1) <= _GOAL else "MISSED"
        predicted, measured = (statistics.median(one[key] for one in tried) for key in ("predicted", "measured"))
        rows.append(
            [target, f"{predicted:,.0f}", f"{measured:,.0f}", f"{median:.2f}", f"{min(ratios):.2f} - {max(ratios):.2f}"]
        )
        within = sum(abs(ratio - 1) <= _GOAL for ratio in ratios)
        lines.append(f"- {target}: {holds}, within {_GOAL:.0%} in {within} of {len(ratios)}; `{tried[-1]['line']}`")
    header = ["target", "predicted", "measured", "predicted / measured", "min - max"]
    return f"{table(header, rows)}\n\n" + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(_TARGETS)}; all by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="that the recommended line is stepped for, at least")
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/RESULTS.md")
    parser.add_argument("--here", choices=_TARGETS, metavar="TARGET", help="try TARGET once, in this process")
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(try_here(arguments.here, arguments.seconds)))
        return
    if unknown := set(arguments.targets) - set(_TARGETS):
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    print(f"{machine()}\n{versions()}\n", flush=True)
    rounds: dict[str, list[dict[str, Any]]] = {target: [] for target in arguments.targets or _TARGETS}
    for _ in range(arguments.rounds):
        for target, tried in rounds.items():
            tried.append(try_target(target, arguments.seconds))
            one = tried[-1]
            ratio = one["predicted"] / one["measured"]
            print(f"{target}: {one['predicted']:,.0f} / {one['measured']:,.0f} = {ratio:.2f}", flush=True)
    text = report(rounds)
    print(text)
    if arguments.write:
        write_section("forecast", f"{heading(_QUESTION)}\n{text}")


if __name__ == "__main__":
    main()
