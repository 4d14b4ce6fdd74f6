"""Linear layers of few rows that read one x, such as queries, keys and values, by bitmaps of their weights.

The copies are kept by a compiler, as those of `bitmap_linear`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsecomp.ops.library import TAGS, implement, library
from sparsecomp.ops.sparse.linear import sparse_linear
from sparsecomp.reference.patterns import Layout

library.define(
    "bitmap_siblings(Tensor x, Tensor[] values, Tensor[] patterns, str[] layouts, Tensor[] copies, Tensor[] biases, "
    "int grain, int longest, str activation) -> Tensor[]",
    tags=TAGS,
)


def bitmap_siblings(
    x: Tensor, values: Sequence[Tensor], patterns: Sequence[Tensor], layouts: Sequence[str], copies: Sequence[Tensor],
    biases: Sequence[Tensor], grain: int, longest: int, activation: str = "none",
) -> list[Tensor]:  # fmt: skip
    """activation(x @ S.mT + bias) for each of two or three weights S, summed in float32 and rounded once.

    It has no gradient. More rows than sixteen, and dtypes that no kernel takes, are multiplied one weight after
    another.

    Args:
        x: (..., k), of the dtype of all values.
        values, layouts: of each S, as of `bitmap_linear`.
        patterns: index arrays of the first S, then those of the second, and so on.
        copies: that of each in the same way; without, all are stored as bitmaps.
        biases: (m,) each, one a weight or none at all.
        grain, longest: of all copies, whose first arrays are of one dtype.
        activation: "none", "relu", "gelu", "gelu_tanh", "silu", "sigmoid" or "tanh".

    Returns:
        (..., m) each, contiguous.

    Raises:
        FormatError: operands that do not belong together, or an unknown word.
    """
    return torch.ops.sparsecomp.bitmap_siblings.default(
        x, values, patterns, layouts, copies, biases, grain, longest, activation
    )


def _siblings(x, values, patterns, layouts, copies, biases, grain, longest, activation):
    arrays = _divided(patterns, [Layout.read(one).own for one in layouts])
    each = zip(values, arrays, layouts, biases or [None] * len(values), strict=True)
    return [sparse_linear(x, one, own, layout, bias=bias, activation=activation) for one, own, layout, bias in each]


def _siblings_cuda(x, values, patterns, layouts, copies, biases, grain, longest, activation):
    from sparsecomp.lowering.sparse.bitmap_linear import takes_bitmap  # loads Triton
    from sparsecomp.lowering.sparse.bitmap_siblings import launch_bitmap_siblings

    parts, size, count = [Layout.read(one).shape[0] for one in layouts], x.shape, len(values)
    rows = size[:-1].numel()
    is_taken = takes_bitmap(size[-1], rows, x.dtype) and all(one.dtype is x.dtype for one in values)
    if not is_taken or 0 in parts:
        return _siblings(x, values, patterns, layouts, copies, biases, grain, longest, activation)
    if copies:
        arrays = _divided(copies, [len(copies) // count] * count)
    else:
        stored = _divided(patterns, [Layout.read(one).own for one in layouts])
        arrays = [[*own, one] for own, one in zip(stored, values, strict=True)]
    outs = launch_bitmap_siblings(
        x.reshape(rows, size[-1]).contiguous(), arrays, parts, [one.shape[0] for one in values], grain, longest,
        [one.contiguous() for one in biases] or [None] * count, activation,
    )  # fmt: skip
    return outs if x.dim() == 2 else [out.view(*size[:-1], m) for out, m in zip(outs, parts, strict=True)]


def _divided(arrays: Sequence[Tensor], lengths: Sequence[int]) -> list[list[Tensor]]:
    """As many of the arrays each, in order."""
    rest = iter(arrays)
    return [[next(rest) for _ in range(length)] for length in lengths]


def _fake(x, values, patterns, layouts, *rest):
    return [x.new_empty((*x.shape[:-1], Layout.read(one).shape[0])) for one in layouts]


implement("bitmap_siblings", _siblings, _siblings_cuda, _fake)
