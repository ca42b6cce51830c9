"""The site is built without a warning, its notebooks run, and the reference has every public name."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("algorithms", "nn", "rollout", "interop.gymnasium", "interop.sb3", "interop.torchrl")
MODULES = ("muster", *(f"muster.{part}" for part in PARTS))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_site_is_whole_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="make test-docs installs what builds the site")
    from sphinx.util.inventory import InventoryFile

    command = ["-m", "sphinx", "--fail-on-warning", "--keep-going", "-q", "-d", str(tmp_path / "doctrees"), "docs"]
    done = subprocess.run(
        [sys.executable, *command, str(tmp_path / "html")], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    entries = InventoryFile.loads((tmp_path / "html" / "objects.inv").read_bytes(), uri="").data
    known = {name.rpartition(".")[2] for kind, names in entries.items() if kind.startswith("py:") for name in names}
    assert public_names() - known == set()
    for page in (tmp_path / "html").rglob("*.html"):
        assert not re.search(r'(src|<link [^>]*href)="https?://', page.read_text()), page


def public_names() -> set[str]:
    """Those that are Muster's own, and neither modules nor second names."""
    found = set()
    for module in map(importlib.import_module, MODULES):
        values = [getattr(module, name) for name in module.__all__]
        found |= {value.__name__ for value in values if getattr(value, "__module__", "").startswith("muster")}
    return found


def test_the_pictures_are_those_that_are_drawn_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    drawing = importlib.import_module("drawing")
    for diagram in drawing.DIAGRAMS:
        assert (drawing.PICTURES / f"{diagram.__name__}.svg").read_text() == str(diagram()), "python docs/drawing.py"
