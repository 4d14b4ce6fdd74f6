"""Products of N:M matrices: on sparse tensor cores where they pay, else by our kernel."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsecomp.lowering.launch.epilogue import Output
from sparsecomp.lowering.sparse import semi_structured
from sparsecomp.lowering.sparse.spmm_nm import SPMM_NM, SpmmNM, spmm_nm
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.patterns import Layout

_LIBRARYS = (2, 4)


def multiply(
    values: Tensor, pattern: Sequence[Tensor], layout: Layout, transpose: bool, dense: Tensor, out: Tensor,
    **finish: Any,
) -> None:  # fmt: skip
    """As `Launcher.multiply`."""
    if layout.block == _LIBRARYS and semi_structured.spmm_semi_structured(values, pattern[0], dense, out, **finish):
        return
    spmm_nm(values, pattern[0], *layout.block, dense, out, **finish)


def problem_of(
    values: Tensor, layout: Layout, dense: Tensor, out: Tensor, described: Output, index: torch.dtype = torch.uint8
) -> SpmmNM:
    """As `Launcher.problem_of`."""
    return SpmmNM.of(values, values.to(index), *layout.block, dense, out, described)


def operations(layout: Layout) -> tuple[Operation[Any], ...]:
    """As `Launcher.operations`."""
    return (SPMM_NM, semi_structured.SEMI_STRUCTURED) if layout.block == _LIBRARYS else (SPMM_NM,)
