"""2:4 times dense by cuSPARSELt, guarded: results of a copy that is not the weight's any more are written anew.

The guard is a fingerprint of the weight's values, 64 bits for each of a fixed number of parts, and a kernel behind the
product that compares it with the copy's and, mostly, ends there. Of a weight with zeros it looks at the result too: the
library multiplies them like other values, by which NaN and infinity would reach rows that do not read them.
"""

from collections.abc import Callable
from functools import lru_cache

import sympy
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from sparsecomp.errors import LibraryError
from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.sparse import cusparselt
from sparsecomp.lowering.sparse.cusparselt import Algorithm, Matmul, MatmulPlan
from sparsecomp.lowering.sparse.kernels.dense_product import GROUP, tile_count, tile_of
from sparsecomp.lowering.sparse.kernels.epilogue import FINISH, dot, flag, precision
from sparsecomp.lowering.sparse.kernels.scramble import scrambled
from sparsecomp.lowering.sparse.kernels.spmm_nm import _put, nm_repair_kernel, spmm_nm_kernel, spread
from sparsecomp.lowering.sparse.spmm_nm import SpmmNM
from sparsecomp.lowering.tuning import host
from sparsecomp.lowering.tuning.cards import Card
from sparsecomp.lowering.tuning.ceilings import card_of
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template

_MOST_PARTS = 512
"""Parts of the values with a fingerprint each, and programs that take it."""
_WORDS = 1024
"""Words of 64 bits that a program reads in a step."""
_OFFERED = {"float16": (6, 7, 4, 1, 5, 3, 2, 0), "bfloat16": (7, 4, 6, 1, 5, 3, 2, 0)}
"""Algorithms, the fastest at 4096 cubed first (0.8.0, H100: 0.127 to 0.320 ms in float16). The library has fifty, of
which these are among the fastest; number 36 of 0.8.0 ended the process's CUDA context there with an illegal
instruction."""
_MOST = 2**31 - 1
"""Elements of an operand: the library is not known to count further."""
_SMOOTH: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda out: torch.ops.aten.gelu_.default(out),
    "gelu_tanh": lambda out: torch.ops.aten.gelu_.default(out, approximate="tanh"),
    "silu": lambda out: F.silu(out, inplace=True),
    "sigmoid": torch.sigmoid_,
    "tanh": torch.tanh_,
}


