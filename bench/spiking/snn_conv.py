"""Single layers on spikes: every implementation beside cuDNN and cuBLAS, prescan included, checked against float64.

Times are of CUDA graph replays. Spikes arrive at full width and the time to turn them to bytes or events counts; so
does packing the weight, which a graph repeats in every replay to see new values. `binary from bytes` is what a site
costs in a compiled graph, where the neuron writes bytes.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from bench.spiking import spike_maps
from bench.timing import graph_ms
from sparsecomp.lowering.spiking.packing import pack_weight, to_bytes
from sparsecomp.ops import spike_conv, spike_linear

BATCH = 128
CLUSTERED = 0.1
"""Share of 8×8 blocks that hold spikes in a clustered case."""
STAGES = ((64, 56), (128, 28), (256, 14), (512, 7))
COPIES = 4
"""Inputs rotated through, so that no call finds its own input in the L2 cache."""


def run(data: Path | None = None) -> Iterator[dict[str, Any]]:
    """All cases, as they are measured: milliseconds by implementation and the error of each of ours.

    Args:
        data: folder of real spike maps, for cases of their own; see `bench.spike_maps`.
    """
    for dtype, densities in ((torch.float32, (0.15, 0.05, 0.01, 0.001)), (torch.float16, (0.15, 0.01, 0.001))):
        for channels, size in STAGES:
            for density in densities:
                yield conv_row(channels, size, density, dtype)
            yield _conv_row(_rotated(_clustered, channels, size, 0.2), "clustered", dtype)
    if data is not None:
        for name, layer in spike_maps.layers(data):
            inputs = [spike_maps.batch_of(layer, BATCH).cuda() for _ in range(COPIES)]
            yield _conv_row(inputs, name, torch.float32)
    yield _prescan_row()
    for m in (512, 4096):
        for dtype in (torch.float32, torch.float16):
            for density in (0.2, 0.05, 0.01):
                yield linear_row(m, density, dtype)


def conv_row(channels: int, size: int, density: float, dtype: torch.dtype) -> dict[str, Any]:
    """A 3×3 convolution of independent spikes."""
    return _conv_row(_rotated(_independent, channels, size, density), "independent", dtype)


def _prescan_row() -> dict[str, Any]:
    """The prescan beside a plain read of the same spikes."""
    inputs = [_independent((BATCH, 64, 56, 56), 0.15).contiguous(memory_format=torch.channels_last)
              for _ in range(COPIES)]  # fmt: skip
    read = graph_ms([lambda x=x: x.amax() for x in inputs])
    cast = graph_ms([lambda x=x: to_bytes(x) for x in inputs])
    row = {"case": "prescan of 128x64x56x56 fp32", "ms": {"read once (amax)": read, "prescan": cast}}
    print(row, flush=True)
    return row


def _independent(shape: tuple[int, ...], density: float) -> torch.Tensor:
    return (torch.rand(shape, device="cuda") < density).float()


def _clustered(shape: tuple[int, ...], density: float) -> torch.Tensor:
    """Nine of ten 8×8 blocks of pixels are empty; the rest hold independent spikes."""
    n, _, h, w = shape
    alive = torch.rand(n, 1, -(-h // 8), -(-w // 8), device="cuda") < CLUSTERED
    mask = alive.repeat_interleave(8, 2).repeat_interleave(8, 3)[:, :, :h, :w]
    return _independent(shape, density) * mask


def _rotated(make: Callable[..., torch.Tensor], channels: int, size: int, density: float) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [make((BATCH, channels, size, size), density) for _ in range(COPIES)]


def _active(x: torch.Tensor) -> float:
    """Share of output pixels whose 3×3 window holds a spike."""
    return F.max_pool2d(x.amax(1, keepdim=True), 3, 1, 1).mean().item()


def _conv_row(maps: list[torch.Tensor], spikes: str, dtype: torch.dtype) -> dict[str, Any]:
    inputs = [x.to(dtype).contiguous(memory_format=torch.channels_last) for x in maps]
    c, size = inputs[0].shape[1], inputs[0].shape[2]
    weight = (torch.randn(c, c, 3, 3, device="cuda") * 0.05).to(dtype).contiguous(memory_format=torch.channels_last)
    digits = 3 if dtype is torch.float32 else 2
    window = ([1, 1], [1, 1], [1, 1], 1)
    row: dict[str, Any] = {
        "case": f"conv 3x3 {c}->{c} @{size}x{size}", "dtype": str(dtype)[6:], "spikes": spikes,
        "density": maps[0].mean().item(), "active": _active(maps[0]), "ms": {}, "error": {},
    }  # fmt: skip

    def dense(x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, weight, None, *window)

    _time_dense(row, dtype, inputs, dense, lambda x: x.contiguous())
    exact = F.conv2d(inputs[0][:8].double(), weight.double(), None, *window)

    def ours(x: torch.Tensor, strategy: str) -> torch.Tensor:
        return spike_conv(x, weight, None, *window, digits, strategy)

    for strategy in ("binary", "event", "skip"):
        _time_ours(row, strategy, inputs, exact, lambda x, s=strategy: ours(x, s))
    as_bytes = [x.to(torch.int8) for x in inputs]
    _time_ours(row, "binary from bytes", as_bytes, exact, lambda x: ours(x, "binary"))
    row["ms"]["of which packing the weight"] = graph_ms([lambda: pack_weight(weight, digits)] * COPIES)
    return _printed(row)


def linear_row(m: int, density: float, dtype: torch.dtype, features: int = 4096) -> dict[str, Any]:
    """A linear layer on independent spikes."""
    torch.manual_seed(0)
    inputs = [_independent((m, features), density).to(dtype) for _ in range(COPIES)]
    weight = (torch.randn(features, features, device="cuda") * 0.02).to(dtype)
    digits = 3 if dtype is torch.float32 else 2
    row: dict[str, Any] = {
        "case": f"linear {m}x{features}x{features}", "dtype": str(dtype)[6:], "density": density,
        "spikes": "independent", "ms": {}, "error": {},
    }  # fmt: skip
    _time_dense(row, dtype, inputs, lambda x: F.linear(x, weight), None)
    exact = F.linear(inputs[0].double(), weight.double())
    for strategy in ("binary", "event"):
        _time_ours(row, strategy, inputs, exact, lambda x, s=strategy: spike_linear(x, weight, None, digits, s))
    return _printed(row)


def _time_dense(row: dict, dtype: torch.dtype, inputs: list, dense: Callable, to_nchw: Callable | None) -> None:
    torch.backends.cudnn.benchmark = True
    modes = {"fp16": True} if dtype is torch.float16 else {"fp32": False, "tf32": True}
    layouts = {" channels_last": inputs} if to_nchw else {"": inputs}
    if to_nchw:
        layouts[" nchw"] = [to_nchw(x) for x in inputs]
    for mode, tf32 in modes.items():
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
        for layout, rotated in layouts.items():
            row["ms"][f"dense {mode}{layout}"] = graph_ms([lambda x=x: dense(x) for x in rotated])
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False


def _time_ours(row: dict, name: str, inputs: list, exact: torch.Tensor, call: Callable) -> None:
    out = call(inputs[0])[: exact.shape[0]].double()
    row["error"][name] = ((out - exact).norm() / exact.norm().clamp_min(1e-30)).item()
    row["ms"][name] = graph_ms([lambda x=x: call(x) for x in inputs])


def _printed(row: dict[str, Any]) -> dict[str, Any]:
    times = ", ".join(f"{name} {ms:.4f}" for name, ms in row["ms"].items())
    errors = ", ".join(f"{name} {error:.0e}" for name, error in row["error"].items())
    print(f"{row['case']} {row['dtype']} {row['spikes']} {row['density']:.4f}: {times} | errors {errors}", flush=True)
    return row
