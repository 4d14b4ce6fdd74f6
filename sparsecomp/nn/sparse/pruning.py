"""From a dense weight to the matrix that a sparse layer keeps of it."""

from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from sparsecomp.errors import FormatError
from sparsecomp.formats import BCSC, BSR, NM, SparseMatrix
from sparsecomp.formats.bsr import check_block
from sparsecomp.nn.masked.existing_mask import has_mask, weight_and_mask
from sparsecomp.reference.selection import select_top


def pruned_layer(
    layer: nn.Module, kind: type[nn.Module], format: type[SparseMatrix], mask: Tensor | None, sparsity: float | None,
    layout: dict[str, Any],
) -> SparseMatrix:  # fmt: skip
    """`pruned` of a layer's weight; where neither a mask nor a sparsity is given, by the mask that it has already.

    Raises:
        FormatError: the layer is of another kind, or as in `pruned`.
        MaskError: as in `pruned`, or the layer is in its RESU phase.
    """
    if not isinstance(layer, kind):
        raise FormatError(f"the layer is a {type(layer).__name__}, needs an nn.{kind.__name__}")
    weight, own = weight_and_mask(layer)
    if mask is None and sparsity is None and has_mask(layer):
        mask = own
    return pruned(weight, format, mask, sparsity, layout)


def pruned(
    weight: Tensor, format: type[SparseMatrix], mask: Tensor | None, sparsity: float | None, layout: dict[str, Any]
) -> SparseMatrix:
    """What `format` stores of `weight` (rows, columns).

    Args:
        mask: (rows, columns), stored where not zero, even if the weight is zero there. Whole blocks for BSR and BCSC.
            N:M fills groups that hold fewer than n with elements that start at 0.
        sparsity: share to leave out, 0 to 1: the elements of least magnitude, or blocks of least norm. Not for N:M,
            whose n and m say it.
        layout: `block=` of BSR and BCSC, `n=` and `m=` of N:M.

    Raises:
        FormatError: neither or both are given, or do not fit.
        MaskError: a weight to be ranked holds NaN.
    """
    if not (isinstance(format, type) and issubclass(format, SparseMatrix)):
        raise FormatError(f"format is {format!r}, needs a class of sparsecomp.formats, such as CSR")
    weight = weight.detach()
    if weight.is_meta:
        raise FormatError("the weight is on the meta device, which has no numbers: make the layer elsewhere")
    if (mask is None) == (sparsity is None) and not (mask is None and format is NM):
        raise FormatError(
            "give mask= or sparsity=, one of them; N:M takes mask= or nothing, since n and m say the rest, and a layer "
            "that torch.nn.utils.prune, a parametrization or RESU masks needs neither"
        )
    if sparsity is not None and (format is NM or not isinstance(sparsity, Real) or not 0 <= sparsity <= 1):
        raise FormatError(
            f"sparsity is {sparsity!r} for {format.__name__}, needs 0 to 1; N:M's is 1 - n/m: leave it out"
        )
    format._check_layout(layout)
    format.from_dense(weight[:0], **layout)  # refuses sizes that no block and no group has
    if mask is None:
        mask = _largest_in_groups(weight, **layout) if sparsity is None else _largest(weight, sparsity, layout)
    if not isinstance(mask, Tensor) or mask.shape != weight.shape:
        given = f"has shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"is a {type(mask).__name__}"
        raise FormatError(f"mask {given}, needs to be a tensor of the weight's shape {tuple(weight.shape)}")
    ones = (mask != 0).to(weight.dtype).to(weight.device)
    pattern = format.from_dense(ones, **layout)
    if format in (BSR, BCSC) and int(pattern._triplets().row.numel()) != pattern.nnz:
        raise FormatError(f"mask cuts through blocks of {layout['block']}: make it the same within each block")
    return pattern * weight


def _largest(weight: Tensor, sparsity: float, layout: dict[str, Any]) -> Tensor:
    """True for the largest elements, or for blocks of the largest norm."""
    if "block" not in layout:
        return _top(weight.abs(), sparsity)
    height, width = check_block(layout["block"])
    rows, cols = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -cols % width, 0, -rows % height))
    norms = padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width).square().sum((1, 3))
    kept = _top(norms, sparsity)
    return kept.repeat_interleave(height, 0).repeat_interleave(width, 1)[:rows, :cols]


def _top(scores: Tensor, sparsity: float) -> Tensor:
    kept = scores.numel() - round(sparsity * scores.numel())
    return select_top(scores.flatten(), kept, refuse_nan=True).view(scores.shape)


def _largest_in_groups(weight: Tensor, n: int, m: int) -> Tensor:
    """True for the n largest of each m columns of a row."""
    rows, cols = weight.shape
    padded = torch.nn.functional.pad(weight.abs().float(), (0, -cols % m), value=-1.0)
    return select_top(padded.view(rows, padded.shape[1] // m, m), n, refuse_nan=True).flatten(1)[:, :cols]