@triton.jit
def fingerprint_kernel(values_ptr, indices_ptr, out_ptr, words, steps, PARTS: tl.constexpr, B: tl.constexpr):
    """out[part] = sum of the part's words, each scrambled with its position; indices have half as many as values."""
    total = _sums(values_ptr, 0, words, steps, PARTS, B)
    total += _sums(indices_ptr, words, words // 2, (steps + 1) // 2, PARTS, B)
    parts_ptr = out_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    tl.store(parts_ptr + tl.program_id(0), tl.sum(total, 0).to(tl.int64, bitcast=True))


@triton.jit
def _sums(array_ptr, before, words, steps, PARTS: tl.constexpr, B: tl.constexpr):
    """Sums of an array's words, each with its position; `before` are the positions in front of it."""
    words_ptr = array_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    first = tl.program_id(0).to(tl.int64) * B
    total = tl.zeros((B,), tl.uint64)
    for step in range(steps):
        at = first + tl.cast(step, tl.int64) * PARTS * B + tl.arange(0, B)
        word = tl.load(words_ptr + at, mask=at < words, other=0).to(tl.uint64, bitcast=True)
        word += (before + at).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
        total += scrambled(word)
    return total


@triton.jit
def guarded_kernel(
    values_ptr, indices_ptr, dense_ptr, bias_ptr, residual_ptr, out_ptr, scratch_ptr, kept_ptr,
    M, N, K, groups, values_b, values_m, indices_m, dense_b, dense_k, dense_n,
    out_b, out_m, out_n, res_b, res_m, res_n, scale,
    BIAS_ROWS: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    G: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """What `spmm_nm_kernel` and then `nm_repair_kernel` do for a tile of a 2:4 product, if the weight has changed, or
    if a weight with zeros gave a number that is not finite.

    scratch: PARTS fingerprints of the weight as it is, and a byte a tile; kept: those of the weight as it was,
    with a lowest bit that says whether there were zeros.
    """
    now_ptr = scratch_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    bad_ptr = (now_ptr + PARTS).to(tl.pointer_type(tl.int8), bitcast=True)
    known_ptr = kept_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    part = tl.arange(0, PARTS)
    known = tl.load(known_ptr + part)
    differ = ((tl.load(now_ptr + part) ^ known) >> 1 != 0).to(tl.int32)
    wrong = tl.sum(differ * 1024 + (known & 1).to(tl.int32), 0)  # in one sum: of up to 512 parts
    if (wrong > 0) & (wrong < 1024):
        batch, block_m, block_n = tile_of(tl.program_id(0), M, N, BM, BN, GROUP)
        rows = (block_m * BM + tl.arange(0, BM))[:, None]
        cols = (block_n * BN + tl.arange(0, BN))[None, :]
        at = rows.to(tl.int64) * out_m + cols.to(tl.int64) * out_n
        found = tl.load(out_ptr + at, mask=(rows < M) & (cols < N), other=0.0).to(tl.float32)
        wrong = tl.sum((found - found != 0.0).to(tl.int32))
    if wrong == 0:
        return
    spmm_nm_kernel(
        values_ptr, indices_ptr, dense_ptr, bias_ptr, residual_ptr, out_ptr, bad_ptr,
        M, N, K, groups, values_b, values_m, indices_m, dense_b, dense_k, dense_n,
        out_b, out_m, out_n, res_b, res_m, res_n, scale,
        BIAS_ROWS, ACTIVATION, PRECISION, 2, 4, 4, BM, BN, G, GROUP,
    )  # fmt: skip
    tl.debug_barrier()  # every thread sees which tile is to be repaired
    nm_repair_kernel(
        values_ptr, indices_ptr, dense_ptr, bias_ptr, residual_ptr, out_ptr, bad_ptr,
        M, N, K, groups, values_b, values_m, indices_m, dense_b, dense_k, dense_n,
        out_b, out_m, out_n, res_b, res_m, res_n, scale,
        BIAS_ROWS, ACTIVATION, 2, 4, BM, BN, GROUP, BM, E,
    )  # fmt: skip


def fingerprint(values: Tensor, indices: Tensor) -> Tensor:
    """(8 · parts,) uint8 of contiguous values of two bytes and indices of one, as many and a multiple of 8."""
    words = values.numel() * values.element_size() // 8
    out = torch.empty(8 * _parts(words), dtype=torch.uint8, device=values.device)
    _fingerprint(words, values.dtype)(values, indices, out)
    return out


def _parts(words: int) -> int:
    return min(triton.next_power_of_2(triton.cdiv(words, _WORDS)), _MOST_PARTS)


@lru_cache(maxsize=1024)
def _fingerprint(words: int, dtype: torch.dtype) -> Launch:
    parts = _parts(words)
    numbers = (words, triton.cdiv(words, parts * _WORDS))
    return Launch(fingerprint_kernel, (parts,), numbers, {"PARTS": parts, "B": _WORDS}, num_warps=4)


class _Guarded:
    """A product by the library, guarded unless no fingerprint is kept."""

    def __init__(self, problem: SpmmNM, config: Config) -> None:
        self.host_seconds = host.CUSPARSELT - (0.0 if problem.guarded else 2 * host.LAUNCH)
        self._scale, self._finish = problem.output.scale, _SMOOTH.get(problem.output.activation)
        self._product = product_of(problem)
        self._algorithm = Algorithm(config["algorithm"], config["split_k"], config["split_k_mode"])
        words = problem.m * problem.groups // 2
        self._fingerprint, self._parts = _fingerprint(words, getattr(torch, problem.dtype)), _parts(words)
        self._guard, self._tiles = _guard(problem, self._parts)
        # where an address is a part of a plan, biases that come and go push one another out
        self._plans = lru_cache(maxsize=64)(self._plan)

    def _plan(self, device: torch.device, bias: int | None) -> MatmulPlan:
        return MatmulPlan(cusparselt.current_handle(device), self._product, self._algorithm, bias, self._scale)

    def __call__(
        self, values: Tensor, indices: Tensor, compressed: Tensor, kept: Tensor | None, dense: Tensor,
        bias: Tensor | None, residual: Tensor | None, out: Tensor,
    ) -> None:  # fmt: skip
        device = values.device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(values, indices, compressed, kept, dense, bias, residual, out)
        at = None if bias is None else bias.data_ptr()
        rebinds = at is not None and cusparselt.loaded_library().rebinds
        plan = self._plans(device, cusparselt.SOME_BIAS if rebinds else at)
        own = self._guard_bytes
        scratch = torch.empty(own + plan.workspace_bytes, dtype=torch.uint8, device=device)
        if kept is not None:
            self._fingerprint(values, indices, scratch)
        plan(
            compressed.data_ptr(), dense.data_ptr(), at, None if residual is None else residual.data_ptr(),
            out.data_ptr(), scratch.data_ptr() + own, _stream_of(device),
        )  # fmt: skip
        if self._finish is not None:
            self._finish(out)
        if kept is not None:
            self._guard(values, indices, dense, bias, residual, out, scratch, kept)

    @property
    def _guard_bytes(self) -> int:
        """Fingerprints and the tiles' flags, so many that the workspace behind them is aligned."""
        return -(-(8 * self._parts + self._tiles) // 256) * 256


def _stream_of(device: torch.device) -> int:
    return driver.active.get_current_stream(device.index) if device.type == "cuda" else 0


def _guard(problem: SpmmNM, parts: int) -> tuple[Launch, int]:
    p = problem
    tile = Config(BM=128 if p.m > 64 else 64, BN=max(min(triton.next_power_of_2(p.n), 128), 16))
    numbers = (p.m, p.n, p.k, p.groups, p.values_batch, p.values_row, p.indices_row, *p.dense, *p.output.numbers)
    constants = {**p.output.constants, **tile, "PRECISION": precision(p.dtype), "G": 16, "GROUP": GROUP}
    constants |= {"PARTS": parts, "E": max(1024 // tile["BN"], 8)}
    tiles = tile_count(p.m, p.n, tile)
    return Launch(guarded_kernel, (tiles,), numbers, constants, num_warps=8, num_stages=3), tiles


def product_of(problem: SpmmNM) -> Matmul:
    """The product in the library's terms; everything that it leaves out is refused or done behind it."""
    p, out = problem, problem.output.strides
    dense_columns, out_columns = p.dense.row == 1, out.row == 1
    return Matmul(
        p.m, p.k, p.n, p.dtype, dense_columns, p.dense.column if dense_columns else p.dense.row, out_columns,
        out.column if out_columns else out.row, bool(p.output.bias), p.output.activation == "relu",
    )  # fmt: skip


def _refuse(problem: SpmmNM, device: Device) -> str | None:
    reason = _unfit(problem) or _unlike(problem)
    if reason is None and not device.capability:
        reason = "there is no CUDA device"
    if reason is None and float(device.capability) < 8.0:
        reason = f"compute capability {device.capability} has no sparse tensor cores: 8.0 or later is needed"
    return reason or _unable(product_of(problem))


def _unfit(problem: SpmmNM) -> str | None:
    """What of the problem's numbers the library does not take."""
    p = problem
    if (p.keep, p.group) != (2, 4):
        return f"sparse tensor cores take 2:4, not {p.keep}:{p.group}"
    if p.batch != 1:
        return "a batch is not bound"
    if p.m % 16 or p.k % 16 or p.n % 8:
        return f"cuSPARSELt takes rows and depth in multiples of 16 and columns of 8, not {p.m}, {p.k} and {p.n}"
    if max(p.m * p.k, p.k * p.n, p.m * p.n) > _MOST:
        return f"an operand of {p.m}, {p.k} and {p.n} has more than {_MOST} elements"
    if p.values_row != p.groups * 2 or p.indices_row != p.groups * 2:
        return "rows of the values are not side by side"
    shapes = (("dense", p.dense, (p.k, p.n)), ("the result", p.output.strides, (p.m, p.n)))
    for name, strides, (rows, cols) in shapes:
        lead, least = (strides.column, rows) if strides.row == 1 else (strides.row, cols)
        if 1 not in strides[1:] or lead % 8 or lead < least:
            return f"{name} has strides {strides[1:]}: one must be 1, the other a multiple of 8 and no overlap"
    return None


def _unlike(problem: SpmmNM) -> str | None:
    """What of the problem's dtypes and epilogue the library does not take."""
    p, out = problem, problem.output
    if p.dtype not in ("float16", "bfloat16") or not p.dtype == p.dense_dtype == out.dtype:
        return f"{p.dtype} times {p.dense_dtype} to {out.dtype} is not bound: float16 or bfloat16 throughout"
    if out.bias and (out.bias_axis != "row" or out.bias != p.dtype):
        return f"cuSPARSELt adds a bias of the operands' dtype by rows of the weight, not one of {out.bias} by columns"
    if out.residual and (out.residual != out.dtype or out.residual_strides != out.strides):
        return "a residual must lie in memory as the result does, in its dtype"
    return None


@lru_cache(maxsize=8192)
def offered(product: Matmul) -> tuple[Algorithm, ...]:
    """Those of the library's that are offered, on the current device; of some with parts it makes no plan.

    Raises:
        LibraryError: it takes no such product.
    """
    current = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    count = cusparselt.algorithms(cusparselt.current_handle(), product)
    numbers = [number for number in _OFFERED[product.dtype] if number < count]
    return tuple(Algorithm(number, *split) for split in _splits(product, card_of(current)) for number in numbers)


def _splits(product: Matmul, card: Card) -> list[tuple[int, int]]:
    """Parts of k and how their sums are joined, in one kernel or two: worth a try where tiles leave processors idle."""
    small = triton.cdiv(product.m, 128) * triton.cdiv(product.n, 128) < card.processors
    return [(1, 0), *((parts, mode) for parts in (2, 4) for mode in (1, 2) if small and product.k >= 1024 * parts)]


def _unable(product: Matmul) -> str | None:
    try:
        return None if offered(product) else "cuSPARSELt has no algorithm for it"
    except LibraryError as error:
        return str(error)


def _space(problem: SpmmNM, device: Device) -> list[Config]:
    found, bfloat16 = offered(product_of(problem)), int(problem.dtype == "bfloat16")
    return [
        Config(
            algorithm=one.number, split_k=one.split_k, split_k_mode=one.split_k_mode, bfloat16=bfloat16,
            place=_OFFERED[problem.dtype].index(one.number),
        )
        for one in found
    ]  # fmt: skip


_m, _k, _n, _itemsize, _guarded = sizes("m k n itemsize guarded")
_split_k, _bfloat16, _place = sizes("split_k bfloat16 place")
_half, _processors, _bandwidth, _two_of_four = sizes("half processors bandwidth two_of_four")

# 4096 cubed took 0.127 ms on an H100 with the best algorithm (0.8.0), in bfloat16 0.173
_tile = (1 + 0.35 * _bfloat16) * 2 * 128 * 128 * _k / _split_k / (_two_of_four * _half / _processors)
_waves = sympy.ceiling(sympy.ceiling(_m / 128) * sympy.ceiling(_n / 128) * _split_k / _processors)
# of 48 MiB 21.9 us, in bfloat16 58.6, and of 252 MiB 93.5 and 295 us with eight rows (H200)
_streamed = sympy.Piecewise((0.22, _bfloat16 > 0), (0.7, True))
_traffic = _itemsize * (_m * _k * sympy.Rational(9, 16) / _streamed + (_k + _m) * _n)
# in parts only where it is measured: many algorithms refuse them, and only when a plan is made
_order = 1e-9 * _place + 1e-3 * (_split_k - 1)
_guard_bytes = _m * _k / 2 * (_itemsize + 1)

SEMI_STRUCTURED = Template(
    name="cusparselt",
    op="semi_structured",
    sources=(
        fingerprint_kernel,
        _sums,
        scrambled,
        guarded_kernel,
        spmm_nm_kernel,
        nm_repair_kernel,
        spread,
        _put,
        tile_of,
        dot,
        flag,
        *FINISH,
        MatmulPlan,
        _Guarded,
    ),
    refuse=_refuse,
    space=_space,
    cost=Cost(
        bytes=_guarded * _guard_bytes,
        launches=1 + 2 * _guarded,
        seconds=sympy.Max(_waves * _tile, _traffic / _bandwidth) + 3e-6 + _order,
    ),
    prepare=_Guarded,
)
