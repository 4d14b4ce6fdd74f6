"""A gated pair of linear layers by weights of one sparse format, as of a LLaMA's feed-forward layer, as one operator.

A compiler puts it where few rows make one launch of both the fastest; more rows are multiplied one weight after
another.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.ops.library import TAGS, implement, library
from sparsecomp.ops.sparse.linear import result_shape, sparse_linear
from sparsecomp.reference.patterns import Layout

library.define(
    "gated_pair(Tensor x, Tensor values, Tensor[] pattern, Tensor? bias, Tensor other_values, Tensor[] other_pattern, "
    "Tensor? other_bias, str layout, str activation) -> Tensor",
    tags=TAGS,
)


def gated_pair(
    x: Tensor, values: Tensor, pattern: Sequence[Tensor], bias: Tensor | None, other_values: Tensor,
    other_pattern: Sequence[Tensor], other_bias: Tensor | None, layout: str, activation: str,
) -> Tensor:  # fmt: skip
    """activation(x @ S.mT + bias) · (x @ T.mT + other_bias), rounded once where a kernel takes it.

    It has no gradient.

    Args:
        x: (..., k), of the dtype of `values` and `other_values`.
        values: of S, without a batch.
        pattern: index arrays of S; see `sparsecomp.reference.patterns`.
        bias: (m,); S and T both have one, of one dtype, or none.
        other_values, other_pattern, other_bias: of T.
        layout: of S, from `Layout.written`; that of T but for how uneven its rows are.
        activation: "none", "relu", "gelu", "gelu_tanh", "silu", "sigmoid" or "tanh".

    Returns:
        (..., m), contiguous.

    Raises:
        FormatError: operands that do not belong together, or an unknown word.
    """
    return torch.ops.sparsecomp.gated_pair.default(
        x, values, pattern, bias, other_values, other_pattern, other_bias, layout, activation
    )


def check_biases(bias: Tensor | None, other_bias: Tensor | None) -> None:
    """That both weights of a pair have a bias of one shape and dtype, or none.

    Raises:
        FormatError: they do not.
    """
    kinds = [None if one is None else (one.dtype, one.shape) for one in (bias, other_bias)]
    if kinds[0] != kinds[1]:
        raise FormatError(
            "one weight of a pair has a bias that the other has not, or of another dtype or shape: both or none"
        )


def _pair(x, values, pattern, bias, other_values, other_pattern, other_bias, layout, activation):
    check_biases(bias, other_bias)
    gate = sparse_linear(x, values, pattern, layout, bias=bias, activation=activation)
    return gate * sparse_linear(x, other_values, other_pattern, layout, bias=other_bias)


def _pair_cuda(x, values, pattern, bias, other_values, other_pattern, other_bias, layout, activation):
    from sparsecomp.lowering.sparse.gated_pair import pair_product  # loads Triton

    read = Layout.read(layout)
    _shape(x, values, pattern, bias, other_values, other_pattern, other_bias, read)
    weight, other = _contiguous(values, *pattern[: read.own]), _contiguous(other_values, *other_pattern[: read.own])
    found = pair_product(_contiguous(x)[0], weight, other, _contiguous(bias, other_bias), read, activation)
    if found is not None:
        return found
    return _pair(x, values, pattern, bias, other_values, other_pattern, other_bias, layout, activation)


def _contiguous(*operands: Tensor | None) -> tuple[Any, ...]:
    return tuple(one if one is None else one.contiguous() for one in operands)


def _fake(x, values, pattern, bias, other_values, other_pattern, other_bias, layout, activation):
    return x.new_empty(_shape(x, values, pattern, bias, other_values, other_pattern, other_bias, Layout.read(layout)))


def _shape(x, values, pattern, bias, other_values, other_pattern, other_bias, layout: Layout) -> tuple[int, ...]:
    """Shape of the result, after all checks that look at no contents."""
    check_biases(bias, other_bias)
    result_shape(x, other_values, other_pattern, other_bias, None, layout, False)
    return result_shape(x, values, pattern, bias, None, layout, False)


implement("gated_pair", _pair, _pair_cuda, _fake)
