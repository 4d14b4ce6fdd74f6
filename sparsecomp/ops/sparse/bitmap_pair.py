"""A gated pair of linear layers of few rows by bitmaps of their weights, as of a LLaMA's feed-forward layer.

The copies are kept by a compiler, as those of `bitmap_linear`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsecomp.ops.library import TAGS, implement, library
from sparsecomp.ops.sparse.gated_pair import check_biases
from sparsecomp.ops.sparse.linear import sparse_linear
from sparsecomp.reference.patterns import Layout

library.define(
    "bitmap_pair(Tensor x, Tensor values, Tensor[] pattern, str layout, Tensor[] copy, Tensor? bias, "
    "Tensor other_values, Tensor[] other_pattern, str other_layout, Tensor[] other_copy, Tensor? other_bias, "
    "int grain, int longest, str activation) -> Tensor",
    tags=TAGS,
)


def _pair(
    x, values, pattern, layout, copy, bias, other_values, other_pattern, other_layout, other_copy, other_bias, grain,
    longest, activation,
):  # fmt: skip
    check_biases(bias, other_bias)
    gate = sparse_linear(x, values, pattern, layout, bias=bias, activation=activation)
    return gate * sparse_linear(x, other_values, other_pattern, other_layout, bias=other_bias)


def _pair_cuda(
    x, values, pattern, layout, copy, bias, other_values, other_pattern, other_layout, other_copy, other_bias, grain,
    longest, activation,
):  # fmt: skip
    from sparsecomp.lowering.sparse.bitmap_linear import takes_bitmap  # loads Triton
    from sparsecomp.lowering.sparse.bitmap_pair import launch_bitmap_pair

    m, size = Layout.read(layout).shape[0], x.shape
    rows = size[:-1].numel()
    if not takes_bitmap(size[-1], rows, x.dtype) or not values.dtype is x.dtype is other_values.dtype or m == 0:
        return _pair(
            x, values, pattern, layout, copy, bias, other_values, other_pattern, other_layout, other_copy, other_bias,
            grain, longest, activation,
        )  # fmt: skip
    check_biases(bias, other_bias)
    first, second = (None if one is None else one.contiguous() for one in (bias, other_bias))
    copies = copy or [*pattern, values], other_copy or [*other_pattern, other_values]
    out = launch_bitmap_pair(
        x.reshape(rows, size[-1]).contiguous(), copies, m, (values.shape[0], other_values.shape[0]), grain,
        longest, (first, second), activation,
    )  # fmt: skip
    return out if x.dim() == 2 else out.view(*size[:-1], m)


def _fake(x, values, pattern, layout, *rest):
    return x.new_empty((*x.shape[:-1], Layout.read(layout).shape[0]))


def bitmap_pair(
    x: Tensor, values: Tensor, pattern: Sequence[Tensor], layout: str, copy: Sequence[Tensor], bias: Tensor | None,
    other_values: Tensor, other_pattern: Sequence[Tensor], other_layout: str, other_copy: Sequence[Tensor],
    other_bias: Tensor | None, grain: int, longest: int, activation: str,
) -> Tensor:  # fmt: skip
    """activation(x @ S.mT + bias) · (x @ T.mT + other_bias), rounded once where a kernel takes it.

    It has no gradient. More rows than sixteen, and dtypes that no kernel takes, are multiplied one weight after
    another.

    Args:
        x: (..., k), of the dtype of both values.
        values, pattern, layout, copy: of S, as of `bitmap_linear`; without a copy S is stored as a bitmap.
        bias: (m,); S and T both have one, of one dtype, or none.
        other_values, other_pattern, other_layout, other_copy, other_bias: of T, of the shape of S.
        grain, longest: of both copies, whose first arrays are of one dtype.
        activation: "none", "relu", "gelu", "gelu_tanh", "silu", "sigmoid" or "tanh".

    Returns:
        (..., m), contiguous.

    Raises:
        FormatError: operands that do not belong together, or an unknown word.
    """
    return torch.ops.sparsecomp.bitmap_pair.default(
        x, values, pattern, layout, copy, bias, other_values, other_pattern, other_layout, other_copy, other_bias,
        grain, longest, activation,
    )  # fmt: skip


implement("bitmap_pair", _pair, _pair_cuda, _fake)
