"""The table of measured speeds, for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from muster.doctor.advice import name_in_code
from muster.doctor.measure import Measured, code_of_options
from muster.doctor.targets import import_code
from muster.pool.resources import usable_cores
from muster.recipes.named import callable_named, parse_name


def show_speeds(
    target: str, wrappers: Sequence[str], num_envs: int, measured: Sequence[Measured], console: Console
) -> None:
    """Prints a row for each way, with its speed as a multiple of the first one's, and the line for our fastest way.

    Ways that failed follow with their problems.
    target, wrappers: the names of the env and of what is around it, as for `env_named`.
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
        named = parse_name(target)
        env = f'"{target}"' if named is None else named.name if named.name.isidentifier() else f'"{named.name}"'
        code = [env, str(num_envs), *code_of_options(best.options or {})]
        if wrappers:
            code.append(f"wrappers=[{', '.join(name_in_code(callable_named(one)) for one in wrappers)}]")
        line = f"envs = muster.make_vec({', '.join(code)})"
        imports = import_code(target, wrappers, line)
        console.print()
        console.print(Text(f"{imports}\n{line}".lstrip(), "cyan"), soft_wrap=True)
