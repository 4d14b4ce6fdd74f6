"""What a product of tiles on tensor cores takes: waves of tiles over the processors, each a walk over the depth."""

import sympy

from sparsecomp.lowering.tuning.cost import sizes

_m, _n, _batch, _itemsize, _processors, _fill = sizes("m n batch itemsize processors fill")
_half, _tf32, _tile_half, _tile_tf32x3, _tile_halves = sizes("half tf32 tile_half tile_tf32x3 tile_halves")
_bm, _bn, _bk, _warps, _stages = sizes("BM BN BK warps stages")
_tiles = sympy.ceiling(_m / _bm) * sympy.ceiling(_n / _bn) * _batch

RATE = sympy.Piecewise((_tile_half * _half, sympy.Eq(_itemsize, 2)), (_tile_tf32x3 * _tf32, True)) / _processors
"""Operations a second of one processor at large tiles: 16-bit, or float32 as three TF32 products."""
HALVES_RATE = _tile_halves * _half / _processors
"""The same of float32 as three products of float16."""


def product_seconds(depth: sympy.Expr, expand: sympy.Expr | float = 0.0, rate: sympy.Expr | float = RATE) -> sympy.Expr:
    """Seconds of the tiles of BM by BN that walk `depth` in steps of BK, with `expand` more a step."""
    # tiles of fewer than 64 rows use the older instructions, and small tiles reach less of the rate
    efficiency = sympy.Min(1, sympy.sqrt(_bm * _bn) / 128) * sympy.Piecewise((0.5, _bm < 64), (1, True))
    products = 2 * _bm * _bn * _bk / (rate * efficiency)
    copies = (_bm + _bn) * _bk * _itemsize / _fill
    shared = _stages * _bk * (_bm + _bn) * _itemsize
    resident = sympy.Max(sympy.floor(sympy.Min(220e3 / shared, 16 / _warps)), 1)
    step = sympy.Max(products, copies) + 1e-7 / resident + expand
    waves = sympy.ceiling(_tiles / (_processors * resident))
    busy = sympy.Min(resident, sympy.Max(_tiles / _processors, 1))
    tail = 2e-6 + _bm * _bn * _itemsize / _fill
    return waves * (sympy.ceiling(depth / _bk) * step * busy + tail)
