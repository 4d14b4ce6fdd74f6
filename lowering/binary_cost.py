"""What a configuration of the binary convolution costs, for both its kernels.

Calibrated on an H100 with the 3×3 stages of a ResNet at batch 128: the cheapest configuration is the one that was the
fastest there, and its estimate is within a quarter of the measured time.
"""

import sympy

from sparsecomp.lowering.cost import Cost, sizes, waves

_n, _oh, _ow, _h, _w, _c, _k, _cp, _r, _s = sizes("n oh ow h w c k cp r s")
_groups, _digits, _itemsize = sizes("groups digits itemsize")
_bm, _bn, _bk, _warps, _stages = sizes("BM BN BK warps stages")
_bandwidth, _int8, _processors, _shared = sizes("bandwidth int8 processors shared")

_SHARED_RATE = 2.2e11
"""Bytes a second of one processor's shared memory: 128 a cycle at 1.7 GHz."""
_FILL_RATE = 3e11
"""Bytes a second at which a tile's first copies delay it; other tiles and the launch hide most of them."""


def binary_conv_cost(hopper: bool) -> Cost:
    """Waves of tiles over the processors, each tile a walk over the depth; the output is written behind the last.

    The tensor cores take their operands from shared memory, which is no less busy than they are: a step takes what the
    slower of the two needs, and what remains of the wait for its copies.
    """
    pixels = _n * _oh * _ow
    tiles = sympy.ceiling(pixels / _bm) * sympy.ceiling(_k / (_groups * _bn)) * _groups
    copied = (_bm + _digits * _bn) * _bk
    products = _bm * _bn * _bk * _digits * _processors / _int8
    # the ceiling of int8 is what whole convolutions reach; warp-wide instructions reach less
    products *= 1.2 if hopper else 1.75
    # planes of the weight are copied apart, which takes more instructions
    shared = (_reads(hopper) + (_bm + 1.15 * _digits * _bn) * _bk) / _SHARED_RATE
    step = sympy.Max(products, shared) + _wait(hopper, _stages * copied)
    tile = _r * _s * _cp / _bk * step + (_stages - 2) * copied / _FILL_RATE
    return Cost(
        bytes=_n * _h * _w * _c + _digits * _k * _r * _s * _cp,
        seconds=waves(tiles, _processors) * tile + pixels * _k * _itemsize / _bandwidth,
    )


def _reads(hopper: bool) -> sympy.Expr:
    """Bytes that the products of a step read from shared memory."""
    if not hopper:
        # each warp multiplies rows of its own with the whole weight block
        return _bk * (_bm + _warps * _digits * _bn)
    # a warpgroup's instruction reads 64 rows and up to 128 columns; two planes lie beside each other in one
    pairs = sympy.floor(_digits / 2)
    instructions = pairs * sympy.ceiling(_bn / 64) + (_digits - 2 * pairs)
    return _bk * _bm * (instructions + _digits * _bn / 64)


def _wait(hopper: bool, shared: sympy.Expr) -> sympy.Expr:
    """Seconds a step waits for copies that run ahead of it, with ``shared`` bytes of stages."""
    if not hopper:
        # two tiles on a processor wait by turns
        return 8e-7 / _stages / sympy.Piecewise((4, 2 * shared <= _shared), (1, True))
    resident = sympy.Max(sympy.Min(sympy.floor(_shared / shared), 8 / _warps), 1)
    # steps of more depth wait longer, for they copy more; more than two steps ahead gained nothing
    return 1e-7 * _bk / 64 / (resident * sympy.Min(_stages - 2, 2))
