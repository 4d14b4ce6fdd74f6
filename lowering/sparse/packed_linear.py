"""Layers of few rows by 2:4 weights as an operation: one, or the product of a pair of them.

    out = activation(weight @ x.mT + bias + residual)
    out = activation(weight @ x.mT + bias) · (other_weight @ x.mT + other_bias)

Such layers take as long as their weights take to read. Positions of two bits make these 9/16 of the dense weights'
bytes. They lie as kernels read them, in one of two orders: for a single row of x by `lanes`, so that a thread finds
what belongs to its groups in a word of its own, step after step; for more rows by `fragments`, the operands of sparse
tensor cores.

A zero among the values is filler and not multiplied, as in every product of the format.
"""

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.epilogue import (
    ACTIVATIONS,
    Output,
    finished,
    output_from_text,
    output_of,
    output_of_layer,
    random_operands,
)
from sparsecomp.lowering.launch.launch import aligned
from sparsecomp.lowering.launch.strided import (
    dtype_name,
    gather_product,
    name_of,
    order_of,
    random_tensor,
    strides_from,
)
from sparsecomp.lowering.launch.watch import allocate
from sparsecomp.lowering.sparse.spmm_csr import TOLERANCE, unsupported_dtypes
from sparsecomp.lowering.tuning.template import Operation

MOST = 8
"""Rows of x that a kernel takes."""
LANES = 32
"""By lanes: neighbouring groups that are read in a step."""
STEPS = 8
"""By lanes: steps whose positions are in a word."""
TILE = 16
"""By fragments: rows whose positions lie together."""
TURN = 64
"""By fragments: groups of a row whose positions lie together."""
DTYPES = (torch.float16, torch.bfloat16)


