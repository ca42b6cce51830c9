"""Two directives: ``drawing``, an SVG within the page, which has the page's colours, and ``command-help``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class InlinedDrawing(SphinxDirective):
    """The SVG of that name from ``pictures/``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        path = Path(self.env.srcdir) / "pictures" / f"{self.arguments[0]}.svg"
        self.env.note_dependency(str(path))
        svg = re.sub(r"<style>.*?</style>\s*", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        return [nodes.raw("", f'<figure class="drawing">{svg}</figure>', format="html")]


class CommandHelp(SphinxDirective):
    """What ``muster COMMAND --help`` prints."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        words = [sys.executable, "-m", "muster", *self.arguments, "--help"]
        environ = {**os.environ, "COLUMNS": "96", "NO_COLOR": "1"}
        text = subprocess.run(words, capture_output=True, text=True, check=True, env=environ).stdout
        return [nodes.literal_block(text, text, language="text", classes=["command-help"])]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("drawing", InlinedDrawing)
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True}
