"""What a card can do, and which share of it each kind of kernel reaches: all that estimates know of a card.

To teach the estimates a new card, run `python -m bench card` on it and add the record that it prints, here and in
`KNOWN`. A card without a record is measured once for its ceilings and taken to reach the H100's shares of them.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

_SHARED_BYTES = {
    "8.0": 166_912, "8.6": 101_376, "8.7": 166_912, "8.9": 101_376, "9.0": 232_448, "10.0": 232_448, "10.3": 232_448,
    "11.0": 232_448, "12.0": 101_376, "12.1": 101_376,
}  # fmt: skip
"""By compute capability, from Triton's least on (CUDA C++ Programming Guide, technical specifications)."""


@cache
def shared_bytes(capability: str) -> int:
    """Shared memory that a block can opt in to.

    A capability that is not listed gets the least of its generation, one of a new generation the least of all.
    """
    generation = capability.partition(".")[0]
    alike = [most for listed, most in _SHARED_BYTES.items() if listed.partition(".")[0] == generation]
    return _SHARED_BYTES.get(capability, min(alike or _SHARED_BYTES.values()))


class ByPrecision(NamedTuple):
    """A share for products of float32 in full precision, in TF32, and of float16 or bfloat16."""

    fp32: float
    tf32: float
    half: float


@dataclass(frozen=True)
class Ceilings:
    """Rates in bytes or operations a second (a multiply-accumulate is two).

    Attributes:
        bandwidth: device memory, bytes read and written.
        fp32, tf32, half, int8: matrix products in that precision; half is float16 and bfloat16.
        launch: seconds that one small kernel behind another takes.
        processors: multiprocessors.
    """

    bandwidth: float
    fp32: float
    tf32: float
    half: float
    int8: float
    launch: float
    processors: float


@dataclass(frozen=True)
class Card(Ceilings):
    """Ceilings, its compute capability, and what kernels reach; every number is a name that costs may use.

    The defaults are the H100's: what a kernel reaches over the ceiling, both in 1e12 a second. `bench card` measures
    those of whole layers; those of tiles were fitted to the timings of all configurations (`bench/results/spmm.json`,
    `bench/results/tuning.json`).

    Attributes:
        capability: as CUDA numbers it, such as `9.0`.
        matmul: cuBLAS, large products (`bench/results/snn_conv.json`: 4096 cubed).
        few_rows: of bandwidth, cuBLAS with a layer's weight and up to 64 rows.
        large_rows, large_rows_ahead: the same with weights of 8 MiB and more in half precision, and seconds that it
            takes beside a launch (`bench few-rows`, `bench shared-input`: up to 448 MiB, an H200).
        long_rows: of that, where a layer has twice as many features in as out, or more (the same: 4096x11008 took 1.07
            to 1.15 times as long as 11008x4096).
        one_row: of bandwidth, the kernel that Inductor writes for a layer of one row under max-autotune (`bench
            shared-input`: weights of 180, 101 and 50 MB as two and three layers in 44.9, 27.0 and 16.8 us, an H200).
        conv, conv_channels_last: cuDNN on channels-first and channels-last input (the same file: the 3x3 stages of a
            ResNet at batch 128).
        narrow, int8_narrow: what 64 output channels and fewer reach of cuDNN's rate, and of ours in int8.
        int8_two_digits: of int8, with weights of two digits; those of three and four are the ceiling (the same file).
        int8_portable: of int8, by warp-wide instructions instead of Hopper's.
        events_float32, events_half: operations on events to a byte of bandwidth: they wait for weights from memory.
        single_rows: of bandwidth, where rows are read and written one by one.
        rewritten: of bandwidth, to copy an operand or write a weight out.
        compared: of bandwidth, to read a stored weight and look whether its copy is still that (an H200).
        tile_half, tile_tf32x3, tile_halves: of half, tf32 and half: large tiles of 16-bit numbers, and of float32 as
            three products of TF32 or of float16.
        block_half: of half, tiles that follow the blocks of a matrix.
        two_of_four: of half, counted densely: cuSPARSELt (4096 cubed in 0.127 ms).
        fill, fill_blocks: bytes a second from L2 to one processor, into tiles of dense matrices and of blocks.
        gathered: bytes a second from L2 to one processor, rows that are gathered, with some help of L1.
        weight_rows: bytes a second from L2 to one processor, rows of weights by event.
        shared_rate: bytes a second of one processor's shared memory (128 a cycle at 1.7 GHz).
        selects: numbers a second that one processor puts in their places in a group of N:M.
        narrow_values, narrow_rows: values of narrow CSR, and besides rows, a second that one processor multiplies by a
            column (`bench few-rows-candidates`, one H200).
    """

    capability: str
    matmul: ByPrecision = ByPrecision(50 / 50, 430 / 430, 800 / 730)
    few_rows: float = 0.9
    large_rows: float = 0.97
    large_rows_ahead: float = 2.5e-6
    long_rows: float = 0.87
    one_row: float = 1.045
    conv: ByPrecision = ByPrecision(80 / 50, 200 / 430, 350 / 730)
    conv_channels_last: ByPrecision = ByPrecision(80 / 50, 330 / 430, 620 / 730)
    narrow: ByPrecision = ByPrecision(1.0, 0.45, 0.65)
    int8_narrow: float = 0.65
    int8_two_digits: float = 850 / 1100
    int8_portable: float = 1 / 1.65
    events_float32: float = 5.3 / 3.0
    events_half: float = 8 / 3.0
    single_rows: float = 0.75
    rewritten: float = 2.5 / 3.0
    compared: float = 0.9
    tile_half: float = 739.2 / 730
    tile_tf32x3: float = 38.28 / 430
    tile_halves: float = 198 / 730
    block_half: float = 528 / 730
    two_of_four: float = 1.5
    fill: float = 6e10
    fill_blocks: float = 1e11
    gathered: float = 7.0e12 / 132
    weight_rows: float = 8.3e10
    shared_rate: float = 2.2e11
    selects: float = 2.0e11
    narrow_values: float = 5.5e9
    narrow_rows: float = 2.1e7

    @property
    def shared(self) -> int:
        """Bytes of shared memory that a block can have."""
        return shared_bytes(self.capability)


H100 = Card(
    bandwidth=3.0e12, fp32=50e12, tf32=430e12, half=730e12, int8=1100e12, launch=2e-6, processors=132,
    capability="9.0",
)  # fmt: skip
"""NVIDIA H100 80GB HBM3, torch 2.11, measured by this project's benchmarks; stands in where there is no GPU."""

H200 = Card(
    bandwidth=4.18e12, fp32=51.6e12, tf32=453e12, half=769e12, int8=1160e12, launch=1.76e-6, processors=132,
    capability="9.0", rewritten=2.5 / 4.18,
)  # fmt: skip
"""NVIDIA H200, torch 2.11, its ceilings measured by `python -m bench card`. What a product writes and reads again stays
in L2, where it gains nothing over an H100."""

KNOWN = {"NVIDIA H100 80GB HBM3": H100, "NVIDIA H200": H200}
"""By name of the GPU: not measured again, so that the same model is compiled the same way on every such machine."""
