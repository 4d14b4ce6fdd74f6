"""Sparse times dense and sampled products: every schedule beside cuSPARSE, torch's kernels and dense tensor cores.

Times are of CUDA graph replays over rotated operands. A schedule's figure is its better of the two configurations that
the cost model expects most of; `chosen` is what an untuned call runs. Errors are relative, in the Frobenius norm,
against cuSPARSE in float64 (dense float64 for blocks and N:M).
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.sparse import matrices
from bench.timing import graph_ms, host_us
from sparsecomp.formats import BSR, CSR, NM
from sparsecomp.lowering.cache.signature import device_of
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.sparse.random_sparse import random_pattern
from sparsecomp.lowering.sparse.sddmm import sddmm
from sparsecomp.lowering.sparse.spmm_bsr import spmm_bsr
from sparsecomp.lowering.sparse.spmm_csr import spmm_csr
from sparsecomp.lowering.sparse.spmm_nm import spmm_nm
from sparsecomp.lowering.tuning import autotune
from sparsecomp.lowering.tuning.ceilings import card_of
from sparsecomp.lowering.tuning.cost import rank
from sparsecomp.lowering.tuning.template import of_operation
from sparsecomp.lowering.tuning.trial import relative_error
from sparsecomp.reference.patterns import evenness

COPIES = 3
"""Sets of operands rotated through, so that no call finds its own in the L2 cache."""
SPARSITIES = (0.7, 0.8, 0.9, 0.95, 0.98)
COLUMNS = (128, 512, 2048)
PRUNED = (
    "dlmc_rn50_mag0.7_b2g2.smtx", "dlmc_transformer_mag0.9_enc2_ffn1.smtx", "dlmc_transformer_vd0.98_dec5_ffn1.smtx",
)  # fmt: skip
GRAPHS = ("bcsstk13.mtx.gz", "ca-CondMat.mtx.gz", "p2p-Gnutella31.mtx.gz")

Call = Callable[[], Any]
Case = Callable[[], dict[str, Any]]


def run(data: Path | None = None) -> Iterator[dict[str, Any]]:
    """All cases, as they are measured: milliseconds by implementation, and the error of each of ours.

    Args:
        data: folder with `matrices/` of real ones, for cases of their own; see `bench.matrices`.
    """
    rows = []
    for case in cases(data):
        rows.append(case())
        yield rows[-1]
    yield from summaries(rows)


def cases(data: Path | None = None) -> list[Case]:
    """What `run` measures, one callable a row; those of one group stand side by side."""
    torch.manual_seed(0)
    found: list[Case] = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for n in COLUMNS:
            found += [partial(_random_row, sparsity, n, dtype) for sparsity in SPARSITIES]
            found += [partial(_file_row, "pruned", data, name, n, dtype) for name in PRUNED if data]
    for n in (32, 64, 128, 256):
        found += [partial(_file_row, "graph", data, name, n, torch.float32) for name in GRAPHS if data]
        found.append(partial(_skewed_row, n))
    for n in (1, 16, 4096):
        found += [partial(_random_row, 0.9, n, dtype, "csr width") for dtype in (torch.float32, torch.float16)]
    for block in (4, 8, 16, 32, 64, 128):
        found += [partial(_bsr_row, block, 512, torch.float16, sparsity=sparsity) for sparsity in (0.8, 0.9, 0.95)]
        found.append(partial(_bsr_row, block, 4096, torch.float16))
    found += [partial(_bsr_row, block, 512, torch.float32) for block in (16, 64)]
    shapes = ((2, 4, 4096, 4096, 4096), (2, 4, 11008, 4096, 16), (1, 4, 11008, 4096, 16))
    found += [partial(_nm_row, *shape) for shape in shapes]
    for dtype in (torch.float32, torch.bfloat16):
        found += [partial(_sddmm_row, sparsity, 512, dtype) for sparsity in (0.8, 0.9, 0.95, 0.99)]
    return [*found, _epilogue_row, _host_row]


def summaries(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Speed over each group's peer: geometric mean, least and most."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        times = row.get("ms", {})
        peer = next((times[name] for name in PEERS if name in times), None)
        if "chosen" in times and peer is not None:
            groups.setdefault(f"{row['group']} {row['dtype']} over its peer", []).append(peer / times["chosen"])
    for name, gains in groups.items():
        summary = {"mean": round(statistics.geometric_mean(gains), 2), "least": round(min(gains), 2)}
        row = {"case": f"speed of {name}", "cases": len(gains), **summary, "most": round(max(gains), 2)}
        print(row, flush=True)
        yield row


PEERS = ("cuSPARSE", "torch bsr", "torch 2:4", "sampled_addmm")


def _random_row(sparsity: float, n: int, dtype: torch.dtype, group: str = "pruned") -> dict[str, Any]:
    return _csr_row(f"csr 4096x4096 {sparsity:.0%}", group, _random_csr(4096, 4096, sparsity), n, dtype)


def _file_row(group: str, data: Path, name: str, n: int, dtype: torch.dtype) -> dict[str, Any]:
    matrix = matrices.read(data / "matrices" / name).to(CSR).to_device("cuda")
    return _csr_row(name.split(".mtx")[0].removesuffix(".smtx"), group, matrix, n, dtype)


def _skewed_row(n: int) -> dict[str, Any]:
    """Most rows are empty, and a hundredth of them hold a third of a million entries."""
    random = torch.Generator("cuda").manual_seed(0)
    pattern = random_pattern(2**16, 2**16, 2**20, 4, "int32", random)
    ones = torch.ones(pattern.col.numel(), device="cuda")
    matrix = CSR.from_arrays(pattern.crow, pattern.col, ones, (2**16, 2**16))
    return _csr_row("skewed 65536x65536", "graph", matrix, n, torch.float32)


def _random_csr(m: int, k: int, sparsity: float) -> CSR:
    return CSR.from_dense((torch.rand(m, k, device="cuda") > sparsity).float())


def _csr_row(case: str, group: str, matrix: CSR, n: int, dtype: torch.dtype) -> dict[str, Any]:
    (m, k), crow, col = matrix.shape, matrix.crow, matrix.col
    values = [torch.randn(col.numel(), device="cuda").to(dtype) for _ in range(COPIES)]
    dense = [torch.randn(k, n, device="cuda").to(dtype) for _ in range(COPIES)]
    out, skew = torch.empty(m, n, dtype=dtype, device="cuda"), evenness(matrix.statistics().row_variation)
    row = _row(case, group, dtype, n=n, shape=[m, k], nnz=col.numel(), skew=skew)
    exact = _torch_csr(matrix, values[0].double()) @ dense[0].double()
    calls = [
        lambda v=v, d=d: spmm_csr(crow, col, v, d, out, skew=skew) for v, d in zip(values, dense, strict=True)
    ]
    _time_ours(row, calls, out, exact)
    theirs = [_torch_csr(matrix, v) for v in values]
    _time_peer(row, "cuSPARSE", lambda: [lambda s=s, d=d: s @ d for s, d in zip(theirs, dense, strict=True)])
    if m * k <= 2**26:
        full = [s.to_dense() for s in theirs]
        _time_dense(row, full, dense)
    return _printed(row)


def _torch_csr(matrix: CSR, values: Tensor) -> Tensor:
    return torch.sparse_csr_tensor(matrix.crow, matrix.col, values, matrix.shape)


def _bsr_row(block: int, n: int, dtype: torch.dtype, size: int = 4096, sparsity: float = 0.9) -> dict[str, Any]:
    grid = size // block
    kept = (torch.rand(grid, grid, device="cuda") > sparsity).float()
    pattern = BSR.from_dense(kept.repeat_interleave(block, 0).repeat_interleave(block, 1), block=block)
    crow, col = pattern.crow, pattern.col
    values = [torch.randn(pattern.values.shape, device="cuda").to(dtype) for _ in range(COPIES)]
    dense = [torch.randn(size, n, device="cuda").to(dtype) for _ in range(COPIES)]
    out = torch.empty(size, n, dtype=dtype, device="cuda")
    row = _row(f"bsr {size}x{size} {sparsity:.0%} block {block}", f"bsr {block}", dtype, n=n)
    theirs = [torch.sparse_bsr_tensor(crow, col, v, (size, size)) for v in values]
    full = [s.to_dense() for s in theirs]
    calls = [lambda v=v, d=d: spmm_bsr(crow, col, v, d, out) for v, d in zip(values, dense, strict=True)]
    _time_ours(row, calls, out, full[0].double() @ dense[0].double())
    if block >= 16:  # torch's kernel takes no smaller ones
        pairs = [(s, d.mT.contiguous()) for s, d in zip(theirs, dense, strict=True)]
        _time_peer(row, "torch bsr", lambda: [lambda s=s, x=x: F.linear(x, s) for s, x in pairs])
    _time_dense(row, full, dense)
    return _printed(row)


def _nm_row(keep: int, group: int, m: int, k: int, n: int) -> dict[str, Any]:
    """`dense` is a transposed activation (n, k), as in a linear layer."""
    weights = [torch.randn(m, k, device="cuda").half() for _ in range(COPIES)]
    for weight in weights:
        least = weight.view(m, -1, group).abs().argsort(-1)[..., : group - keep]
        weight.view(m, -1, group).scatter_(-1, least, 0)
    formats = [NM.from_dense(weight, n=keep, m=group) for weight in weights]
    x = [torch.randn(n, k, device="cuda").half() for _ in range(COPIES)]
    out = torch.empty(n, m, dtype=torch.float16, device="cuda")
    row = _row(f"{keep}:{group} {m}x{k}", "n:m emulated", torch.float16, n=n)
    calls = [
        lambda f=f, a=a: spmm_nm(f.values, f.indices, keep, group, a.mT, out.mT)
        for f, a in zip(formats, x, strict=True)
    ]
    _time_ours(row, calls, out, x[0].double() @ weights[0].double().mT)
    if (keep, group) == (2, 4):
        _time_peer(row, "torch 2:4", lambda: _semi_structured(weights, x))
    row["ms"]["dense fp16"] = graph_ms([lambda w=w, a=a: F.linear(a, w) for w, a in zip(weights, x, strict=True)])
    return _printed(row)


def _semi_structured(weights: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Call]:
    sparse = [torch.sparse.to_sparse_semi_structured(weight) for weight in weights]
    return [lambda s=s, a=a: F.linear(a, s) for s, a in zip(sparse, inputs, strict=True)]


def _sddmm_row(sparsity: float, d: int, dtype: torch.dtype, size: int = 4096) -> dict[str, Any]:
    pattern = _random_csr(size, size, sparsity)
    a = [torch.randn(size, d, device="cuda").to(dtype) for _ in range(COPIES)]
    b = [torch.randn(size, d, device="cuda").to(dtype) for _ in range(COPIES)]
    out = torch.empty(pattern.col.numel(), dtype=dtype, device="cuda")
    row = _row(f"sddmm {size}x{size} {sparsity:.0%}", "sddmm", dtype, d=d)
    rows = torch.repeat_interleave(torch.arange(size, device="cuda"), pattern.crow.diff())
    exact = (a[0].double() @ b[0].double().mT)[rows, pattern.col.long()]
    pairs = list(zip(a, b, strict=True))
    _time_ours(row, [lambda x=x, y=y: sddmm(pattern.crow, pattern.col, x, y, out) for x, y in pairs], out, exact)
    zero = _torch_csr(pattern, torch.zeros_like(out))
    _time_peer(
        row, "sampled_addmm",
        lambda: [lambda x=x, y=y: torch.sparse.sampled_addmm(zero, x, y.mT, beta=0.0) for x, y in pairs],
    )  # fmt: skip
    _time_dense(row, a, [y.mT for y in b])
    return _printed(row)


def _epilogue_row() -> dict[str, Any]:
    """A bare product, and one with bias, residual and ReLU, beside the same epilogue in kernels of torch's."""
    matrix, n = _random_csr(4096, 4096, 0.95), 512
    dense = [torch.randn(4096, n, device="cuda") for _ in range(COPIES)]
    bias, residual = torch.randn(4096, device="cuda"), torch.randn(4096, n, device="cuda")
    out = torch.empty(4096, n, device="cuda")
    arrays = (matrix.crow, matrix.col, torch.randn(matrix.col.numel(), device="cuda"))

    def bare(d: Tensor) -> Tensor:
        spmm_csr(*arrays, d, out)
        return out

    fused = {"bias": bias, "bias_axis": "row", "activation": "relu"}
    variants: dict[str, Callable[[Tensor], Any]] = {
        "bare": bare,
        "bias+relu fused": lambda d: spmm_csr(*arrays, d, out, **fused),
        "bias+residual+relu fused": lambda d: spmm_csr(*arrays, d, out, residual=residual, **fused),
        "bias+residual+relu apart": lambda d: torch.relu(bare(d) + bias[:, None] + residual),
    }
    calls = {name: [lambda d=d, f=f: f(d) for d in dense] for name, f in variants.items()}
    # in turns, so that a drifting clock favours none
    turns = [{name: graph_ms(call, 10) for name, call in calls.items()} for _ in range(5)]
    times = {name: statistics.median(turn[name] for turn in turns) for name in calls}
    row = _row("epilogue csr 4096x4096 95%", "epilogue", torch.float32, n=n)
    return _printed(row | {"ms": times})


