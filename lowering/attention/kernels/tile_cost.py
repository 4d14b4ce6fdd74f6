"""What a program that keeps one tile and walks over a list of others costs.

Fitted to the times of all configurations of a short window on heads of 64 numbers and of a long one on 128, on one H200
(`python -m bench attention-candidates`), with two loops: the first by estimate took at most 1.1 times as long as the
fastest. The rates of products and pairs are those of 4096 tokens with all, half and a tenth of the blocks kept, within
13 % (`bench/results/attention.json`).
"""

import sympy

from sparsecomp.lowering.tuning.cost import Cost, sizes

_batch, _heads, _depth, _v_depth, _itemsize = sizes("batch heads padded_depth padded_v_depth itemsize")
_bm, _bn, _warps, _stages, _processors, _shared = sizes("BM BN warps stages processors shared")
_half, _tf32, _tile_tf32x3, _dropped, _single = sizes("half tf32 tile_tf32x3 dropped single")
ADDED_BYTES = sizes("added_bytes")[0]
"""Of a number that is added to a score; 0 without one."""

_RATE = sympy.Piecewise(
    (1.0 * _half, sympy.Eq(_itemsize, 2)), (1.0 * _tf32, sympy.Eq(_single, 1)), (_tile_tf32x3 * _tf32, True)
) / _processors  # fmt: skip
"""Operations a second of a processor that multiplies all the time."""
_PAIR = 8.6e-11
"""Seconds in which a processor makes a weight of a score."""
_DRAWN = 1.2e-10
"""Seconds in which a processor draws whether a weight is kept: 0.9e-10 to 1.4e-10 on an H200, by the result of all
pairs of 4096 tokens and of a window."""
_STEP = 8.5e-8
"""Seconds that a program of two stages waits in a step, beside what it computes."""
_PROGRAM = 4.7e-6
"""Seconds before a program's first product and after its last."""
_BYTE = 2.1e-11
"""Seconds in which a processor reads a byte from L2."""


def cost_by_tiles(
    programs: sympy.Expr, steps: sympy.Expr, products: sympy.Expr, walked: sympy.Expr, kept: sympy.Expr,
    kept_depth: sympy.Expr, sums: sympy.Expr, scores: sympy.Expr, beside: sympy.Expr = ADDED_BYTES,
) -> Cost:  # fmt: skip
    """The cost of a launch.

    Args:
        programs: of one head.
        steps: tiles that a program walks over, in the longest list.
        products: multiply-accumulates of a pair.
        walked, kept: rows of a tile that is walked over, and of the one that stays.
        kept_depth: numbers of a row that stay in shared memory.
        sums: numbers of a row that stay in registers.
        scores: matrices (BM, BN) that are alive at once, about.
        beside: bytes that are read of a pair in each step.
    """
    numbers = (kept * sums + scores * _bm * _bn) / (32 * _warps)
    registers = sympy.ceiling(sympy.Min(255, 36 + 1.4 * numbers) / 8) * 8
    spilled = 1 + sympy.Max(0, numbers - 176) * 0.01
    shared = _itemsize * (kept * kept_depth + _stages * walked * (_depth + _v_depth)) + 4 * _stages * kept * walked / 32
    resident = sympy.Min(sympy.floor(65536 / (32 * _warps * registers)), sympy.floor(_shared / (shared + 2048)))
    total = programs * _batch * _heads / _processors
    resident = sympy.Max(1, sympy.Min(resident, total))
    compute = spilled * _bm * _bn * (2 * products / _RATE + _PAIR + _DRAWN * _dropped)
    load = (walked * (_depth + _v_depth) * _itemsize + _bm * _bn * beside) * _BYTE
    # what a processor does, what its programs wait for, and what it reads overlap, if not wholly
    waited = (steps * (compute + 2 * _STEP / sympy.Min(_stages, 3)) + _PROGRAM) / resident
    program = sympy.sqrt(sympy.sqrt((steps * compute) ** 4 + waited**4 + (steps * load) ** 4))
    return Cost(bytes=sympy.Integer(0), seconds=sympy.Max(total, 1) * program)
