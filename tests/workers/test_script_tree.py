"""What a script's syntax tree shows: what its top level assigns into other modules, and where its main guard is."""

from __future__ import annotations

import collections
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.workers.script_tree import ScriptTree, read_script

Read = Callable[[str], ScriptTree]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """Reads code, indented or not, as a script that imports the module robotlib, which is imported already."""
    robotlib = types.ModuleType("robotlib")
    robot = type("Robot", (), {"gain": 1, "parts": ["arm"]})
    monkeypatch.setitem(sys.modules, "robotlib", robotlib)
    vars(robotlib).update(REGISTRY={"a": {}}, NAMES=collections.OrderedDict(), Robot=robot, update=print)
    monkeypatch.setitem(vars(sys.modules["__main__"]), "REGISTRY", vars(robotlib)["REGISTRY"])

    def read_code(code: str) -> ScriptTree:
        script = tmp_path / "train.py"
        script.write_text(textwrap.dedent(code))
        tree = read_script(str(script))
        assert tree is not None
        return tree

    return read_code


@pytest.mark.parametrize(
    "code",
    [
        "import numpy as np\nnp.bool8 = np.bool_",
        "import numpy\nnumpy.bool8: type = numpy.bool_",
        "import sys, gymnasium\nsys.modules['oldgym'] = gymnasium",
        "import sys\nsys.modules.setdefault('oldgym', sys)",
        "import sys\ndel sys.modules['oldgym']",
        "import builtins\nbuiltins.profile = print",
        "import os.path as p\np.sep = '/'",
        "import robotlib\nrobotlib.Robot.gain = 5",
        "import robotlib\nrobotlib.Robot.gain += 5",
        "import robotlib\nrobotlib.REGISTRY['arm'] = 5",
        "import robotlib\nrobotlib.REGISTRY['a']['b'] = 5",
        "import robotlib\nrobotlib.REGISTRY.update(arm=5)",
        "import robotlib\nrobotlib.REGISTRY['a'].update(arm=5)",
        "import robotlib\nrobotlib.NAMES.pop('arm', None)",
        "import robotlib\nrobotlib.Robot.parts.append('leg')",
        "import robotlib\nsetattr(robotlib.Robot, 'gain', 5)",
        "from robotlib import REGISTRY\nREGISTRY['arm'] = 5",
        "from robotlib import REGISTRY\nREGISTRY.update(arm=5)",
        "from robotlib import *\nREGISTRY['arm'] = 5",
        "from robotlib import Robot as R\nR.gain = 5",
        "import robotlib; R = robotlib.Robot\nR.gain = 5",
        "import robotlib\n(robotlib.a, b), *c = 1, 2",
        "import robotlib\nwith open('x') as robotlib.file: pass",
        "import robotlib\nfor robotlib.i in range(3): pass",
        "import robotlib\nif not hasattr(robotlib, 'x'): robotlib.x = 1",
        "import robotlib\ntry: robotlib.x\nexcept AttributeError: robotlib.x = 1",
        "import robotlib\nfor name in 'ab': setattr(robotlib, name, 1)",
        "import robotlib\nwhile False: robotlib.x = 1",
        "import robotlib\nclass A: robotlib.x = 1",
        "import robotlib\nif __name__ != '__main__': robotlib.x = 1",
        "import robotlib\nif __name__ == '__main__': pass\nelse: robotlib.x = 1",
        "import robotlib\nmatch 1:\n    case 1: robotlib.x = 1",
        "import robotlib\ndef set_up(): robotlib.x = 1\nset_up()",
        "def set_up():\n    import robotlib\n    robotlib.x = 1\nset_up()",
        "from robotlib import REGISTRY\nREGISTRY |= {'arm': 5}",
        "import robotlib\nvars(robotlib)['x'] = 1",
        "import robotlib\ngetattr(robotlib, 'Robot').gain = 5",
        "import importlib\nimportlib.import_module('robotlib').x = 1",
        "import robotlib\nfor kind in (robotlib.Robot,): kind.gain = 5",
        "import robotlib\ndef patch(kind): kind.gain = 5\npatch(object); patch(robotlib.Robot)",
        "import robotlib\ndef patch(kind, x): kind.gain = x\npatch(x=1, kind=robotlib.Robot)",
        "import robotlib\nmade = [setattr(robotlib, name, 1) for name in 'ab']",
        "import robotlib\nclass P:\n    @staticmethod\n    def go(kind): kind.gain = 1\nP.go(robotlib.Robot)",
        "import robotlib\nclass P:\n    @classmethod\n    def go(cls, kind): kind.gain = 1\nP.go(robotlib.Robot)",
        "import robotlib\nclass P:\n    def go(self, kind): kind.gain = 1\nP().go(robotlib.Robot)",
        "import robotlib\nclass P:\n    def go(self, kind): kind.gain = 1\np = P()\np.go(kind=robotlib.Robot)",
        "import robotlib\nclass P:\n    def go(self): robotlib.x = 1\nclass Q(P): pass\nQ().go()",
        "import robotlib\nclass P:\n    def go(self): robotlib.x = 1\n    def all(self): self.go()\nP().all()",
        "import robotlib\nclass P:\n    def __init__(self, kind): kind.gain = 1\nP(robotlib.Robot)",
        "import robotlib\ndef patch(n, kind=robotlib.Robot): kind.gain = n\npatch(1)",
        "import robotlib\ndef patch(*, kind=robotlib.Robot): kind.gain = 1\npatch()",
        "import robotlib\ndef patch(*kinds):\n    for kind in kinds: kind.gain = 1\npatch(object, robotlib.Robot)",
        "import robotlib\nkinds = object, robotlib.Robot\ndef patch(one, two): two.gain = one.gain\npatch(*kinds)",
        "import robotlib\ndef patch(registry): registry.update(x=1)\npatch(robotlib.REGISTRY)",
        "import robotlib\ndef patch(part): robotlib.part = part\n@patch\ndef arm(): pass",
        "import robotlib\ndef patch(part): robotlib.part = part\n@patch\nclass Arm: pass",
        "import robotlib\ndef run(act): act()\ndef patch(): robotlib.x = 1\nrun(patch)",
        "import robotlib\na, (b, c) = object, (1, robotlib.Robot)\nc.gain = 1",
        "import robotlib\nfor kind, n in ((robotlib.Robot, 1),): kind.gain = n",
        "import robotlib\n(lib := robotlib).x = 1",
        "import robotlib\nif lib := robotlib:\n    lib.x = 1",
        "import robotlib\nvars(robotlib).update(x=1)",
        "import robotlib\nrobotlib.__dict__.update(x=1)",
        "import robotlib\n(lambda kind: setattr(kind, 'gain', 1))(robotlib.Robot)",
        "import robotlib\npatch = lambda: robotlib.REGISTRY.pop('a')\npatch()",
        "import robotlib\nfrom unittest import mock\nmock.patch.dict(robotlib.REGISTRY, {'arm': 1}).start()",
        "import robotlib\nimport unittest.mock as um\num.patch.object(robotlib, 'update', print).start()",
        "from unittest.mock import patch\npatcher = patch('robotlib.update', print)\npatcher.start()",
    ],
)
def test_an_assignment_into_an_imported_module_is_seen(read: Read, code: str) -> None:
    [effect] = read(code).effects
    lines = code.splitlines()
    assert effect.code == lines[effect.line - 1].strip()
    assert not effect.code.startswith(("import ", "from "))


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.environ['A'] = '1'",
        "import os\nos.environ.update(A='1')",
        "from os import environ\nenviron['A'] = '1'",
        "import sys\nsys.path.insert(0, 'x')\nsys.path[:] = []\nsys.argv[1:] = []\nsys.stdout = sys.stderr",
        "import torch\ntorch.backends.cudnn.benchmark = True",
        "from torch.backends import cudnn\ncudnn.benchmark = True",
        "import matplotlib\nmatplotlib.rcParams['a'] = 1",
        "import matplotlib.pyplot as plt\nplt.rcParams.update(a=1)",
        "from matplotlib import rcParams\nrcParams['a'] = 1",
        "import gymnasium as gym\ngym.registry['A'] = 1",
        "import robotlib\nrobot = robotlib.Robot()\nrobot.gain = 5",
        "import robotlib\nrobotlib.Robot().gain = 5",
        "import robotlib\nrobotlib.update(1)",
        "from robotlib import Robot\nRobot += 1",
        "import robotlib\nfor kind in (object, robotlib.Robot): kind()",
        "import robotlib\ndef f(n): f(n); return f(n)\nf(robotlib)",
        "import robotlib\nprint(robotlib.REGISTRY.get('a'))",
        "import robotlib\nrobotlib = lambda: 1\nrobotlib.x = 1",
        "import robotlib\nfor robotlib in []: robotlib.x = 1",
        "import robotlib\ndef set_up(): robotlib.x = 1",
        "import robotlib\nasync def set_up(): robotlib.x = 1",
        "import robotlib\ndef set_up(robotlib): robotlib.x = 1\nset_up(object)",
        "import robotlib\nset_up = lambda: setattr(robotlib, 'x', 1)",
        "import robotlib\nif __name__ == '__main__': robotlib.x = 1",
        "import robotlib\nif '__main__' == __name__ and robotlib: robotlib.x = 1",
        "import robotlib\nif __name__ != '__main__': pass\nelse: robotlib.x = 1",
        "CONFIG = {}\nCONFIG['a'] = 1\nclass A: pass\nA.x = 1",
        "import robotlib\nclass P:\n    def go(self): robotlib.x = 1\nP().other()",
        "import robotlib\nclass P(robotlib.Robot):\n    def __init__(self): self.gain = 5\np = P()\np.x = P.x = 6",
        "import robotlib\nclass P:\n    @staticmethod\n    def go(kind): return kind.gain\nP.go(robotlib.Robot)",
        "import robotlib\nclass P:\n    def robotlib(self): pass\nP().robotlib = 1\nprint(robotlib.Robot.gain)",
        "import robotlib\ndef f(kind=robotlib.Robot): return kind.gain\nf()",
        "import robotlib\ndef f(kind=robotlib.Robot): kind.gain = 1\nf(object)",
        "import robotlib\ndef f(n): n.x = 1\nf = print\nf(robotlib)",
        "import robotlib\na, b = robotlib.Robot, object\nb.x = 1",
        "import robotlib\na, b = robotlib.Robot(), robotlib.update()\na.x = b.x = 1",
        "import robotlib\n(robot := robotlib.Robot()).gain = 1",
        "import robotlib\nopts = object()\nvars(opts).update(vars(robotlib))\nopts.__dict__.update(a=robotlib)",
        "import robotlib\n(lambda kind: kind.gain)(robotlib.Robot)",
        "import robotlib\ndef f(part): return robotlib.Robot\n@f\ndef arm(): robotlib.x = 1",
        "import os\nfrom unittest import mock\nmock.patch.dict(os.environ, {'A': '1'}).start()",
        "import robotlib\nfrom unittest import mock\nwith mock.patch.object(robotlib, 'update', print): pass",
        "from unittest import mock\nmock.patch('__main__.print', print).start()",
        "import robotlib\nrobotlib.Robot('a').start()\nimport threading\nthreading.Thread(target=robotlib).start()",
        "import robotlib\ndef f(m): f(m.a); f((m, m)); f(m.b)\nf(robotlib)",
        "import robotlib\nclass B: pass\nclass A(B): pass\nclass B(A): pass\nB().go()\nB.x = 1",
    ],
)
def test_what_stays_in_the_script_or_reaches_workers_anyway_is_not_counted(read: Read, code: str) -> None:
    assert read(code).effects == ()


