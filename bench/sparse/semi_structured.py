"""2:4 weights on sparse tensor cores: linear + bias + ReLU beside dense and torch's own cuSPARSELt path.

Device times are of CUDA graph replays over rotated operands, as in `bench.sparse.spmm`, and of eager calls. `ours`
has the algorithm of the cost model's choice, `ours tuned` the best that was found in a few seconds; `frozen` is
under `ops.frozen_weights`. What cannot run is recorded with its reason.
"""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.timing import eager_ms, graph_ms, guarded, host_us
from sparsecomp import ops
from sparsecomp.formats import NM
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.sparse import cusparselt, semi_structured
from sparsecomp.lowering.sparse.semi_structured import spmm_semi_structured
from sparsecomp.lowering.sparse.spmm_nm import spmm_nm
from sparsecomp.lowering.tuning import autotune
from sparsecomp.lowering.tuning.trial import relative_error
from sparsecomp.passes.cost import sparse as sparse_cost
from sparsecomp.reference.patterns import Layout

COPIES = 3
"""Sets of operands rotated through, so that no call finds its own in the L2 cache."""
SIZES = (1024, 2048, 4096, 8192)
ROWS = (64, 256, 1024, 4096, 8192)

Call = Callable[[], Any]


def run() -> Iterator[dict[str, Any]]:
    """A row for each weight (size, size), number of rows of the input, and dtype, and the host's time for a call."""
    torch.manual_seed(0)
    # measured everywhere: whether the estimate is right is what the table is for
    with mock.patch.object(semi_structured, "slower", lambda problem, device: None):
        yield _host_row()
        for dtype in (torch.float16, torch.bfloat16):
            for size in SIZES:
                for rows in ROWS if dtype is torch.float16 else (size,):
                    yield _row(size, rows, dtype)


class _Operands:
    """A linear layer's operands, and a result that every call writes to where it can."""

    def __init__(self, size: int, rows: int, dtype: torch.dtype) -> None:
        self.weight = _pruned(size, dtype)
        self.matrix = NM.from_dense(self.weight, n=2, m=4)
        self.x = torch.randn(rows, size, device="cuda").to(dtype)
        self.bias = torch.randn(size, device="cuda").to(dtype)
        self.out = torch.empty(rows, size, dtype=dtype, device="cuda")

    def ours(self) -> None:
        """The product on sparse tensor cores; raises where it is refused."""
        f = self.matrix
        given = {"bias": self.bias, "bias_axis": "row", "activation": "relu"}
        if not spmm_semi_structured(f.values, f.indices, self.x.mT, self.out.mT, **given):
            raise RuntimeError("refused")

    def ordinary(self) -> None:
        """The product on ordinary tensor cores, of the compressed weight."""
        f = self.matrix
        given = {"bias": self.bias, "bias_axis": "row", "activation": "relu"}
        spmm_nm(f.values, f.indices, 2, 4, self.x.mT, self.out.mT, **given)

    def dense(self) -> Tensor:
        """What a dense model runs."""
        return torch.relu_(F.linear(self.x, self.weight, self.bias))

    def exact(self) -> Tensor:
        """The result in float64."""
        return F.relu(self.x.double() @ self.weight.double().mT + self.bias.double())


def _pruned(size: int, dtype: torch.dtype) -> Tensor:
    weight = torch.randn(size, size, device="cuda").to(dtype)
    groups = weight.view(size, -1, 4)
    groups.scatter_(-1, groups.abs().argsort(-1)[..., :2], 0)
    return weight


def _row(size: int, rows: int, dtype: torch.dtype) -> dict[str, Any]:
    operands = [_Operands(size, rows, dtype) for _ in range(COPIES)]
    row: dict[str, Any] = {"case": f"2:4 {size}x{size}", "rows": rows, "dtype": str(dtype)[6:], "ms": {}, "eager": {}}
    row |= {"algorithms": {}, "estimate": _decision(size, rows, dtype)}
    _timed(row, "dense", lambda: [each.dense for each in operands])
    # torch's search of an algorithm is left out: with cuSPARSELt 0.8.0 it ended the process's CUDA context
    _timed(row, "torch 2:4", lambda: _of_torch(operands))
    _timed(row, "ordinary", lambda: [each.ordinary for each in operands])
    # a plan may take a quarter of a second, and there are fifty algorithms
    for effort in ("none", "full" if rows == size else "quick"):
        name = "ours" if effort == "none" else "ours tuned"
        guarded(row, name, lambda name=name, effort=effort: _time_ours(row, name, effort, operands))
    times = ", ".join(f"{name} {ms:.4f}" for name, ms in row["ms"].items())
    print(f"{row['case']} x {rows} {row['dtype']}: {times} | {row.get('left out', '')}", flush=True)
    return row


def _decision(size: int, rows: int, dtype: torch.dtype) -> str:
    """What the compiler makes of such a layer, and why."""
    product = sparse_cost.Product(
        torch.device("cuda", torch.cuda.current_device()), Layout("nm", (2, 4), (size, size)), rows, 1,
        size * size // 2, dtype, True, True, False, "relu", "",
    )  # fmt: skip
    decision = sparse_cost.decide(product)
    return f"{decision.implementation}: {decision.reason}"


def _time_ours(row: dict[str, Any], name: str, effort: Any, operands: list[_Operands]) -> None:
    with autotune.effort_scope(effort) as chosen:
        operands[0].out.fill_(torch.nan)
        operands[0].ours()
    row.setdefault("error", {})[name] = relative_error(operands[0].out, operands[0].exact())
    row["algorithms"][name] = [str(one.choice.candidate.config) for one in chosen][-1:]
    dispatch.forget()  # a default that was prepared before it was tuned
    calls = [each.ours for each in operands]
    _timed(row, name, lambda: calls)
    with ops.frozen_weights():
        _timed(row, f"{name}, frozen", lambda: calls)


def _of_torch(operands: list[_Operands]) -> list[Call]:
    """torch's cuSPARSELt operator with bias, by its algorithm 0, and ReLU behind it."""
    from torch.sparse import SparseSemiStructuredTensorCUSPARSELT as Kind

    sparse = [Kind.from_dense(each.weight) for each in operands]
    return [lambda s=s, o=o: torch.relu_(F.linear(o.x, s, o.bias)) for s, o in zip(sparse, operands, strict=True)]


def _timed(row: dict[str, Any], name: str, make: Callable[[], list[Call]]) -> None:
    def measure() -> None:
        calls = make()
        row["ms"][name] = graph_ms(calls, 10)
        row["eager"][name] = eager_ms(calls[0])

    guarded(row, name, measure)


def _host_row() -> dict[str, Any]:
    """Host time of calls so small that the device is never the limit."""
    small = _Operands(256, 64, torch.float16)
    row: dict[str, Any] = {"case": "host microseconds of one eager call", "us": {}, "cusparselt": cusparselt.missing()}
    if cusparselt.missing() is None:
        row["cusparselt"] = ".".join(map(str, cusparselt.loaded_library().version))
    calls: dict[str, Callable[[], Call]] = {
        "linear + relu": lambda: small.dense, "spmm_nm": lambda: small.ordinary, "ours": lambda: small.ours,
        "torch 2:4 + relu": lambda: _of_torch([small])[0],
    }  # fmt: skip
    for name, make in calls.items():
        guarded(row, name, lambda name=name, make=make: row["us"].update({name: host_us(make())}))
    with ops.frozen_weights():
        guarded(row, "ours, frozen", lambda: row["us"].update({"ours, frozen": host_us(small.ours)}))
    print(f"{row['case']}: {row['us']} {row.get('left out', '')}", flush=True)
    return row
