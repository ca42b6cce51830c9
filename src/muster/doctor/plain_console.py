"""A console of rich that shows texts of others as they are, and obeys none of them."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from muster.errors import printable_lines


class PlainConsole(Console):
    """Prints escapes in place of the control characters of texts; its own colours and cursor stay."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable_lines(segment.text), segment.style)
