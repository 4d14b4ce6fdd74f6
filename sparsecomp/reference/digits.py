"""Weights as sums of signed bytes, so that a product with small integers runs exactly on int8 tensor cores.

A spike is a small integer, exact in int8. A weight becomes `scale[k] * (d0·256^(D-1) + … + d(D-1))` with signed
bytes `d` and one power-of-two scale an output channel, so the tensor cores accumulate without rounding in int32 and
the only error of a product is the rounding of the weights: at most `2^(1-8D)` of the channel's largest (D=3: 1.2e-7).
This is the Ozaki scheme (Ootomo et al., 2024, "DGEMM on integer matrix multiplication unit") with one operand exact.

Next to one very large weight the others would lose their digits, so the split itself looks at the weight that is there:
the scale of a channel whose digits would not do says so by its sign, and the product takes the channel's floats.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from sparsecomp.errors import InputError

CHANNEL_BLOCK = 32
"""Channels are padded to this multiple, the depth of one int8 tensor-core instruction."""


def padded_channels(channels: int) -> int:
    """Input channels of one group, padded to the depth that the kernels step in (64, or 32 for narrow layers)."""
    block = CHANNEL_BLOCK if channels <= CHANNEL_BLOCK else 2 * CHANNEL_BLOCK
    return -(-channels // block) * block


def check_digits(digits: int) -> None:
    """Raise `InputError` for a number of digits that no kernel has: it would read beyond the split weight."""
    if not 2 <= digits <= 4:
        raise InputError(f"digits is {digits}: 2, 3 or 4 bytes a weight are needed")


def digit_bits(digits: int) -> int:
    """Bits of a weight, without sign, in `digits` signed bytes."""
    return 8 * digits - 1


def largest_mantissa(digits: int) -> float:
    """The largest number of `digits` balanced bytes (each at most 127), as a share of 2^digit_bits."""
    return sum(127 * 256**i for i in range(digits)) / 2 ** digit_bits(digits)


SPREAD = 20.0
"""Greatest weight of a channel, in medians of its non-zero ones, at which the fewest digits of a precision do.

The rounding error of D digits is at most 2^(1-8D) of the greatest weight, its root mean square 2^(2-8D) / sqrt(12).
Next to normally distributed weights (median 0.67) that reaches 1e-6 at D=3, and 2.4e-4 at D=2, for a range of 21. Every
further digit allows 256 times the range. Not in means or root mean squares: one outlier would hide in either, while its
input may never fire.
"""


def channel_scale(magnitudes: Tensor, digits: int, spread: float) -> Tensor:
    """The power of two that maps each channel's largest weight onto `digits` balanced bytes.

    Args:
        magnitudes: (K, N) float32, absolute weights of each output channel.
        digits: number of signed bytes, 2 to 4.
        spread: how often the largest weight may contain the median of the non-zero ones.

    Returns:
        (K,) float32 powers of two; negative where the digits do not hold the channel's weights, NaN where one is not
        finite.
    """
    if magnitudes.shape[1] == 0:
        magnitudes = magnitudes.new_zeros((magnitudes.shape[0], 1))
    amax = magnitudes.amax(1)
    mantissa, exponent = torch.frexp(amax)
    biased = exponent - digit_bits(digits) + (mantissa > largest_mantissa(digits)) + 127
    scale = (biased.clamp(1, 254).to(torch.int32) << 23).view(torch.float32)
    used = (magnitudes != 0).sum(1)
    near = ((magnitudes != 0) & (magnitudes * spread >= amax[:, None])).sum(1)
    lost = ((2 * near <= used) | (biased < 1)) & (used > 0)
    return torch.where(torch.isfinite(amax), torch.where(lost, -scale, scale), torch.nan)


def split_weight(weight: Tensor, digits: int, spread: float = SPREAD) -> tuple[Tensor, Tensor]:
    """Split a convolution or linear weight in signed bytes, most significant first.

    Args:
        weight: (K, C, …), float32, float16 or bfloat16; C is the number of input channels of one group.
        digits: number of signed bytes, 2 to 4.
        spread: see :func:`channel_scale`.

    Returns:
        `(bytes, scale)`: (digits, K, taps · Cp) int8 with Cp = `padded_channels(C)`, channels innermost; (K,)
        float32, above zero where the bytes stand for the channel's weights.
    """
    w = weight.float()
    k, c = w.shape[:2]
    scale = channel_scale(w.abs().flatten(1), digits, spread)
    # 1/scale overflows for scales under 2^-126; channel_scale never returns one.
    q = w.reshape(k, c, prod(w.shape[2:])).mT * (1.0 / scale.abs())[:, None, None]
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
    return stacked.flatten(2), scale


def multiplied_weight(weight: Tensor, digits: int, spread: float) -> Tensor:
    """The float64 weight (K, C, …) that a product of `digits` multiplies with: the split one, or as it is."""
    return used_weight(weight, *split_weight(weight, digits, spread))


def used_weight(weight: Tensor, planes: Tensor, scale: Tensor) -> Tensor:
    """As :func:`multiplied_weight`, of a weight that was split before."""
    split = join_weight(planes, scale, weight.shape[2:], weight.shape[1])
    return torch.where((scale > 0).view(-1, *(1,) * (weight.dim() - 1)), split, weight.double())


def join_weight(planes: Tensor, scale: Tensor, kernel: Sequence[int], channels: int) -> Tensor:
    """The float64 weight (K, C, …) that `split_weight` stored; the inverse up to its rounding."""
    digits, k, _ = planes.shape
    powers = 256.0 ** torch.arange(digits - 1, -1, -1, dtype=torch.float64, device=planes.device)
    w = (planes.double() * powers[:, None, None]).sum(0) * scale.double().abs()[:, None]
    return w.reshape(k, *kernel, padded_channels(channels))[..., :channels].movedim(-1, 1)
