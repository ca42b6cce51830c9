"""Reads Muster's docstrings for the reference: lines ``name: text`` are parameters, names in backticks are links."""

from __future__ import annotations

import builtins
import collections
import inspect
import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.nodes import make_refnode

from muster import errors

_ENTRY = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): (.*)")
_NEXT_ENTRY = re.compile(r"  (?=[a-z_]\w*(?:, [a-z_]\w*)*: )")
_NARROW = ",\u200b"  # between names: of no width, and no space to Python
_KNOWN: dict[str, list[str]] = collections.defaultdict(list)  # by the last part of names, the whole ones
_ERROR_NAMES = [name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, Exception)]
_ERRORS = re.compile(rf"\b({'|'.join(_ERROR_NAMES)})\b")


def as_fields(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turns lines ``name: text``, with what follows up to the next or an empty line, into fields and items."""
    if obj is None or getattr(obj, "__module__", "muster").partition(".")[0] != "muster":
        return
    parameters = _parameters(obj)
    read: list[str] = []
    within, code = "", False
    for whole in lines:
        if whole.startswith(">>> ") or (whole.strip() and read and read[-1] == "" and whole.startswith("    ")):
            code = True
        if not whole.strip():
            within, code = "", False
        if whole.startswith("Raises "):
            within = ""
            read.append("")
            whole = _ERRORS.sub(r"`\1`", whole)
        parts = [whole] if code or (whole.startswith(" ") and not within) else _NEXT_ENTRY.split(whole.lstrip())
        for at, line in enumerate(parts):
            goes_on = whole.startswith(" ") and at == 0
            if not code and not goes_on and (entry := _ENTRY.fullmatch(line)):
                names, text = entry[1], entry[2]
                is_field = all(one in parameters for one in names.split(", "))
                # Sphinx takes what stands before a space for a type.
                start = f":param {_NARROW.join(names.split(', '))}: " if is_field else f"- **{names}**: "
                if read and read[-1] and within != start[:2]:
                    read.append("")
                read.append(start + _escaped(text))
                within = start[:2]
            elif within:
                read.append("    " + _escaped(line.strip()))
            else:
                read.append(line if code else _escaped(line))
    lines[:] = [*read, ""]


def _parameters(obj: Any) -> set[str]:
    try:
        return set(inspect.signature(obj).parameters)
    except (TypeError, ValueError):
        return set()


def _escaped(text: str) -> str:
    """The text with its stars as they are, which begin no emphasis; those between double backticks need nothing."""
    stars = r"(``.+?``)|(?<![\w`*])(\*{1,2})(?=\w+\b(?!\*))"
    return re.sub(stars, lambda found: found[1] or "\\*" * len(found[2]), text)


def resolve(app: Sphinx, env: Any, node: Any, around: Any) -> Any:
    """A name in backticks: a link where the reference has it once, or once on this page, else code.

    Whole names of Muster's that it lacks are warned of.
    """
    if node.get("refdomain") != "py":
        return None
    objects = env.get_domain("py").objects
    if not _KNOWN:
        for full in objects:
            _KNOWN[full.rpartition(".")[2]].append(full)
    target = node["reftarget"].removeprefix("~").removesuffix("()")
    if target not in objects and target.startswith("muster."):
        return None
    named = [] if hasattr(builtins, target) else _KNOWN[target.rpartition(".")[2]]
    found = [target] if target in objects else named
    here = [full for full in found if objects[full].docname == node["refdoc"]]
    found = found if len(found) == 1 else here
    text = node.astext()
    if len(found) != 1:
        return around if isinstance(around, nodes.literal) else nodes.literal(text, text)
    entry = objects[found[0]]
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, nodes.literal(text, text))


def public_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """The signature without the keywords that are Muster's own, and without the addresses of functions."""
    if signature is not None:
        signature = re.sub(r", (\*, )?_\w+=[^,)]+(, _\w+=[^,)]+)*(?=\))|, \*\*private", "", signature)
        signature = re.sub(r"<function [\w.<>]+>", "...", signature)
    return signature, returned


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", as_fields)
    app.connect("autodoc-process-signature", public_signature)
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True}
