"""Rich's tables and texts as plain text."""

import io
import shutil

from rich.console import Console, RenderableType

_WIDTH = 160
"""Of what is not printed to a terminal."""


def rendered(*parts: RenderableType) -> str:
    """Text of rich's tables and texts, as wide as the terminal."""
    stream = io.StringIO()
    console = Console(file=stream, width=shutil.get_terminal_size((_WIDTH, 0)).columns)
    for part in parts:
        console.print(part)
    return stream.getvalue().rstrip("\n")
