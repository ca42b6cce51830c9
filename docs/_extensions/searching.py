"""An index for each language, without decisions and changelog, and with more words than the pages have.

``searchindex.js`` is that of the English pages; ``search-zh.html`` searches the Chinese ones. Sphinx's own index, of
all pages, stays in another file, which the next build reads.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

from sphinx.application import Sphinx
from sphinx.search import js_index
from sphinx.search.en import SearchEnglish

_WHOLE = ".searchindex.js"
# What people type, by the page that they look for.
_WORDS = {
    "start/install": ("pip", "windows", "macos", "docker"),
    "start/train": ("ppo", "train", "save model", "load model", "load policy"),
    "tasks/agents": ("multi-agent", "marl", "mappo", "pettingzoo"),
    "tasks/curriculum": ("domain randomization",),
    "tasks/deploy": ("export", "onnx", "torchscript", "inference", "production"),
    "tasks/doctor": ("doctor", "diagnose"),
    "tasks/early-stopping": ("callback", "stop training", "patience"),
    "tasks/evaluate": ("video", "film", "best model", "evaluate"),
    "tasks/hyperparameters": ("hyperparameter", "optuna", "rl-zoo", "rl_zoo3", "tuning", "sweep"),
    "tasks/loggers": ("wandb", "weights & biases", "tensorboard", "mlflow", "logger"),
    "tasks/machines": ("distributed", "ray", "multi-node"),
    "tasks/network": ("custom policy", "own network", "policy network"),
    "tasks/queue": ("slurm", "preemption"),
    "tasks/restarts": ("restart", "crash", "on_failure", "step_timeout"),
    "tasks/resume": ("checkpoint", "continue training"),
    "tasks/self-play": ("selfplay", "opponent", "league"),
    "problems/envs-that-hang": ("timeout", "deadlock", "stuck"),
    "problems/many-processes": ("num_workers", "slow", "processes"),
    "problems/ports-and-devices": ("port", "device"),
    "problems/script-set-up": ("logging", "monkey patch"),
    "training": ("preset", "config", "gpu", "cuda", "device", "gru", "lstm", "action mask", "atari"),
    "cluster": ("kubernetes",),
    "zh/install": ("安装", "pip"),
    "zh/train": ("训练", "ppo"),
    "zh/tasks/agents": ("多智能体", "mappo"),
    "zh/tasks/doctor": ("诊断", "doctor"),
    "zh/tasks/loggers": ("日志", "wandb", "tensorboard"),
    "zh/tasks/network": ("自定义网络", "网络"),
    "zh/tasks/restarts": ("重启", "崩溃", "restart"),
    "zh/tasks/resume": ("续训", "恢复训练", "断点", "resume"),
    "zh/problems/many-processes": ("num_workers", "进程"),
}  # fmt: skip
_INDEXES: dict[str, Callable[[str], bool]] = {
    "searchindex.js": lambda name: not (is_chinese(name) or name.startswith("adr/") or name == "changelog"),
    "searchindex-zh.js": lambda name: is_chinese(name),
}


class EnglishAndChinese(SearchEnglish):
    """Words of letters, and of Chinese characters each two that are neighbours, as nothing separates words there."""

    js_splitter_code = r"""
splitQuery = (query) => query.split(/[^\p{Letter}\p{Number}_]+|(?<=[\u4e00-\u9fff])(?=\w)|(?<=\w)(?=[\u4e00-\u9fff])/gu)
  .flatMap((word) => /^[\u4e00-\u9fff]{3,}$/.test(word) ? [...word].slice(1).map((c, at) => word[at] + c) : [word])
  .filter((word) => word);
"""

    def split(self, input: str) -> list[str]:
        return [*_words_of(input)]


def _words_of(text: str) -> Iterator[str]:
    for word in re.findall(r"[\u4e00-\u9fff]+|[^\W\u4e00-\u9fff]+", text):
        if "\u4e00" <= word[0] <= "\u9fff" and len(word) > 2:
            yield from (word[at : at + 2] for at in range(len(word) - 1))
        else:
            yield word


def is_chinese(page: str) -> bool:
    return page.startswith("zh/") or page == "search-zh"


def keep_the_whole(app: Sphinx) -> None:
    if hasattr(app.builder, "searchindex_filename"):
        app.builder.searchindex_filename = _WHOLE


def search_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    yield "search-zh", {}, "search.html"


def by_language(app: Sphinx, pagename: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Chinese pages lead to the search of Chinese pages."""
    if is_chinese(pagename):
        there, chinese = context["pathto"], {"search": "search-zh", "searchindex.js": "searchindex-zh.js"}
        context["pathto"] = lambda page, *args, **options: there(chinese.get(page, page), *args, **options)


def write_indexes(app: Sphinx, error: Exception | None) -> None:
    whole = getattr(app.builder, "indexer", None)
    if error is not None or whole is None:
        return
    for file, keeps in _INDEXES.items():
        part, pages = copy.copy(whole), {name for name in whole._titles if keeps(name)}
        for kind in ("_titles", "_all_titles", "_index_entries"):
            setattr(part, kind, {name: one for name, one in getattr(whole, kind).items() if name in pages})
        for kind in ("_mapping", "_title_mapping"):
            found = {word: names & pages for word, names in getattr(whole, kind).items()}
            setattr(part, kind, {word: names for word, names in found.items() if names})
        for name in _WORDS.keys() & pages:
            part._index_entries[name] = [(word, "", "main") for word in _WORDS[name]]
        (app.outdir / file).write_text(js_index.dumps(part.freeze()), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_search_language(EnglishAndChinese)
    app.connect("builder-inited", keep_the_whole)
    app.connect("html-collect-pages", search_pages)
    app.connect("html-page-context", by_language)
    app.connect("build-finished", write_indexes)
    return {"parallel_read_safe": True}
