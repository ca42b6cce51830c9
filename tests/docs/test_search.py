"""The site's search finds the page by the words that people type, in the language of the page."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sphinx", reason="make test-docs installs what builds the site")
    if shutil.which("node") is None:
        pytest.skip("node runs the search as a browser does: apt-get install nodejs")
    folder = tmp_path_factory.mktemp("site")
    # Notebooks have more code than words, and take a minute.
    command = ["-m", "sphinx", "-q", "-D", "nb_execution_mode=off", "-d", str(folder / "doctrees"), "docs"]
    subprocess.run([sys.executable, *command, str(folder / "html")], cwd=ROOT, check=True, timeout=300)
    return folder / "html"


def found(site: Path, index: str, *queries: str) -> list[list[str]]:
    """For each query the pages that the JavaScript of the search page finds, best first."""
    command = ["node", str(Path(__file__).with_name("search.js")), str(site), index, *queries]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(360)
@pytest.mark.parametrize(
    ("index", "finds"), [("searchindex.js", FINDS), ("searchindex-zh.js", FINDS_CHINESE)], ids=["English", "Chinese"]
)
def test_a_word_finds_its_page_among_the_first_three(site: Path, index: str, finds: dict[str, str]) -> None:
    pages = found(site, index, *finds)
    missed = {
        word: first[:3] for (word, page), first in zip(finds.items(), pages, strict=True) if page not in first[:3]
    }
    assert missed == {}


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_an_index_has_the_pages_of_its_language(site: Path) -> None:
    english, chinese = (found(site, index, "env", "muster") for index in ("searchindex.js", "searchindex-zh.js"))
    english_pages, chinese_pages = ({page for pages in results for page in pages} for results in (english, chinese))
    assert english_pages
    assert chinese_pages
    assert [page for page in english_pages if page.startswith(("zh/", "adr/", "changelog"))] == []
    assert [page for page in chinese_pages if not page.startswith("zh/")] == []
    assert found(site, "searchindex.js", "qwertyuiop") == [[]]
    assert 'action="../search-zh.html"' in (site / "zh" / "train.html").read_text()
