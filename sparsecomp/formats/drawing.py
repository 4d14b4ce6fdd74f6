"""Pictures of where a matrix stores elements."""

from __future__ import annotations

from os import PathLike

import torch

from sparsecomp.errors import ExtraError, FormatError
from sparsecomp.formats.triplets import Triplets

_SHADES = " .:-=+*#%@"
_PIXELS = 512


def characters(elements: Triplets, width: int, height: int) -> str:
    """A framed map of at most `width` by `height` characters; blank means that nothing is stored there.

    Raises:
        FormatError: width or height is below 1.
    """
    return framed(cells(elements, width, height))


def framed(shares: torch.Tensor) -> str:
    """Shares (lines, columns) from 0 to 1 as characters in a frame; blank means 0."""
    shades = (shares * (len(_SHADES) - 1)).ceil().int().tolist()
    edge = "+" + "-" * (len(shades[0]) if shades else 0) + "+"
    return "\n".join([edge, *("|" + "".join(_SHADES[shade] for shade in line) + "|" for line in shades), edge])


def image(elements: Triplets, path: str | PathLike[str]) -> None:
    """Write the map as an image file.

    Raises:
        ExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ExtraError("spy needs matplotlib: pip install matplotlib") from error
    rows, cols = elements.shape
    figure = Figure()
    axes = figure.add_subplot()
    axes.set_title(f"{rows} x {cols}, {elements.row.numel()} stored")
    if rows and cols:
        density = cells(elements, _PIXELS, _PIXELS).numpy()
        axes.imshow(density, cmap="Greys", extent=(0, cols, rows, 0), aspect="auto", interpolation="nearest")
    figure.savefig(path)


def cells(elements: Triplets, width: int, height: int) -> torch.Tensor:
    """Share of stored elements in each cell of a grid of at most (height, width): float64 on the CPU."""
    if width < 1 or height < 1:
        raise FormatError(f"width is {width} and height {height}, need 1 or more")
    rows, cols = elements.shape
    high, wide = -(-rows // height) or 1, -(-cols // width) or 1
    lines, columns = -(-rows // high), -(-cols // wide)
    cell = elements.row.long().div(high, rounding_mode="floor") * columns
    cell += elements.col.long().div(wide, rounding_mode="floor")
    counts = cell.bincount(minlength=lines * columns).cpu().view(lines, columns)
    heights = (rows - torch.arange(lines, device=counts.device) * high).clamp(max=high)
    widths = (cols - torch.arange(columns, device=counts.device) * wide).clamp(max=wide)
    return counts.double() / heights[:, None] / widths
