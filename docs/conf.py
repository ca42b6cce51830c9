"""The site: `make docs` builds it into docs/_build/html, offline and with warnings as errors."""

from __future__ import annotations

import logging
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

from searching import is_chinese

# What notebooks are run in: no display, and no kernel's lines about its own connection.
os.environ |= {
    "SDL_VIDEODRIVER": "dummy",
    "XDG_RUNTIME_DIR": "/tmp",
    "IPYTHONDIR": str(Path(__file__).parent / "_ipython"),
}
logging.getLogger("traitlets").setLevel(logging.WARNING)

project = "Muster"
author = "The Muster authors"
release = metadata.version("muster-rl")
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_design",
    "sphinx_copybutton",
    "docstrings",
    "inlined",
    "links",
    "searching",
]
exclude_patterns = ["_build", "_extensions", "_ipython"]
default_role = "py:obj"
nitpicky = True

html_theme = "furo"
html_title = f"Muster {release}"
html_static_path = ["_static"]
html_css_files, html_js_files = ["site.css"], ["site.js"]
html_logo = html_favicon = "_static/logo.svg"
html_show_sphinx = html_show_copyright = False
smartquotes_action = "De"  # dashes, no quotes
html_show_sourcelink = html_copy_source = True  # each page links its source, as text
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b57a4", "color-brand-content": "#0b57a4"},
    "dark_css_variables": {"color-brand-primary": "#7ab8ff", "color-brand-content": "#7ab8ff"},
}
pygments_style, pygments_dark_style = "a11y-high-contrast-light", "a11y-high-contrast-dark"

autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say shapes and dtypes, the signatures types
autodoc_class_signature = "mixed"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = "cache"
nb_execution_cache_path = str(Path(__file__).parent / "_build" / "notebooks")
nb_execution_in_temp = True
nb_execution_timeout = 100
nb_execution_raise_on_error = True
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True


def say_language(app: Sphinx, pagename: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Screen readers choose a voice by it, and browsers the shapes of Chinese characters."""
    context["language"] = "zh-CN" if is_chinese(pagename) else "en"


def setup(app: Sphinx) -> None:
    app.connect("html-page-context", say_language)
