"""How many env steps per second does each vector environment make, and what share is that of what the cores can do?

The limit is a bare loop of ``env.step`` per core, unconnected, on envs from the identical factory, resets included. The
contenders run one after another in every round, each for the same wall time and in an order that turns from round to
round, so that other work of the machine affects all of them. A share is the median over the rounds of the ratio to the
limit of the same round; the smallest and the largest ratio follow it. Rows that only reset an env are not counted as
env steps.

The limit in step is the same loops, which wait for each other after every round, in Python and awake: the most that a
vector env can reach whose batches are complete only with their slowest env.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from contenders import CONTENDERS, open_by_name, run_together, start_host, stop_host
from results import busy_share, heading, machine, table, versions, write_section
from workloads import LIMIT, WORKLOADS, Workload

_QUESTION = "Env steps per second"
_TERMS = """\
*limit*: a bare loop of `env.step` on each core, unconnected. *limit, in step*: the same loops, which wait for each
other after every round. *muster process*: a worker per core, each with several envs, as `make_vec` has them for ids of
known libraries, and for a factory with `num_workers`. *muster, one each*: a worker per env, a factory's default.
"""
_QUIET = 0.05  # the share of the machine that others may use before the figures stop meaning anything
_LISTEN_S = 0.2

Speeds = dict[str, list[float]]  # of each contender, env steps per second, one per round


@dataclass
class Measured:
    """The results of one workload.

    notes: why a contender did not take part.
    busy: the share of the machine that other programs used while all contenders slept.
    """

    speeds: Speeds
    notes: list[str]
    busy: float

    @property
    def is_quiet(self) -> bool:
        return self.busy <= _QUIET


def measure(workload: Workload, contenders: Sequence[str], rounds: int, seconds: float) -> Measured:
    """Starts the contenders, runs them in turns and stops them."""
    started = {name: start_host(open_by_name, name, workload.name) for name in contenders}
    hosts, notes = {}, []
    for name, (process, connection) in started.items():
        try:
            why_not = connection.recv()
        except EOFError:
            why_not = "failed; its traceback is above"
        if why_not is None:
            hosts[name] = (process, connection)
        else:
            process.join()
            notes.append(f"{name} does not take part: {why_not}.")
    speeds: Speeds = {name: [] for name in hosts}
    busy = []
    try:
        for first in range(rounds):
            busy.append(busy_share(_LISTEN_S))
            order = list(hosts)
            turn = first % len(order)
            for name in order[turn:] + order[:turn]:
                speeds[name] += run_together([hosts[name][1]], seconds)
    finally:
        for process, connection in hosts.values():
            stop_host(process, connection)
    return Measured(speeds, notes, statistics.median(busy))


def ratios(speeds: Speeds, contender: str, reference: str) -> list[float]:
    """The ratios of the contender to the reference, round by round; empty where one of them did not take part."""
    pairs = zip(speeds.get(contender, []), speeds.get(reference, []), strict=False)
    return [mine / theirs for mine, theirs in pairs]


def _spread(values: list[float], form: str = ".3f") -> str:
    return f"{min(values):{form}} - {max(values):{form}}"


def speeds_table(speeds: Speeds) -> str:
    """One line per contender: env steps per second and share of the limit, as median and spread.

    The limit's own spread shows how quiet the machine was.
    """
    rows = []
    for name, values in speeds.items():
        shares = ratios(speeds, name, LIMIT)
        share = [f"{statistics.median(shares):.3f}", _spread(shares)] if shares else ["", ""]
        rows.append([name, f"{statistics.median(values):,.0f}", _spread(values, ",.0f"), *share])
    return table(["contender", "env steps/s", "min - max", "share of limit", "min - max"], rows)


def goal_lines(workload: Workload, measured: Measured) -> list[str]:
    """The goals whose two sides took part, each with the ratio that was reached."""
    lines = []
    for goal in workload.goals:
        if reached := ratios(measured.speeds, goal.contender, goal.reference):
            median = statistics.median(reached)
            verdict = "holds" if median >= goal.ratio else f"MISSED by {goal.ratio - median:.3f}"
            lines.append(
                f"{goal.contender} / {goal.reference} = {median:.3f} ({_spread(reached)}), "
                f"goal {goal.ratio:.2f}: {verdict if measured.is_quiet else 'cannot tell, the machine is busy'}"
            )
    return lines


def section(workload: Workload, measured: Measured) -> str:
    """A workload's table, its goals and its notes, as Markdown."""
    views = "" if workload.copy else ", copy=False"
    lines = [*goal_lines(workload, measured), *measured.notes]
    if not measured.is_quiet:
        lines.append(f"Others kept {measured.busy:.0%} of the machine busy: these figures mean little.")
    notes = "\n".join(f"- {line}" for line in lines)
    title = f"### {workload.name} ({workload.num_envs} envs{views})"
    return f"{title}\n\n{speeds_table(measured.speeds)}\n\n{notes}".rstrip() + "\n"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="NAME")
    parser.add_argument("--contender", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement (default: 1)")
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    parser.add_argument("--write", action="store_true", help="write the tables to benchmarks/RESULTS.md")
    parser.epilog = f"workloads: {', '.join(WORKLOADS)}\ncontenders: {', '.join(CONTENDERS)}"
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.seconds <= 0:
        parser.error("--rounds must be at least 1 and --seconds above 0")
    return arguments


def main() -> None:
    arguments = _arguments()
    print(f"{machine()}\n{versions()}\n")
    sections, records = [], []
    for name in arguments.workload:
        measured = measure(WORKLOADS[name], arguments.contender, arguments.rounds, arguments.seconds)
        sections.append(section(WORKLOADS[name], measured))
        records.append({"workload": name, **asdict(measured)})
        print(sections[-1], flush=True)
    if arguments.json:
        report = {"machine": machine(), "versions": versions(), "seconds": arguments.seconds, "workloads": records}
        arguments.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    if arguments.write:
        write_section("stepping", "\n".join([heading(_QUESTION), _TERMS, *sections]))


if __name__ == "__main__":
    main()
