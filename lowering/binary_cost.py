"""What a configuration of the binary convolution costs, for both its kernels."""

import sympy

from sparsecomp.lowering.cost import Cost, sizes

_n, _oh, _ow, _h, _w, _c, _k, _cp, _r, _s = sizes("n oh ow h w c k cp r s")
_groups, _digits, _itemsize, _processors = sizes("groups digits itemsize processors")
_bm, _bn, _bk, _warps, _stages = sizes("BM BN BK warps stages")


def binary_conv_cost(hopper: bool) -> Cost:
    """Waves of tiles over the processors, each tile a walk over the depth.

    A step of a tile takes its products at the processor's int8 rate, or the copies of its operands from L2, whichever
    is longer, and a little for itself. As many tiles run at once on a processor as its registers and shared memory hold.
    """
    pixels, channels = _n * _oh * _ow, _k / _groups
    tiles = sympy.ceiling(pixels / _bm) * sympy.ceiling(channels / _bn) * _groups
    steps = _r * _s * _cp / _bk
    rate = 8.0e12 if hopper else 5.5e12  # int8 operations a second of one processor
    fill = 3.0e10  # bytes a second from L2 to one processor
    products = 2 * _bm * _bn * _bk * _digits / rate
    copies = (_bm + _digits * _bn) * _bk / fill
    shared = _stages * _bk * (_bm + _digits * _bn)
    resident = sympy.Max(sympy.floor(sympy.Min(220e3 / shared, 16 / _warps)), 1)
    step = sympy.Max(products, copies) + 1.2e-7 / resident
    tail = 2e-6 + _bm * _bn * _itemsize / fill
    waves = sympy.ceiling(tiles / (_processors * resident)) * resident
    return Cost(
        bytes=_n * _h * _w * _c + _digits * _k * _r * _s * _cp + pixels * _k * _itemsize,
        seconds=waves * (steps * step) + sympy.ceiling(tiles / (_processors * resident)) * tail,
    )
