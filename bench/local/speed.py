"""Layers of fixed fan-in as a user calls them, beside what else computes the same, and dense layers of their size.

All go through `torch.compile` in one process (cuSPARSE, which Inductor does not compile, as torch calls it) and take
turns; host included. A training step is forward and backward, of a block an optimizer's step too. `plain` is
`(x[:, index] * weight).sum(-1) + bias`. float32 is exact in all: none may use TF32. `graph` is a replayed CUDA graph of
calls whose inputs rotate.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import sparsecomp
from bench.local.patterns import PATTERNS, index_of
from bench.loop import Alone
from bench.parallel import measured
from bench.timing import MODES, bandwidth, graph_ms, guarded, relative_error, time_rivals
from sparsecomp.nn import GeoSparseLinear, GeoSparseResidualBlock

SIZES = (256, 1024, 4096, 16384, 65536)
FAN_INS = (2, 4, 8, 16, 32, 64)
ROWS = (1, 8, 64, 512, 4096)
MOST_DENSE = {"cuda": 2**33, "cpu": 2**27}
"""Bytes of a dense weight and its gradient beyond which it is left out: several cases are on the device at once."""
COPIES = 3
"""Inputs that a replayed graph rotates through, so that they are not all in the cache."""

Row = dict[str, Any]


class Case(NamedTuple):
    """A square layer, or a block of two.

    Attributes:
        part: of the benchmark, which says who its rivals are.
        n: features in and out.
        k: fan-in.
        training: a training step instead of a call without gradients.
    """

    device: str
    part: str
    n: int
    k: int
    rows: int
    pattern: str
    dtype: str
    training: bool

    @classmethod
    def of(cls, row: Row) -> "Case":
        """What gave a row."""
        return cls(**row["layer"])


class Rival(NamedTuple):
    """A module, its input, and what compiles it; None takes it as it is."""

    module: nn.Module
    x: Tensor
    backend: str | None


class Plain(nn.Module):
    """The layer as one writes it in torch."""

    index: Tensor

    def __init__(self, layer: GeoSparseLinear) -> None:
        super().__init__()
        assert layer.bias is not None
        self.weight, self.bias = nn.Parameter(layer.weight.detach().clone()), layer.bias
        self.register_buffer("index", layer.in_index_per_out.long())

    def forward(self, x: Tensor) -> Tensor:
        """(rows, n) to the same."""
        return (x[:, self.index] * self.weight).sum(-1) + self.bias


class Csr(nn.Module):
    """The layer's weight as torch's own sparse matrix, which cuSPARSE (on a CPU, MKL) multiplies."""

    def __init__(self, layer: GeoSparseLinear) -> None:
        super().__init__()
        assert layer.bias is not None
        n, k = layer.weight.shape
        places = torch.stack([torch.arange(n, device=layer.weight.device).repeat_interleave(k),
                              layer.in_index_per_out.flatten().long()])  # fmt: skip
        values = layer.weight.detach().flatten()
        self.weight = torch.sparse_coo_tensor(places, values, (n, layer.in_features)).coalesce().to_sparse_csr()
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """(rows, n) to the same."""
        return (self.weight @ x.mT).mT + self.bias


def table_cases(device: str) -> Iterator[Case]:
    """Those of which targets are stated."""
    large, small = ((4096, 8, 1024), (16384, 8, 1024), (65536, 16, 256)), ((1024, 8, 64), (4096, 8, 256))
    for training in (False, True):
        for n, k, rows in large if device == "cuda" else small:
            yield from (Case(device, "table", n, k, rows, pattern, "float32", training) for pattern in PATTERNS)


def block_cases(device: str) -> Iterator[Case]:
    """Residual blocks."""
    n, rows = (4096, 1024) if device == "cuda" else (1024, 64)
    yield from (Case(device, "block", n, 8, rows, pattern, "bfloat16", training=True) for pattern in PATTERNS)


def grid_cases(device: str) -> Iterator[Case]:
    """A third of all sizes, so that any two of n, k and rows meet; pattern and step change from one to the next."""
    sizes, rows = (SIZES, ROWS) if device == "cuda" else (SIZES[:3], ROWS[:4])
    place = 0
    for i, n in enumerate(sizes):
        for j, k in enumerate(FAN_INS):
            for m, count in enumerate(rows):
                if (i + j + m) % 3 == 0:
                    yield Case(device, "grid", n, k, count, PATTERNS[place % 2], "float32", place % 4 > 1)
                    place += 1


def curve_cases(device: str) -> Iterator[Case]:
    """Ever larger grids, to a million neurons."""
    rows = 64 if device == "cuda" else 8
    for exponent in range(10, 21, 2):
        for pattern in PATTERNS:
            yield Case(device, "curve", 2**exponent, 16, rows, pattern, "float32", training=False)


PARTS: dict[str, Callable[[str], Iterator[Case]]] = {
    "table": table_cases, "block": block_cases, "grid": grid_cases, "curve": curve_cases,
}  # fmt: skip
_RIVALS = {
    "table": ("sparsecomp", "plain by sparsecomp", "Inductor", "psann", "psann by sparsecomp", "cuSPARSE",
              "dense bfloat16", "dense float32"),
    "block": ("sparsecomp", "Inductor", "psann", "psann by sparsecomp"),
    "grid": ("sparsecomp", "plain by sparsecomp", "Inductor"),
    "curve": ("sparsecomp", "Inductor"),
}  # fmt: skip
"""Who takes turns. `Inductor` and `psann` are stock compile, the first of the plain layer."""


def run(
    cases: Sequence[Case], modes: Sequence[str] = MODES, workers: int = 1, seconds: float = math.inf
) -> Iterator[Row]:  # fmt: skip
    """The row of each case that is measured in time: milliseconds by rival and mode, and what was left out and why."""
    yield from measured(partial(prepared, modes=tuple(modes)), cases, workers, batch=1, seconds=seconds)


def prepared(case: Case, modes: tuple[str, ...]) -> Callable[[], Row]:
    """What measures a case, compiled in all modes."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    row: Row = {"layer": case._asdict(), "ms": {}, "implementation": {}}
    calls: dict[str, dict[str, Timed]] = {mode: {} for mode in modes}
    layer = layer_of(case)

    def prepare(name: str) -> None:
        rival = MAKERS[name](case, layer)
        for mode in modes if rival.backend is not None else modes[:1]:
            calls[mode][name] = call = _warm(row, f"{name}, {mode}", case, rival, mode)
            if name.endswith("sparsecomp") and case.part != "block" and not case.training:
                row.setdefault("error", {})[f"{name}, {mode}"] = error_of(layer, call)

    def measure() -> Row:
        for mode in modes:
            guarded(row, mode, partial(time_rivals, row, mode, calls[mode], case.training))
        if case.device == "cuda" and not case.training:
            for name, call in calls[modes[0]].items() if modes[0] == "default" else ():
                guarded(row, f"{name}, graph", partial(_replayed, row, name, call))
            guarded(row, "floor", lambda: row.update({"floor ms": round(_bytes(case) / bandwidth() * 1e3, 5)}))
        return row

    with torch.set_grad_enabled(case.training):
        for name in _RIVALS[case.part]:
            guarded(row, name, partial(prepare, name))
    return measure


