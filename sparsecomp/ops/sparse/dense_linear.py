"""A dense linear layer with its ReLU in the product: one launch where a compiled graph has two.

For layers in inference whose weight is written out dense; torch's product has no gradient in this form.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsecomp import _compat
from sparsecomp.ops.library import TAGS, implement, library

library.define("dense_linear_relu(Tensor x, Tensor weight, Tensor bias) -> Tensor", tags=TAGS)


def dense_linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """relu(x @ weight.mT + bias), rounded once.

    Args:
        x: (..., k).
        weight: (m, k), of the same dtype.
        bias: (m,), of the same dtype.
    """
    return torch.ops.sparsecomp.dense_linear_relu.default(x, weight, bias)


def _reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.relu(F.linear(x, weight, bias)).contiguous()


def _cuda(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if x.numel() == 0 or weight.numel() == 0:
        return _reference(x, weight, bias)
    if x.dim() == 2:
        return _compat.addmm_relu(bias, x, weight.t())
    return _compat.addmm_relu(bias, x.reshape(-1, x.shape[-1]), weight.t()).view(*x.shape[:-1], weight.shape[0])


def _fake(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


implement("dense_linear_relu", _reference, _cuda, _fake)
