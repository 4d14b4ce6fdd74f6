"""CUDA implementation of the gradient of a layer of fixed fan-in by its input, and the operation behind it.

It goes through the lists of who reads an input, so that each input's sum is one program's and nothing is scattered.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.strided import dtype_name, random_tensor
from sparsecomp.lowering.local.gather_dot import SIZES, TOLERANCE, contiguous_rows
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.local.transposed import transposed_lists


class GatherDotInput(NamedTuple):
    """The sizes, strides and type of a gradient.

    Attributes:
        rows, inputs, outputs, fan_in: sizes; the gradient of the layer's result is (rows, outputs), that by its input
            (rows, inputs).
        grad_row: stride of the former by row; by column it is 1.
        dtype: of all operands.
    """

    rows: int
    inputs: int
    outputs: int
    fan_in: int
    grad_row: int
    dtype: str


def gather_dot_input(grad: Tensor, weight: Tensor, pointers: Tensor, order: Tensor, out: Tensor) -> None:
    """Write the sum of grad[:, o] · weight[o, j] over all (o, j) that read input i to ``out[:, i]``.

    Args:
        grad: (rows, n_out), float16, bfloat16 or float32.
        weight: (n_out, k), contiguous.
        pointers, order: (n_in + 1,) and (n_out · k,), int32: see ``sparsecomp.reference.local.transposed``.
        out: (rows, n_in), contiguous.
    """
    grad = contiguous_rows(grad)
    (rows, inputs), (outputs, fan_in) = out.shape, weight.shape
    problem = GatherDotInput(rows, inputs, outputs, fan_in, grad.stride(0), dtype_name(grad))
    dispatch.launch(GATHER_DOT_INPUT, problem, grad, weight, pointers, order, out)


def _signature(problem: GatherDotInput, device: Device) -> KernelSignature:
    p = problem
    return KernelSignature(
        "gather_dot_input", device, dtypes=(p.dtype,), accumulator="float32", index="int32",
        sizes=tuple(zip(SIZES, p[:4], strict=True)),
    )  # fmt: skip


def _representative(signature: KernelSignature) -> GatherDotInput:
    rows, inputs, outputs, fan_in = (int(dict(signature.sizes)[name]) for name in SIZES)
    return GatherDotInput(rows, inputs, outputs, fan_in, outputs, signature.dtypes[0])


def _operands(problem: GatherDotInput, device: torch.device, seed: int) -> tuple[Tensor, ...]:
    p, random = problem, torch.Generator(device).manual_seed(seed)
    grad = random_tensor((p.rows, p.outputs), (p.grad_row, 1), p.dtype, random)
    weight = random_tensor((p.outputs, p.fan_in), (p.fan_in, 1), p.dtype, random)
    index = torch.randint(p.inputs, weight.shape, generator=random, device=device, dtype=torch.int32)
    return grad, weight, *transposed_lists(index, p.inputs), grad.new_full((p.rows, p.inputs), torch.nan)


def _reference(problem: GatherDotInput, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    grad, weight, pointers, order, _ = operands
    assert grad is not None and weight is not None and pointers is not None and order is not None
    reads = torch.repeat_interleave(torch.arange(problem.inputs, device=grad.device), pointers.long().diff())
    found = grad.new_zeros((problem.rows, problem.inputs), dtype=torch.float64)
    for some, read in zip(order.split(problem.outputs), reads.split(problem.outputs), strict=True):
        terms = grad.double()[:, some.long() // problem.fan_in] * weight.flatten()[some.long()].double()
        found.index_add_(1, read, terms)
    return (found,)


GATHER_DOT_INPUT: Operation[Any] = Operation(
    "gather_dot_input", _signature, _representative, _operands, (4,), _reference,
    lambda problem: TOLERANCE[problem.dtype],
)  # fmt: skip