def test_effects_come_in_their_order_each_line_once_and_long_ones_shortened(read: Read) -> None:
    tree = read(f"import robotlib\nrobotlib.b = robotlib.a = 1\nrobotlib.c = '{'x' * 100}'\n")
    assert [effect.line for effect in tree.effects] == [2, 3]
    assert len(tree.effects[1].code) == 80
    assert tree.effects[1].code.endswith("xxx ...")


def test_a_script_may_run_again_for_what_stands_under_its_guard(read: Read) -> None:
    tree = read("a = 1\nif __name__ == '__main__':\n    b = 1\n    c = (\n        2)\nd = 1\n")
    assert [line for line in range(1, 7) if tree.may_run_again(line)] == [3, 4, 5]
    assert tree.may_run_again(None)
    assert not read("a = 1").may_run_again(None)


@pytest.mark.parametrize("content", [b"a = (", b"\0\1\2", "é".encode("latin-1")])
def test_what_is_no_source_has_no_tree(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "train.pyc").write_bytes(content)
    assert read_script(str(tmp_path / "train.pyc")) is None
    assert read_script(str(tmp_path / "gone.py")) is None


def test_an_encoding_that_is_declared_is_read(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_bytes("# coding: latin-1\nimport sys\nsys.é = 1\n".encode("latin-1"))
    tree = read_script(str(tmp_path / "train.py"))
    assert tree is not None
    assert [effect.code for effect in tree.effects] == ["sys.é = 1"]
