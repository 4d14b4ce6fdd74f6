"""CUDA implementation of the gradient by a table whose rows were read at many places, and the operation behind it.

Places lie in parts, and a program adds up those of one part in a block of rows: the product of which place read which
row, a matrix of zeros and ones, with their gradients. Where a block of places read none of its rows it is passed over:
neighbouring pairs of tokens have neighbouring distances, so that most are. No sum depends on who comes first.
"""

from math import isqrt
from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.strided import dtype_name, random_tensor
from sparsecomp.lowering.tuning.template import Operation

_TOLERANCE = {"float32": 4e-6, "float16": 1e-3, "bfloat16": 8e-3}
"""Relative Frobenius error of a result. Tensor cores cut off what they add, of float32 in each block of places anew."""
_SIZES = ("places", "rows", "features")


class TableGradient(NamedTuple):
    """The sizes, strides and types of a sum; see ``sparsecomp.ops.attention.bias_table``.

    Attributes:
        places: at which a row was read.
        rows, features: of the table.
        place_stride, feature_stride: of the gradient (places, features).
        padding: the row that gets no gradient, -1 for none.
        index_dtype: such as "int64".
        dtype: of the gradient and of the result.
    """

    places: int
    rows: int
    features: int
    place_stride: int
    feature_stride: int
    padding: int
    index_dtype: str
    dtype: str

    @property
    def index_bytes(self) -> int:
        """Of the number of a row."""
        return getattr(torch, self.index_dtype).itemsize


def table_gradient(grad: Tensor, index: Tensor, padding: int, out: Tensor) -> None:
    """Write out[r] = the sum of grad[p] over all p whose index[p] is r, zeros if r is ``padding``.

    Args:
        grad: (places, features), float16, bfloat16 or float32, of any strides.
        index: (places,), int32 or int64; negative numbers count from the end, others beyond the rows are left out.
        out: (rows, features), contiguous, of the gradient's dtype.
    """
    (rows, features), (place, feature) = out.shape, grad.stride()
    problem = TableGradient(
        len(grad), rows, features, place, feature, padding, dtype_name(index), dtype_name(grad)
    )  # fmt: skip
    dispatch.launch(TABLE_GRADIENT, problem, grad, index.contiguous(), out)


def _signature(problem: TableGradient, device: Device) -> KernelSignature:
    p = problem
    return KernelSignature(
        "table_gradient", device, dtypes=(p.dtype,), accumulator="float32", index=p.index_dtype,
        sizes=tuple(zip(_SIZES, p[:3], strict=True)),
        parameters=(("places_side_by_side", int(p.place_stride == 1)),),
    )  # fmt: skip


def _representative(signature: KernelSignature) -> TableGradient:
    places, rows, features = (int(dict(signature.sizes)[name]) for name in _SIZES)
    apart = int(dict(signature.parameters)["places_side_by_side"])
    place, feature = (1, places) if apart else (features + (features == 1), 1)
    return TableGradient(places, rows, features, place, feature, -1, signature.index, signature.dtypes[0])


def _operands(problem: TableGradient, device: torch.device, seed: int) -> tuple[Tensor, ...]:
    """The index is of distances in a square, those that are far alike."""
    p, random = problem, torch.Generator(device).manual_seed(seed)
    grad = random_tensor((p.places, p.features), (p.place_stride, p.feature_stride), p.dtype, random)
    place, side = torch.arange(p.places, device=device), max(isqrt(p.places), 1)
    middle = p.rows // 2
    index = (place // side - place % side).clamp(-middle, p.rows - 1 - middle) + middle
    out = torch.full((p.rows, p.features), torch.nan, dtype=grad.dtype, device=device)
    return grad, index.to(getattr(torch, p.index_dtype)), out


def _reference(problem: TableGradient, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    grad, index, _ = operands
    assert grad is not None and index is not None
    columns = [torch.bincount(index, grad[:, at].double(), problem.rows) for at in range(problem.features)]
    found = torch.stack(columns, 1)
    if problem.padding >= 0:
        found[problem.padding] = 0
    return (found,)


TABLE_GRADIENT = Operation(
    "table_gradient", _signature, _representative, _operands, (2,), _reference,
    lambda problem: _TOLERANCE[problem.dtype],
)  # fmt: skip
