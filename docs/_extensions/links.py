"""Links to files of the checkout: those that the site has as pages lead there, programs are downloads.

A block of code that begins with the name of a file has a caption that says to save it, for the blocks behind it.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

_PAGES = {
    "README": "index",
    "README.zh-CN": "zh/index",
    "benchmarks/RESULTS": "results",
    "SECURITY": "security",
    "CONTRIBUTING": "contribute",
    "CHANGELOG": "changelog",
}
_UP = r"\]\((?:\.\./)*"
_PAGE = re.compile(rf"{_UP}({'|'.join(map(re.escape, _PAGES))})\.md(#[^)]*)?\)")
_FILE = re.compile(r"^```python\n(?=# ([\w/]+\.py)\n)", re.MULTILINE)
_PROGRAM = re.compile(rf"\[`?([^]`]+)`?{_UP}((?:examples|src)/[\w/]+\.\w+)\)")


def in_page(app: Sphinx, docname: str, source: list[str]) -> None:
    source[0] = _rewritten(source[0])


def in_included(app: Sphinx, path: Any, parent: str, source: list[str]) -> None:
    source[0] = _rewritten(source[0])


def _rewritten(text: str) -> str:
    text = _PAGE.sub(lambda link: f"](/{_PAGES[link[1]]}.md{link[2] or ''})", text)
    text = _FILE.sub(r"```{code-block} python\n:caption: Save this as `\1`\n\n", text)
    return _PROGRAM.sub(lambda link: f"{{download}}`{' '.join(link[1].split())} </../{link[2]}>`", text)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", in_page)
    app.connect("include-read", in_included)
    return {"parallel_read_safe": True}
