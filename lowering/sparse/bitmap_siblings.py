"""Layers of few rows by bitmaps that read one x, such as queries, keys and values, as operations of one launch:

    out_i = activation(weight_i @ x.mT + bias_i)

A launch takes a few microseconds whatever it does, and a small layer leaves processors of a card idle. A problem is
that of a layer with the rows of all, `parts` of each, and as many values; of its output, strides are the first's.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.epilogue import output_of
from sparsecomp.lowering.launch.launch import aligned
from sparsecomp.lowering.launch.strided import Strides, dtype_name
from sparsecomp.lowering.launch.watch import allocate
from sparsecomp.lowering.sparse.bitmap_linear import BITMAP_LINEAR, BitmapLinear, checked_copy
from sparsecomp.lowering.tuning.template import Operation

MOST_SIBLINGS = 3
"""Weights that a kernel takes."""
_Operands = tuple[Tensor | None, ...]


def _side_by_side(name: str, count: int) -> Operation[BitmapLinear]:
    """The operation on so many weights.

    Its operands are the arrays of each weight, x, the biases and the outputs; in the place of a third one there is
    None.
    """
    alone, missing = BITMAP_LINEAR, MOST_SIBLINGS - count
    assert alone.representative and alone.operands and alone.reference
    representative, operands, reference, arrays = (
        alone.representative, alone.operands, alone.reference, alone.results[0] - 3
    )  # fmt: skip

    def signature(problem: BitmapLinear, device: Device) -> KernelSignature:
        return replace(alone.signature(problem, device), op=name)

    def equal_parts(signature: KernelSignature) -> BitmapLinear:
        found = representative(signature)
        rows = max(1, found.m // count)
        return found._replace(parts=(*(rows,) * (count - 1), max(1, found.m - rows * (count - 1))))

    def of_all(problem: BitmapLinear, device: torch.device, seed: int) -> _Operands:
        each = [operands(one, device, seed + place) for place, one in enumerate(alone_of(problem))]
        weights, none = [array for one in each for array in one[:arrays]], [None] * missing
        biases, outs = ([one[place] for one in each] for place in (arrays + 1, arrays + 3))
        return *weights, *none * arrays, each[0][arrays], *biases, *none, *outs, *none

    def products(problem: BitmapLinear, given: _Operands) -> tuple[Tensor, ...]:
        begin = MOST_SIBLINGS * arrays
        found = [
            reference(one, (*given[place * arrays : (place + 1) * arrays], given[begin], given[begin + 1 + place], None,
                            None))
            for place, one in enumerate(alone_of(problem))
        ]  # fmt: skip
        return tuple(out for (out,) in found)

    begin = MOST_SIBLINGS * (arrays + 1) + 1
    results = tuple(range(begin, begin + count))
    return Operation(name, signature, equal_parts, of_all, results, products, alone.tolerance)


def alone_of(problem: BitmapLinear) -> list[BitmapLinear]:
    """The problems of the layers one by one, with as many values in a row each."""
    p = problem
    return [
        p._replace(m=rows, nnz=p.nnz * rows // p.m, output=p.output._replace(strides=Strides(0, 1, rows)), parts=())
        for rows in p.parts
    ]


BITMAP_TWO, BITMAP_THREE = _side_by_side("bitmap_two", 2), _side_by_side("bitmap_three", 3)
SIBLINGS = {2: BITMAP_TWO, 3: BITMAP_THREE}
"""By how many."""


def launch_bitmap_siblings(
    x: Tensor, copies: Sequence[Sequence[Tensor]], parts: Sequence[int], values: Sequence[int], grain: int,
    longest: int, biases: Sequence[Tensor | None], activation: str,
) -> list[Tensor]:  # fmt: skip
    """activation(x @ weight.mT + bias) of two or three weights, for an x that `takes_bitmap` accepts.

    Args:
        x: (n, k), contiguous, of the values' dtype; so is what follows.
        copies, grain, longest: as of `launch_bitmap_linear`, for weights of so many rows and values; `longest` is that
            of all, and their starts are of one dtype.
        biases: one a weight, of one dtype that kernels take; all or none.

    Raises:
        FormatError: operands that do not belong together.
    """
    n, k = x.shape
    x, m, none = aligned(x), sum(parts), [None] * (MOST_SIBLINGS - len(parts))
    weights = [
        checked_copy(copy, rows, k, stored, grain) for copy, rows, stored in zip(copies, parts, values, strict=True)
    ]
    outs = [allocate((n, rows), (rows, 1), x.dtype, x.device) for rows in parts]
    described = output_of(outs[0].mT, biases[0], "row", None, activation, 1.0)
    index = dtype_name(weights[0][0])
    problem = BitmapLinear(m, k, n, sum(values), grain, longest, dtype_name(x), index, described, parts=tuple(parts))
    arrays = [array for weight in weights for array in weight]
    dispatch.launch(
        SIBLINGS[len(parts)], problem, *arrays, *none * len(weights[0]), x, *biases, *none,
        *(out.mT for out in outs), *none,
    )  # fmt: skip
    return outs
