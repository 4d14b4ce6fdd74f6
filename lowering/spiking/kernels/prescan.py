"""The light first pass over spikes: one byte an element, channels innermost, for the kernels of stage two.

In a compiled graph Inductor fuses this cast into the neuron's own kernel; these kernels serve eager calls.
"""

import sympy
import triton
import triton.language as tl

from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.spiking.convolution import as_image
from sparsecomp.lowering.spiking.packing import Cast, CastStrided
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template


@triton.jit
def cast_flat_kernel(x_ptr, out_ptr, count_ptr, numel, limit, inverse, BINARY: tl.constexpr, BLOCK: tl.constexpr):
    """out[i] = count(x[i]) for dense memory that already lies channels-last; with count_ptr, if *count_ptr > limit."""
    if count_ptr is not None:
        count = tl.load(count_ptr)
        if count <= limit:
            return
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < numel
    tl.store(out_ptr + offset, _count(tl.load(x_ptr + offset, mask=mask, other=0.0), inverse, BINARY), mask=mask)


@triton.jit
def cast_strided_kernel(
    x_ptr, out_ptr, C, W, P, stride_n, stride_c, stride_h, stride_w, inverse,
    BINARY: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """out[n, p, c] = count(x[n, c, p]) for any strides; P = H·W pixels an image. Tiles are transposed on chip."""
    blocks = tl.cdiv(P, BP)
    image = (tl.program_id(0) // blocks).to(tl.int64)
    p = (tl.program_id(0) % blocks) * BP + tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    mask = (c[:, None] < C) & (p[None, :] < P)
    pixel = (p // W).to(tl.int64) * stride_h + (p % W).to(tl.int64) * stride_w
    src = x_ptr + image * stride_n + c.to(tl.int64)[:, None] * stride_c + pixel[None, :]
    value = _count(tl.load(src, mask=mask, other=0.0), inverse, BINARY)
    dst = out_ptr + image * P * C + p.to(tl.int64)[None, :] * C + c[:, None]
    tl.store(dst, value, mask=mask)


@triton.jit
def _count(x, inverse, BINARY: tl.constexpr):
    """The whole number that x · inverse is; with BINARY 1 where x is not zero, -1 where it is NaN."""
    # through float32: the interpreter has no direct bf16 conversion
    x = x.to(tl.float32)
    if BINARY:
        return (tl.abs(x) > 0.0).to(tl.int8) - (x != x).to(tl.int8)
    return (x * inverse).to(tl.int8)


def _prepare_flat(problem: Cast, config: Config) -> Launch:
    grid = (triton.cdiv(problem.numel, config["BLOCK"]),)
    numbers, constants = (problem.numel, problem.limit, problem.inverse), {"BINARY": problem.binary}
    constants |= {"BLOCK": config["BLOCK"]}
    return Launch(cast_flat_kernel, grid, numbers, constants, num_warps=config["warps"])


def _prepare_strided(problem: CastStrided, config: Config) -> Launch:
    p, bc, bp = problem.x, config["BC"], config["BP"]
    grid = (p.outer * triton.cdiv(p.pixels, bp), triton.cdiv(p.c, bc))
    numbers = (p.c, as_image(p.size, 1)[-1], p.pixels, *p.numbers, problem.inverse)
    return Launch(cast_strided_kernel, grid, numbers, {"BINARY": problem.binary, "BC": bc, "BP": bp})


_numel, _itemsize, _block, _warps, _bandwidth = sizes("numel itemsize BLOCK warps bandwidth")
_n, _c, _pixels, _x_itemsize, _bc, _bp = sizes("x.outer x.c x.pixels x.itemsize BC BP")
_cast_bytes = _numel * (_itemsize + 1)
# more than eight elements a thread leave fewer threads to hide loads; blocks of 2048 are a shade better than others
_cast_misfit = 0.04 * sympy.Max(sympy.log(_block / (256 * _warps)), 0) + 0.004 * abs(sympy.log(_block / 2048))

CAST_FLAT = Template(
    name="cast_flat",
    op="cast",
    sources=(cast_flat_kernel, _count),
    space=lambda problem, device: [
        Config(BLOCK=block, warps=warps) for block in (1024, 2048, 4096, 8192) for warps in (4, 8)
    ],
    # 3 µs to start and end
    cost=Cost(bytes=_cast_bytes, seconds=3e-6 + _cast_bytes / _bandwidth * _cast_misfit),
    prepare=_prepare_flat,
)

CAST_STRIDED = Template(
    name="cast_strided",
    op="cast_strided",
    sources=(cast_strided_kernel, _count),
    space=lambda problem, device: [Config(BC=bc, BP=bp) for bc in (32, 64, 128) for bp in (32, 64, 128)],
    # tiles that reach past the channels or pixels are read in vain
    cost=Cost(
        bytes=_n * sympy.ceiling(_c / _bc) * _bc * sympy.ceiling(_pixels / _bp) * _bp * (_x_itemsize + 1),
        seconds=1e-10 * (abs(_bc - 64) + abs(_bp - 64)),
    ),
    prepare=_prepare_strided,
)
