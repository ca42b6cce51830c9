"""Installs the wheels of dist/ into empty environments and tests them there: ``python packaging/try_wheels.py``.

Every Python that this machine has is used, beside the newest NumPy and Gymnasium, and two of them beside older ones.
No environment sees a compiler or the sources. A Python of another processor, run by an emulator, can be named in
PYTHONS; it is given the wheel for its processor.
"""

from __future__ import annotations

import platform
import shutil
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import pythons
from pythons import Python
from workshop import DIST, ROOT, run, tools_of

REQUIRED = ("3.11", "3.12", "3.13")
# What users hold to an older version, by the Pythons that it is tried on: one for each kind of wheel. NumPy 1.26 has no
# wheels for later ones.
NEWEST: tuple[str, ...] = ()
OLDER = (("numpy==1.26.4", "gymnasium==1.2.0"), ("gymnasium==1.2.2",))
OLDER_ON = ("3.11", "3.12")

SUITES = ("tests/conformance/test_backends.py", "tests/conformance/test_env_apis.py")
SIMULATORS = ("gymnasium[mujoco]", "ale-py")
SMOKE_TEST = """
import muster

envs = muster.make_vec("CartPole-v1", num_envs=8, num_workers=2)
envs.reset(seed=0)
for _ in range(200):
    obs, *_ = envs.step(envs.action_space.sample())
assert obs.shape == (8, 4) and len(envs.stats()["workers"]) == 2
envs.close()
"""


def main() -> None:
    found = pythons.found()
    here = [python for python in found if python.machine == platform.machine()]
    pythons.demanded(here, REQUIRED)
    if not list(DIST.glob("*.whl")):
        sys.exit("No wheels in dist/. Build them with: make wheels")
    pip = [*tools_of(here[0].path), "pip", "--disable-pip-version-check", "--quiet"]
    for python in found:
        for companions in (NEWEST, *(OLDER if python in here and python.name in OLDER_ON else ())):
            try_wheel(python, companions, pip, emulated=python not in here)


def try_wheel(python: Python, companions: tuple[str, ...], pip: list[str], *, emulated: bool) -> None:
    """Installs the wheel for ``python`` with ``companions``, steps envs with warnings as errors, and runs the tests."""
    wheel = wheel_for(python)
    print(f"Python {python.name} on {python.machine}, {' '.join(companions) or 'newest'}: {wheel.name}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder, "env")
        run([python.path, "-m", "venv", "--without-pip", str(home)])
        inside = str(home / "bin" / "python")
        # No compiler is found here.
        alone = {"PATH": str(home / "bin"), "PYTHONPATH": ""}
        install = [*pip, "--python", inside, "install", "--only-binary", ":all:"]
        start = time.monotonic()
        run([*install, str(wheel), *companions], **alone)
        print(f"  installed in {time.monotonic() - start:.1f} s", flush=True)
        script = Path(folder, "smoke.py")
        script.write_text(SMOKE_TEST, encoding="utf-8")
        run([inside, "-W", "error", str(script)], **alone)
        print("  8 CartPole envs step on 2 workers", flush=True)
        simulators = SIMULATORS if companions is NEWEST and not emulated else ()
        run([*install, "pytest", "pytest-timeout", "pytest-xdist", *simulators, *companions], **alone)
        shutil.copytree(ROOT / "tests", Path(folder, "tests"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        speed = ["--timeout", "1200"] if emulated else ["--numprocesses", "logical", "--dist", "worksteal"]
        options = ["-m", "not slow", "-p", "no:cacheprovider", "--rootdir", folder, *speed]
        printed = run([inside, "-m", "pytest", *options, *(f"{folder}/{suite}" for suite in SUITES)], **alone)
        print(f"  {printed.splitlines()[-1].strip('= ')}", flush=True)


def wheel_for(python: Python) -> Path:
    """The wheel of dist/ that serves ``python``; ends with a sentence where there is none."""
    tag = "cp311" if python.name == "3.11" else "cp312-abi3"
    wheels = list(DIST.glob(f"*-{tag}-*_{python.machine}.whl"))
    if len(wheels) != 1:
        sys.exit(f"dist/ holds {len(wheels)} wheels for Python {python.name} on {python.machine}. Run: make wheels")
    with zipfile.ZipFile(wheels[0]) as archive:
        for path in (ROOT / "src").rglob("*.py"):
            name = path.relative_to(ROOT / "src").as_posix()
            if name not in archive.namelist() or archive.read(name) != path.read_bytes():
                sys.exit(f"{wheels[0].name} was built from another {name}. Run: make wheels")
    return wheels[0]


if __name__ == "__main__":
    main()
