"""The table of measured speeds, for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from muster.doctor.measure import Measured, code_of_options
from muster.workers.resources import usable_cores


def show_speeds(
    target: str, how_to_import: str | None, num_envs: int, measured: Sequence[Measured], console: Console
) -> None:
    """Prints a row for each way, with its speed as a multiple of the first one's, and the line for our fastest way.

    Ways that failed follow with their problems.
    how_to_import: the line that imports the target's factory; None for an id.
    """
    cores = usable_cores()
    counts = f"{num_envs} env{'s' * (num_envs > 1)}, {cores} core{'s' * (cores > 1)}"
    console.print(Text(f"{target}, {counts}", "bold"), soft_wrap=True)
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
        name = f'"{target}"' if how_to_import is None else target.rpartition(":")[2]
        lines = [] if how_to_import is None else [how_to_import]
        lines.append(
            f"envs = muster.make_vec({', '.join([name, str(num_envs), *code_of_options(best.options or {})])})"
        )
        console.print()
        console.print(Text("\n".join(lines), "cyan"), soft_wrap=True)
