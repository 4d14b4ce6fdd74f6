"""A linear layer of one row that reads the weights of active inputs alone: those that are not zero.

Behind a ReLU most inputs of a layer are zero, and a layer of one row takes as long as its weights take to read. Deja
Vu (Liu et al. 2023) and TEAL (Liu et al. 2024) leave such weights out by a prediction or a threshold; here an input is
left out only where it is zero, so that nothing is approximated.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsecomp.ops.library import TAGS, implement, library

library.define("active_linear(Tensor x, Tensor weight, Tensor every, Tensor? bias) -> Tensor", tags=TAGS)


def active_linear(x: Tensor, weight: Tensor, every: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight + bias, without the rows of `weight` whose input is zero; summed in float32.

    It has no gradient. Several rows, and dtypes that no kernel takes, are multiplied as a whole.

    Args:
        x: (..., k).
        weight: (k, n), contiguous, of x's dtype: the transpose of a linear layer's.
        every: (1,) int32; not 0 if all rows are to be read, since 0 times infinity is NaN. See `must_read_all`.
        bias: (n,), of x's dtype.

    Returns:
        (..., n), contiguous.
    """
    return torch.ops.sparsecomp.active_linear.default(x, weight, every, bias)


def must_read_all(weight: Tensor) -> Tensor:
    """`every` of a weight: 1 where it holds NaN or infinity, which an input of zero turns into NaN. No host wait."""
    return torch.isfinite(weight).all().logical_not().to(torch.int32).reshape(1)


def _reference(x: Tensor, weight: Tensor, every: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight.mT, bias).contiguous()


def _cuda(x: Tensor, weight: Tensor, every: Tensor, bias: Tensor | None) -> Tensor:
    from sparsecomp.lowering.sparse.active_linear import launch_active_linear  # loads Triton

    rows = x.reshape(-1, x.shape[-1])
    if weight.is_contiguous() and (bias is None or bias.is_contiguous()):
        out = launch_active_linear(rows if rows.is_contiguous() else rows.contiguous(), weight, every, bias)
        if out is not None:
            return out if x.dim() == 2 else out.view(*x.shape[:-1], weight.shape[1])
    return _reference(x, weight, every, bias)


def _fake(x: Tensor, weight: Tensor, every: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[1]))


implement("active_linear", _reference, _cuda, _fake)
