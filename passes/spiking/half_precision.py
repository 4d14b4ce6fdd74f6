"""How torch's elementwise operators compute on numbers of half precision: in float32, with a result that is rounded.

A Python number, or a tensor without dimensions, does not make the result float32. Whether it is rounded before it is
used depends on operator and device, as torch's kernels are written.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import fx

from sparsecomp.passes.graph.canonicalize import dtype_of, example_of
from sparsecomp.reference.neuron import COMPARISONS, ROUNDINGS

_OF_TWO = ("add", "sub", "mul", "div", *COMPARISONS)


def rounding(dtype: torch.dtype | None) -> str:
    """The instruction that rounds to a dtype, none for one that is no half precision."""
    return next((name for name, one in ROUNDINGS.items() if one is dtype), "")


def rounded(number: float, operation: str) -> float:
    """A number as it is in half precision."""
    return float(torch.tensor(number, dtype=ROUNDINGS[operation], device="cpu"))


def computed_in(node: fx.Node, operands: Sequence[Any]) -> torch.dtype | None:
    """The dtype that an operator computes its result in: of a comparison that of what it compares."""
    if dtype_of(node) is not torch.bool:
        return dtype_of(node)
    examples = [example for one in operands if (example := example_of(one)) is not None]
    whole = [example for example in examples if example.dim()] or examples
    return reduce(torch.promote_types, [example.dtype for example in whole]) if whole else None


def rounded_before(operation: str, operands: Sequence[Any], device: torch.device, half: str) -> tuple[int, ...]:
    """Which operands of an operator in half precision are rounded before it computes, and change: single numbers."""
    if operation not in _OF_TWO or not half:
        return ()
    cuda, scales = device.type == "cuda", operation in ("mul", "div")
    found = []
    for index, one in enumerate(operands):
        if not isinstance(one, fx.Node):
            whole = rounded(one, half) == one or (operation not in COMPARISONS if cuda else scales)
        else:
            example = example_of(one)
            whole = (example is not None and example.dim() > 0) or (not cuda and scales and index == 1)
        found += [] if whole else [index]
    return tuple(found)
