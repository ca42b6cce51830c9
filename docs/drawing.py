"""Draws the pictures of the site, docs/pictures/*.svg: `python docs/drawing.py`.

Boxes have translucent fills and texts the colour of the page, so that one file suits light and dark pages.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import ClassVar

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"

# What a box stands for, by its colour.
CALLER, WORKER, MEMORY, OTHER = "#3b82f6", "#22a06b", "#d98200", "#8b8f96"
_STYLE = "svg { color: #1f2328 } @media (prefers-color-scheme: dark) { svg { color: #e6edf3 } }"
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif"
_MONO = "ui-monospace, 'SFMono-Regular', Menlo, Consolas, 'DejaVu Sans Mono', monospace"
_LINE = 18


class Drawing:
    """A picture of that size in pixels. title, about: what a screen reader says."""

    words: ClassVar[dict[str, str]] = {}  # a translation of what stands in it

    def __init__(self, name: str, width: int, height: int, title: str, about: str) -> None:
        self.name = name
        title, about = (self.words.get(text, text) for text in (title, about))
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" aria-labelledby="{name}-title {name}-about" '
            f'font-family="{escape(_FONT)}" font-size="14">',
            f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-about">{escape(about)}</desc>',
            f"<style>{_STYLE}</style>",
            f'<defs><marker id="{name}-head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path d="M0 0 L10 5 L0 10 z" fill="currentColor"/></marker></defs>',
        ]

    def box(
        self, x: float, y: float, width: float, height: float, colour: str, *lines: str, strong: float = 0.14
    ) -> None:
        """A box with lines of text in its middle; the first is bold where there are several."""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="7" fill="{colour}" fill-opacity="{strong}" '
            f'stroke="{colour}" stroke-width="1.5"/>'
        )
        top = y + height / 2 - _LINE * (len(lines) - 1) / 2 + 5
        for at, line in enumerate(lines):
            self.text(x + width / 2, top + at * _LINE, line, bold=at == 0 and len(lines) > 1, anchor="middle")

    def text(self, x: float, y: float, text: str, *, bold: bool = False, anchor: str = "start", size: int = 14) -> None:
        """A line of text; what lies in backticks is code."""
        parts = [
            f'<tspan font-family="{escape(_MONO)}" font-size="{size - 1}">{escape(part)}</tspan>'
            if at % 2
            else escape(part)
            for at, part in enumerate(self.words.get(text, text).split("`"))
        ]
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}"{weight} fill="currentColor">'
            f"{''.join(parts)}</text>"
        )

    def arrow(self, *points: tuple[float, float], both: bool = False, dashed: bool = False) -> None:
        """A line through the points, with a head at its end, or at both ends."""
        way = " ".join(f"{'M' if at == 0 else 'L'}{x} {y}" for at, (x, y) in enumerate(points))
        start = f' marker-start="url(#{self.name}-head)"' if both else ""
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<path d="{way}" fill="none" stroke="currentColor" stroke-width="1.5"{dashes}{start} '
            f'marker-end="url(#{self.name}-head)"/>'
        )

    def rule(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """A bar without a border."""
        self._parts.append(f'<rect x="{x}" y="{y}" width="{width:.1f}" height="{height}" rx="3" fill="{colour}"/>')

    def __str__(self) -> str:
        return "\n".join([*self._parts, "</svg>", ""])


def step() -> Drawing:
    """The road of a step."""
    it = Drawing(
        "step", 760, 292, "One step of eight envs",
        "The caller writes actions into shared memory and rings; two workers step four envs each and write "
        "observations and rewards back; nothing is pickled.",
    )  # fmt: skip
    it.box(10, 90, 170, 110, CALLER, "your process", "`envs.step(actions)`", "returns a batch")
    it.box(270, 30, 220, 230, MEMORY)
    it.text(380, 54, "the slab", bold=True, anchor="middle")
    it.text(380, 74, "one block of shared memory", anchor="middle", size=13)
    for at, name in enumerate(("actions `[8]`", "observations `[8, 4]`", "rewards, ends, infos")):
        it.box(290, 92 + at * 52, 180, 40, MEMORY, name, strong=0.2)
    for at, (y, envs) in enumerate(((42, "envs 0 to 3"), (162, "envs 4 to 7"))):
        it.box(580, y, 170, 86, WORKER, f"worker {at}", "a C++ loop steps", envs)
        it.arrow((490, y + 32), (576, y + 32))
        it.arrow((580, y + 58), (494, y + 58))
    it.arrow((180, 122), (266, 122))
    it.arrow((270, 170), (184, 170))
    it.text(223, 112, "write", anchor="middle", size=12)
    it.text(223, 188, "read", anchor="middle", size=12)
    it.text(380, 282, "Bells ring where somebody sleeps. Nothing is pickled, and no byte goes through a pipe.",
            anchor="middle", size=13)  # fmt: skip
    return it


def slab() -> Drawing:
    """What lies where in the shared memory."""
    it = Drawing(
        "slab", 760, 330, "The slab: what lies where",
        "One record of a cache line for each env, then an array for each leaf of the spaces with a row for each env. "
        "Two counters in the record say whose the row is.",
    )  # fmt: skip
    for env in range(4):
        y = 66 + env * 46
        it.text(12, y + 24, f"env {env}", bold=True)
        it.box(70, y, 190, 36, MEMORY, "reward, flags, counters", strong=0.2)
        it.box(280, y, 100, 36, MEMORY, "action")
        it.box(400, y, 130, 36, MEMORY, "observation")
        it.box(550, y, 200, 36, MEMORY, "numbers of its infos")
    for x, width, name in ((70, 190, "record, 1 cache line"), (280, 100, "`[N, *shape]`"), (400, 130, "`[N, *shape]`"),
                           (550, 200, "columns, by layout")):  # fmt: skip
        it.text(x + width / 2, 52, name, anchor="middle", size=12)
    it.text(12, 26, "One memfd, mapped by the caller and by each worker: no file, nothing in /dev/shm", bold=True)
    it.box(70, 262, 310, 54, CALLER, "`requested == finished`", "the row is the caller's")
    it.box(440, 262, 310, 54, WORKER, "`requested != finished`", "the row is its worker's")
    it.arrow((384, 280), (436, 280))
    it.arrow((436, 300), (384, 300))
    return it


def doorbell() -> Drawing:
    """Who waits for whom, and how."""
    it = Drawing(
        "doorbell", 760, 300, "The doorbell: how a caller and a worker wait for each other",
        "A timeline: the caller writes, requests and rings; the worker, awake for a while and then asleep, steps its "
        "envs and answers; the caller waits awake for up to some milliseconds, then asleep.",
    )  # fmt: skip
    it.text(12, 64, "caller", bold=True)
    it.text(12, 214, "worker", bold=True)
    for x, y, width, colour, words in (
        (90, 40, 110, CALLER, "writes actions"), (200, 40, 230, OTHER, "waits awake, then asleep"),
        (520, 40, 125, CALLER, "reads the batch"), (645, 40, 105, CALLER, "the policy"),
        (90, 190, 130, OTHER, "awake or asleep"), (230, 190, 270, WORKER, "steps its envs, writes rows"),
        (510, 190, 240, OTHER, "waits awake, then asleep"),
    ):  # fmt: skip
        it.box(x, y, width, 40, colour, words)
    it.arrow((200, 84), (228, 186))
    it.arrow((500, 186), (520, 84))
    it.text(232, 128, "`requested + 1`, and a ring", size=13)
    it.text(232, 146, "only if the worker sleeps", size=13)
    it.text(530, 128, "`finished + 1`, and a ring", size=13)
    it.text(530, 146, "only if the caller sleeps", size=13)
    it.text(12, 268, "Awake: pauses, then yields of the core, for 10 ms at most, or not at all where cores are short. "
            "Asleep: a futex.", size=13)  # fmt: skip
    it.text(12, 288, "Whoever goes to sleep says so first, and looks once more: no ring is missed.", size=13)
    return it


def life() -> Drawing:
    """Life and death of a worker."""
    it = Drawing(
        "life", 760, 350, "Life and death of a worker",
        "The launcher forks workers; a worker builds its envs, steps, and closes them. One that dies or hangs is "
        "noticed, explained, and with on_failure restart replaced, while the other envs go on.",
    )  # fmt: skip
    it.box(10, 20, 150, 64, CALLER, "your process", "pool of places")
    it.box(230, 20, 150, 64, OTHER, "launcher", "one small process")
    it.box(230, 150, 150, 54, WORKER, "builds its envs")
    it.box(440, 150, 130, 54, WORKER, "steps")
    it.box(630, 150, 120, 54, WORKER, "closes")
    it.box(
        330,
        262,
        350,
        70,
        OTHER,
        "died, hung, or its env raised",
        "exit code or signal, what it did, its stack,",
        "its last words",
    )
    it.arrow((160, 52), (226, 52))
    it.text(193, 44, "asks", anchor="middle", size=12)
    it.arrow((305, 84), (305, 146))
    it.text(315, 120, "forks a fresh process", size=13)
    it.arrow((380, 177), (436, 177))
    it.arrow((570, 177), (626, 177))
    it.arrow((505, 204), (505, 258))
    it.text(515, 236, "noticed within 0.1 s", size=13)
    it.arrow((330, 297), (85, 297), (85, 88))
    it.text(98, 230, '`on_failure="raise"`: an error', size=13)
    it.text(98, 248, '`"restart"`: the next worker', size=13)
    it.text(440, 44, "All end with your process, even by SIGKILL:", size=13)
    it.text(440, 64, "no orphans, nothing left in `/dev/shm`.", size=13)
    return it


def policies() -> Drawing:
    """Where a policy acts."""
    it = Drawing(
        "policies", 760, 330, "Where a policy acts: copied to collectors, or staying",
        "Left: each collector process has a copy of the policy and receives weights. Right: a policy that cannot be "
        "copied stays in the caller and acts for all envs in one batch.",
    )  # fmt: skip
    it.text(185, 24, "it can be copied", bold=True, anchor="middle")
    it.text(575, 24, "it cannot", bold=True, anchor="middle")
    it.box(85, 44, 200, 60, CALLER, "your process", "learner, policy")
    it.box(85, 138, 200, 50, MEMORY, "weights and batches", "in shared memory")
    for x in (10, 200):
        it.box(x, 226, 170, 88, WORKER, "collector", "a copy of the policy", "its share of the envs")
    it.arrow((185, 104), (185, 134), both=True)
    it.arrow((150, 188), (110, 222), both=True)
    it.arrow((220, 188), (270, 222), both=True)
    it.box(450, 44, 250, 60, CALLER, "your process", "learner, policy: acts for all envs")
    it.box(450, 138, 250, 50, MEMORY, "the slab", "actions, observations")
    for at, x in enumerate((400, 590)):
        it.box(x, 226, 160, 88, WORKER, f"worker {at}", "half of the envs", "no policy, no torch")
    it.arrow((575, 104), (575, 134), both=True)
    it.arrow((540, 188), (490, 222), both=True)
    it.arrow((610, 188), (660, 222), both=True)
    return it


def agents() -> Drawing:
    """The layout of agents."""
    it = Drawing(
        "agents", 760, 320, "Agents in fixed slots",
        "Each env has one row. Within a group each agent has a fixed slot; an agent that is not there is a row of "
        "zeros with alive False.",
    )  # fmt: skip
    it.text(12, 26, 'obs["walker"]: `[N, A, ...]`, here 3 envs of 4 agents', bold=True)
    for agent in range(4):
        it.text(150 + agent * 110, 56, f"walker_{agent}", anchor="middle", size=13)
    gone = {(1, 2), (2, 0), (2, 3)}
    for env in range(3):
        y = 68 + env * 50
        it.text(12, y + 25, f"env {env}", bold=True)
        for agent in range(4):
            absent = (env, agent) in gone
            it.box(100 + agent * 110, y, 100, 40, OTHER if absent else WORKER, "zeros" if absent else "row")
        alive = ", ".join("False" if (env, agent) in gone else "True" for agent in range(4))
        it.text(552, y + 25, f"`[{alive}]`", size=12)
    it.text(552, 56, '`infos["alive"]["walker"]`', size=12)
    it.box(
        12,
        232,
        360,
        74,
        MEMORY,
        "by group, `[N, A]`",
        "rewards, `alive`, `acting`, `action_mask`,",
        "`agent_terminated`, `agent_truncated`",
    )
    it.box(
        392,
        232,
        356,
        74,
        MEMORY,
        "by env, `[N]`",
        'terminated, truncated, `infos["state"]`,',
        'what all agents observe alike: `obs["shared"]`',
    )
    return it


# What is compared: rows of benchmarks/RESULTS.md, by what they are called here.
_CONTENDERS = {
    "Muster": "muster process", "Muster, a process each": "muster, one each", "Gymnasium async": "gymnasium async",
    "SB3 subproc": "sb3 subproc", "Gymnasium sync": "gymnasium sync", "EnvPool": "envpool",
}  # fmt: skip
_WORKLOADS = {"CartPole-v1": "cartpole-8", "HalfCheetah-v5": "halfcheetah-8", "ALE/Pong-v5": "pong-8",
              "1 ms of work a step": "busy-1ms-8"}  # fmt: skip
_PROGRAMS = {
    "PPO of Stable-Baselines3, CartPole-v1": ("SB3 PPO", "SubprocVecEnv", "SB3"),
    "PPO of TorchRL, CartPole-v1": ("TorchRL PPO", "ParallelEnv", "TorchRL"),
    "AsyncVectorEnv, CartPole-v1": ("CartPole in AsyncVectorEnv", "", "Gymnasium"),
    "AsyncVectorEnv, HalfCheetah-v5": ("HalfCheetah in AsyncVectorEnv", "", "Gymnasium"),
    "SubprocVecEnv, CartPole-v1": ("CartPole in SubprocVecEnv", "", "SB3"),
    "SubprocVecEnv, HalfCheetah-v5": ("HalfCheetah in SubprocVecEnv", "", "SB3"),
}


def measured(section: str) -> list[list[str]]:
    """The cells of the table below a heading of benchmarks/RESULTS.md, as text."""
    text = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    table = re.split(r"^##", text.partition(f"# {section}")[2], maxsplit=1, flags=re.MULTILINE)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:2] == "| "]


def speed() -> Drawing:
    """Env steps a second, against the peers."""
    groups = {}
    for title, workload in _WORKLOADS.items():
        rows = {row[0]: row for row in measured(f"{workload} (")}
        found = [(called, rows[name]) for called, name in _CONTENDERS.items() if name in rows]
        groups[title] = [(called, row[1], float(row[3])) for called, row in found]
    return _bars(
        "speed", groups, "Env steps per second of 8 envs on 2 cores",
        "8 envs on 2 cores: env steps per second; a full bar is all that the cores can do",
    )  # fmt: skip


def drop_ins() -> Drawing:
    """Seconds that programs take with Muster's classes and with the originals."""
    rows = {row[0]: row[1] for row in measured("Drop-ins against their originals")}
    groups = {}
    for title, (program, name, peer) in _PROGRAMS.items():
        of = {"Muster": "Muster's", peer: f"{peer}'s"}
        seconds = {called: rows[f"{program}, {owner} {name}".strip()] for called, owner in of.items()}
        most = max(map(float, seconds.values()))
        groups[title] = [(called, f"{text} s", float(text) / most) for called, text in seconds.items()]
    return _bars(
        "drop_ins", groups, "Seconds for 100,000 steps with a changed import",
        "8 envs, a process each, on 2 cores: seconds for 100,000 env steps; shorter is better",
    )  # fmt: skip


