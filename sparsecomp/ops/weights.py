"""Weights as sums of signed bytes, so that a product with small integers runs exactly on int8 tensor cores.

A spike is a small integer, exact in int8. A weight becomes ``scale[k] * (d0·256^(D-1) + … + d(D-1))`` with signed
bytes ``d`` and one power-of-two scale an output channel, so the tensor cores accumulate without rounding in int32 and
the only error of a product is the rounding of the weights: at most ``2^(1-8D)`` of the channel's largest (D=3: 1.2e-7).
This is the Ozaki scheme (Ootomo et al., 2024, "DGEMM on integer matrix multiplication unit") with one operand exact.
"""

import torch
from torch import Tensor

CHANNEL_BLOCK = 32
"""Channels are padded to this multiple, the depth of one int8 tensor-core instruction."""


def padded_channels(channels: int) -> int:
    """Input channels of one group, padded to the depth that the kernels step in (64, or 32 for narrow layers)."""
    block = CHANNEL_BLOCK if channels <= CHANNEL_BLOCK else 2 * CHANNEL_BLOCK
    return -(-channels // block) * block


def digit_bits(digits: int) -> int:
    """Bits of a weight, without sign, in ``digits`` signed bytes."""
    return 8 * digits - 1


def largest_mantissa(digits: int) -> float:
    """The largest number of ``digits`` balanced bytes (each at most 127), as a share of 2^digit_bits."""
    return sum(127 * 256**i for i in range(digits)) / 2 ** digit_bits(digits)


def channel_scale(amax: Tensor, digits: int) -> Tensor:
    """The power of two that maps a channel's largest weight onto ``digits`` balanced bytes.

    Args:
        amax: (K,) float32, largest absolute weight of each output channel.
        digits: number of signed bytes, 2 to 4.

    Returns:
        (K,) float32 powers of two; NaN where ``amax`` is not finite, so that the whole channel becomes NaN.
    """
    mantissa, exponent = torch.frexp(amax)
    exponent = exponent - digit_bits(digits) + (mantissa > largest_mantissa(digits))
    biased = (exponent + 127).clamp(1, 254).to(torch.int32)
    scale = (biased << 23).view(torch.float32)
    return torch.where(torch.isfinite(amax), scale, torch.nan)


def split_weight(weight: Tensor, digits: int) -> tuple[Tensor, Tensor]:
    """Split a convolution or linear weight in signed bytes, most significant first.

    Args:
        weight: (K, C, R, S) or (K, C), float32, float16 or bfloat16; C is the number of input channels of one group.
        digits: number of signed bytes, 2 to 4.

    Returns:
        ``(bytes, scale)``: (digits, K, R·S·Cp) int8 with Cp = ``padded_channels(C)``, channels innermost; (K,) float32.
    """
    w = weight.float()
    if w.dim() == 2:
        w = w[:, :, None, None]
    k, c, r, s = w.shape
    scale = channel_scale(w.abs().amax((1, 2, 3)), digits)
    # 1/scale overflows for scales under 2^-126; channel_scale never returns one.
    q = w.permute(0, 2, 3, 1) * (1.0 / scale)[:, None, None, None]
    # from 2^23 on every float32 is whole, and adding a half would round it
    q = torch.where(q.abs() < 2**23, torch.floor(q + 0.5), q)
    q = torch.where(torch.isfinite(q), q, 0.0).to(torch.int32)
    planes = []
    for _ in range(digits):
        digit = ((q + 128) & 255) - 128
        planes.append(digit.to(torch.int8))
        q = (q - digit) >> 8
    stacked = torch.stack(planes[::-1])
    stacked = torch.nn.functional.pad(stacked, (0, padded_channels(c) - c))
    return stacked.reshape(digits, k, r * s * padded_channels(c)), scale


def join_weight(planes: Tensor, scale: Tensor, kernel: tuple[int, int], channels: int) -> Tensor:
    """The float64 weight (K, C, R, S) that ``split_weight`` stored; the inverse up to its rounding."""
    digits, k, _ = planes.shape
    powers = 256.0 ** torch.arange(digits - 1, -1, -1, dtype=torch.float64, device=planes.device)
    w = (planes.double() * powers[:, None, None]).sum(0) * scale.double()[:, None]
    return w.reshape(k, *kernel, -1)[..., :channels].permute(0, 3, 1, 2)
