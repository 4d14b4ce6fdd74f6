"""How Sphinx builds these pages: `sphinx-build -W --keep-going -b html docs build/docs`. No network is needed."""

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import sparsecomp

project = "sparsecomp"
version = release = sparsecomp.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["plots"]
html_theme = "furo"
html_title = f"sparsecomp {release}"
html_copy_source = False

myst_heading_anchors = 3
# README.md, ARCHITECTURE.md and CHANGELOG.md are included from the root, where they begin with a heading of their own
suppress_warnings = ["myst.header"]

default_role = "code"  # docstrings put names in single backticks
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True


def setup(app: Any) -> None:
    """Docstrings are plain text: code is indented, and |x| is a magnitude. Napoleon reads them after this."""
    app.connect("autodoc-process-docstring", _escape_bars, priority=300)
    app.connect("autodoc-process-docstring", _mark_code, priority=400)


def _escape_bars(app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    def escaped(line: str) -> str:
        parts = re.split(r"(`+[^`]*`+)", line)  # every second one is code
        return "".join(part if place % 2 else part.replace("|", r"\|") for place, part in enumerate(parts))

    lines[:] = map(escaped, lines)


def _mark_code(app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    marked: list[str] = []
    paragraph = ""
    for place, line in enumerate(lines):
        indented, after_blank = line.startswith("    "), place > 0 and not lines[place - 1].strip()
        if indented and after_blank and not paragraph.startswith(" ") and not paragraph.endswith(":"):
            marked += ["::", ""]
        marked.append(line)
        paragraph = line if line.strip() else paragraph
    lines[:] = marked