def _warm(row: Row, which: str, case: Case, rival: Rival, mode: str) -> "Timed":
    call = Timed(rival, mode, case)
    for _ in range(4):  # compiles, records CUDA graphs
        call()
    if rival.backend == "sparsecomp":
        report = sparsecomp.last_report()
        sites = [] if report is None else report.sites
        row["implementation"][which] = [f"{site.implementation}: {site.reason}" for site in sites]
    return call


class Timed:
    """A call of a rival without arguments, or a training step."""

    def __init__(self, rival: Rival, mode: str, case: Case) -> None:
        self.module, self.x, self._training = rival.module, rival.x, case.training
        whole = Alone.alone(rival.module)
        self.compiled: Callable[[Tensor], Tensor] = (
            whole if rival.backend is None else torch.compile(whole, backend=rival.backend, mode=mode)
        )
        if case.training:
            self.x = rival.x.clone().requires_grad_()
            self._given = torch.randn_like(rival.x)
            self._optimizer = torch.optim.SGD(rival.module.parameters(), 1e-6) if case.part == "block" else None

    def __call__(self) -> Tensor | None:
        if not self._training:
            return self.compiled(self.x)
        self.compiled(self.x).backward(self._given)
        if self._optimizer is not None:
            self._optimizer.step()
        self.x.grad = None
        self.module.zero_grad()
        return None


