"""Random programs, for as long as one likes, checked against the model, a loop by hand or the original.

    python tests/fuzz/fuzz.py --seconds 300
    python tests/fuzz/fuzz.py --kind agents --seed 7 --programs 1

A failure is printed with the command that repeats it, as far as the envs' workers answer in the same order again.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

for folder in ("", "envs"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))

import drop_in_programs  # noqa: E402
import vector_programs  # noqa: E402
from drawn_envs import draw_plans  # noqa: E402
from vector_programs import Tally  # noqa: E402

import muster  # noqa: E402

BACKENDS = ["serial", "thread", "process", "fork"]
PROGRAM_S = 120  # a program that takes longer hangs


def _module(name: str, function: str) -> Callable[..., None]:
    """A function of a module that takes seconds to import."""

    def run(*args: Any) -> None:
        getattr(__import__(name), function)(*args)

    return run


KINDS: dict[str, Callable[[Random, Tally, list[str]], None]] = {
    "vector": vector_programs.run,
    "agents": functools.partial(vector_programs.run, agents=True),
    "gymnasium": drop_in_programs.run_gymnasium,
    "sb3": drop_in_programs.run_sb3,
    "collector": _module("collector_programs", "run_collector"),
    "torchrl": _module("torchrl_programs", "run_torchrl"),
    "interrupts": _module("interrupt_programs", "run"),
}


def _hangs(*_: object) -> None:
    raise TimeoutError(f"the program has not ended after {PROGRAM_S} s")


def fuzz(kinds: list[str], seed: int, seconds: float, programs: int | None) -> int:
    """Runs programs of seed, seed + 1, ... until the time is over; returns how many have failed."""
    signal.signal(signal.SIGALRM, _hangs)
    warnings.filterwarnings("ignore", ".*left env.agents", RuntimeWarning)  # agents pause
    tallies, failures, ends, count = {kind: Tally() for kind in kinds}, 0, time.monotonic() + seconds, 0
    # One vector env stays open: with the last one the process ends from which workers are forked.
    with muster.make_vec([one.env for one in draw_plans(Random(0), 1)]):
        while time.monotonic() < ends and count != programs:
            for kind in kinds:
                signal.alarm(PROGRAM_S)
                try:
                    KINDS[kind](Random(seed + count), tallies[kind], BACKENDS)
                except Exception:
                    traceback.print_exc()
                    print(f"again: {sys.executable} {__file__} --kind {kind} --seed {seed + count} --programs 1")
                    failures += 1
                finally:
                    signal.alarm(0)
            count += 1
    for kind, tally in tallies.items():
        print(f"{kind}: {tally}")
    return failures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument("--programs", type=int, help="programs of each kind (default: until the time is over)")
    parser.add_argument("--kind", choices=KINDS, action="append", help="may be repeated (default: all)")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    failed = fuzz(options.kind or list(KINDS), options.seed, options.seconds, options.programs)
    print(f"{failed} programs have failed")
    raise SystemExit(bool(failed))
