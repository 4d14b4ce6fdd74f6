"""Linear layers of few rows by 2:4 weights, with a packed copy of their positions beside them.

At few rows a layer takes as long as its weight takes to read: half of the dense weight's values, and of positions two
bits a value, which are an eighth of that. The copy is kept by a compiler, under the promise that the pattern stays. A
gated pair, as of a LLaMA's feed-forward layer, is one launch.
"""

from typing import Any

import torch
from torch import Tensor

from sparsecomp.ops.library import TAGS, implement, library
from sparsecomp.ops.sparse.gated_pair import check_biases
from sparsecomp.ops.sparse.linear import residual_rows, sparse_linear
from sparsecomp.reference.patterns import Layout

library.define(
    "packed_linear(Tensor x, Tensor values, Tensor indices, Tensor positions, Tensor? bias, Tensor? residual, "
    "str activation) -> Tensor",
    tags=TAGS,
)
library.define(
    "packed_pair(Tensor x, Tensor values, Tensor indices, Tensor positions, Tensor? bias, Tensor other_values, "
    "Tensor other_indices, Tensor other_positions, Tensor? other_bias, str activation) -> Tensor",
    tags=TAGS,
)


def packed_linear(
    x: Tensor, values: Tensor, indices: Tensor, positions: Tensor, bias: Tensor | None = None,
    residual: Tensor | None = None, activation: str = "none",
) -> Tensor:  # fmt: skip
    """activation(x @ S.mT + bias + residual) for S of 2:4, summed in float32 and rounded once.

    It has no gradient. More rows than eight, or than one if positions lie by lanes, and dtypes that no kernel takes are
    multiplied as by `sparse_linear`.

    Args:
        x: (..., k), of the dtype of `values`.
        values: (m, k / 2), float16 or bfloat16.
        indices: (m, k / 2) uint8: each value's column within its group of four, ascending.
        positions: of these, from `sparsecomp.lowering.sparse.packed_linear.PackedPositions`.
        bias: (m,).
        residual: of the result's shape.
        activation: "none", "relu", "gelu", "gelu_tanh", "silu", "sigmoid" or "tanh".

    Returns:
        (..., m), contiguous.

    Raises:
        FormatError: operands that do not belong together, or an unknown word.
    """
    return torch.ops.sparsecomp.packed_linear.default(x, values, indices, positions, bias, residual, activation)


def packed_pair(
    x: Tensor, values: Tensor, indices: Tensor, positions: Tensor, bias: Tensor | None, other_values: Tensor,
    other_indices: Tensor, other_positions: Tensor, other_bias: Tensor | None, activation: str,
) -> Tensor:  # fmt: skip
    """activation(x @ S.mT + bias) · (x @ T.mT + other_bias) for S and T of 2:4, rounded once where a kernel takes it.

    As `packed_linear`; S and T have one shape, and both have a bias or none.
    """
    return torch.ops.sparsecomp.packed_pair.default(
        x, values, indices, positions, bias, other_values, other_indices, other_positions, other_bias, activation
    )


def _linear(x, values, indices, positions, bias, residual, activation):
    layout = Layout("nm", (2, 4), (values.shape[0], x.shape[-1])).written()
    return sparse_linear(x, values, [indices], layout, bias=bias, residual=residual, activation=activation)


def _linear_cuda(x, values, indices, positions, bias, residual, activation):
    beside = residual_rows(residual, (*x.shape[:-1], values.shape[0]))
    out = _launched(x, values, positions, bias, beside, activation, None)
    return _linear(x, values, indices, positions, bias, residual, activation) if out is None else out


def _launched(x, values, positions, bias, residual, activation, other) -> Tensor | None:
    """The result, if a kernel takes the operands."""
    from sparsecomp.lowering.sparse.packed_linear import (  # loads Triton
        launch_packed_linear,
        order_of_positions,
        takes_packed,
    )

    size, m = x.shape, values.shape[0]
    order = order_of_positions(positions)
    if not takes_packed(size[-1], size[:-1].numel(), x.dtype, order) or values.dtype is not x.dtype or m == 0:
        return None
    rows = x.reshape(-1, size[-1])
    pair = None if other is None else _contiguous(*other)
    out = launch_packed_linear(*_contiguous(rows, values, positions, bias, residual), activation=activation, other=pair)
    return out if x.dim() == 2 else out.view(*size[:-1], m)


def _contiguous(*operands: Tensor | None) -> tuple[Any, ...]:
    return tuple(one if one is None else one.contiguous() for one in operands)


def _pair(
    x, values, indices, positions, bias, other_values, other_indices, other_positions, other_bias, activation
):  # fmt: skip
    first = _linear(x, values, indices, positions, bias, None, activation)
    return first * _linear(x, other_values, other_indices, other_positions, other_bias, None, "none")


def _pair_cuda(
    x, values, indices, positions, bias, other_values, other_indices, other_positions, other_bias, activation
):  # fmt: skip
    check_biases(bias, other_bias)
    other = (other_values, other_positions, other_bias)
    out = _launched(x, values, positions, bias, None, activation, other)
    if out is not None:
        return out
    return _pair(
        x, values, indices, positions, bias, other_values, other_indices, other_positions, other_bias, activation
    )


def _fake(x, values, *rest):
    return x.new_empty((*x.shape[:-1], values.shape[0]))


implement("packed_linear", _linear, _linear_cuda, _fake)
implement("packed_pair", _pair, _pair_cuda, _fake)
