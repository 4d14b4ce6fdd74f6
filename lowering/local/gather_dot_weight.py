"""CUDA implementation of the gradient of a layer of fixed fan-in by its weight, and the operation behind it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.strided import dtype_name, random_tensor
from sparsecomp.lowering.local.gather_dot import SIZES, TOLERANCE, contiguous_rows
from sparsecomp.lowering.tuning.template import Operation


class GatherDotWeight(NamedTuple):
    """The sizes, strides and type of a gradient.

    Attributes:
        rows, inputs, outputs, fan_in: sizes; x is (rows, inputs), the gradient of the layer's result (rows, outputs).
        x_row, grad_row: their strides by row; by column they are 1.
        dtype: of all operands.
    """

    rows: int
    inputs: int
    outputs: int
    fan_in: int
    x_row: int
    grad_row: int
    dtype: str


def gather_dot_weight(x: Tensor, grad: Tensor, index: Tensor, out: Tensor) -> None:
    """Write the sum of grad[:, o] · x[:, index[o, j]] over rows to ``out[o, j]``.

    Args:
        x, grad: (rows, n_in) and (rows, n_out), float16, bfloat16 or float32.
        index: (n_out, k), int32, contiguous.
        out: (n_out, k), contiguous.
    """
    x, grad = contiguous_rows(x), contiguous_rows(grad)
    (rows, inputs), (outputs, fan_in) = x.shape, index.shape
    problem = GatherDotWeight(rows, inputs, outputs, fan_in, x.stride(0), grad.stride(0), dtype_name(x))
    dispatch.launch(GATHER_DOT_WEIGHT, problem, x, grad, index, out)


def _signature(problem: GatherDotWeight, device: Device) -> KernelSignature:
    p = problem
    return KernelSignature(
        "gather_dot_weight", device, dtypes=(p.dtype,), accumulator="float32", index="int32",
        sizes=tuple(zip(SIZES, p[:4], strict=True)),
    )  # fmt: skip


def _representative(signature: KernelSignature) -> GatherDotWeight:
    rows, inputs, outputs, fan_in = (int(dict(signature.sizes)[name]) for name in SIZES)
    return GatherDotWeight(rows, inputs, outputs, fan_in, inputs, outputs, signature.dtypes[0])


def _operands(problem: GatherDotWeight, device: torch.device, seed: int) -> tuple[Tensor, ...]:
    p, random = problem, torch.Generator(device).manual_seed(seed)
    x = random_tensor((p.rows, p.inputs), (p.x_row, 1), p.dtype, random)
    grad = random_tensor((p.rows, p.outputs), (p.grad_row, 1), p.dtype, random)
    shape = (p.outputs, p.fan_in)
    index = torch.randint(p.inputs, shape, generator=random, device=device, dtype=torch.int32)
    return x, grad, index, x.new_full(shape, torch.nan)


def _reference(problem: GatherDotWeight, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    x, grad, index, _ = operands
    assert x is not None and grad is not None and index is not None
    places = [x.double().index_select(1, place.long()) for place in index.unbind(1)]
    return (torch.stack([(grad.double() * place).sum(0) for place in places], 1),)


GATHER_DOT_WEIGHT: Operation[Any] = Operation(
    "gather_dot_weight", _signature, _representative, _operands, (3,), _reference,
    lambda problem: TOLERANCE[problem.dtype],
)  # fmt: skip
