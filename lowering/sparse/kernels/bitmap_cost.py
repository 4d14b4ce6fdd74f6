"""What a product with a bitmap costs, and which problems its kernels take."""

import sympy

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.sparse.bitmap import SpmmBitmap
from sparsecomp.lowering.sparse.spmm_csr import unsupported_dtypes
from sparsecomp.lowering.tuning.cost import Cost, sizes, waves

SPLIT_COUNTS = (1, 2, 4, 8, 16)
"""Parts of the depth, for enough programs to keep the memory busy."""
_LARGEST = 2**31

_m, _n, _k, _words, _nnz, _itemsize = sizes("m n k words nnz itemsize")
_bm, _bn, _bk, _warps, _splits = sizes("BM BN BK warps splits")
_bandwidth, _processors, _latency = sizes("bandwidth processors spread_latency")


def refusal(problem: SpmmBitmap) -> str | None:
    """Why a kernel cannot take a problem, None if it can."""
    p = problem
    if p.batch != 1:
        return "a batch is multiplied by columns"
    if p.dtype != p.dense_dtype:
        return f"one dtype is multiplied, not {p.dtype} with {p.dense_dtype}"
    if max(p.m * p.words, p.n * p.m) >= _LARGEST:
        return "there are too many words or results for 32-bit places"
    return unsupported_dtypes(p.dtype, p.dense_dtype, p.output.dtype)


def cost(rate: str) -> Cost:
    """Of two launches: the product, whose spread places are bounded by a rate of the card, and the sum of its splits.

    Args:
        rate: name of the card's number of places a second that one processor spreads.
    """
    (places,) = sizes(rate)
    programs = sympy.ceiling(_m / _bm) * sympy.ceiling(_n / _bn) * _splits
    steps = sympy.ceiling(_k / (_splits * _bk))
    registers = 48 + 1.3 * _bm * _bk / (32 * _warps)
    resident = sympy.Max(
        1, sympy.Min(sympy.floor(64 / _warps), sympy.floor(65536 / (registers * 32 * _warps)), 32)
    )  # fmt: skip
    # loads of one step after another; a processor's programs hide one another's
    walk = waves(programs, _processors * resident) * steps * _latency
    work = waves(programs, _processors) * steps * _bm * _bk / places
    traffic = (_nnz * _itemsize + 6 * _m * _words) / _bandwidth
    sums = 8 * _splits * _m * _n / _bandwidth
    return Cost(
        bytes=sympy.Integer(0), launches=sympy.Integer(2),
        seconds=sympy.sqrt(walk**2 + sympy.Max(work, traffic) ** 2) + sums,
    )  # fmt: skip
