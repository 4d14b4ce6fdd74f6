"""Which of several weights a program is for, each of which has programs of its own; see `lowering.sparse.siblings`."""

from typing import Any

import triton
import triton.language as tl

from sparsecomp.lowering.sparse.siblings import MOST_SIBLINGS


@triton.jit
def sibling(program, M, second_M, ROWS: tl.constexpr):
    """Which weight a program is for, and which of its programs it is, if each has ROWS rows."""
    begin_second = tl.cdiv(M, ROWS)
    begin_third = begin_second + tl.cdiv(second_M, ROWS)
    place = (program >= begin_second).to(tl.int32) + (program >= begin_third).to(tl.int32)
    return place, program - chosen(place, 0, begin_second, begin_third)


@triton.jit
def chosen(place, first, second, third):
    """What belongs to the weight at this place; there may be no third."""
    found = tl.where(place == 1, second, first)
    if third is not None:
        found = tl.where(place == 2, third, found)
    return found


CHOOSING = (sibling, chosen)
"""What chooses."""


def part_programs(problem: Any, rows: int) -> int:
    """Programs of so many rows of a weight each."""
    return sum(-(-part // rows) for part in problem.parts)


def part_rows(problem: Any) -> tuple[int, ...]:
    """Rows of each weight, as kernels take them."""
    return *problem.parts, *(0,) * (MOST_SIBLINGS - len(problem.parts))
