"""The examples run as a person would run them, and print what they promise."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

import programs
from command import muster

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("example", "printed"),
    [
        ("zeromq.py", ["positions: [-2.0, 0.0, 2.0, 2.0]"]),
        (
            "remote_client.py",
            [
                "100 steps of 0.1 s in under a second: True",
                "rewards 0.5, 0.3; messages hello, bye",
                "over: 1 of 100, in 1 process",
            ],
        ),
        ("one_instance_library.py", ["heights: [2.0, 4.0, 6.0]", "processes: 3"]),
        (
            "files_and_locks.py",
            ["own files: ['0', '11', '20', '31']", "one lock: True", "one file: [0, 11, 20, 31]"],
        ),
    ],
)
def test_example(example: str, printed: list[str], tmp_path: Path) -> None:
    done = programs.run("-W", "error", ROOT / "examples" / example, cwd=tmp_path, check=True)
    assert done.stdout.splitlines() == printed
    assert done.stderr == ""


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("example", "options", "printed"),
    [
        ("mpe2_groups.py", [], r"adversary: adversary_0, adversary_1, adversary_2; observations \(8, 3, 16\)"),
        pytest.param(
            "melting_pot.py",
            ["--num-steps", "20"],
            r"6 envs reset in .* groups \{'player': \['player_0', (.*\n)*\d+ MB for each env",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_example_of_agents(example: str, options: list[str], printed: str, tmp_path: Path) -> None:
    pytest.importorskip("mpe2" if example.startswith("mpe2") else "dmlab2d")
    done = programs.run("-W", "ignore", ROOT / "examples" / example, *options, cwd=tmp_path, timeout=300, check=True)
    assert re.search(printed, done.stdout), done.stdout


@pytest.mark.parametrize(("steps", "right"), [("2048", 0), pytest.param("30000", 190, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_a_transformer_of_ones_own_learns_from_the_parts_of_a_dict(tmp_path: Path, steps: str, right: int) -> None:
    example = ROOT / "examples" / "transformer.py"
    options = ["--total-steps", steps, "--run-dir", tmp_path / "run"]
    done = programs.run(example, *options, imports=programs.TORCH, cwd=tmp_path, timeout=500, check=True)
    found = re.search(r"right on (\d+) of 200 shelves after ([\d,]+) steps", done.stdout)
    assert found is not None, done.stdout
    assert int(found[1]) >= right


@pytest.mark.slow
def test_the_ship_learns_to_dock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = str(ROOT / "examples" / "docking.py")
    trained = muster("train", f"{example}:Docking", "--total-steps", "50k", "--backend", "serial")
    assert trained.exit_code == 0, trained.output
    (run,) = (tmp_path / "runs").iterdir()
    flown = programs.run(example, run, imports=programs.TORCH, check=True)
    assert re.fullmatch(r"docked after \d+ steps, return 1\.\d+", flown.stdout.splitlines()[-1]), flown.stdout


@pytest.mark.slow
def test_the_board_game_is_learnt_without_a_forbidden_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The game raises an error for such a move."""
    pytest.importorskip("pettingzoo.classic.connect_four_v3")
    monkeypatch.chdir(tmp_path)
    example = str(ROOT / "examples" / "board_game.py")
    trained = muster("train", f"{example}:AgainstRandom", "--total-steps", "16k", "--backend", "serial")
    assert trained.exit_code == 0, trained.output
    (run,) = (tmp_path / "runs").iterdir()
    played = programs.run(example, run, "--games", "50", imports=programs.TORCH, check=True).stdout
    shares = [int(share) for share in re.findall(r"play wins (\d+)% of 50 games", played)]
    assert shares[0] > shares[1] + 10
    assert played.splitlines()[-1] in ("won", "drawn", "lost")


@pytest.mark.slow
def test_multiwalker_trains_and_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("pettingzoo.sisl")
    example = ["-W", "ignore", ROOT / "examples" / "multiwalker.py", "--total-steps", "4096"]
    shown = programs.run(*example, imports=programs.TORCH, cwd=tmp_path, check=True).stdout
    measured = r"trained: the package comes -?\d+\.\d far, an episode lasts \d+ of 500 steps"
    assert re.match(rf"un{measured}.*\n4,096 steps, mean return -\d+\.\d\n{measured}", shown), shown


@pytest.mark.slow
def test_the_atari_example_trains_as_the_command_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ale_py")
    monkeypatch.chdir(tmp_path)
    example = ["-W", "error", str(ROOT / "examples" / "atari.py"), "--total-steps", "1024"]
    game = ["CrazyClimberNoFrameskip-v4", "--total-steps", "1024", "--seed", "1"]
    shown = programs.run(*example, imports=programs.TORCH, check=True).stdout
    assert "1,024 steps" in shown
    assert muster("train", *game).exit_code == 0
    (run,) = (tmp_path / "runs").iterdir()
    (row,) = csv.DictReader((run / "metrics.csv").read_text().splitlines())
    assert f"policy loss {float(row['policy_loss']):.6f}" in shown
