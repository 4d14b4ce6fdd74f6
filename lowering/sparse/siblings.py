"""Layers of few rows that read one x, such as queries, keys and values, as operations of one launch:

    out_i = activation(weight_i @ x.mT + bias_i)

A launch takes a few microseconds whatever it does, and a small layer leaves processors of a card idle. A problem is
that of a layer with the rows of all, `parts` of each, and as many values; of its output, strides are the first's.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch.strided import Strides
from sparsecomp.lowering.tuning.template import Operation

MOST_SIBLINGS = 3
"""Weights that a kernel takes."""
_Operands = tuple[Tensor | None, ...]


def of_several(name: str, count: int, alone: Operation[Any], arrays: int, x_at: int) -> Operation[Any]:
    """The operation on so many weights of what `alone` takes one of.

    Its operands are the arrays of each weight, x, the biases and the outputs; in the place of a third one there is
    None.

    Args:
        arrays: of a weight, the first operands of `alone`.
        x_at: which of these x is; the bias stands behind it, and the output last.
    """
    missing, behind = MOST_SIBLINGS - count, alone.results[0] - x_at - 1
    assert alone.representative and alone.operands and alone.reference
    representative, operands, reference = alone.representative, alone.operands, alone.reference

    def signature(problem: Any, device: Device) -> KernelSignature:
        return replace(alone.signature(problem, device), op=name)

    def equal_parts(signature: KernelSignature) -> Any:
        found = representative(signature)
        rows = max(1, found.m // count)
        return found._replace(parts=(*(rows,) * (count - 1), max(1, found.m - rows * (count - 1))))

    def of_all(problem: Any, device: torch.device, seed: int) -> _Operands:
        each = [operands(one, device, seed + place) for place, one in enumerate(alone_of(problem))]
        weights, none = [array for one in each for array in one[:arrays]], [None] * missing
        biases, outs = ([one[place] for one in each] for place in (x_at + 1, -1))
        return *weights, *none * arrays, each[0][x_at], *biases, *none, *outs, *none

    def products(problem: Any, given: _Operands) -> tuple[Tensor, ...]:
        begin, between = MOST_SIBLINGS * arrays, (None,) * (x_at - arrays)
        found = [
            reference(one, (*given[place * arrays : (place + 1) * arrays], *between, given[begin],
                            given[begin + 1 + place], *(None,) * behind))
            for place, one in enumerate(alone_of(problem))
        ]  # fmt: skip
        return tuple(out for (out,) in found)

    begin = MOST_SIBLINGS * (arrays + 1) + 1
    results = tuple(range(begin, begin + count))
    return Operation(name, signature, equal_parts, of_all, results, products, alone.tolerance)


def alone_of(problem: Any) -> list[Any]:
    """The problems of the layers one by one, with as many values in a row each."""
    p = problem
    values = [{"nnz": p.nnz * rows // p.m} if hasattr(p, "nnz") else {} for rows in p.parts]
    return [
        p._replace(m=rows, output=p.output._replace(strides=Strides(0, 1, rows)), parts=(), **stored)
        for rows, stored in zip(p.parts, values, strict=True)
    ]


def siblings_problem(each: Sequence[Any]) -> Any:
    """The problem of layers on one x, from those of each alone."""
    first = each[0]
    sums = {name: sum(getattr(one, name) for one in each) for name in ("m", "nnz") if hasattr(first, name)}
    most = {"longest": max(one.longest for one in each)} if hasattr(first, "longest") else {}
    return first._replace(**sums, **most, parts=tuple(one.m for one in each))


def sibling_operands(
    weights: Sequence[Sequence[Tensor]], x: Tensor, biases: Sequence[Tensor | None], outs: Sequence[Tensor]
) -> list[Tensor | None]:  # fmt: skip
    """Operands as kernels take them."""
    none: list[Tensor | None] = [None] * (MOST_SIBLINGS - len(weights))
    arrays = [array for weight in weights for array in weight]
    return [*arrays, *none * len(weights[0]), x, *biases, *none, *(out.mT for out in outs), *none]
