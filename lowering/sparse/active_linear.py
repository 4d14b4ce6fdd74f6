"""A linear layer of one row by the weights of inputs that are not zero, as an operation."""

from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.strided import dtype_name, name_of
from sparsecomp.lowering.launch.watch import allocate
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.precision import KERNEL_DTYPES


class ActiveLinear(NamedTuple):
    """(1, k) times (k, n), all contiguous."""

    k: int
    n: int
    has_bias: bool
    dtype: str


def launch_active_linear(x: Tensor, weight: Tensor, every: Tensor, bias: Tensor | None) -> Tensor | None:
    """See `sparsecomp.ops.active_linear`; None where no kernel takes the operands."""
    (rows, k), n = x.shape, weight.shape[1]
    if not takes(rows, k, n, x.dtype) or weight.dtype is not x.dtype or bias is not None and bias.dtype is not x.dtype:
        return None
    out = allocate((1, n), (n, 1), x.dtype, x.device)
    problem = ActiveLinear(k, n, bias is not None, dtype_name(x))
    dispatch.launch(ACTIVE_LINEAR, problem, x, weight, every, bias, out)
    return out


def takes(rows: int, k: int, n: int, dtype: torch.dtype) -> bool:
    """Whether there is a kernel for a layer. Several rows have few inputs that are zero in all of them."""
    return rows == 1 and k > 0 and n > 0 and dtype in KERNEL_DTYPES


def _signature(problem: ActiveLinear, device: Device) -> KernelSignature:
    p = problem
    return KernelSignature(
        "active_linear", device, dtypes=(p.dtype,), accumulator="float32", epilogue="bias" if p.has_bias else "",
        sizes=(("k", p.k), ("n", p.n)),
    )  # fmt: skip


def _representative(signature: KernelSignature) -> ActiveLinear:
    given = {name: int(size) for name, size in signature.sizes}
    return ActiveLinear(**given, has_bias=bool(signature.epilogue), dtype=signature.dtypes[0])


def _operands(problem: ActiveLinear, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    p, random = problem, torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, p.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device).to(dtype)

    # a fifth of what a ReLU of values around zero leaves: where a kernel reads too little, much is missing
    x = (normal(1, p.k) - 1.3).relu()
    every = torch.zeros(1, dtype=torch.int32, device=device)
    out = torch.full((1, p.n), float("nan"), dtype=dtype, device=device)
    return x, normal(p.k, p.n), every, normal(p.n) if p.has_bias else None, out


def _reference(problem: ActiveLinear, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    x, weight, _, bias, _ = operands
    assert x is not None and weight is not None
    product = x.double() @ weight.double()
    return (product if bias is None else product + bias.double(),)


_TOLERANCE = {name_of(torch.float32): 2e-6, name_of(torch.float16): 1e-3, name_of(torch.bfloat16): 8e-3}

ACTIVE_LINEAR = Operation(
    "active_linear", _signature, _representative, _operands, (4,), _reference,
    lambda problem: _TOLERANCE[problem.dtype],
)  # fmt: skip
