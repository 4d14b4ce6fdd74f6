"""What a card can do at most: measured once, kept beside the tuning results, and the yardstick of every estimate."""

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import cache

import torch

from sparsecomp.lowering.cache import default_cache
from sparsecomp.lowering.signature import device_of

_FACT = "ceilings"
_INT8_OVER_HALF = 1.5
"""Rate of int8 products over half-precision ones here; the data sheet's ratio is 2, its power limit allows less."""


@dataclass(frozen=True)
class Ceilings:
    """Rates in bytes or operations a second (a multiply-accumulate is two), and the cost of a launch in seconds.

    Attributes:
        bandwidth: device memory, bytes read and written.
        fp32, tf32, half, int8: matrix products in that precision.
        launch: one small kernel, replayed in a CUDA graph.
        processors: multiprocessors.
    """

    bandwidth: float
    fp32: float
    tf32: float
    half: float
    int8: float
    launch: float
    processors: float


H100 = Ceilings(
    bandwidth=3.0e12, fp32=50e12, tf32=430e12, half=730e12, int8=1100e12, launch=2e-6, processors=132
)  # fmt: skip
"""NVIDIA H100 80GB HBM3, torch 2.11, measured by this project's benchmarks; stands in where there is no GPU."""


@cache
def ceilings_of(device: torch.device) -> Ceilings:
    """The ceilings of ``device``: from the tuning cache, or measured now and stored there.

    During CUDA graph capture, and where there is no GPU, they are the H100's.
    """
    if device.type != "cuda":
        return H100
    known = default_cache().fact(_FACT, device_of(device))
    names = {field.name for field in fields(Ceilings)}
    if known is not None and set(known) == names:
        return Ceilings(**known)
    if torch.cuda.is_current_stream_capturing():
        return H100
    measured = measure(device)
    default_cache().put_fact(_FACT, device_of(device), asdict(measured))
    return measured


def measure(device: torch.device) -> Ceilings:
    """Measure a CUDA device, in under a second and within 2 GB of its memory."""
    with torch.cuda.device(device), torch.no_grad():
        half = _product_rate(torch.float16, False)
        return Ceilings(
            bandwidth=_bandwidth(), fp32=_product_rate(torch.float32, False), tf32=_product_rate(torch.float32, True),
            half=half, int8=_INT8_OVER_HALF * half, launch=H100.launch,
            processors=torch.cuda.get_device_properties(device).multi_processor_count,
        )  # fmt: skip


def _bandwidth() -> float:
    source = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / _seconds(lambda: target.copy_(source))


def _product_rate(dtype: torch.dtype, tf32: bool) -> float:
    size = 2048 if dtype is torch.float32 and not tf32 else 4096
    a = torch.randn(size, size, device="cuda").to(dtype)
    b = torch.randn(size, size, device="cuda").to(dtype)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        return 2 * size**3 / _seconds(lambda: a @ b)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _seconds(call: Callable[[], object], repeats: int = 7) -> float:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    call()
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) * 1e-3
