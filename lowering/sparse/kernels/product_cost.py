"""What a product of tiles on tensor cores takes: waves of tiles over the processors, each a walk over the depth."""

import sympy

from sparsecomp.lowering.tuning.cost import sizes

_m, _n, _batch, _itemsize, _processors = sizes("m n batch itemsize processors")
_bm, _bn, _bk, _warps, _stages = sizes("BM BN BK warps stages")
_tiles = sympy.ceiling(_m / _bm) * sympy.ceiling(_n / _bn) * _batch
_half = sympy.Piecewise((1, sympy.Eq(_itemsize, 2)), (0, True))

RATE = 5.6e12 * _half + 0.29e12 * (1 - _half)
"""Operations a second of one processor at large tiles, on an H100: 16-bit, or float32 as three TF32 products."""
_FILL = 6e10
"""Bytes a second from L2 to one processor."""


def product_seconds(depth: sympy.Expr, expand: sympy.Expr | float = 0.0, rate: sympy.Expr | float = RATE) -> sympy.Expr:
    """Seconds of the tiles of BM by BN that walk ``depth`` in steps of BK, with ``expand`` more a step."""
    # tiles of fewer than 64 rows use the older instructions, and small tiles reach less of the rate
    efficiency = sympy.Min(1, sympy.sqrt(_bm * _bn) / 128) * sympy.Piecewise((0.5, _bm < 64), (1, True))
    products = 2 * _bm * _bn * _bk / (rate * efficiency)
    copies = (_bm + _bn) * _bk * _itemsize / _FILL
    shared = _stages * _bk * (_bm + _bn) * _itemsize
    resident = sympy.Max(sympy.floor(sympy.Min(220e3 / shared, 16 / _warps)), 1)
    step = sympy.Max(products, copies) + 1e-7 / resident + expand
    waves = sympy.ceiling(_tiles / (_processors * resident))
    busy = sympy.Min(resident, sympy.Max(_tiles / _processors, 1))
    tail = 2e-6 + _bm * _bn * _itemsize / _FILL
    return waves * (sympy.ceiling(depth / _bk) * step * busy + tail)
