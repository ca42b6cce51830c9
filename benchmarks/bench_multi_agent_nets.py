"""How fast are MultiAgentMLP and MultiAgentConvNet, forward and forward with backward, compared with TorchRL's?

Both start from the same seed, so that their outputs have to agree, and are timed in turns, on one torch thread. A ratio
above 1 says that Muster's is faster. Where the agents share one network, the last column is the ratio for a call of the
bare ``nn.Sequential``, which neither checks nor reshapes anything. ``--products`` measures instead the two ways in
which Muster computes unshared networks: all agents together, and one after the other. The thresholds of
``muster.nn.stacked`` come from these figures.

    python benchmarks/bench_multi_agent_nets.py [--products] [--rounds 21]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn
from torchrl.modules import MultiAgentConvNet as TorchRLConvNet
from torchrl.modules import MultiAgentMLP as TorchRLMLP

from muster.nn import MultiAgentConvNet, MultiAgentMLP, stacked

INPUTS, OUTPUTS, CHANNELS, PIXELS = 31, 4, 3, 32
MLP_SIZES = [(3, 1), (7, 8), (16, 256)]  # agents, batch
CONV_SIZES = [(3, 1), (7, 8)]
FLAGS = [(share, central) for share in (False, True) for central in (False, True)]


def machine() -> str:
    models = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "torchrl", "tensordict"))
    return f"{models[0]}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, {packages}"


def interleaved(calls: Sequence[Callable[[], object]], rounds: int, round_s: float = 0.03) -> list[list[float]]:
    """Microseconds per call, [calls][rounds]; in each round every call runs for the same time, one after the other."""
    repeats = []
    for call in calls:
        for _ in range(3):
            call()
        start = time.perf_counter()
        call()
        repeats.append(max(2, int(round_s / (time.perf_counter() - start))))
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, repeat, row in zip(calls, repeats, times, strict=True):
            start = time.perf_counter()
            for _ in range(repeat):
                call()
            row.append((time.perf_counter() - start) / repeat * 1e6)
    return times


def forward(net: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return net(x)

    return call


def forward_backward(net: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    parameters = list(net.parameters())

    def call() -> None:
        for parameter in parameters:  # as an optimizer does; a module's zero_grad() looks them up each time
            parameter.grad = None
        net(x).sum().backward()

    return call


def shown(times: list[float]) -> str:
    quartiles = statistics.quantiles(times, n=4)
    return f"{statistics.median(times):9.1f} us ±{(quartiles[2] - quartiles[0]) / 2:6.1f}"


def ratio(mine: list[float], other: list[float]) -> float:
    return statistics.median(b / a for a, b in zip(mine, other, strict=True))


def against_torchrl(rounds: int) -> None:
    print(f"MLP {INPUTS}-64-64-{OUTPUTS}; ConvNet on {CHANNELS}x{PIXELS}x{PIXELS}; ± half the interquartile range")
    flags = f"{'share':6}{'central':8}"
    print(f"{'net':5}{'agents':>7}{'batch':>6} {flags}{'pass':9}{'Muster':>20}{'TorchRL':>21}   ratio   bare")
    for kind, n_agents, batch, share, central, ours, theirs, x in pairs():
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-6)
        for name, wrap in (("forward", forward), ("+backward", forward_backward)):
            bare = [wrap(ours.net, x.flatten(1, 2) if central else x.flatten(0, 1))] if share else []
            mine, other, *bound = interleaved([wrap(ours, x), wrap(theirs, x), *bare], rounds)
            row = f"{kind:5}{n_agents:7}{batch:6} {share!s:6}{central!s:8}{name:9}"
            bounds = "".join(f"{ratio(times, other):7.2f}" for times in bound)
            print(f"{row}{shown(mine)} {shown(other)} {ratio(mine, other):7.2f}{bounds}", flush=True)


def pairs() -> Iterator[tuple[str, int, int, bool, bool, nn.Module, nn.Module, torch.Tensor]]:
    for n_agents, batch in MLP_SIZES:
        for share, central in FLAGS:
            nets = []
            for mlp in (MultiAgentMLP, TorchRLMLP):
                torch.manual_seed(0)
                options = {"centralised": central, "share_params": share, "depth": 2, "num_cells": 64}
                nets.append(mlp(INPUTS, OUTPUTS, n_agents, **options))
            yield "mlp", n_agents, batch, share, central, *nets, torch.randn(batch, n_agents, INPUTS)
    for n_agents, batch in CONV_SIZES:
        for share, central in FLAGS:
            nets = []
            for conv in (MultiAgentConvNet, TorchRLConvNet):
                torch.manual_seed(0)
                nets.append(conv(n_agents, central, share, in_features=CHANNELS, kernel_sizes=3))
            yield "conv", n_agents, batch, share, central, *nets, torch.randn(batch, n_agents, CHANNELS, PIXELS, PIXELS)


def products(rounds: int) -> None:
    print("unshared networks: all agents together, and one after the other; elements as the thresholds count them")
    mlps = [(3, 256, 64), (3, 4096, 64), (16, 1024, 64), (16, 2048, 64), (16, 4096, 64), (4, 1024, 256), (4, 4096, 256)]
    for n_agents, batch, width in mlps:
        net = MultiAgentMLP(INPUTS, OUTPUTS, n_agents, centralised=False, share_params=False, depth=2, num_cells=width)
        compare(f"mlp  {n_agents:3} agents, batch {batch:5}, width {width:4}", n_agents * batch * width, net,
                torch.randn(batch, n_agents, INPUTS), rounds)  # fmt: skip
    for n_agents, batch, pixels in [
        (3, 1, 32),
        (3, 8, 32),
        (7, 8, 32),
        (16, 8, 32),
        (2, 1, 84),
        (3, 8, 84),
        (16, 1, 84),
    ]:
        net = MultiAgentConvNet(n_agents, False, False, in_features=CHANNELS, kernel_sizes=3)
        x = torch.randn(batch, n_agents, CHANNELS, pixels, pixels)
        compare(f"conv {n_agents:3} agents, batch {batch:5}, pixels {pixels:3}", x.numel(), net, x, rounds)


def compare(title: str, elements: int, net: nn.Module, x: torch.Tensor, rounds: int) -> None:
    columns = []
    for wrap in (forward, forward_backward):
        call = wrap(net, x)
        together, loop = interleaved([at_threshold(2**62, call), at_threshold(-1, call)], rounds)
        columns.append(f"{shown(together)} {shown(loop)}  {ratio(together, loop):5.2f}")
    print(f"{title} {elements:9}  forward {columns[0]}   +backward {columns[1]}", flush=True)


def at_threshold(threshold: int, call: Callable[[], object]) -> Callable[[], object]:
    def thresholded() -> None:
        stacked.LOOP_ABOVE_HIDDEN = stacked.LOOP_ABOVE_PIXELS = threshold
        call()

    return thresholded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--products", action="store_true", help="measure the ways to compute unshared networks")
    parser.add_argument("--rounds", type=int, default=21, help="interleaved runs of each (at least 3)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(machine(), f"{torch.get_num_threads()} torch thread, {arguments.rounds} rounds", sep="; ")
    (products if arguments.products else against_torchrl)(max(3, arguments.rounds))


if __name__ == "__main__":
    main()
