"""The light first pass over spikes: one byte an element, channels innermost, for the kernels of stage two.

In a compiled graph Inductor fuses this cast into the neuron's own kernel; these kernels serve eager calls.
"""

import triton
import triton.language as tl


@triton.jit
def cast_flat_kernel(x_ptr, out_ptr, numel, count_ptr, limit, BLOCK: tl.constexpr):
    """out[i] = int8(x[i]) for dense memory that already lies channels-last; with count_ptr, if *count_ptr > limit."""
    if count_ptr is not None:
        count = tl.load(count_ptr)
        if count <= limit:
            return
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < numel
    # through float32: the interpreter has no direct bf16 conversion
    value = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offset, value.to(tl.int8), mask=mask)


@triton.jit
def cast_strided_kernel(
    x_ptr, out_ptr, C, W, P, stride_n, stride_c, stride_h, stride_w, BC: tl.constexpr, BP: tl.constexpr
):
    """out[n, p, c] = int8(x[n, c, p]) for any strides; P = H·W pixels an image. Tiles are transposed on chip."""
    blocks = tl.cdiv(P, BP)
    image = (tl.program_id(0) // blocks).to(tl.int64)
    p = (tl.program_id(0) % blocks) * BP + tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    mask = (c[:, None] < C) & (p[None, :] < P)
    pixel = (p // W).to(tl.int64) * stride_h + (p % W).to(tl.int64) * stride_w
    src = x_ptr + image * stride_n + c.to(tl.int64)[:, None] * stride_c + pixel[None, :]
    value = tl.load(src, mask=mask, other=0.0).to(tl.float32).to(tl.int8)
    dst = out_ptr + image * P * C + p.to(tl.int64)[None, :] * C + c[:, None]
    tl.store(dst, value, mask=mask)
