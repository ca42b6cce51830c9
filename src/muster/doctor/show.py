"""The doctor's reports for people, in the terminal. Needs rich, of the extra ``doctor``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from muster.doctor.advice import name_in_code
from muster.doctor.diagnosis import MARKS, Diagnosis, Finding, Severity, Soak, Trend, tried_rows
from muster.doctor.machine import Fact, MachineReport
from muster.doctor.measure import Measured, code_of_options
from muster.doctor.targets import import_code
from muster.pool.resources import usable_cores
from muster.recipes.named import callable_named, parse_name

_STYLES: dict[Severity, str] = {"blocks": "bold red", "warns": "yellow", "good": "green", "note": "dim"}

_TREND_STYLES: dict[Trend, str] = {"grows": "yellow", "steady": "dim"}


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Prints the diagnosis: obstacles first, then the measurements, then the code to write."""
    parts: list[RenderableType] = [Text(diagnosis.target, "bold"), _listed(diagnosis.findings)]
    if rows := diagnosis.measured.rows():
        parts.append(_grid("One env alone", rows))
    if diagnosis.soak is not None:
        parts.append(_soaked(diagnosis.soak))
    if diagnosis.tried:
        parts.append(_tried(tried_rows(diagnosis.tried)))
    if diagnosis.recommendation is None:
        parts.append(Text("Nothing works yet: see what is in the way, above.", "bold red"))
    else:
        parts.append(_grid(diagnosis.recommendation.title, diagnosis.recommendation.rows()))
        parts.append(Text(diagnosis.recommendation.code, "cyan"))
    _print(parts, console)


def show_machine(report: MachineReport, console: Console) -> None:
    """Prints the report: the facts, obstacles first, then the packages, then whether workers run here."""
    packages = Group(Text("Packages", "bold"), _listed(report.packages))
    end = Text("Workers run here. To try an env out: muster doctor ENV; what runs: muster top")
    if report.blocks:
        end = Text("Worker processes cannot run here: see what is in the way, above.", "bold red")
    _print([Text(f"Muster {report.version}", "bold"), _listed(report.facts), packages, end], console)


def show_speeds(
    target: str, wrappers: Sequence[str], num_envs: int, measured: Sequence[Measured], console: Console
) -> None:
    """Prints a row for each way, with its speed as a multiple of the first one's, and the line for our fastest way.

    Ways that failed follow with their problems.
    target, wrappers: the names of the env and of what is around it, as for `env_named`.
    """
    cores = usable_cores()
    counts = f"{num_envs} env{'s' * (num_envs > 1)}, {cores} core{'s' * (cores > 1)}"
    table = Table.grid(padding=(0, 2))
    done = [one for one in measured if not one.problem]
    if done:
        table.add_row("", Text("env steps/s", "dim", justify="right"), Text("lowest to highest", "dim"), "")
    for one in done:
        spread = f"{min(one.steps_per_s):,.0f} to {max(one.steps_per_s):,.0f}"
        times = f"{one.median / done[0].median:.2f} x"
        table.add_row(f"  {one.way}", Text(f"{one.median:,.0f}", justify="right"), Text(spread, "dim"), times)
    _print([Text(f"{target}, {counts}", "bold"), table], console)
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


def _print(parts: Sequence[RenderableType], console: Console) -> None:
    for number, part in enumerate(parts):
        if number > 0:
            console.print()
        # Code and names, to be copied, are not broken at the terminal's edge.
        console.print(part, soft_wrap=isinstance(part, Text))


def _listed(findings: Sequence[Finding]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column()
    table.add_column(overflow="fold")  # paths and commands are there to be copied
    for severity in MARKS:
        for finding in findings:
            if finding.severity == severity:
                table.add_row(Text(MARKS[severity], _STYLES[severity]), Text(finding.topic, "bold"), _body(finding))
    return table


def _soaked(soak: Soak) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    headings, *rows = soak.rows()
    for heading in headings:
        table.add_column(justify="right" if heading else "left")
    table.add_row(*(Text(heading, "dim") for heading in headings))
    for one, (name, *figures, trend) in zip(soak.quantities, rows, strict=True):
        table.add_row(Text(f"  {name}", "dim"), *figures, Text(trend, _TREND_STYLES[one.trend]))
    return Group(Text(soak.title, "bold"), table)


def _tried(rows: list[tuple[str, str]]) -> Text:
    width = max(len(speed) for speed, _ in rows)
    shown = Text.assemble(("Tried, in env steps/s without a policy", "bold"))
    for speed, text in rows:
        shown.append(f"\n  {speed:>{width}}  ").append(text, "" if speed else "yellow")
    return shown


def _body(finding: Finding) -> RenderableType:
    # An env's own messages may contain terminal colours.
    parts: list[RenderableType] = [Text.from_ansi(finding.text)]
    if isinstance(finding, Fact) and finding.meaning:
        parts.append(Text(finding.meaning, "dim"))
    if finding.remedy:
        parts.append(Padding(Text.from_ansi(finding.remedy, style="cyan"), (0, 0, 0, 2)))
    return Group(*parts)


def _grid(title: str, rows: list[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_row(Text(title, "bold"))
    for name, value in rows:
        grid.add_row(Text(f"  {name}", "dim"), value)
    return grid