def _bars(name: str, groups: dict[str, list[tuple[str, str, float]]], title: str, about: str) -> Drawing:
    """Bars by group: what each is called, its value as text, and its length, 1 for the whole width."""
    it = Drawing(name, 760, 36 + sum(38 + 22 * len(bars) for bars in groups.values()), title, about)
    left, full, y = 190, 440, 20
    it.text(12, y, about, size=13)
    for group, bars in groups.items():
        y += 34
        it.text(12, y, group, bold=True)
        y += 4
        for called, value, length in bars:
            it.text(left - 10, y + 16, called, anchor="end", size=13)
            it.rule(left, y + 4, full, 14, f"{OTHER}22")
            it.rule(left, y + 4, full * min(length, 1.0), 14, CALLER if "Muster" in called else OTHER)
            it.text(left + full + 12, y + 16, value, size=13)
            y += 22
    return it


def step_zh() -> Drawing:
    return _in_chinese(step)


def speed_zh() -> Drawing:
    return _in_chinese(speed)


def _in_chinese(diagram: Callable[[], Drawing]) -> Drawing:
    Drawing.words = json.loads((PICTURES / "chinese.json").read_text(encoding="utf-8"))
    try:
        return diagram()
    finally:
        Drawing.words = {}


DIAGRAMS = (step, slab, doorbell, life, policies, agents, speed, drop_ins, step_zh, speed_zh)


def main(names: Sequence[str]) -> None:
    for diagram in DIAGRAMS:
        if not names or diagram.__name__.removesuffix("_zh") in names:
            (PICTURES / f"{diagram.__name__}.svg").write_text(str(diagram()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
