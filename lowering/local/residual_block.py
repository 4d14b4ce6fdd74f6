"""CUDA implementation of a residual block of two layers of fixed fan-in, and the operation behind it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.strided import dtype_name, random_tensor
from sparsecomp.lowering.local.gather_dot import TOLERANCE, contiguous_rows
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.local.residual_block import activated, normalised

SIZES = ("rows", "features", "first", "second")
"""What a problem begins with."""


class ResidualBlock(NamedTuple):
    """The sizes, strides and types of a block; see ``sparsecomp.ops.local.residual_block``.

    Attributes:
        rows, features: of x and of the result.
        first, second: inputs of each output of the two layers.
        x_row: stride of x by row; by column it is 1.
        alike: rows that share a number of the scale.
        norm, activation: as of the operator.
        operands: how many tensors the norm and the sine have, and of the layers, a weight and perhaps a bias.
        kept: what the activation is given is written out.
        x_dtype, dtype: of x, scale and result, and of everything between them.
        eps: of the norm.
    """

    rows: int
    features: int
    first: int
    second: int
    x_row: int
    alike: int
    norm: str
    activation: str
    operands: tuple[int, int, int, int]
    kept: bool
    x_dtype: str
    dtype: str
    eps: float


def residual_block(
    x: Tensor, norm: Sequence[Tensor], first: Sequence[Tensor], sine: Sequence[Tensor], second: Sequence[Tensor],
    scale: Tensor, indices: tuple[Tensor, Tensor], out: Tensor, before: Tensor | None, kind: str, eps: float,
    activation: str,
) -> None:  # fmt: skip
    """Write the block to ``out``, and what the activation is given to ``before``.

    Args:
        x, out: (rows, n), float16, bfloat16 or float32; the latter contiguous, as all that follows.
        norm, first, sine, second, kind, eps, activation: as of the operator.
        scale: (numbers,), each for as many neighbouring rows.
        indices: of both layers, int32.
        before: (rows, n).
    """
    x = contiguous_rows(x)
    rows, features = x.shape
    operands = len(norm), len(first), len(sine), len(second)
    problem = ResidualBlock(
        rows, features, first[0].shape[1], second[0].shape[1], x.stride(0), rows // scale.numel(), kind, activation,
        operands, before is not None, dtype_name(x), dtype_name(first[0]), eps,
    )  # fmt: skip
    given = *_some(norm, 2), *_some(first, 2), *_some(sine, 4), *_some(second, 2)
    dispatch.launch(RESIDUAL_BLOCK, problem, x, *given, *indices, scale, out, before)


def _some(tensors: Sequence[Tensor], count: int) -> tuple[Tensor | None, ...]:
    return (*tensors, *[None] * (count - len(tensors)))


def _signature(problem: ResidualBlock, device: Device) -> KernelSignature:
    p = problem
    return KernelSignature(
        "residual_block", device, dtypes=(p.x_dtype, p.dtype), accumulator="float32", index="int32",
        epilogue=p.activation, sizes=tuple(zip(SIZES, p[:4], strict=True)),
        parameters=(("norm", p.norm), ("operands", " ".join(map(str, p.operands))), ("kept", int(p.kept))),
    )  # fmt: skip


def _representative(signature: KernelSignature) -> ResidualBlock:
    rows, features, first, second = (int(dict(signature.sizes)[name]) for name in SIZES)
    parameters = {name: str(value) for name, value in signature.parameters}
    norm, one, sine, other = map(int, parameters["operands"].split())
    return ResidualBlock(
        rows, features, first, second, features, rows, parameters["norm"], signature.epilogue, (norm, one, sine, other),
        parameters["kept"] == "1", signature.dtypes[0], signature.dtypes[1], 1e-5,
    )  # fmt: skip


def _operands(problem: ResidualBlock, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    p, random = problem, torch.Generator(device).manual_seed(seed)

    def drawn(*shape: int, dtype: str = p.dtype) -> Tensor:
        return random_tensor(shape, (*shape[1:], 1), dtype, random)

    def layer(fan_in: int, operands: int) -> tuple[Tensor | None, ...]:
        return _some([drawn(p.features, fan_in), drawn(p.features)][:operands], 2)

    x = random_tensor((p.rows, p.features), (p.x_row, 1), p.x_dtype, random)
    norm = _some([drawn(p.features) for _ in range(p.operands[0])], 2)
    sine = _some([drawn(p.features).abs() for _ in range(p.operands[2])], 4)
    first, second = layer(p.first, p.operands[1]), layer(p.second, p.operands[3])
    indices = [
        torch.randint(p.features, (p.features, fan_in), generator=random, device=device, dtype=torch.int32)
        for fan_in in (p.first, p.second)
    ]
    scale = drawn(p.rows // p.alike, dtype=p.x_dtype)
    out, before = (x.new_full((p.rows, p.features), torch.nan, dtype=getattr(torch, one)) for one in p[-3:-1])
    return x, *norm, *first, *sine, *second, *indices, scale, out, before if p.kept else None


def _reference(problem: ResidualBlock, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    p, exact = problem, [None if one is None else one.double() for one in operands]
    x, *norm = exact[:3]
    scale = exact[13]
    assert x is not None and scale is not None

    def layer(x: Tensor, weight: Tensor | None, bias: Tensor | None, index: Tensor | None) -> Tensor:
        assert weight is not None and index is not None
        places = zip(index.long().unbind(1), weight.unbind(1), strict=True)
        out = sum((x.index_select(1, read) * by for read, by in places), torch.zeros_like(x))
        return out if bias is None else out + bias

    before = layer(normalised(x, p.norm, p.eps, *norm), exact[3], exact[4], exact[11])
    hidden = activated(before, p.activation, [one for one in exact[5:9] if one is not None])
    return (x + scale.repeat_interleave(p.alike)[:, None] * layer(hidden, exact[9], exact[10], exact[12]),)


RESIDUAL_BLOCK: Operation[Any] = Operation(
    "residual_block", _signature, _representative, _operands, (14,), _reference,
    lambda problem: max(TOLERANCE[problem.x_dtype], 2 * TOLERANCE[problem.dtype]),
)  # fmt: skip