def _host_row() -> dict[str, Any]:
    """Host time of ops on operands so small that the device is never the limit."""
    matrix, dense = _random_csr(64, 64, 0.9), torch.randn(64, 64, device="cuda")
    out = torch.empty_like(dense)
    blocks = BSR.from_dense(torch.ones(64, 64, device="cuda"), block=16)
    pairs = NM.from_dense(torch.eye(64, device="cuda"), n=2, m=4)
    sampled, theirs = torch.empty_like(matrix.values), _torch_csr(matrix, matrix.values)
    calls = {
        "spmm_csr": lambda: spmm_csr(matrix.crow, matrix.col, matrix.values, dense, out),
        "spmm_bsr": lambda: spmm_bsr(blocks.crow, blocks.col, blocks.values, dense, out),
        "spmm_nm": lambda: spmm_nm(pairs.values, pairs.indices, 2, 4, dense, out),
        "sddmm": lambda: sddmm(matrix.crow, matrix.col, dense, dense, sampled),
        "torch csr @ dense": lambda: theirs @ dense,
        "matmul": lambda: dense @ dense,
    }
    row = {"case": "host microseconds of one eager call", "us": {name: host_us(call) for name, call in calls.items()}}
    print(row, flush=True)
    return row


def _row(case: str, group: str, dtype: torch.dtype, **facts: Any) -> dict[str, Any]:
    return {"case": case, "group": group, "dtype": str(dtype)[6:], **facts, "ms": {}, "error": {}, "config": {}}


