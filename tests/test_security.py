"""What SECURITY.md promises of processes, and that each of its promises names a test that there is."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import programs

ROOT = Path(__file__).resolve().parents[1]


def test_each_promise_names_its_tests():
    promised = (ROOT / "SECURITY.md").read_text().partition("## What Muster promises")[2].partition("\n## ")[0]
    promises = re.findall(r"^- \*\*.*?(?=^- \*\*|\Z)", promised, re.MULTILINE | re.DOTALL)
    assert len(promises) >= 10
    for promise in promises:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", promise)
        assert named, promise
        for file, test in named:
            assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.MULTILINE), (file, test)


@pytest.mark.parametrize("context", ["forkserver", "spawn", "fork"])
def test_workers_are_reached_by_what_is_inherited_alone(context: str, tmp_path: Path):
    around = {"TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parent)}
    done = programs.run("-c", REACHED, context, cwd=tmp_path, env={**os.environ, **around})
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "3 processes\n")
    assert list(tmp_path.iterdir()) == []


# Prints how many processes there are, after what they hold that another process could open or connect to.
REACHED = """
import os, re, sys, time
import muster
from processes import shared_memory_of_others

def held(pid):
    links = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            links.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:
            pass  # that of listdir
    return links

def unnamed():
    with open("/proc/net/unix") as file:
        return {f"socket:[{fields[6]}]" for fields in map(str.split, list(file)[1:]) if len(fields) == 7}

def descendants(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        children = list(map(int, file.read().split()))
    return [*children, *(one for child in children for one in descendants(child))]

calls = []
sys.addaudithook(lambda event, _: calls.append(event) if event in ("socket.bind", "socket.connect") else None)
before, shared = held(os.getpid()), os.listdir("/dev/shm")
with muster.make_vec("CartPole-v1", 2, num_workers=2, context=sys.argv[1]) as envs:
    envs.reset()
    envs.step(envs.action_space.sample())
    workers = [worker["pid"] for worker in envs.stats()["workers"]]
    pids = {*descendants(os.getpid()), *workers, os.getpid()}
    links = {pid: held(pid) - before for pid in pids}
    private = re.compile(r"pipe:\\[|/memfd:|anon_inode:|/dev/null$")
    sockets = unnamed()
    for pid, some in links.items():
        for link in some:
            if not private.match(link) and link not in sockets:
                print(pid, link)
    until = time.monotonic() + 10  # another program may be about to map what it has put there
    while new := set(os.listdir("/dev/shm")) - set(shared) - shared_memory_of_others():
        assert time.monotonic() < until, new
        time.sleep(0.02)
assert not calls, calls
print(len({os.getpid(), *workers}), "processes")
"""


def test_nothing_that_comes_from_a_file_is_unpickled(tmp_path: Path):
    done = programs.run("-c", UNPICKLED, tmp_path / "run", imports=programs.TORCH)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["[0, 0, 0, 0] []"]), done.stderr


# Trains, then looks at the run in each way that there is. Prints the exit codes, and what was unpickled meanwhile.
UNPICKLED = """
import sys
from muster import cli

run, found = sys.argv[1], []
kept = ["--checkpoint-every=64", "--eval-every=64", "--eval-episodes=1"]
words = ["CartPole-v1", "--num-envs=2", "--num-steps=32", "--num-minibatches=1", "--backend=serial", *kept]
codes = [cli.run(["train", *words, "--total-steps=128", "--run-dir", run])]
sys.addaudithook(lambda event, names: found.append(names) if event == "pickle.find_class" else None)
for some in (["eval", run, "--episodes=1"], ["train", "--resume", run, "--total-steps=256"], ["plot", run]):
    codes.append(cli.run([*some, *(["--output", run + "/all.png"] if some[0] == "plot" else [])]))
print(codes, found)
"""
