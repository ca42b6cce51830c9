"""The site is built without a warning, its notebooks run, it has every public name, and the search finds its pages."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("algorithms", "nn", "rollout", "interop.gymnasium", "interop.sb3", "interop.torchrl")
MODULES = ("muster", *(f"muster.{part}" for part in PARTS))
# The page that has to be among the first three, by the words that people type.
FINDS = {
    "restart": "tasks/restarts",
    "num_workers": "problems/many-processes",
    "wandb": "tasks/loggers",
    "custom network": "tasks/network",
    "hyperparameter": "tasks/hyperparameters",
    "early stopping": "tasks/early-stopping",
    "curriculum": "tasks/curriculum",
    "resume": "tasks/resume",
    "self-play": "tasks/self-play",
    "export": "tasks/deploy",
    "optuna": "tasks/hyperparameters",
    "make_vec": "reference/vector-envs",
}
FINDS_CHINESE = {
    "重启": "zh/tasks/restarts",
    "环境卡死": "zh/problems/envs-that-hang",
    "自定义网络": "zh/tasks/network",
    "续训": "zh/tasks/resume",
    "wandb": "zh/tasks/loggers",
}


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
    if shutil.which("node") is None:
        pytest.skip("node runs the search as a browser does: apt-get install nodejs")
    the_search_finds_pages_of_its_language(tmp_path / "html")


def the_search_finds_pages_of_its_language(site: Path) -> None:
    missed = {}
    for index, finds in (("searchindex.js", FINDS), ("searchindex-zh.js", FINDS_CHINESE)):
        found = dict(zip(finds, search(site, index, *finds), strict=True))
        missed |= {word: found[word][:3] for word, page in finds.items() if page not in found[word][:3]}
    assert missed == {}
    english, chinese = (search(site, index, "env", "muster") for index in ("searchindex.js", "searchindex-zh.js"))
    assert [page for pages in english for page in pages if page.startswith(("zh/", "adr/", "changelog"))] == []
    assert [page for pages in chinese for page in pages if not page.startswith("zh/")] == []
    assert search(site, "searchindex.js", "qwertyuiop") == [[]]
    assert 'action="../search-zh.html"' in (site / "zh" / "train.html").read_text()


def search(site: Path, index: str, *queries: str) -> list[list[str]]:
    """For each query the pages that the JavaScript of the search page finds, best first."""
    command = ["node", str(Path(__file__).with_name("search.js")), str(site), index, *queries]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


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
