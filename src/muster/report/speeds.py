"""What a person sees of a measurement of speeds."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from muster.backends.resources import usable_cores
from muster.bench import Measured


def show_speeds(target: str, num_envs: int, measured: Sequence[Measured], console: Console) -> None:
    """A row for each way, its speed as a multiple of the first one's, what stood in the way of the others, and the line
    to write for the fastest of ours.
    """
    cores = usable_cores()
    console.print(Text(f"{target}, {num_envs} envs, {cores} core{'s' * (cores > 1)}", "bold"), soft_wrap=True)
    console.print()
    table = Table.grid(padding=(0, 2))
    done = [one for one in measured if not one.problem]
    if done:
        table.add_row("", Text("env steps/s", "dim", justify="right"), Text("lowest to highest", "dim"), "")
    for one in done:
        spread = f"{min(one.steps_per_s):,.0f} to {max(one.steps_per_s):,.0f}"
        times = f"{one.median / done[0].median:.2f} x"
        table.add_row(f"  {one.way}", Text(f"{one.median:,.0f}", justify="right"), Text(spread, "dim"), times)
    console.print(table)
    for one in measured:
        if one.problem:
            console.print(Text(f"  {one.way}  ").append(Text.from_ansi(one.problem, style="dim")), soft_wrap=True)
    ours = [one for one in done if one.options is not None]
    if ours:
        best = max(ours, key=lambda one: one.median)
        name = f'"{target}"' if ":" not in target.split("/")[0] else target.rpartition(":")[2]
        line = ", ".join(part for part in (name, str(num_envs), best.options) if part)
        console.print()
        console.print(Text(f"envs = muster.make_vec({line})", "cyan"), soft_wrap=True)
