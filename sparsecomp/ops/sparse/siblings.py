"""Linear layers of few rows that read one x, such as queries, keys and values, by sparse weights of one form.

Copies that a kernel reads besides what is stored are kept by a compiler, as those of `bitmap_linear` and
`packed_linear`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsecomp.ops.library import TAGS, implement, library
from sparsecomp.ops.sparse.linear import sparse_linear
from sparsecomp.reference.patterns import Layout

library.define(
    "siblings(Tensor x, Tensor[] values, Tensor[] patterns, str[] layouts, Tensor[] copies, Tensor[] biases, "
    "int grain, int longest, str activation) -> Tensor[]",
    tags=TAGS,
)


def siblings(
    x: Tensor, values: Sequence[Tensor], patterns: Sequence[Tensor], layouts: Sequence[str], copies: Sequence[Tensor],
    biases: Sequence[Tensor], grain: int, longest: int, activation: str = "none",
) -> list[Tensor]:  # fmt: skip
    """activation(x @ S.mT + bias) for each of two or three weights S, summed in float32 and rounded once.

    It has no gradient. More rows, and dtypes, than a kernel takes are multiplied one weight after another.

    Args:
        x: (..., k), of the dtype of all values.
        values, layouts: of each S, as of `sparse_linear`: of any formats where there are bitmaps, else all of 2:4, or
            all in NARROW.
        patterns: index arrays of the first S, then those of the second, and so on.
        copies: that of each in the same way: three arrays of `bitmap_linear`, without which all are stored as bitmaps;
            the positions of `packed_linear`; of NARROW none.
        biases: (m,) each, one a weight or none at all.
        grain, longest: of all bitmaps, whose first arrays are of one dtype; 0 where there are none.
        activation: "none", "relu", "gelu", "gelu_tanh", "silu", "sigmoid" or "tanh".

    Returns:
        (..., m) each, contiguous.

    Raises:
        FormatError: operands that do not belong together, or an unknown word.
    """
    return torch.ops.sparsecomp.siblings.default(
        x, values, patterns, layouts, copies, biases, grain, longest, activation
    )


def _siblings(x, values, patterns, layouts, copies, biases, grain, longest, activation):
    arrays = _divided(patterns, [Layout.read(one).own for one in layouts])
    each = zip(values, arrays, layouts, biases or [None] * len(values), strict=True)
    return [sparse_linear(x, one, own, layout, bias=bias, activation=activation) for one, own, layout, bias in each]


def _siblings_cuda(x, values, patterns, layouts, copies, biases, grain, longest, activation):
    kinds, size, count = [Layout.read(one) for one in layouts], x.shape, len(values)
    parts = [kind.shape[0] for kind in kinds]
    is_whole = 0 not in parts and size.numel() > 0 and all(one.numel() > 0 for one in values)
    found = None
    if is_whole and all(one.dtype is x.dtype for one in values):
        stored = _divided(patterns, [kind.own for kind in kinds])
        kept = _divided(copies, [len(copies) // count] * count)
        rows = x.reshape(size[:-1].numel(), size[-1]).contiguous()
        added = [one.contiguous() for one in biases] or [None] * count
        found = _launched(rows, values, stored, kinds, kept, added, grain, longest, activation)
    if found is None:
        return _siblings(x, values, patterns, layouts, copies, biases, grain, longest, activation)
    return found if x.dim() == 2 else [out.view(*size[:-1], m) for out, m in zip(found, parts, strict=True)]


def _launched(x, values, stored, kinds, kept, biases, grain, longest, activation) -> list[Tensor] | None:
    """The results, if a kernel takes the operands."""
    from sparsecomp.lowering.sparse.bitmap_linear import takes_bitmap  # loads Triton
    from sparsecomp.lowering.sparse.bitmap_siblings import launch_bitmap_siblings
    from sparsecomp.lowering.sparse.narrow_siblings import launch_narrow_siblings
    from sparsecomp.lowering.sparse.packed_linear import order_of_positions, takes_packed
    from sparsecomp.lowering.sparse.packed_siblings import launch_packed_siblings

    (n, k), parts = x.shape, [kind.shape[0] for kind in kinds]
    whole = [[*own, one] for own, one in zip(stored, values, strict=True)]
    if grain:
        arrays, counts = kept if kept[0] else whole, [one.shape[0] for one in values]
        if not takes_bitmap(k, n, x.dtype):
            return None
        return launch_bitmap_siblings(x, arrays, parts, counts, grain, longest, biases, activation)
    if kinds[0].format == "narrow":
        return launch_narrow_siblings(x, [[a.contiguous() for a in one] for one in whole], parts, biases, activation)
    weights = [(one.contiguous(), positions) for one, (positions,) in zip(values, kept, strict=True)]
    if not takes_packed(k, n, x.dtype, order_of_positions(weights[0][1])):
        return None
    return launch_packed_siblings(x, weights, biases, activation)


def _divided(arrays: Sequence[Tensor], lengths: Sequence[int]) -> list[list[Tensor]]:
    """As many of the arrays each, in order."""
    rest = iter(arrays)
    return [[next(rest) for _ in range(length)] for length in lengths]


def _fake(x, values, patterns, layouts, *rest):
    return [x.new_empty((*x.shape[:-1], Layout.read(one).shape[0])) for one in layouts]


implement("siblings", _siblings, _siblings_cuda, _fake)
