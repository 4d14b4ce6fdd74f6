"""What a configuration of the convolution on int8 tensor cores costs, for both its kernels and the transposed one's.

Held against all configurations of 22 convolutions and products on an H100 (`bench/results/tuning.json`): the fastest is
among the first three in 18, and the first is within 13 % of it, 3 % in the mean. Only three numbers are fitted there:
the latency, the start and the bytes of an output. Fitted without one width of layers they rank that width no worse.
"""

import sympy

from sparsecomp.lowering.tuning.cost import Cost, sizes, waves

_m, _in_pixels, _taps = sizes("conv.m conv.in_pixels conv.taps")
_c, _k, _groups = sizes("conv.c conv.k conv.groups")
_cp, _digits, _phases = sizes("conv.cp digits phases")
_pixels, _slots, _residuals, _current_bytes = sizes("pixels slots residuals current_bytes")
_steps, _operations, _waits = sizes("neurons.steps neurons.operations neurons.waits")
_bm, _bn, _bk, _warps, _stages = sizes("BM BN BK warps stages")
_bandwidth, _int8, _processors, _shared = sizes("bandwidth int8 processors shared")
_shared_rate, _int8_portable, _fp32 = sizes("shared_rate int8_portable fp32")

_REGISTERS = 65_536
"""Of one processor, on all cards since 2012."""
_COPY_RATE = _shared_rate / 2
"""Bytes a second that come into a processor from L2: 64 a cycle."""
_LATENCY = 5e-7
"""Seconds from the start of a copy to shared memory to its first byte, with a cold L2."""
_START = 3e-6
"""Seconds before the first product and after the last."""


def conv_lif_cost(hopper: bool) -> Cost:
    """The same walks, in tiles that hold all steps of a pixel, and the neurons' work; spikes are written as bytes,
    and what neurons are given where it is asked for."""
    rows = sympy.ceiling(_pixels * _slots / _bm)
    tiles = rows * sympy.ceiling(_k / (_groups * _bn)) * _groups
    step = _operations * (1 + _waits * (8 / _warps - 1))
    neurons = waves(tiles, _processors) * _bm * _bn * step * _processors / _fp32
    return Cost(
        # at the share of the bandwidth that a convolution's outputs reach
        bytes=((1.5 * (1 + _current_bytes) + _residuals) * _steps + 6) * _pixels * _k,
        # behind the neurons of a tile another tile's products can run
        seconds=_walks(hopper, rows) + neurons / _resident(_stages * (_bm + _digits * _bn) * _bk),
    )


def binary_conv_cost(hopper: bool, transposed: bool = False) -> Cost:
    """Waves of tiles over the processors, each tile a walk over the depth; what is written comes on top.

    Four things overlap, if not wholly: the processors' work, what is copied to shared memory, the wait for these
    copies, of which the stages allow so many at a time, and the inputs' traffic. The tensor cores read from shared
    memory, which is no less busy than they are. A transposed convolution's output sees one of `phases` parts of the
    taps.
    """
    return Cost(
        bytes=6 * _m * _k,  # of half precision as well, whose stores are narrower
        seconds=_walks(hopper, sympy.ceiling(_m / _bm), transposed),
    )


def _walks(hopper: bool, rows: sympy.Expr, transposed: bool = False) -> sympy.Expr:
    """Seconds of all tiles of so many rows of tiles, but for what they write."""
    tiles = rows * sympy.ceiling(_k / (_groups * _bn)) * _groups
    steps = _taps * _cp / _bk / (_phases if transposed else 1)
    copied = (_bm + _digits * _bn) * _bk
    walks = waves(tiles, _processors) * steps
    # the ceiling of int8 is what whole convolutions reach; warp-wide instructions reach less
    products = _bm * _bn * _bk * _digits * _processors / (_int8 * (1 if hopper else _int8_portable))
    work = walks * sympy.Max(products, bytes_read(hopper) / _shared_rate)
    copies = walks * copied / _COPY_RATE
    ahead = _stages - (2 if hopper else 1)
    arrival = _LATENCY + copied / _COPY_RATE
    wait = waves(tiles, _processors * _resident(_stages * copied)) * steps * arrival / ahead
    traffic = (_in_pixels * _c + _digits * _k * _taps * _cp) / _bandwidth
    return sympy.sqrt(work**2 + copies**2 + wait**2 + traffic**2) + _START


def bytes_read(hopper: bool) -> sympy.Expr:
    """Bytes that the products of a step read from shared memory."""
    if not hopper:
        # each warp multiplies rows of its own with the whole weight block
        return _bk * (_bm + _warps * _digits * _bn)
    # a warpgroup's instruction reads 64 rows and up to 128 columns; two planes lie beside each other in one
    pairs = sympy.floor(_digits / 2)
    instructions = pairs * sympy.ceiling(_bn / 64) + (_digits - 2 * pairs)
    return _bk * _bm * (instructions + _digits * _bn / 64)


def _resident(shared: sympy.Expr) -> sympy.Expr:
    """Tiles that run on a processor at a time, by `shared` bytes and by registers: the sums, and 30 a thread."""
    registers = _bm * _bn * _digits + 30 * 32 * _warps
    return sympy.Max(sympy.floor(sympy.Min(_shared / shared, _REGISTERS / registers)), 1)
