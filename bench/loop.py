"""Compiled layers as a user calls them: loops of calls, host included, sparse beside the dense layer under stock.

A figure of a kernel says nothing of a model whose host cannot keep up. Here both layers go through `torch.compile`,
with the same ReLU behind them, in the same process, one after the other; a call is what the user writes, a training
step is forward, backward and an optimizer's step. float32 is exact in both: neither may use TF32.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsecomp
from bench.parallel import measured
from bench.timing import MODES, guarded, time_rivals
from sparsecomp.nn import SparseLinear

SIZES = (256, 512, 1024, 1536, 2048, 3072, 4096, 8192)
SPARSITIES = (0.5, 0.7, 0.8, 0.9, 0.98)
ROWS = (1, 16, 64, 512, 2048)
DTYPES = ("float32", "float16", "bfloat16")


class Layer(NamedTuple):
    """A square layer of the grid.

    Attributes:
        size: features in and out.
        sparsity: share of weights that are zero.
        rows: of the input.
        training: a step instead of a call without gradients.
    """

    size: int
    sparsity: float
    rows: int
    dtype: str
    training: bool


def grid(
    sizes: tuple[int, ...] = SIZES, sparsities: tuple[float, ...] = SPARSITIES, rows: tuple[int, ...] = ROWS,
    dtypes: tuple[str, ...] = DTYPES, trainings: tuple[bool, ...] = (False, True),
) -> Iterator[Layer]:  # fmt: skip
    """The layers, the smallest first."""
    for found in itertools.product(sizes, dtypes, sparsities, rows, trainings):
        yield Layer(found[0], found[2], found[3], found[1], found[4])


def run(
    layers: Iterable[Layer], modes: tuple[str, ...] = MODES, device: str = "cuda", workers: int = 1
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Milliseconds of each layer in each mode, by `stock`, `sparsecomp` and, without gradients, `frozen`.

    The rivals of a mode take turns, so that all see the same machine; the least mean of each counts.
    """
    for row in measured(partial(prepared, modes=modes, device=device), list(layers), workers, batch=2):
        print(row, flush=True)
        yield row


def prepared(layer: Layer, modes: tuple[str, ...], device: str) -> Callable[[], dict[str, Any]]:
    """What measures a layer, compiled in all modes."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    row: dict[str, Any] = {"layer": layer._asdict(), "ms": {}, "implementation": {}}
    calls: dict[str, dict[str, Callable[[], Any]]] = {}
    dense, sparse, x = operands(layer, device)

    def prepare(mode: str) -> None:
        calls[mode] = _compiled(row, layer, mode, dense, sparse, x)

    def measure() -> dict[str, Any]:
        for mode in calls:
            guarded(row, mode, partial(time_rivals, row, mode, calls[mode], layer.training))
        return row

    for mode in modes:
        guarded(row, mode, partial(prepare, mode))
    return measure


def operands(layer: Layer, device: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """The dense layer with its zeros, the sparse one of the same weights, and an input."""
    torch.manual_seed(0)
    dtype = getattr(torch, layer.dtype)
    linear = nn.Linear(layer.size, layer.size, device=device)
    mask = torch.rand(layer.size, layer.size, device=device) >= layer.sparsity
    with torch.no_grad():
        linear.weight.mul_(mask)
    sparse = SparseLinear.from_linear(linear, mask=mask)
    dense, ours = (WithRelu.alone(copy.deepcopy(model)).to(dtype) for model in (linear, sparse))
    return dense, ours, torch.randn(layer.rows, layer.size, device=device, dtype=dtype)


class Alone(nn.Module):
    """A layer, with code of its own: what Dynamo keeps of other layers then costs no time here."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """(rows, in) to (rows, out)."""
        return self.layer(x)

    @classmethod
    def alone(cls, layer: nn.Module) -> Self:
        """Of a class that no other layer has."""
        own = FunctionType(cls.forward.__code__.replace(), cls.forward.__globals__)
        made: Any = type(cls.__name__, (cls,), {"forward": own})
        return made(layer)


class WithRelu(Alone):
    """A layer and a ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        """(rows, in) to (rows, out)."""
        return F.relu(self.layer(x))


def _compiled(
    row: dict[str, Any], layer: Layer, mode: str, dense: nn.Module, sparse: nn.Module, x: Tensor
) -> dict[str, Callable[[], Any]]:  # fmt: skip
    calls: dict[str, Callable[[], Any]] = {}
    with torch.set_grad_enabled(layer.training):
        for which in ("stock", "sparsecomp") if layer.training else ("stock", "sparsecomp", "frozen"):
            calls[which] = call = _call(which, mode, layer, dense if which == "stock" else sparse, x)
            for _ in range(4):  # compiles, records CUDA graphs
                call()
            if which != "stock":
                report = sparsecomp.last_report()
                assert report is not None
                found = [f"{site.implementation}: {site.reason}" for site in report.sites]
                row["implementation"][f"{which}, {mode}"] = found
    return calls


def _call(which: str, mode: str, layer: Layer, model: nn.Module, x: Tensor) -> Callable[[], Any]:
    if which == "stock":
        compiled = torch.compile(model, mode=mode)
    elif which == "sparsecomp":
        compiled = torch.compile(model, backend="sparsecomp", mode=mode)
    else:
        compiled = torch.compile(model, backend="sparsecomp", options={"frozen": True, "mode": mode})
    return _step(compiled, model, x) if layer.training else lambda: compiled(x)


def _step(compiled: Callable[..., Tensor], model: nn.Module, x: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    grad = torch.randn(x.shape[0], x.shape[1], device=x.device, dtype=x.dtype)

    def step() -> None:
        compiled(x).backward(grad)
        optimizer.step()
        optimizer.zero_grad()

    return step
