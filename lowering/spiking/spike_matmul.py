"""The batched product of two tensors of counts of one byte, as one operation on int8 tensor cores."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.strided import name_of, strided
from sparsecomp.lowering.tuning.template import Operation


class BatchStrides(NamedTuple):
    """Of a batch of batches of matrices, such as the heads of each image."""

    outer: int
    inner: int
    row: int
    column: int

    @property
    def layout(self) -> str:
        """Which elements are neighbours."""
        return "rows" if self.column == 1 else "columns" if self.row == 1 else "strided"


class SpikeMatmul(NamedTuple):
    """(outer, inner, m, k) times (outer, inner, k, n), the result contiguous and times `scale`.

    Attributes:
        a, b: strides of the operands.
        dtype: of the result.
    """

    m: int
    n: int
    k: int
    outer: int
    inner: int
    a: BatchStrides
    b: BatchStrides
    scale: float
    dtype: str

    @property
    def batch(self) -> int:
        """Matrices of each operand."""
        return self.outer * self.inner

    @property
    def numbers(self) -> tuple[float, ...]:
        """The run-time numbers of the kernel, in its order."""
        return (self.m, self.n, self.k, self.inner, *self.a, *self.b, self.scale)


def launch_spike_matmul(a: Tensor, b: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """See `sparsecomp.ops.spiking.spike_matmul`; the counts are bytes, their strides any."""
    out = a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=dtype)
    if out.numel() == 0:
        return out
    if a.shape[-1] == 0:
        return out.zero_()
    dispatch.launch(SPIKE_MATMUL, *_problem(a, b, scale, dtype), out)
    return out


def _problem(a: Tensor, b: Tensor, scale: float, dtype: torch.dtype) -> tuple[SpikeMatmul, Tensor, Tensor]:
    a, b = _two_batches(a, b)
    outer, inner, m, k = a.shape
    strides = BatchStrides(*a.stride()), BatchStrides(*b.stride())
    return SpikeMatmul(m, b.shape[-1], k, outer, inner, *strides, scale, name_of(dtype)), a, b


def _two_batches(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both with two dimensions of the batch: views where the strides allow, as they do of a tensor split in heads."""
    batch = a.shape[:-2]
    for split in reversed(range(len(batch) + 1)):
        sizes = math.prod(batch[:split]), math.prod(batch[split:])
        try:
            return a.view(*sizes, *a.shape[-2:]), b.view(*sizes, *b.shape[-2:])
        except RuntimeError:
            continue
    return a.reshape(1, -1, *a.shape[-2:]), b.reshape(1, -1, *b.shape[-2:])


def _signature(problem: SpikeMatmul, device: Device) -> KernelSignature:
    p = problem
    return KernelSignature(
        "spike_matmul", device, dtypes=("int8", p.dtype), accumulator="int32", layouts=(p.a.layout, p.b.layout),
        sizes=(("m", p.m), ("n", p.n), ("k", p.k), ("batch", p.batch)),
    )  # fmt: skip


def _representative(signature: KernelSignature) -> SpikeMatmul:
    given = {name: int(size) for name, size in signature.sizes}
    m, n, k, batch = given["m"], given["n"], given["k"], given["batch"]
    a, b = (
        {"rows": (columns, 1), "columns": (1, rows), "strided": (2 * columns, 2)}[layout]
        for layout, rows, columns in zip(signature.layouts, (m, k), (k, n), strict=True)
    )
    strides = BatchStrides(0, 2 * m * k, *a), BatchStrides(0, 2 * k * n, *b)
    return SpikeMatmul(m, n, k, 1, batch, *strides, 1.0, signature.dtypes[1])


def _operands(problem: SpikeMatmul, device: torch.device, seed: int) -> tuple[Tensor, ...]:
    p, random = problem, torch.Generator(device).manual_seed(seed)

    def counts(count: int) -> Tensor:
        return torch.randint(-128, 128, (count,), generator=random, device=device, dtype=torch.int8)

    a, b = strided((p.outer, p.inner, p.m, p.k), p.a, counts), strided((p.outer, p.inner, p.k, p.n), p.b, counts)
    poison = float("nan") if getattr(torch, p.dtype).is_floating_point else -77
    out = torch.full((p.outer, p.inner, p.m, p.n), poison, dtype=getattr(torch, p.dtype), device=device)
    return a, b, out


def _reference(problem: SpikeMatmul, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    a, b, _ = operands
    assert a is not None and b is not None
    return (a.double() @ b.double() * problem.scale,)


_TOLERANCE = {"float16": 1e-3, "bfloat16": 5e-3, "float32": 1e-7}

SPIKE_MATMUL = Operation(
    "spike_matmul", _signature, _representative, _operands, (2,), _reference,
    lambda problem: _TOLERANCE.get(problem.dtype, 0.0),
)  # fmt: skip
