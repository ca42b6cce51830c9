"""Builds the source distribution and the wheels into dist/, and checks them: ``python packaging/build_wheels.py``.

One wheel alone: ``python packaging/build_wheels.py 3.12-x86_64``, or with make ``make wheels WHEEL=3.12-x86_64``.

It needs Linux, Python 3.11 and 3.12 with their headers, and PyPI, but no compiler: ziglang from PyPI compiles for both
processors. The same commit gives the same files, byte for byte, wherever it is built.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

import pythons
from workshop import DIST, PROJECT, ROOT, WORK, environment, run, tools_of

# 3.11 has no stable ABI that the core could use. The wheel that is built by 3.12 serves all later versions.
BUILT_BY = ("3.11", "3.12")
MACHINES = ("x86_64", "aarch64")
# zig.cmake compiles for this glibc.
PLATFORM = "manylinux_2_17"
TIME_OF_FILES = "315532800"  # 1980, the first year of zip archives


def main() -> None:
    known = [f"{name}-{machine}" for name in BUILT_BY for machine in MACHINES]
    wanted = sys.argv[1:] or known
    if unknown := set(wanted) - set(known):
        sys.exit(f"there is no wheel {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    print(f"builds into {DIST}: the source distribution, and the wheels {', '.join(wanted)}", flush=True)
    by_name = pythons.demanded(pythons.found(), BUILT_BY)
    tools = tools_of(by_name["3.11"].path)
    zig = zig_of(tools)
    requires = [*PROJECT["build-system"]["requires"], "cmake", "ninja"]
    builds = {name: environment(by_name[name].path, f"python{name}", requires) for name in BUILT_BY}
    with tempfile.TemporaryDirectory() as folder:
        sdist = build_sdist(tools, Path(folder))
        source = unpacked(sdist, Path(folder))
        shutil.rmtree(DIST, ignore_errors=True)
        DIST.mkdir()
        shutil.copy(sdist, DIST)
        for name, machine in (one.split("-") for one in wanted):
            print(f"building the wheel of Python {name} for {machine}", flush=True)
            build_wheel(builds[name], source, name, machine, zig)
            (built,) = DIST.glob(f"*-linux_{machine}.whl")
            tag = ["--remove", "--platform-tag", f"{PLATFORM}_{machine}"]
            run([*tools, "wheel", "tags", *tag, str(built)], SOURCE_DATE_EPOCH=TIME_OF_FILES)
    print("checking tags, symbols and texts", flush=True)
    check(tools)
    for path in sorted(DIST.iterdir()):
        print(f"{path.stat().st_size:>9,} bytes  {hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}")


def build_sdist(tools: list[str], folder: Path) -> Path:
    """Builds the source distribution of the commit that is checked out, without what lies beside it."""
    if run(["git", "-C", str(ROOT), "status", "--porcelain"]):
        print("changes that are not committed are not in what is built", flush=True)
    commit = folder / "commit.tar"
    run(["git", "-C", str(ROOT), "archive", "--output", str(commit), "--prefix", "commit/", "HEAD"])
    print("building the source distribution", flush=True)
    run([*tools, "build", "--sdist", "--outdir", str(folder), str(unpacked(commit, folder))])
    (sdist,) = folder.glob("*.tar.gz")
    return sdist


def unpacked(path: Path, folder: Path) -> Path:
    """Unpacks an archive, and returns the one folder in it."""
    with tarfile.open(path) as archive:
        top = archive.getnames()[0].partition("/")[0]
        archive.extractall(folder, filter="data")
    return folder / top


def zig_of(tools: list[str]) -> str:
    """The path of the compiler in the environment of the command ``tools``."""
    find = "import importlib.util; print(importlib.util.find_spec('ziglang').submodule_search_locations[0])"
    return run([tools[0], "-c", find]).strip() + "/zig"


def build_wheel(build: list[str], source: Path, name: str, machine: str, zig: str) -> None:
    """Builds the wheel of Python ``name`` for the processor ``machine`` from an unpacked source distribution."""
    settings = {
        "build-dir": str(source / "build"),
        "cmake.toolchain-file": str(ROOT / "packaging" / "zig.cmake"),
        "wheel.reproducible": "true",
    }
    shutil.rmtree(source / "build", ignore_errors=True)
    options = ["--no-deps", "--no-build-isolation", *(f"--config-settings={k}={v}" for k, v in settings.items())]
    run(
        [*build, "pip", "--disable-pip-version-check", "wheel", *options, "--wheel-dir", str(DIST), str(source)],
        SOURCE_DATE_EPOCH=TIME_OF_FILES,
        MUSTER_ZIG=zig,
        MUSTER_WHEEL_MACHINE=machine,
        ZIG_GLOBAL_CACHE_DIR=str(WORK / "zig"),
        # The names of CPython's cross builds: the platform of the wheel, and what ends the name of its module.
        _PYTHON_HOST_PLATFORM=f"linux-{machine}",
        SETUPTOOLS_EXT_SUFFIX=f".cpython-{name.replace('.', '')}-{machine}-linux-gnu.so",
    )


def check(tools: list[str]) -> None:
    """Checks the tags, the symbols and the texts of everything in dist/."""
    wheels = sorted(DIST.glob("*.whl"))
    for wheel in wheels:
        shown = run([*tools, "auditwheel", "show", str(wheel)])
        platform = wheel.stem.rpartition("-")[2]
        if f'platform tag: "{platform}"' not in shown.replace("\n", " "):
            sys.exit(f"{wheel.name} is not {platform}:\n{shown}")
    run([*tools, "abi3audit", "--strict", *(str(wheel) for wheel in wheels if "-abi3-" in wheel.name)])
    run([*tools, "check_wheel_contents", *map(str, wheels)])
    run([*tools, "twine", "check", "--strict", *map(str, DIST.iterdir())])


if __name__ == "__main__":
    main()
