"""Every operation by name, for tuning ahead of any call."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from sparsecomp.lowering.binary_conv import BINARY_CONV
from sparsecomp.lowering.effective_weight import MERGE, PACK_MASK, SPLIT
from sparsecomp.lowering.event_conv import ACCUMULATE, FIND_EVENTS, PACK_EVENTS
from sparsecomp.lowering.neurons import LIF
from sparsecomp.lowering.packing import CAST, CAST_STRIDED, PACK_WEIGHT
from sparsecomp.lowering.sddmm import SDDMM
from sparsecomp.lowering.select_largest import SELECT_LARGEST
from sparsecomp.lowering.selective_step import SELECTIVE_STEP
from sparsecomp.lowering.skip_conv import LIST_ROWS, SCAN_PIXELS
from sparsecomp.lowering.spmm_bsr import SPMM_BSR
from sparsecomp.lowering.spmm_csr import SPMM_CSR
from sparsecomp.lowering.spmm_nm import SPMM_NM
from sparsecomp.lowering.strategies import SPIKE_CONV
from sparsecomp.lowering.template import Operation


@cache
def operations() -> Mapping[str, Operation[Any]]:
    """Operation by name."""
    every = (
        BINARY_CONV, PACK_WEIGHT, CAST, CAST_STRIDED, LIF, FIND_EVENTS, PACK_EVENTS, ACCUMULATE, SCAN_PIXELS, LIST_ROWS,
        SPIKE_CONV, SPMM_CSR, SPMM_BSR, SPMM_NM, SDDMM, PACK_MASK, MERGE, SPLIT, SELECTIVE_STEP,
        SELECT_LARGEST,
    )  # fmt: skip
    return {operation.name: operation for operation in every}
