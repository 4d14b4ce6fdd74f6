"""CUDA implementation of a layer of fixed fan-in, and the operation behind it.

Its kernels differ in how they gather. Where neighbouring outputs read neighbouring inputs, as on a grid, reading
x as it lies is as fast as reading without an index; where they read anywhere, each input is better kept beside the
same input of other rows.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.epilogue import Output, finished, output_from_text, output_of, random_operands
from sparsecomp.lowering.launch.strided import Strides, dtype_name, random_tensor
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.local.spread import SPREADS

TOLERANCE = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}
"""Relative Frobenius error of a product by dtype of its result."""
SIZES = ("rows", "inputs", "outputs", "fan_in")
"""What a problem begins with."""


class GatherDot(NamedTuple):
    """The sizes, strides and types of a product; see ``sparsecomp.ops.local.gather_dot``.

    Attributes:
        rows: of x, and of the result.
        inputs, outputs, fan_in: n_in, n_out and k.
        x_row: stride of x by row; by column it is 1.
        lines: cache lines that 32 neighbouring outputs read at once, as one of ``SPREADS``.
        dtype: of x and weight.
        output: the output (1, rows, outputs) and its epilogue.
    """

    rows: int
    inputs: int
    outputs: int
    fan_in: int
    x_row: int
    lines: int
    dtype: str
    output: Output


def gather_dot(
    x: Tensor, weight: Tensor, index: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor,
    activation: str, spread: str,
) -> None:  # fmt: skip
    """Write activation(y + bias + residual) to ``out``.

    Args:
        x: (rows, n_in), float16, bfloat16 or float32.
        weight, index: (n_out, k), contiguous, the index int32.
        bias: (n_out,), contiguous.
        residual, out: (rows, n_out).
        spread: as of ``sparsecomp.ops.local.gather_dot``.
    """
    if not out.numel():
        return
    x = contiguous_rows(x)
    described = output_of(out, bias, "column", residual, activation, 1.0)
    outputs, fan_in = index.shape
    problem = GatherDot(
        x.shape[0], x.shape[1], outputs, fan_in, x.stride(0), SPREADS[spread], dtype_name(x), described
    )
    dispatch.launch(GATHER_DOT, problem, x, weight, index, bias, residual, out)


def contiguous_rows(x: Tensor) -> Tensor:
    """x (rows, columns) with the numbers of a row side by side."""
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()


def _signature(problem: GatherDot, device: Device) -> KernelSignature:
    p = problem
    return KernelSignature(
        "gather_dot", device, dtypes=(p.dtype, p.output.dtype), accumulator="float32", index="int32",
        epilogue=p.output.text,
        sizes=tuple(zip(SIZES, p[:4], strict=True)),
        parameters=(("lines", p.lines),),
    )  # fmt: skip


def _representative(signature: KernelSignature) -> GatherDot:
    rows, inputs, outputs, fan_in = (int(dict(signature.sizes)[name]) for name in SIZES)
    output = output_from_text(signature.epilogue, signature.dtypes[1], Strides(0, outputs, 1))
    lines = int(dict(signature.parameters)["lines"])
    return GatherDot(rows, inputs, outputs, fan_in, inputs, lines, signature.dtypes[0], output)


def _operands(problem: GatherDot, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    p, random = problem, torch.Generator(device).manual_seed(seed)
    x = random_tensor((p.rows, p.inputs), (p.x_row, 1), p.dtype, random)
    weight = random_tensor((p.outputs, p.fan_in), (p.fan_in, 1), p.dtype, random)
    shape = (p.outputs, p.fan_in)
    if p.lines > 8:
        index = torch.randint(p.inputs, shape, generator=random, device=device, dtype=torch.int32)
    else:  # a window that slides with the output
        first = torch.arange(p.outputs, device=device)[:, None] * max(p.inputs - p.fan_in, 0) // max(p.outputs, 1)
        index = (first + torch.arange(p.fan_in, device=device)).remainder(p.inputs).int()
    bias, residual, out = random_operands(p.output, (1, p.rows, p.outputs), random)
    return x, weight, index, bias, None if residual is None else residual[0], out[0]


def _reference(problem: GatherDot, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    x, weight, index, bias, residual, _ = operands
    assert x is not None and weight is not None and index is not None
    found = x.new_zeros((problem.rows, problem.outputs), dtype=torch.float64)
    for place in range(problem.fan_in):
        found += x.double().index_select(1, index[:, place].long()) * weight[:, place].double()
    return (finished(problem.output, found, bias, residual),)


GATHER_DOT: Operation[Any] = Operation(
    "gather_dot", _signature, _representative, _operands, (5,), _reference,
    lambda problem: TOLERANCE[problem.output.dtype],
)  # fmt: skip


def unrolled(fan_in: int) -> int:
    """How many weights of an output a kernel loads at once: a divisor of them all."""
    return max(count for count in range(1, 13) if fan_in % count == 0)


def unsupported(problem: Any) -> str | None:
    """Why no kernel here takes the problem's dtype; None if they do."""
    return None if problem.dtype in TOLERANCE else f"{problem.dtype} is not summed in float32: use the reference"
