"""Which line of the user's code a node comes from."""

import re
import site
import sysconfig
from pathlib import Path

from torch import fx

import sparsecomp

_FRAME = re.compile(r'File "(?P<file>.+?)", line (?P<line>\d+)')
_LIBRARIES = tuple({sysconfig.get_path("stdlib"), *site.getsitepackages(), site.getusersitepackages()})
_OURS = str(Path(sparsecomp.__file__).parent)
_EXAMPLE = "sparsecomp/demo.py"
"""A user's code, wherever it is installed."""


def user_location(node: fx.Node) -> str:
    """`file:line` of the innermost frame outside installed libraries and this one; empty if there is none."""
    frames = [(match["file"], match["line"]) for match in _FRAME.finditer(node.meta.get("stack_trace") or "")]
    own = [frame for frame in frames if frame[0].endswith(_EXAMPLE) or not frame[0].startswith((*_LIBRARIES, _OURS))]
    return ":".join(own[-1]) if own else ""
