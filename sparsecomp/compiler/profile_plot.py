"""A profile as a figure: how long each layer takes, and how sparse its input is."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sparsecomp.errors import ExtraError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROW = 0.28
"""Height of a layer in inches."""


def figure(title: str, names: Sequence[str], milliseconds: Sequence[float], shares: dict[str, list[float]]) -> "Figure":
    """Bars of time, and beside them of shares by what they are of; a row a layer, the first on top.

    Raises:
        ExtraError: matplotlib is missing.
    """
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ExtraError("plot() needs matplotlib: pip install 'sparsecomp[plot]'") from error
    size = 11, 1.4 + _ROW * len(names)
    drawn, (times, sparsity) = pyplot.subplots(1, 2, figsize=size, sharey=True, layout="constrained")
    rows: Any = range(len(names))
    times.barh(rows, milliseconds)
    height = 0.8 / len(shares)
    for place, (label, values) in enumerate(shares.items()):
        sparsity.barh([row + (place - (len(shares) - 1) / 2) * height for row in rows], values, height, label=label)
    times.set(xlabel="ms in one forward pass", yticks=rows, yticklabels=names)
    times.invert_yaxis()
    sparsity.set(xlabel="share", xlim=(0, 1))
    sparsity.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    drawn.suptitle(title)
    return drawn
