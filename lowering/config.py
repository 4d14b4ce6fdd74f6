"""Launch configurations of the binary convolution and the rule that picks one without measuring."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ConvConfig:
    """Block sizes (output pixels, output channels, depth a step), warps and pipeline stages of one launch."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


def choose_config(pixels: int, out_channels: int, in_channels: int, depth: int, digits: int) -> ConvConfig:
    """The configuration for a problem of this size.

    Args:
        pixels: output pixels N·OH·OW.
        out_channels, in_channels: channels of one group.
        depth: R·S·Cp, the padded length of the reduction.
        digits: byte planes of the weight.
    """
    taps_fit = depth % 128 == 0 and in_channels % 128 == 0
    block_n = 64 if out_channels > 32 else 32
    if pixels <= 64:
        return ConvConfig(64, block_n, 64 if in_channels > 32 else 32, 4, 4)
    if in_channels <= 32:
        return ConvConfig(128, block_n, 32, 4, 4)
    if digits == 2 and taps_fit:
        return ConvConfig(128, block_n, 128, 4, 3)
    return ConvConfig(128, block_n, 64, 4, 4)