def error_of(layer: GeoSparseLinear, call: "Timed") -> float:
    """Of the first rows, relative to float64: psann's layer has other weights, so by the module's own."""
    weight, bias = (getattr(call.module, name).detach().double() for name in ("weight", "bias"))
    x, exact = call.x[:16].double(), bias.expand(min(len(call.x), 16), -1).clone()
    for place in range(layer.k):
        exact += x.index_select(1, layer.in_index_per_out[:, place].long()) * weight[:, place]
    found = call.compiled(call.x)[:16].double()
    return relative_error(found, exact)


def _replayed(row: Row, name: str, call: Timed) -> None:
    inputs = [call.x.clone() for _ in range(COPIES)]
    with torch.no_grad():
        row["ms"][f"{name}, graph"] = round(graph_ms([lambda x=x: call.compiled(x) for x in inputs]), 5)


def _bytes(case: Case) -> float:
    """That a product reads and writes at least."""
    size = torch.empty((), dtype=getattr(torch, case.dtype)).itemsize
    return case.n * (2 * case.rows * size + case.k * (size + 4) + size)


def layer_of(case: Case) -> GeoSparseLinear:
    torch.manual_seed(0)
    return GeoSparseLinear(case.n, case.n, index_of(case.n, case.k, case.pattern).to(case.device))


def _x(case: Case, layer: GeoSparseLinear, dtype: str | None = None) -> Tensor:
    return torch.randn(case.rows, case.n, device=layer.weight.device, dtype=getattr(torch, dtype or case.dtype))


def _block(case: Case, layer: GeoSparseLinear, mode: str, backend: str) -> Rival:
    block = GeoSparseResidualBlock(case.n, layer.in_index_per_out, compute_mode=mode)
    x = _x(case, layer)
    return Rival(block.to(x), x, backend)


def _ours(case: Case, layer: GeoSparseLinear) -> Rival:
    if case.part == "block":
        return _block(case, layer, "compiled", "sparsecomp")
    return Rival(layer, _x(case, layer), "sparsecomp")


def _inductor(case: Case, layer: GeoSparseLinear) -> Rival:
    return _block(case, layer, "gather", "inductor") if case.part == "block" else _plain(case, layer, "inductor")


def _plain(case: Case, layer: GeoSparseLinear, backend: str) -> Rival:
    return Rival(Plain(layer), _x(case, layer), backend)


def _psann(case: Case, layer: GeoSparseLinear, backend: str) -> Rival:
    block, linear = (import_module(f"psann.{name}") for name in ("nn_geo_sparse", "layers.geo_sparse"))  # in no extra
    x, index = _x(case, layer), layer.in_index_per_out.long().cpu()
    if case.part == "block":
        return Rival(block.GeoSparseResidualBlock(case.n, index, residual_alpha_init=0.01).to(x), x, backend)
    return Rival(linear.GeoSparseLinear(case.n, case.n, index).to(x), x, backend)


def _csr(case: Case, layer: GeoSparseLinear) -> Rival:
    if case.training:
        raise NotImplementedError("torch gives the gradient of a sparse matrix as a dense one")
    return Rival(Csr(layer), _x(case, layer), None)


def _dense(case: Case, layer: GeoSparseLinear, dtype: str) -> Rival:
    x = _x(case, layer, dtype)
    size = case.n * case.n * x.itemsize * (1 + case.training)
    if size > MOST_DENSE[x.device.type]:
        raise ValueError(f"its weight and gradient have {size / 2**30:.2g} GiB")
    return Rival(nn.Linear(case.n, case.n, device=x.device, dtype=x.dtype), x, "inductor")


MAKERS: dict[str, Callable[[Case, GeoSparseLinear], Rival]] = {
    "sparsecomp": _ours, "plain by sparsecomp": partial(_plain, backend="sparsecomp"), "Inductor": _inductor,
    "psann": partial(_psann, backend="inductor"), "psann by sparsecomp": partial(_psann, backend="sparsecomp"),
    "cuSPARSE": _csr, "dense bfloat16": partial(_dense, dtype="bfloat16"),
    "dense float32": partial(_dense, dtype="float32"),
}  # fmt: skip
