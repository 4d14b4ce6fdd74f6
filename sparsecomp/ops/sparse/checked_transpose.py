"""Looks, under `SPARSECOMP_DEBUG=1`, whether the transpose that a sparse layer keeps still fits its index arrays.

A layer follows writes to them that a version counter or another address tells of. One through a NumPy alias, by a
collective or in compiled code it does not see, and its gradients would be those of another matrix.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsecomp.errors import FrozenWeightError
from sparsecomp.ops.library import TAGS, implement, library
from sparsecomp.reference.patterns import Layout, transposed_arrays

library.define("checked_transpose(Tensor[] pattern, str layout) -> Tensor", tags=TAGS)


def checked_transpose(pattern: Sequence[Tensor], layout: str) -> list[Tensor]:
    """Pointers, indices and order of the transpose in `pattern`, once it is sure that they fit; waits for the device.

    Args:
        pattern: index arrays of a matrix and of its transpose; see `sparsecomp.reference.patterns`.
        layout: of the matrix, from `Layout.written`.

    Raises:
        FrozenWeightError: they belong to another matrix.
    """
    *_, pointers, indices, _ = pattern
    return [pointers, indices, torch.ops.sparsecomp.checked_transpose.default(pattern, layout)]


def _checked(pattern: Sequence[Tensor], layout: str) -> Tensor:
    own, kept, order = pattern[:-3], pattern[-3:], pattern[-1]
    capturing = order.is_cuda and torch.cuda.is_current_stream_capturing()  # a graph cannot ask
    if not capturing and not _fits(own, kept, Layout.read(layout)):
        raise FrozenWeightError(
            "the index arrays of a sparse layer were written to where nothing tells of it (a NumPy alias, a "
            "collective, compiled code), and the transpose that it keeps is that of the old ones: change a pattern by "
            "load_state_dict, or by an in-place operation of torch outside of compiled code"
        )
    return order.clone()


def _fits(own: Sequence[Tensor], kept: Sequence[Tensor], layout: Layout) -> bool:
    try:
        if len(own) > 1 and int(own[0][-1]) > own[1].numel():
            return False
        found = transposed_arrays(own, layout)
        # what is kept may have spare capacity, as the arrays have
        return all(torch.equal(one, other[: one.numel()]) for one, other in zip(found, kept, strict=True))
    except (RuntimeError, IndexError):
        return False  # the arrays are those of no matrix


implement("checked_transpose", _checked, fake=lambda pattern, layout: pattern[-1].clone())
