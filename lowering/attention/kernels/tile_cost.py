"""What a program that keeps one tile and walks over a list of others costs."""

import sympy

from sparsecomp.lowering.tuning.cost import Cost, sizes, waves

_batch, _heads, _depth, _v_depth, _itemsize = sizes("batch heads padded_depth padded_v_depth itemsize")
_bm, _bn, _warps, _stages, _processors = sizes("BM BN warps stages processors")
_half, _tf32, _tile_half, _tile_tf32x3, _fill = sizes("half tf32 tile_half tile_tf32x3 fill_blocks")

_RATE = sympy.Piecewise((_tile_half * _half, sympy.Eq(_itemsize, 2)), (_tile_tf32x3 * _tf32, True)) / _processors
_LATENCY = 6e-7
"""Seconds from a load to its first product, where nothing else is in flight."""
_START = 3e-6
"""Seconds before the first product of a program and after its last."""


def cost_by_tiles(
    programs: sympy.Expr, steps: sympy.Expr, products: sympy.Expr, walked: sympy.Expr, kept: sympy.Expr,
    sums: sympy.Expr, scores: int,
) -> Cost:  # fmt: skip
    """The cost of a launch.

    Args:
        programs: of one head.
        steps: tiles that a program walks over, in the longest list.
        products: multiply-accumulates of a pair.
        walked, kept: rows of a tile that is walked over, and of the one that stays.
        sums: numbers of a row that stay in registers.
        scores: matrices (BM, BN) that are alive at once.
    """
    # a step multiplies tiles at a rate that grows with their sides, or waits for what it loads
    share = 0.62 * sympy.Min(kept, 128) / (sympy.Min(kept, 128) + 32) * walked / (walked + 16)
    registers = (kept * sums + scores * _bm * _bn) / (32 * _warps)
    spilled = 1 + sympy.Max(0, registers - 128) / 100
    multiply = spilled * 2 * _bm * _bn * products / (_RATE * share)
    load = walked * (_depth + _v_depth) * _itemsize / _fill
    resident = sympy.Max(1, sympy.floor(16 / _warps) * 64 / sympy.Max(kept, 64))
    wait = _LATENCY / (sympy.Min(_stages, 3) * resident)
    walk = steps * (sympy.Max(multiply, load) + wait)
    rounds = waves(programs * _batch * _heads, _processors * resident)
    return Cost(bytes=sympy.Integer(0), seconds=rounds * (walk * resident + _START))
