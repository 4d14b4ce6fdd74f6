"""Softmax over what is stored in each row of a matrix, of a batch of values that share a pattern."""

from typing import Any

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.ops.library import TAGS, differentiable, implement, library
from sparsecomp.reference.precision import KERNEL_DTYPES, accumulator

library.define("row_softmax(Tensor values, Tensor pointers) -> Tensor", tags=TAGS)
library.define("row_softmax_gradient(Tensor grad, Tensor weights, Tensor pointers) -> Tensor", tags=TAGS)


def row_softmax(values: Tensor, pointers: Tensor) -> Tensor:
    """exp(value - the row's greatest) over its sum, for what rows store; computed in float32 at least.

    A row of -inf alone gives zeros, as attention that keeps nothing does. Two calls give the same bits.

    Args:
        values: (entries,) or (batch, entries), floating.
        pointers: (rows + 1,) int32 or int64, as of `sparsecomp.formats.CSR`; entries outside of them are spare.

    Returns:
        As values, 0 in spare entries. Gradients flow to values.

    Raises:
        FormatError: values or pointers of other dimensions or dtypes, or on two devices.
    """
    return torch.ops.sparsecomp.row_softmax.default(values, pointers)


def _check(values: Tensor, pointers: Tensor) -> None:
    whole = pointers.dim() == 1 and pointers.numel() > 0 and pointers.dtype in (torch.int32, torch.int64)
    if values.dim() not in (1, 2) or not values.is_floating_point() or not whole or values.device != pointers.device:
        raise FormatError(
            f"values {tuple(values.shape)} {values.dtype} on {values.device} and pointers {tuple(pointers.shape)}"
            f" {pointers.dtype} on {pointers.device}: need (entries,) or (batch, entries), floating, and (rows + 1,) of"
            " int32 or int64 on the same device"
        )


def _softmax(values: Tensor, pointers: Tensor) -> Tensor:
    """Plain torch, which can be differentiated any number of times."""
    place, inside, rows = _places(values, pointers)
    wide = values.to(accumulator(values.dtype)).masked_fill(~inside, -torch.inf)
    top = wide.new_full((*wide.shape[:-1], rows), -torch.inf).scatter_reduce(-1, place, wide.detach(), "amax")
    top = top.masked_fill(top == -torch.inf, 0)
    powers = (wide - top.gather(-1, place)).exp()
    sums = torch.zeros_like(top).scatter_add(-1, place, powers)
    return (powers / sums.masked_fill(sums == 0, 1).gather(-1, place)).to(values.dtype)


def _places(values: Tensor, pointers: Tensor) -> tuple[Tensor, Tensor, int]:
    """Each entry's row, 0 for spare ones; which entries are none; rows, of which there is one at least."""
    entry, rows = torch.arange(values.shape[-1], device=values.device), max(pointers.numel() - 1, 1)
    inside = (entry >= pointers[0]) & (entry < pointers[-1])
    row = torch.searchsorted(pointers[1:].long(), entry, right=True)
    return row.where(inside, 0).expand_as(values), inside, rows


def _cpu(values: Tensor, pointers: Tensor) -> Tensor:
    _check(values, pointers)
    return _softmax(values, pointers)


def _cuda(values: Tensor, pointers: Tensor) -> Tensor:
    _check(values, pointers)
    if values.dtype not in KERNEL_DTYPES or not values.numel():
        return _softmax(values, pointers)
    from sparsecomp.lowering.sparse.row_softmax import write_softmax  # loads Triton

    out = torch.zeros_like(values, memory_format=torch.contiguous_format)
    write_softmax(values.contiguous(), pointers.contiguous(), out)
    return out


def _fake(values: Tensor, pointers: Tensor) -> Tensor:
    _check(values, pointers)
    return torch.empty_like(values, memory_format=torch.contiguous_format)


def _gradient(grad: Tensor, weights: Tensor, pointers: Tensor) -> Tensor:
    """weights · (grad - the row's sum of weights · grad)."""
    place, inside, rows = _places(weights, pointers)
    grad, wide = (one.to(accumulator(weights.dtype)).masked_fill(~inside, 0) for one in (grad, weights))
    sums = wide.new_zeros((*wide.shape[:-1], rows)).scatter_add(-1, place, wide * grad)
    return (wide * (grad - sums.gather(-1, place))).to(weights.dtype)


def _cuda_gradient(grad: Tensor, weights: Tensor, pointers: Tensor) -> Tensor:
    if weights.dtype not in KERNEL_DTYPES or not weights.numel():
        return _gradient(grad, weights, pointers)
    from sparsecomp.lowering.sparse.row_softmax import write_softmax_gradient  # loads Triton

    out = torch.zeros_like(weights, memory_format=torch.contiguous_format)
    write_softmax_gradient(grad.contiguous(), weights.contiguous(), pointers.contiguous(), out)
    return out


def _fake_gradient(grad: Tensor, weights: Tensor, pointers: Tensor) -> Tensor:
    return torch.empty_like(weights, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(output, inputs[1])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    weights, pointers = ctx.saved_tensors
    if torch.is_grad_enabled():  # by those who differentiate it again
        return _gradient(grad, weights, pointers), None
    return torch.ops.sparsecomp.row_softmax_gradient.default(grad, weights, pointers), None


implement("row_softmax", _cpu, _cuda, _fake)
implement("row_softmax_gradient", _gradient, _cuda_gradient, _fake_gradient)
differentiable("row_softmax", _backward, _save)