class PackedLinear(NamedTuple):
    """A weight (m, k), or a pair of them, times n rows of x; everything but the output is contiguous.

    Attributes:
        order: of the positions, "lanes" or "fragments".
        pair: whether there are two.
        dtype: of values and x.
        output: the output (m, n) and its epilogue; where one of a pair has a bias, both have.
        parts: rows of each of several weights; see `lowering.sparse.siblings`.
    """

    m: int
    k: int
    n: int
    order: str
    pair: bool
    dtype: str
    output: Output
    parts: tuple[int, ...] = ()

    @property
    def groups(self) -> int:
        """Of four columns, in a row."""
        return self.k // 4

    @property
    def turns(self) -> int:
        """In a row, those whose positions lie together counted as one."""
        return -(-self.groups // (LANES * STEPS if self.order == "lanes" else TURN))

    @property
    def stored_bytes(self) -> int:
        """Of values and positions."""
        size = getattr(torch, self.dtype).itemsize
        return (self.m * self.k // 2 * size + 4 * prod(positions_shape(self.m, self.k, self.order))) * (1 + self.pair)

    @property
    def refusal(self) -> str | None:
        """Why no kernel takes it, None if that of its order does."""
        if not takes_packed(self.k, self.n, getattr(torch, self.dtype), self.order):
            return (
                f"{self.n} rows of {self.k} columns of {self.dtype} with positions by {self.order} are multiplied by "
                f"another kernel: a row by lanes or {MOST} by fragments, of whole groups, float16 or bfloat16"
            )
        return unsupported_dtypes(self.dtype, self.dtype, self.output.dtype)

    @classmethod
    def of_layer(
        cls, m: int, k: int, n: int, dtype: torch.dtype, has_bias: bool, has_residual: bool, activation: str,
        pair: bool = False,
    ) -> "PackedLinear":  # fmt: skip
        """The product of a layer, or a pair, whose operands all have this dtype."""
        output = output_of_layer(n, m, dtype, has_bias, has_residual, activation)
        return cls(m, k, n, order_for(n), pair, name_of(dtype), output)


def order_for(n: int) -> str:
    """The order of positions for n rows of x."""
    return "lanes" if n == 1 else "fragments"


def takes_packed(k: int, n: int, dtype: torch.dtype, order: str) -> bool:
    """Whether there is a kernel for a layer of so many columns and rows of x."""
    return dtype in DTYPES and 0 < n <= (1 if order == "lanes" else MOST) and k > 0 and k % 4 == 0


def positions_shape(m: int, k: int, order: str) -> tuple[int, ...]:
    """Shape of the packed positions of a weight (m, k)."""
    if order == "lanes":
        return m, -(-k // (4 * LANES * STEPS)) * LANES
    return -(-m // TILE), -(-k // (4 * TURN)), TILE * TURN // 8


class PackedPositions(NamedTuple):
    """Positions as kernels read them, from a weight's indices; reads nothing from a GPU."""

    order: str

    def __call__(self, indices: Tensor) -> Tensor:
        """Pack.

        Args:
            indices: (m, k / 2) uint8: each value's column within its group of four, ascending.

        Returns:
            int32; four bits for each group of a row, the first value's position in the lower two of them.

            By lanes (m, words): group g = (b · STEPS + s) · LANES + l has bits 4 · s and on of word b · LANES + l.

            By fragments (tiles of 16 rows, turns of 64 groups, 128), four of the 128 words for each thread of a warp.
            A turn is eight products, each of 16 rows and of two groups of each of four threads. Its positions are
            words of two threads: of the first groups and of the second, those of a tile's lower eight rows in the
            upper half.

        Raises:
            FormatError: these are no indices of 2:4.
        """
        if indices.dim() != 2 or indices.dtype is not torch.uint8 or indices.shape[1] % 2:
            raise FormatError(f"indices are {tuple(indices.shape)} {indices.dtype}, need (m, k / 2) uint8")
        m, groups = indices.shape[0], indices.shape[1] // 2
        shape = positions_shape(m, 4 * groups, self.order)
        first, second = indices.view(m, groups, 2).unbind(-1)
        both = first & 3 | (second & 3) << 2
        rows, places = (m, shape[1] * STEPS) if self.order == "lanes" else (shape[0] * TILE, shape[1] * TURN)
        # beyond the weight 0 and 1: a product takes no two values of one place
        both = torch.nn.functional.pad(both, (0, places - groups, 0, rows - m), value=0b0100)
        if self.order == "lanes":
            nibbles = both.view(m, -1, STEPS, LANES).transpose(2, 3)
        else:
            # halves of rows, rows, turns, halves of products, steps in these, threads, products of a step, groups
            nibbles = both.view(shape[0], 2, 8, shape[1], 2, 2, 4, 2, 2).permute(0, 3, 2, 4, 8, 5, 7, 1, 6)
        pairs = nibbles.reshape(-1, 2)
        return (pairs[:, 0] | pairs[:, 1] << 4).view(torch.int32).view(shape)


def unpacked_columns(positions: Tensor, m: int, k: int) -> Tensor:
    """The column of each value (m, k / 2), int64, from packed positions of either order."""
    octets = positions.contiguous().view(torch.uint8).flatten()
    nibbles = torch.stack([octets & 15, octets >> 4], -1)
    if positions.dim() == 2:
        both = nibbles.view(m, -1, LANES, STEPS).transpose(2, 3).reshape(m, -1)
    else:
        tiles, turns, _ = positions.shape
        places = nibbles.view(tiles, turns, 8, 2, 2, 2, 2, 2, 4).permute(0, 7, 2, 1, 3, 5, 8, 6, 4)
        both = places.reshape(tiles * TILE, turns * TURN)
    both, group = both[:m, : k // 4].long(), torch.arange(k // 4, device=positions.device)
    return (torch.stack([both & 3, both >> 2], -1) + 4 * group[:, None]).flatten(1)


def launch_packed_linear(
    x: Tensor, values: Tensor, positions: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str,
    other: tuple[Tensor, Tensor, Tensor | None] | None = None,
) -> Tensor:  # fmt: skip
    """activation(x @ weight.mT + bias + residual), times x @ other.mT + its bias, for an x that `takes_packed` accepts.

    Args:
        x: (n, k), contiguous, of the values' dtype; so is what follows.
        values: (m, k / 2).
        positions: of `PackedPositions`, in an order that n rows go with.
        bias, residual: (m,) and (n, m), of any dtype that kernels take; a pair has no residual.
        other: values, positions and bias of the other weight of a pair, of the same dtypes; both have a bias or none.

    Raises:
        FormatError: operands that do not belong together.
    """
    (n, k), m, order = x.shape, values.shape[0], order_of_positions(positions)
    others = (None, None, None) if other is None else other
    for one, words in ((values, positions), *([] if other is None else [other[:2]])):
        check_packed(one, words, m, k, order)
    # a thread reads a group, or several, at once
    x, values = aligned(x), aligned(values)
    other_values = None if others[0] is None else aligned(others[0])
    out = allocate((n, m), (m, 1), x.dtype, x.device)
    beside = None if residual is None else residual.mT
    described = output_of(out.mT, bias, "row", beside, activation, 1.0)
    problem = PackedLinear(m, k, n, order, other is not None, dtype_name(values), described)
    dispatch.launch(
        PACKED_LINEAR, problem, values, positions, other_values, others[1], x, bias, others[2], beside, out.mT
    )  # fmt: skip
    return out


def check_packed(values: Tensor, positions: Tensor, m: int, k: int, order: str) -> None:
    """That these are of a weight (m, k).

    Raises:
        FormatError: they are not.
    """
    needed = positions_shape(m, k, order)
    if values.shape != (m, k // 2) or positions.shape != needed or positions.dtype is not torch.int32:
        raise FormatError(
            f"values {tuple(values.shape)} and positions {tuple(positions.shape)} {positions.dtype} are not of 2:4 in "
            f"{m} rows of {k} columns: {(m, k // 2)} and {needed} int32 are needed"
        )


def order_of_positions(positions: Tensor) -> str:
    """The order in which they lie."""
    return "lanes" if positions.dim() == 2 else "fragments"


def _signature(problem: PackedLinear, device: Device) -> KernelSignature:
    p = problem
    return KernelSignature(
        "packed_linear", device, dtypes=(p.dtype, p.output.dtype), accumulator="float32", formats=(f"2:4 {p.order}",),
        layouts=(order_of(p.output.strides, p.n),), epilogue=p.output.text,
        sizes=(("m", p.m), ("groups", p.groups), ("n", p.n)), parameters=(("weights", 1 + p.pair),),
    )  # fmt: skip


def _representative(signature: KernelSignature) -> PackedLinear:
    m, groups, n = (int(size) for _, size in signature.sizes)
    out = strides_from(signature.layouts[0], m, n)
    dtype, out_dtype = signature.dtypes
    output = output_from_text(signature.epilogue, out_dtype, out)
    order, pair = signature.formats[0].split()[1], signature.parameters[0][1] == 2
    return PackedLinear(m, 4 * groups, n, order, pair, dtype, output)


def _operands(problem: PackedLinear, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    p, random = problem, torch.Generator(device).manual_seed(seed)
    weight, other = _random_weight(p, random), _random_weight(p, random) if p.pair else (None, None)
    x = random_tensor((p.n, p.k), (p.k, 1), p.dtype, random)
    bias, residual, out = random_operands(p.output, (1, p.m, p.n), random)
    other_bias = bias.flip(0).contiguous() if p.pair and bias is not None else None
    return *weight, *other, x, bias, other_bias, residual if residual is None else residual[0], out[0]


def _random_weight(problem: PackedLinear, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Values and packed positions."""
    p = problem
    order = torch.rand(p.m, p.groups, 4, generator=random, device=random.device).argsort(-1)[..., :2]
    values = random_tensor((p.m, p.k // 2), (p.k // 2, 1), p.dtype, random)
    return values, PackedPositions(p.order)(order.sort(-1).values.flatten(1).to(torch.uint8))


def _reference(problem: PackedLinear, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    values, positions, other_values, other_positions, x, bias, other_bias, residual, _ = operands
    assert values is not None and positions is not None and x is not None
    product = _product(problem, values, positions, x)
    if not problem.pair:
        return (finished(problem.output, product, bias, residual),)
    assert other_values is not None and other_positions is not None
    other = _product(problem, other_values, other_positions, x)
    sums = [one if added is None else one + added.double()[:, None] for one, added in
            ((product, bias), (other, other_bias))]  # fmt: skip
    return (ACTIVATIONS[problem.output.activation](sums[0]) * sums[1],)


def _product(problem: PackedLinear, values: Tensor, positions: Tensor, x: Tensor) -> Tensor:
    """weight @ x.mT in float64."""
    column, stored = unpacked_columns(positions, problem.m, problem.k), values != 0
    row = torch.arange(problem.m, device=x.device)[:, None].expand_as(column)
    return gather_product(row[stored], column[stored], values[stored][None], x.mT[None], problem.m)[0]


PACKED_LINEAR = Operation(
    "packed_linear", _signature, _representative, _operands, (8,), _reference,
    lambda problem: TOLERANCE[problem.output.dtype],
)  # fmt: skip
