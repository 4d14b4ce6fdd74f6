"""The transpose of a matrix by the arrays that are kept of it: values in their order, one launch.

The launch also sees whether those are still of the matrix's index arrays, and makes them anew on the device where they
are not, so that a product by the transpose is right after any write, without the host knowing of it.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.strided import contiguous_strides
from sparsecomp.lowering.launch.watch import allocate
from sparsecomp.lowering.sparse.launcher import as_csr
from sparsecomp.reference.patterns import CompressedArrays, Layout, compressed, guarded

_Kind = tuple[torch.dtype, torch.Size]


def transposed_matrix(values: Tensor, pattern: Sequence[Tensor], layout: Layout) -> CompressedArrays:
    """The transposed matrix by rows, as `sparsecomp.reference.patterns.compressed` gives it.

    Its kernel knows pointers and indices, or N:M's indices: a format of other arrays is taken as CSR.
    """
    values, pattern, layout = as_csr(values, pattern, layout)
    kept = guarded(pattern, layout)
    if kept is None:
        return compressed(values, pattern, layout, True)
    pointers, indices, order, source = kept
    values, own = values.contiguous(), [array.contiguous() for array in pattern[: layout.own]]
    kinds = [(one.dtype, one.shape) for one in (values, pointers, order, *own)]
    shape, launch = _reordering(values.device, layout, *kinds)
    out = allocate(shape, contiguous_strides(shape), values.dtype, values.device)
    if launch is not None:
        launch(own[-1], own[0], pointers, indices, order, source, values, out)
    rows, cols = layout.shape
    return CompressedArrays(pointers, indices, out.mT if layout.entry else out, (cols, rows), layout.skews[1])


@dispatch.recorded
def _reordering(
    device: torch.device, layout: Layout, values: _Kind, pointers: _Kind, order: _Kind, *own: _Kind
) -> tuple[tuple[int, ...], Callable[..., None] | None]:
    """Shape of the values in the order of the transpose, and what writes them; None if there are none."""
    (entries,), first = order[1], own[0][1]
    shape = (*values[1][: len(values[1]) - layout.kind.VALUE_DIMS], entries, *layout.entry)
    launch = None
    if (count := values[1].numel()) and entries:
        from sparsecomp.lowering.sparse.kernels.transposed import reorder_launch

        grouped, width = len(own) == 1, torch.Size(layout.entry).numel()
        rows, lines = (first[0], 0) if grouped else (first[0] - 1, first[0])
        sizes = (count // (entries * width), rows, pointers[1][0] - 1, lines, entries)
        launch = reorder_launch(*sizes, width, layout.block if grouped else (0, 0))
    return shape, launch
