"""The command that installs Melting Pot, with a pip that only writes down what it is asked for."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from fake_packages import pretend_installed
from muster.envs import install_meltingpot
from muster.envs.install_meltingpot import REQUIREMENTS, VERSION

# Appends its arguments to a file, with the archives in TMPDIR and what they hold; ends with the next exit status.
PIP = """
import json, os, sys, tarfile
from pathlib import Path
folder = Path(__file__).parent.parent
found = Path(os.environ.get("TMPDIR", folder)).glob("*.tar.gz")
archives = {path.name: tarfile.open(path).getnames() for path in found}
with (folder / "calls").open("a") as calls:
    calls.write(json.dumps([sys.argv[1:], archives]) + "\\n")
statuses = os.environ["STATUSES"].split()
sys.exit(int(statuses[len((folder / "calls").read_text().splitlines()) - 1]))
"""


class FakePip:
    """A folder for PYTHONPATH, with the command's way into it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "pip").mkdir(parents=True)
        (folder / "pip" / "__init__.py").touch()
        (folder / "pip" / "__main__.py").write_text(PIP)

    def install(self, *arguments: str, statuses: str = "0 0") -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "STATUSES": statuses}
        environment.pop("TMPDIR", None)
        command = [sys.executable, "-W", "error", "-m", "muster.envs.install_meltingpot", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    @property
    def calls(self) -> list[tuple[list[str], dict[str, list[str]]]]:
        """The arguments of each call, and the archives that it could find."""
        record = self.folder / "calls"
        return [tuple(json.loads(line)) for line in record.read_text().splitlines()] if record.exists() else []


@pytest.fixture
def pip(tmp_path: Path) -> FakePip:
    """An environment that has an older Melting Pot."""
    pretend_installed(tmp_path / "packages", "dm-meltingpot", "2.3.0")
    return FakePip(tmp_path / "packages")


@pytest.fixture
def suitable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that dmlab2d has a wheel for."""
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.35"))


needs_suitable_machine = pytest.mark.skipif(
    install_meltingpot.obstacle_here() is not None, reason="dmlab2d has no wheel for this machine"
)


@needs_suitable_machine
def test_two_calls_of_pip_install_it_and_the_second_finds_an_archive_without_bots(pip: FakePip):
    done = pip.install("--constraint", "my constraints.txt")
    assert (done.returncode, done.stderr) == (0, "")
    (first, _), (second, archives) = pip.calls
    common = ["install", "--disable-pip-version-check"]
    assert first == [*common, "--constraint", "my constraints.txt", *REQUIREMENTS]
    options = ["--no-cache-dir", "--no-deps", "--constraint", "my constraints.txt"]
    assert second == [*common, *options, f"dm-meltingpot=={VERSION}"]
    assert archives == {"meltingpot-assets-2.3.0.tar.gz": ["assets/saved_models"]}
    steps = done.stdout.splitlines()
    assert [step.partition(":")[0] for step in steps[:2]] == ["1 of 2", "2 of 2"]
    assert 'muster.make_vec("meltingpot/' in steps[2]


@needs_suitable_machine
@pytest.mark.parametrize(("statuses", "calls"), [("3 0", 1), ("0 3", 2)])
def test_where_pip_fails_its_exit_status_is_passed_on(pip: FakePip, statuses: str, calls: int):
    done = pip.install(statuses=statuses)
    assert done.returncode == 3
    assert done.stderr == "Melting Pot is not installed: pip ended with exit status 3. Its own words are above.\n"
    assert "Done" not in done.stdout
    assert len(pip.calls) == calls


def test_where_everything_is_there_nothing_is_done(tmp_path: Path):
    for requirement in REQUIREMENTS:
        pretend_installed(tmp_path, requirement.partition(">")[0], "9.0")
    pretend_installed(tmp_path, "dm-meltingpot", VERSION)
    pip = FakePip(tmp_path)
    done = pip.install("--constraint", "constraints.txt")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"dm-meltingpot {VERSION} is installed already")
    assert pip.install("-q").stdout == ""
    assert pip.calls == []


def test_a_part_that_is_missing_is_installed(monkeypatch: pytest.MonkeyPatch):
    found = {requirement.partition(">")[0]: "9.0" for requirement in REQUIREMENTS} | {"dm-meltingpot": VERSION}

    monkeypatch.setattr(install_meltingpot, "installed_version", found.get)
    assert install_meltingpot.is_complete()
    found["dmlab2d"] = "1.0.0"
    assert not install_meltingpot.is_complete()
    found["dmlab2d"] = "1.0.2"
    del found["dm-tree"]
    assert not install_meltingpot.is_complete()


@pytest.mark.usefixtures("suitable")
@pytest.mark.parametrize(
    ("function", "answer", "sentence"),
    [
        ("libc_ver", ("glibc", "2.31"), "needs glibc 2.35 or newer; this system has 2.31."),
        ("libc_ver", ("glibc", "2.34.9"), "needs glibc 2.35 or newer; this system has 2.34.9."),
        ("libc_ver", ("", ""), "needs glibc 2.35 or newer; this system has none of it."),
        ("libc_ver", ("musl", "1.2.5"), "needs glibc 2.35 or newer; this system has none of it."),
        ("machine", "riscv64", "on Linux on x86_64 or aarch64; this is Linux on riscv64."),
        ("system", "Darwin", "on Linux on x86_64 or aarch64; this is Darwin on x86_64."),
    ],
)
def test_a_machine_that_cannot_have_it_is_told_why(
    function: str, answer: object, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(platform, function, lambda: answer)
    monkeypatch.setattr(install_meltingpot, "is_complete", lambda: False)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("pip was called"))
    assert install_meltingpot.main([]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.endswith(f"{sentence}\n")
