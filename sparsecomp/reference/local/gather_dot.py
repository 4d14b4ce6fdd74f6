"""The three products of a layer of fixed fan-in in plain torch: what the CPU runs, and what kernels are held against.

The layer is a CSR matrix whose rows all have k entries, so the sparse products of `sparsecomp.reference.sparse` are the
form: on a CPU they took a tenth of the time of gathering (rows, n_out, k) elements, compiled by Inductor or not.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsecomp.reference.local.transposed import outputs_of
from sparsecomp.reference.sparse import compact_product, compact_sampled, gathered_elements

_FEW, _ROWS = 4, 128
"""Rows up to which a CPU's gradient by the weight gathers, as torch's sampled product takes longer; and those that
product takes at a time, so that transposed operands stay in the cache."""


def gathered_product(x: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    """(rows, n_in) to (rows, n_out): the sum of weight[o, j] · x[:, index[o, j]] over j."""
    matrix = pointers_of_rows(index), index.flatten(), weight.flatten()
    return compact_product(*matrix, (index.shape[0], x.shape[1]), x.mT).mT


def by_input(grad: Tensor, weight: Tensor, index: Tensor, lists: Sequence[Tensor], inputs: int) -> Tensor:
    """(rows, n_out) to (rows, inputs): the gradient by x, summed in the order of `lists`.

    Args:
        lists: pointers and order of `transposed_lists`.
    """
    pointers, order = lists
    values = weight.flatten().index_select(0, order)
    return compact_product(pointers, outputs_of(order, index.shape[1]), values, (inputs, index.shape[0]), grad.mT).mT


def by_weight(x: Tensor, grad: Tensor, index: Tensor) -> Tensor:
    """(n_out, k): the sum of grad[:, o] · x[:, index[o, j]] over rows."""
    pattern = pointers_of_rows(index), index.flatten()
    if index.is_cuda:
        return gathered_elements(grad.mT, x.mT, *pattern).view(index.shape)
    if index.shape[1] > x.shape[1]:  # more elements than the dense gradient has, which torch's sampled product refuses
        return (grad.mT @ x).gather(1, index.long())
    if 0 < x.shape[0] <= _FEW:
        return _by_weight_of_few(x, grad, index)
    found = x.new_zeros(index.numel())
    for some, of_some in zip(x.split(_ROWS), grad.split(_ROWS), strict=True):
        found += compact_sampled(of_some.mT, some.mT, *pattern)
    return found.view(index.shape)


def _by_weight_of_few(x: Tensor, grad: Tensor, index: Tensor) -> Tensor:
    out = x.new_zeros(index.shape)
    for row, of_row in zip(x, grad, strict=True):
        out.addcmul_(row.index_select(0, index.flatten()).view(index.shape), of_row[:, None])
    return out


def pointers_of_rows(index: Tensor) -> Tensor:
    """Of the CSR matrix that a layer is: (n_out + 1,), int32."""
    outputs, fan_in = index.shape
    return torch.arange(0, outputs * fan_in + 1, fan_in, dtype=torch.int32, device=index.device)
