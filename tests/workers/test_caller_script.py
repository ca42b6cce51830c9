"""What a script's syntax tree shows: statements that may set up something for envs, and where its main guard is."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.pool.script import Outline, Script

Read = Callable[[str], Outline]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Reads code, indented or not, as a script."""

    def read_code(code: str) -> Outline:
        (tmp_path / "train.py").write_text(textwrap.dedent(code))
        outline = Script(str(tmp_path / "train.py"), None, None, None).outline
        assert outline is not None
        return outline

    return read_code


STORES = [
    "import numpy as np\nnp.bool8 = np.bool_",
    "import numpy\nnumpy.bool8: type = numpy.bool_",
    "import sys, gymnasium\nsys.modules['gym'] = gymnasium",
    "import sys\ndel sys.modules['gym']",
    "import os.path as p\np.sep = '/'",
    "from robotlib import Robot as R\nR.gain = 5",
    "import robotlib\nrobotlib.Robot.gain += 5",
    "from robotlib import REGISTRY\nREGISTRY['arm']['left'] = 5",
    "from .robotlib import REGISTRY\nREGISTRY['arm'] = 5",
    "import robotlib\n(robotlib.a, b), *c = 1, 2",
    "import robotlib\nif not hasattr(robotlib, 'x'): robotlib.x = 1",
    "try:\n    import robotlib\n    robotlib.x\nexcept AttributeError: robotlib.x = 1",
    "import robotlib\nfor robotlib.i in range(3): pass",
    "import robotlib\nwith open('x') as robotlib.file: pass",
    "import robotlib\nwhile False: robotlib.x = 1",
    "import robotlib\nmatch 1:\n    case 1: robotlib.x = 1",
    "import robotlib\nif __name__ != '__main__': robotlib.x = 1",
    "import robotlib\nif __name__ == '__main__': pass\nelse: robotlib.x = 1",
    "import logging\nlogging.Logger.trace = print",
]
OTHERS = [
    "from robotlib import register, Arm\nregister('arm', Arm)",
    "import robotlib\nif True: robotlib.REGISTRY.update(arm=5)",
    "import robotlib\nsetattr(robotlib.Robot, 'gain', 5)",
    "import gym\ngym.register('arm')",
    "import wandb\nwith wandb: wandb.init()",
    "def set_up(): pass\nset_up()",
    "import robotlib\nR = robotlib.Robot\nR.gain = 5",
    "import robotlib\nrobotlib.Robot().gain = 5",
    "from robotlib import *\nREGISTRY['arm'] = 5",
    "CONFIG = {}\nCONFIG['arm'] = 5",
]


@pytest.mark.parametrize("code", STORES + OTHERS)
def test_stores_into_what_is_imported_count_and_so_do_calls_and_other_stores(read: Read, code: str) -> None:
    outline = read(code)
    [found] = outline.statements
    line = int(found.place.removeprefix("train.py:"))
    assert found.code == code.splitlines()[line - 1].strip()
    assert line > 1
    assert found.is_store == (code in STORES)


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.environ['A'] = '1'; os.environ.update(A='1'); os.chdir('/')",
        "from os import environ\nenviron['A'] = '1'; del environ['A']",
        "import sys\nsys.path.insert(0, 'x')\nsys.path[:] = []\nsys.argv[1:] = []\nsys.stdout = sys.stderr",
        "import torch\ntorch.backends.cudnn.benchmark = True\nfrom torch.backends import cudnn\ncudnn.benchmark = True",
        "import matplotlib.pyplot as plt\nplt.rcParams.update(a=1)\nplt.rcParams['a'] = 1",
        "import gymnasium as gym\ngym.registry['A'] = 1\ngym.register('A')\ngym.register_envs(gym)",
        "from gymnasium.envs.registration import register\nregister('A')",
        "import logging\nlogging.basicConfig(level=10)\nlogging.getLogger('a').setLevel(10)",
        "import logging\nlogging.getLogger('a').propagate = False",
        "import warnings, sys\nwarnings.filterwarnings('ignore')\nsys.setrecursionlimit(9000)",
        "import numpy as np\nnp.seterr(all='raise')\nnp.seterrcall(print)\nnp.random.seed(0)",
        "import random, torch\nrandom.seed(0)\ntorch.manual_seed(0)\ntorch.set_num_threads(1)",
        "import torch\ntorch.set_default_dtype(torch.float64)",
        "'''A script.'''\nprint('begins')",
        "import robotlib\nx = robotlib.register()\nmade = [robotlib.make(i) for i in range(2)]",
        "import robotlib\ndef f(): robotlib.x = robotlib.y()\nasync def g(): robotlib.x = 1",
        "import robotlib\nclass A:\n    robotlib.x = 1\n    robotlib.y()",
        "import robotlib\nset_up = lambda: setattr(robotlib, 'x', 1)",
        "import robotlib\nif __name__ == '__main__': robotlib.x = robotlib.y()",
        "import robotlib\nif '__main__' == __name__ and robotlib: robotlib.x = 1",
        "import robotlib\nif __name__ != '__main__': pass\nelse: robotlib.x = 1",
    ],
)
def test_what_workers_have_anyway_or_does_not_run_at_once_does_not_count(read: Read, code: str) -> None:
    assert read(code).statements == ()


def test_statements_come_in_their_order_and_long_ones_shortened(read: Read) -> None:
    found = read(f"import robotlib\nrobotlib.b()\nrobotlib.c = '{'x' * 100}'\n").statements
    assert [one.place for one in found] == ["train.py:2", "train.py:3"]
    assert len(found[1].code) == 80
    assert found[1].code.endswith("xxx ...")


def test_the_names_that_the_rest_binds_are_known(read: Read) -> None:
    code = "import os.path, sys as s\nfrom a import b as c\nd, *e = 1, 2\nclass F:\n    x = 1\nfor g in e: h = g\n"
    assert read(f"{code}if __name__ == '__main__': i = 1\n").names == {"os", *"scdeFgh"}


def test_a_script_may_run_again_for_what_stands_under_its_guard(tmp_path: Path) -> None:
    def may_run_again(name: str, line: int | None) -> bool:
        return Script(str(tmp_path / name), None, None, line).may_run_again

    (tmp_path / "plain.py").write_text("a = 1\n")
    (tmp_path / "guarded.py").write_text("a = 1\nif __name__ == '__main__':\n    b = 1\n    c = (\n        2)\nd = 1\n")
    assert not may_run_again("plain.py", None)
    assert [line for line in range(1, 7) if may_run_again("guarded.py", line)] == [3, 4, 5]
    assert may_run_again("guarded.py", None)


@pytest.mark.parametrize("content", [b"a = (", b"\0\1\2", "é".encode("latin-1"), None])
def test_what_is_no_source_has_no_outline(tmp_path: Path, content: bytes | None) -> None:
    script = tmp_path / "train.py"
    if content is not None:
        script.write_bytes(content)
    assert Script(str(script), None, None, None).outline is None


def test_an_encoding_that_is_declared_is_read(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_bytes("# coding: latin-1\nimport sys\nsys.é = 1\n".encode("latin-1"))
    outline = Script(str(tmp_path / "train.py"), None, None, None).outline
    assert outline is not None
    assert [one.code for one in outline.statements] == ["sys.é = 1"]
