"""Which line of the user's code a node comes from."""

import re
import site
import sysconfig

from torch import fx

_FRAME = re.compile(r'File "(?P<file>.+?)", line (?P<line>\d+)')
_LIBRARIES = tuple({sysconfig.get_path("stdlib"), *site.getsitepackages(), site.getusersitepackages()})
_TRACER = "sparsecomp/compiler/capture.py"
"""Where `optimize` calls the user's modules from; an editable install puts it outside the installed libraries."""


def user_location(node: fx.Node) -> str:
    """`file:line` of the innermost frame outside installed libraries, else of the innermost frame; empty if unknown."""
    frames = [(match["file"], match["line"]) for match in _FRAME.finditer(node.meta.get("stack_trace") or "")]
    if not frames:
        return ""
    own = [frame for frame in frames if not frame[0].startswith(_LIBRARIES) and not frame[0].endswith(_TRACER)]
    return ":".join((own or frames)[-1])
