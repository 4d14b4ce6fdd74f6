"""Linear layers of few rows by unstructured weights, with a bitmap of their places and their values beside them.

At few rows a layer takes as long as its weight takes to read and to decode, which is the values and a bit for each
place, or for two neighbours. The copy is kept by a compiler, under the promise that the weight stays.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsecomp.ops.library import TAGS, implement, library
from sparsecomp.ops.sparse.linear import residual_rows, sparse_linear
from sparsecomp.reference.patterns import Layout

library.define(
    "bitmap_linear(Tensor x, Tensor values, Tensor[] pattern, str layout, Tensor[] copy, int grain, int longest, "
    "Tensor? bias, Tensor? residual, str activation) -> Tensor",
    tags=TAGS,
)


def bitmap_linear(
    x: Tensor, values: Tensor, pattern: Sequence[Tensor], layout: str, copy: Sequence[Tensor], grain: int, longest: int,
    bias: Tensor | None = None, residual: Tensor | None = None, activation: str = "none",
) -> Tensor:  # fmt: skip
    """activation(x @ S.mT + bias + residual), summed in float32 and rounded once.

    It has no gradient. More rows than sixteen, and dtypes that no kernel takes, are multiplied as by `sparse_linear`.

    Args:
        x: (..., k), of the dtype of `values`.
        values, pattern, layout: of S, as of `sparse_linear`; of single elements, by rows.
        copy, grain: of these, from `sparsecomp.lowering.sparse.bitmap_linear.BitmapChunks`.
        longest: values of its longest chunk. Where one of another pattern is longer, its rows are multiplied slowly.
        bias: (m,).
        residual: of the result's shape.
        activation: "none", "relu", "gelu", "gelu_tanh", "silu", "sigmoid" or "tanh".

    Returns:
        (..., m), contiguous.

    Raises:
        FormatError: operands that do not belong together, or an unknown word.
    """
    return torch.ops.sparsecomp.bitmap_linear.default(
        x, values, pattern, layout, copy, grain, longest, bias, residual, activation
    )


def _linear(x, values, pattern, layout, copy, grain, longest, bias, residual, activation):
    return sparse_linear(x, values, pattern, layout, bias=bias, residual=residual, activation=activation)


def _linear_cuda(x, values, pattern, layout, copy, grain, longest, bias, residual, activation):
    from sparsecomp.lowering.sparse.bitmap_linear import launch_bitmap_linear, takes_bitmap  # loads Triton

    m, size = Layout.read(layout).shape[0], x.shape
    beside, rows = residual_rows(residual, (*size[:-1], m)), size[:-1].numel()
    if not takes_bitmap(size[-1], rows, x.dtype) or values.dtype is not x.dtype or m == 0:
        return _linear(x, values, pattern, layout, copy, grain, longest, bias, residual, activation)
    beside, bias = (None if one is None else one.contiguous() for one in (beside, bias))
    given = x.reshape(rows, size[-1]).contiguous()
    out = launch_bitmap_linear(given, copy, m, values.shape[0], grain, longest, bias, beside, activation)
    return out if x.dim() == 2 else out.view(*size[:-1], m)


def _fake(x, values, pattern, layout, *rest):
    return x.new_empty((*x.shape[:-1], Layout.read(layout).shape[0]))


implement("bitmap_linear", _linear, _linear_cuda, _fake)