def _time_ours(row: dict[str, Any], calls: Sequence[Call], out: Tensor, exact: Tensor) -> None:
    """Each schedule by itself, and what dispatch chooses."""
    found: list[tuple[Any, ...]] = []
    with mock.patch.object(dispatch, "launch", lambda *arguments: found.append(arguments)):
        for call in calls:
            call()
    operation, problem = found[0][:2]
    device = device_of(out.device)
    for template in of_operation(operation.name):
        able = [one for one in operation.candidates(problem, device) if one.template is template]
        best = inf
        for candidate in rank(able, problem, card_of(out.device))[:2]:
            launch = template.prepare(problem, candidate.config)
            out.fill_(torch.nan)
            launch(*found[0][2:])
            wrong = relative_error(out, exact)
            took = graph_ms([lambda tensors=tensors[2:], launch=launch: launch(*tensors) for tensors in found], 10)
            if took < best:
                best = took
                row["ms"][template.name], row["error"][template.name] = took, wrong
                row["config"][template.name] = str(candidate.config)
    candidate = autotune.tuner().choose(operation, problem, out.device).candidate
    calls[0]()
    row["error"]["chosen"] = relative_error(out, exact)
    row["ms"]["chosen"] = graph_ms(calls, 10)
    row["config"]["chosen"] = f"{candidate.template.name} {candidate.config}"


