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


def hopper_config(pixels: int, out_channels: int, padded_channels: int, digits: int) -> ConvConfig:
    """For the Gluon kernel; the best of twelve on the four 3×3 stages of a ResNet at batch 128 (H100).

    Args:
        pixels: output pixels N·OH·OW.
        out_channels: output channels of one group.
        padded_channels: input channels of one group, padded as in the packed weight.
        digits: byte planes of the weight.
    """
    block_k = 64 if padded_channels % 64 == 0 else 32
    if pixels <= 64 * 132 or digits == 4:
        return ConvConfig(128, 64, block_k, 8 if digits == 4 else 4, 4)
    if out_channels <= 64 or digits == 2:
        return ConvConfig(256, 64, block_k, 8, 4)
    return ConvConfig(128, 128, block_k, 8, 4)


def portable_config(pixels: int, out_channels: int, padded_channels: int, digits: int) -> ConvConfig:
    """For the Triton kernel, on any card with int8 tensor cores; arguments as in :func:`hopper_config`."""
    block_k = 64 if padded_channels % 64 == 0 else 32
    block_n = 64 if out_channels > 32 else 32
    if digits == 2 and padded_channels % 128 == 0:
        block_k = 128
    block_m = 64 if pixels <= 64 else 128
    return ConvConfig(block_m, block_n, block_k, 8 if digits == 4 else 4, 3 if block_k == 128 else 4)
