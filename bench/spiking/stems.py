"""Float32 convolutions of images, the first layers of networks, beside cuDNN's float32 and TF32.

Kernels replayed as CUDA graphs. Every configuration of ours is timed too, to hold the estimates against; worker
processes compile them side by side into Triton's cache first.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import sparsecomp.ops  # noqa: F401  (registers the operator)
from bench.table import markdown_grid
from bench.timing import graph_ms
from sparsecomp.lowering.cache.signature import device_of
from sparsecomp.lowering.spiking.convolution import Convolution
from sparsecomp.lowering.spiking.halves_conv import HALVES_CONV, HalvesConv
from sparsecomp.lowering.tuning.ceilings import card_of
from sparsecomp.lowering.tuning.cost import seconds
from sparsecomp.lowering.tuning.trial import first_line
from sparsecomp.reference.geometry import Window, laid_out

Row = dict[str, Any]


class Stem(NamedTuple):
    """The shapes of a convolution that is padded by half its window."""

    x: tuple[int, int, int, int]
    outputs: int
    side: int
    stride: int = 1

    @property
    def window(self) -> tuple[list[int], list[int], list[int]]:
        """Stride, padding and dilation."""
        return [self.stride] * 2, [self.side // 2] * 2, [1, 1]


STEMS = {
    "ResNet, 224": Stem((128, 3, 224, 224), 64, 7, 2), "ResNet, 224, hoisted": Stem((32, 3, 224, 224), 64, 7, 2),
    "ResNet, 224, one image": Stem((1, 3, 224, 224), 64, 7, 2), "VGG, 32": Stem((256, 3, 32, 32), 64, 3),
    "Spikformer, 32": Stem((256, 3, 32, 32), 48, 3), "events, 128": Stem((64, 2, 128, 128), 64, 3),
    "64 channels, 56": Stem((32, 64, 56, 56), 64, 3), "128 channels, 28": Stem((32, 128, 28, 28), 128, 3),
    "256 channels, 14": Stem((32, 256, 14, 14), 256, 3),
}  # fmt: skip
LAYOUTS = {"channels last": True, "contiguous": False}


def run(names: Sequence[str] = tuple(STEMS), workers: int = 1) -> Iterator[Row]:
    """A row a stem and layout: milliseconds by rival, errors beside float64, and milliseconds by configuration.

    Args:
        workers: processes that compile side by side.
    """
    cases = [(name, layout) for name in names for layout in LAYOUTS]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.starmap(_compile, [(*case, share, workers) for case in cases for share in range(workers)], chunksize=1)
    for case in cases:
        yield _row(*case)


def _compile(name: str, layout: str, share: int, workers: int) -> None:
    x, weight, _ = _operands(name, layout)
    for call in [*_candidates(name, layout, x, weight).values()][share::workers]:
        try:
            call()
        except Exception as error:
            print(first_line(error), flush=True)


def _operands(name: str, layout: str) -> tuple[Tensor, Tensor, tuple[list[int], list[int], list[int]]]:
    torch.manual_seed(0)
    stem = STEMS[name]
    x = torch.randn(stem.x, device="cuda")
    weight = torch.randn(stem.outputs, stem.x[1], stem.side, stem.side, device="cuda") / stem.side
    return laid_out(x, LAYOUTS[layout]), laid_out(weight, LAYOUTS[layout]), stem.window


def _problem(name: str, layout: str) -> HalvesConv:
    x, weight, window = _operands(name, layout)
    last = LAYOUTS[layout]
    return HalvesConv(
        Convolution.of(x.shape, weight.shape, Window.of(weight.shape, *window), channels_last=last), x.stride(), last
    )


def _candidates(name: str, layout: str, x: Tensor, weight: Tensor) -> dict[str, Callable[[], None]]:
    problem = _problem(name, layout)
    out = problem.conv.poisoned_output(x.device)
    return {
        str(one.config): partial(one.template.prepare(problem, one.config), x, weight, None, out)
        for one in HALVES_CONV.candidates(problem, device_of(x.device))
    }


def _row(name: str, layout: str) -> Row:
    x, weight, window = _operands(name, layout)
    row: Row = {"stem": name, "layout": layout, "ms": {}, "error": {}, "configurations": {}}
    torch.backends.cudnn.benchmark = True
    rivals: dict[str, Callable[[], Tensor]] = {
        "cuDNN float32": lambda: F.conv2d(x, weight, None, *window),
        "cuDNN TF32": lambda: F.conv2d(x, weight, None, *window),
        "halves": lambda: torch.ops.sparsecomp.halves_conv(x, weight, None, *window, LAYOUTS[layout]),
    }
    exact = F.conv2d(x[:1].double(), weight.double(), None, *window)
    for rival, call in rivals.items():
        torch.backends.cudnn.allow_tf32 = rival == "cuDNN TF32"
        row["ms"][rival] = round(graph_ms([call] * 3, 8), 5)
        row["error"][rival] = float((call()[:1] - exact).norm() / exact.norm())
    times = {}
    for config, call in _candidates(name, layout, x, weight).items():
        try:
            times[config] = round(graph_ms([call] * 3, 5), 5)
        except Exception as error:
            print(config, first_line(error), flush=True)
    problem, device = _problem(name, layout), torch.device("cuda", 0)
    for one in HALVES_CONV.candidates(problem, device_of(device)):
        if str(one.config) in times:
            estimate = round(seconds(one, problem, card_of(device)) * 1e3, 5)
            row["configurations"][str(one.config)] = [times[str(one.config)], estimate]
    row["configurations"] = dict(sorted(row["configurations"].items(), key=lambda item: item[1]))
    print({**row, "configurations": [*row["configurations"].items()][:6]}, flush=True)
    return row


def table(rows: list[Row]) -> str:
    """Milliseconds by rival, cuDNN's over ours in float32, the fastest configuration, and errors."""
    grid = [["stem", "layout", "cuDNN float32", "TF32", "halves", "speed", "fastest", "its", "error", "float32's"]]
    for row in rows:
        float32, tf32, ours = (row["ms"][rival] for rival in ("cuDNN float32", "cuDNN TF32", "halves"))
        config, (fastest, _) = next(iter(row["configurations"].items()))
        errors = (f"{row['error'][rival]:.1e}" for rival in ("halves", "cuDNN float32"))
        times = (f"{one:.4f}" for one in (float32, tf32, ours))
        grid.append([row["stem"], row["layout"], *times, f"{float32 / ours:.2f}", config, f"{fastest:.4f}", *errors])
    return markdown_grid(grid)