def _time_peer(row: dict[str, Any], name: str, make: Callable[[], Sequence[Call]]) -> None:
    """A peer that cannot run the case, or not in a graph, is left out with its reason."""
    try:
        row["ms"][name] = graph_ms(make(), 10)
    except (RuntimeError, NotImplementedError) as error:
        row.setdefault("left out", {})[name] = str(error).splitlines()[0]


def _time_dense(row: dict[str, Any], full: Sequence[Tensor], dense: Sequence[Tensor]) -> None:
    pairs = list(zip(full, dense, strict=True))
    half = [(a.half(), b.half()) for a, b in pairs]
    row["ms"]["dense fp16"] = graph_ms([lambda a=a, b=b: a @ b for a, b in half], 10)
    if full[0].dtype is torch.float32:
        for name, precision in (("dense fp32", "ieee"), ("dense tf32", "tf32")):
            before = torch.backends.cuda.matmul.fp32_precision
            torch.backends.cuda.matmul.fp32_precision = precision
            row["ms"][name] = graph_ms([lambda a=a, b=b: a @ b for a, b in pairs], 10)
            torch.backends.cuda.matmul.fp32_precision = before


def _printed(row: dict[str, Any]) -> dict[str, Any]:
    times = ", ".join(f"{name} {ms:.4f}" for name, ms in row["ms"].items())
    errors = ", ".join(f"{name} {error:.0e}" for name, error in row["error"].items())
    case = f"{row['case']} x {row.get('n', row.get('d'))} {row['dtype']}"
    print(f"{case}: {times} | errors {errors} | {row['config'].get('chosen')}", flush=True)
    return row
