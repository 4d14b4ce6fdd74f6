"""2:4 times dense on sparse tensor cores as an operation: out = activation(scale · (S @ dense) + bias + residual).

cuSPARSELt multiplies a copy of S in a form of its own, which is made once and kept. A write to S's arrays can escape
the host: through `.data`, in a compiled graph, in the replay of a CUDA graph. So each product takes a fingerprint of
them on the device, and where it is not that of the copy, an ordinary kernel behind the product writes the result
anew. So it does where the library multiplied NaN or infinity by the zeros that fill groups up. Inside
`frozen_weights` a weight without such zeros needs none of this.
"""

import logging
from dataclasses import replace
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsecomp.errors import LibraryError
from sparsecomp.lowering.cache.signature import Device, KernelSignature, device_of
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.epilogue import finished, output_of
from sparsecomp.lowering.launch.strided import dtype_name, strides_of
from sparsecomp.lowering.launch.watch import do_not_note
from sparsecomp.lowering.sparse import cusparselt
from sparsecomp.lowering.sparse.spmm_csr import TOLERANCE
from sparsecomp.lowering.sparse.spmm_nm import SPMM_NM, SpmmNM
from sparsecomp.lowering.tuning import cost
from sparsecomp.lowering.tuning.ceilings import card_of
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.frozen import are_frozen
from sparsecomp.reference.memo import MEMO

log = logging.getLogger("sparsecomp")

refused_late: set[tuple[SpmmNM, torch.device]] = set()
"""Products that the library refused when it came to it."""


def spmm_semi_structured(
    values: Tensor, indices: Tensor, dense: Tensor, out: Tensor, *, bias: Tensor | None = None,
    bias_axis: str = "column", residual: Tensor | None = None, activation: str = "none", scale: float = 1.0,
) -> bool:  # fmt: skip
    """Write activation(scale · (S @ dense) + bias + residual) to `out`, if the library takes it and is expected to
    be the faster; else do nothing.

    Args:
        values: (m, k / 2) float16 or bfloat16, contiguous.
        indices: (m, k / 2) uint8: each value's column within its group of four, ascending.

    Everything else is as in `spmm_nm`. All but relu are computed from what was rounded to the dtype of `out`.

    Returns:
        Whether `out` was written.

    Raises:
        FormatError: a bias or residual that does not fit `out`, or an unknown word.
    """
    if values.dim() != 2 or dense.dim() != 2 or out.numel() == 0 or indices.shape != values.shape:
        return False
    tensors = (values, indices, dense, bias, residual, out)
    # the library reads whole vectors; a view may start between them
    if any(tensor is not None and tensor.data_ptr() % 16 for tensor in tensors) or not indices.is_contiguous():
        return False
    described = output_of(out, bias, bias_axis, residual, activation, scale)
    (m, width), (k, n), promised = values.shape, dense.shape, are_frozen()
    problem = SpmmNM(
        m, k, n, 1, 2, 4, 0, values.stride(0), width, strides_of(dense), dtype_name(values),
        dtype_name(dense), described, not promised,
    )  # fmt: skip
    where = problem, values.device
    if width != 2 * problem.groups or refusal(*where) is not None or (refused_late and where in refused_late):
        return False
    do_not_note()
    copy = MEMO.of(copied, (values, indices), "guarded")
    kept = copy.fingerprint if copy.filled or not promised else None
    try:
        dispatch.launch(SEMI_STRUCTURED, problem, values, indices, copy.compressed, kept, dense, bias, residual, out)
    except LibraryError as error:  # such as an algorithm, tuned for sizes much like these, that does not take them
        refused_late.add(where)
        log.warning("%s: ordinary tensor cores multiply %s from now on", error, problem)
        return False
    return True


@lru_cache(maxsize=8192)
def refusal(problem: SpmmNM, device: torch.device) -> str | None:
    """Why a product on a device goes to the ordinary kernels instead, None if it does not."""
    identity = device_of(device)
    if not SEMI_STRUCTURED.candidates(problem, identity):
        return "; ".join(SEMI_STRUCTURED.refusals(problem, identity).values()) or "no algorithm takes the product"
    return slower(problem, device)


def slower(problem: SpmmNM, device: torch.device) -> str | None:
    ordinary, sparse = (
        min((cost.seconds(one, problem, card_of(device)) for one in found), default=inf)
        for found in (operation.candidates(problem, device_of(device)) for operation in (SPMM_NM, SEMI_STRUCTURED))
    )
    if sparse <= ordinary:
        return None
    return f"estimated {sparse * 1e6:.1f} us on sparse tensor cores against {ordinary * 1e6:.1f} us by ordinary ones"


class Copy(NamedTuple):
    """A weight as the library wants it.

    Attributes:
        compressed: uint8, opaque.
        fingerprint: of what it was made of, each part's lowest bit set if there are zeros among the values.
        filled: whether there may be zeros; only within `frozen_weights` is that read from the device.
    """

    compressed: Tensor
    fingerprint: Tensor
    filled: bool


def copied(values: Tensor, indices: Tensor) -> Copy:
    """A weight compressed by the library.

    Raises:
        LibraryError: the library does not take it.
    """
    from sparsecomp.lowering.sparse.kernels.semi_structured import fingerprint

    values = values.detach()
    compressed = cusparselt.compress(cusparselt.current_handle(values.device), dense_weight(values, indices))
    zeros, seen = (values == 0).any(), fingerprint(values, indices)
    seen.view(torch.int64).bitwise_and_(-2).bitwise_or_(zeros)
    capturing = values.is_cuda and torch.cuda.is_current_stream_capturing()
    return Copy(compressed, seen, capturing or not are_frozen() or bool(zeros))


def dense_weight(values: Tensor, indices: Tensor) -> Tensor:
    """The dense weight (m, k) of values and indices (m, k / 2)."""
    m, width = values.shape
    groups = values.new_zeros((m, width // 2, 4))
    return groups.scatter_(-1, indices.view(m, -1, 2).long(), values.view(m, -1, 2)).view(m, -1)


def _signature(problem: SpmmNM, device: Device) -> KernelSignature:
    version = ".".join(map(str, cusparselt.loaded_library().version))
    found = SPMM_NM.signature(problem, device)
    unguarded = () if problem.guarded else (("guarded", 0),)
    return replace(found, op="semi_structured", parameters=(*found.parameters, ("cusparselt", version), *unguarded))


def _representative(signature: KernelSignature) -> SpmmNM:
    assert SPMM_NM.representative is not None
    return SPMM_NM.representative(signature)._replace(guarded="guarded" not in dict(signature.parameters))


def _operands(problem: SpmmNM, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    assert SPMM_NM.operands is not None
    values, indices, *others = SPMM_NM.operands(problem, device, seed)
    assert values is not None and indices is not None
    copy = copied(values[0], indices)
    return values[0], indices, copy.compressed, copy.fingerprint if problem.guarded else None, *others


def _reference(problem: SpmmNM, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    values, indices, _, _, dense, bias, residual, _ = operands
    assert values is not None and indices is not None and dense is not None
    product = dense_weight(values.double(), indices) @ dense.double()
    return (finished(problem.output, product, bias, residual),)


def _tolerance(problem: SpmmNM) -> float:
    return TOLERANCE[problem.output.dtype]


SEMI_STRUCTURED: Operation[Any] = Operation(
    "semi_structured", _signature, _representative, _operands, (7,), _reference, _tolerance
)
