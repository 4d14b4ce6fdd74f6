"""CUDA implementation of the selection by a count, and the operation behind it."""

from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.strided import dtype_name
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.masks import MOST, select_by_sorting
from sparsecomp.reference.precision import KERNEL_DTYPES

_BITS = {2: torch.int16, 4: torch.int32}
"""The kernels read scores as integers of their size, whose order follows from their bits."""


class SelectLargest(NamedTuple):
    """The largest of `numel` scores, 1 to 2^31 - 2^16 of them; how many is read on the device."""

    numel: int
    dtype: str
    count_dtype: str


def select(scores: Tensor, count: Tensor) -> Tensor:
    """See `sparsecomp.ops.select_largest`: by the kernels, or by sorting what they do not take."""
    fits = scores.dtype in KERNEL_DTYPES and 0 < scores.numel() <= MOST and count.device == scores.device
    return select_by_kernel(scores.contiguous(), count) if fits else select_by_sorting(scores, count)


def select_by_kernel(scores: Tensor, count: Tensor) -> Tensor:
    """See `sparsecomp.ops.select_largest`: contiguous scores of a kernel's dtype, and a 0-d count on their device."""
    selected = torch.empty_like(scores, dtype=torch.bool)
    problem = SelectLargest(scores.numel(), dtype_name(scores), dtype_name(count))
    dispatch.launch(SELECT_LARGEST, problem, scores.view(_BITS[scores.itemsize]), count, selected.view(torch.uint8))
    return selected


def _signature(problem: SelectLargest, device: Device) -> KernelSignature:
    dtypes = (problem.dtype, problem.count_dtype)
    return KernelSignature("select_largest", device, dtypes=dtypes, sizes=(("numel", problem.numel),))


def _representative(signature: KernelSignature) -> SelectLargest:
    return SelectLargest(int(dict(signature.sizes)["numel"]), *signature.dtypes)


def _operands(problem: SelectLargest, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    """Scores in [0, 1), as consistencies are, a tenth of which is selected."""
    p, random = problem, torch.Generator(device).manual_seed(seed)
    scores = torch.rand(p.numel, generator=random, device=device).to(getattr(torch, p.dtype))
    count = torch.full((), p.numel // 10, dtype=getattr(torch, p.count_dtype), device=device)
    selected = torch.full((p.numel,), 77, dtype=torch.uint8, device=device)
    return scores.view(_BITS[scores.itemsize]), count, selected


def _reference(problem: SelectLargest, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    scores, count, _ = operands
    assert scores is not None and count is not None
    return (select_by_sorting(scores.view(getattr(torch, problem.dtype)), count).view(torch.uint8),)


SELECT_LARGEST = Operation(
    "select_largest", _signature, _representative, _operands, (2,), _reference, lambda _: 0.0
)  # fmt: skip
