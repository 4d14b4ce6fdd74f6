"""N:M times dense on tensor cores: values and their places are read compressed and spread to dense tiles on chip.

With few columns of `dense` the weight's bytes are the time, and only the compressed ones are read. Tiles with a sum
that is not finite are gathered anew, as in the densified CSR product, without a group's filler.
"""

import sympy
import torch
import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.launch.sequence import Launches, Step
from sparsecomp.lowering.sparse.kernels.dense_product import GROUP, tile_count, tile_of
from sparsecomp.lowering.sparse.kernels.epilogue import FINISH, dot, finish, flag, precision
from sparsecomp.lowering.sparse.kernels.product_cost import product_seconds
from sparsecomp.lowering.sparse.spmm_csr import unsupported_dtypes
from sparsecomp.lowering.sparse.spmm_nm import SpmmNM
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.limits import fits_registers, fits_shared
from sparsecomp.lowering.tuning.template import Config, Template

_REPAIR_ROWS = 16


@triton.jit
def spread(values_ptr, indices_ptr, v_rows, i_rows, first, GROUPS, mask, BM: tl.constexpr, G: tl.constexpr,
           KEEP: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """A dense tile (BM, G · WIDE) of G groups from `first`: each value at its place in its group, zero elsewhere."""
    place = tl.arange(0, WIDE)[None, None, :]
    w = tl.zeros((BM, G, WIDE), values_ptr.dtype.element_ty)
    if KEEP == 1 or KEEP == 2 or KEEP == 4:
        entry = first * KEEP + tl.arange(0, G * KEEP)
        ok = mask & (entry < GROUPS * KEEP)[None, :]
        values = tl.load(values_ptr + v_rows + entry[None, :], mask=ok, other=0.0)
        places = tl.load(indices_ptr + i_rows + entry[None, :], mask=ok, other=0)
        if KEEP == 1:
            w = _put(w, values, places, place)
        if KEEP == 2:
            v0, v1 = tl.split(tl.reshape(values, (BM, G, 2)))
            p0, p1 = tl.split(tl.reshape(places, (BM, G, 2)))
            w = _put(_put(w, v0, p0, place), v1, p1, place)
        if KEEP == 4:
            even, odd = tl.split(tl.reshape(values, (BM, G, 2, 2)))
            even_p, odd_p = tl.split(tl.reshape(places, (BM, G, 2, 2)))
            v0, v2 = tl.split(even)
            v1, v3 = tl.split(odd)
            p0, p2 = tl.split(even_p)
            p1, p3 = tl.split(odd_p)
            w = _put(_put(w, v0, p0, place), v1, p1, place)
            w = _put(_put(w, v2, p2, place), v3, p3, place)
    else:
        group = first + tl.arange(0, G)
        ok = mask & (group < GROUPS)[None, :]
        for t in tl.static_range(KEEP):
            values = tl.load(values_ptr + v_rows + (group * KEEP + t)[None, :], mask=ok, other=0.0)
            places = tl.load(indices_ptr + i_rows + (group * KEEP + t)[None, :], mask=ok, other=0)
            w = _put(w, values, places, place)
    return tl.reshape(w, (BM, G * WIDE))


@triton.jit
def _put(w, values, places, place):
    """`w` with values (BM, G) at their places."""
    return tl.where(places.to(tl.int32)[:, :, None] == place, values[:, :, None], w)


@triton.jit
def spmm_nm_kernel(
    values_ptr, indices_ptr, dense_ptr, bias_ptr, residual_ptr, out_ptr, bad_ptr,
    M, N, K, groups, values_b, values_m, indices_m, dense_b, dense_k, dense_n,
    out_b, out_m, out_n, res_b, res_m, res_n, scale,
    BIAS_ROWS: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, KEEP: tl.constexpr,
    MEMBERS: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, G: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """A tile of BM by BN, G groups a step. KEEP of MEMBERS columns are stored; WIDE is MEMBERS up to a power of two."""
    batch, block_m, block_n = tile_of(tl.program_id(0), M, N, BM, BN, GROUP)
    rows = block_m * BM + tl.arange(0, BM)
    cols = block_n * BN + tl.arange(0, BN)
    row_ok = (rows < M)[:, None]
    col_ok = (cols < N)[None, :]
    v_rows = batch * values_b + rows.to(tl.int64)[:, None] * values_m
    i_rows = rows.to(tl.int64)[:, None] * indices_m
    b_cols = dense_ptr + batch * dense_b + cols.to(tl.int64)[None, :] * dense_n
    depth = tl.arange(0, G * WIDE)
    offset = depth // WIDE * MEMBERS + depth % WIDE
    acc = tl.zeros((BM, BN), tl.float32)
    for first in range(0, groups, G):
        a = spread(values_ptr, indices_ptr, v_rows, i_rows, first, groups, row_ok, BM, G, KEEP, WIDE)
        k = first * MEMBERS + offset
        ok = k < K
        if WIDE > MEMBERS:
            ok = ok & (depth % WIDE < MEMBERS)
        b = tl.load(b_cols + k.to(tl.int64)[:, None] * dense_k, mask=ok[:, None] & col_ok, other=0.0)
        acc = dot(a, b, acc, PRECISION)
    mask = row_ok & col_ok
    flag(acc, mask, bad_ptr)
    finish(
        acc, bias_ptr, residual_ptr, out_ptr, batch, rows, cols, mask,
        out_b, out_m, out_n, res_b, res_m, res_n, scale, BIAS_ROWS, ACTIVATION,
    )  # fmt: skip


@triton.jit
def nm_repair_kernel(
    values_ptr, indices_ptr, dense_ptr, bias_ptr, residual_ptr, out_ptr, bad_ptr,
    M, N, K, groups, values_b, values_m, indices_m, dense_b, dense_k, dense_n,
    out_b, out_m, out_n, res_b, res_m, res_n, scale,
    BIAS_ROWS: tl.constexpr, ACTIVATION: tl.constexpr, KEEP: tl.constexpr, MEMBERS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Gathers the flagged tiles of `spmm_nm_kernel`; a program does ROWS rows of a tile, or nothing."""
    tile = tl.program_id(0) // (BM // ROWS)
    if tl.load(bad_ptr + tile) == 0:
        return
    batch, block_m, block_n = tile_of(tile, M, N, BM, BN, GROUP)
    cols = block_n * BN + tl.arange(0, BN)
    col_ok = (cols < N)[None, :]
    first = block_m * BM + tl.program_id(0) % (BM // ROWS) * ROWS
    b_cols = dense_ptr + batch * dense_b + cols.to(tl.int64)[None, :] * dense_n
    for row in range(first, tl.minimum(first + ROWS, M)):
        at = tl.cast(row, tl.int64)
        acc = tl.zeros((E, BN), tl.float32)
        for start in range(0, groups * KEEP, E):
            entry = start + tl.arange(0, E)
            known = entry < groups * KEEP
            k = tl.load(indices_ptr + at * indices_m + entry, mask=known, other=0).to(tl.int32)
            k += entry // KEEP * MEMBERS
            ok = known & (k < K)
            value = tl.load(values_ptr + batch * values_b + at * values_m + entry, mask=ok, other=0.0)
            stored = (value != 0.0)[:, None] & col_ok
            b = tl.load(b_cols + k.to(tl.int64)[:, None] * dense_k, mask=stored, other=0.0)
            acc += value.to(tl.float32)[:, None] * b.to(tl.float32)
        finish(
            tl.sum(acc, 0)[None, :], bias_ptr, residual_ptr, out_ptr, batch, row + tl.zeros((1,), tl.int32), cols,
            col_ok, out_b, out_m, out_n, res_b, res_m, res_n, scale, BIAS_ROWS, ACTIVATION,
        )  # fmt: skip


def _refuse(problem: SpmmNM, device: Device) -> str | None:
    p = problem
    if p.dtype != p.dense_dtype:
        return f"tensor cores multiply one dtype, not {p.dtype} with {p.dense_dtype}"
    return unsupported_dtypes(p.dtype, p.dense_dtype, p.output.dtype)


def _space(problem: SpmmNM, device: Device) -> list[Config]:
    """BK is the depth of a step, groups padded to powers of two."""
    p, wide = problem, triton.next_power_of_2(problem.group)
    # float32 is split in two; older cards hold both operands of a product in registers
    held = 1 if p.dtype != "float32" else 2 if device.is_hopper else 3
    itemsize = 4 if p.dtype == "float32" else 2
    n = max(triton.next_power_of_2(p.n), 16)
    m = max(triton.next_power_of_2(p.m), 16)
    shapes = [(bm, bn) for bm in (16, 32, 64, 128) for bn in (16, 32, 64, 128, 256)
              if bn <= n and (bn >= 64 or bn == n) and bm <= m and (bm >= 64 or bn <= 32 or bm == m)]  # fmt: skip
    found = [
        Config(BM=bm, BN=bn, BK=bk, G=bk // wide, warps=warps, stages=stages)
        for bm, bn in shapes for bk in ((32, 64) if itemsize == 4 else (64, 128, 256)) for warps in (4, 8)
        for stages in (3, 4, 5)
        if bm * bk <= 64 * 32 * warps and bm * bn >= 64 * warps and (bk <= 64 or bn <= 32)
        and fits_registers(bm * bn * held + bm * bk, warps)
        and fits_shared((stages + 1) * bk * (bm + bn) * itemsize, device)
    ]  # fmt: skip
    return found or [Config(BM=16, BN=16, BK=64, G=64 // wide, warps=4, stages=3)]


def _prepare(problem: SpmmNM, config: Config) -> Launches:
    p = problem
    tiles = p.batch * tile_count(p.m, p.n, config)
    numbers = (p.m, p.n, p.k, p.groups, p.values_batch, p.values_row, p.indices_row, *p.dense, *p.output.numbers)
    shared = {**p.output.constants, "KEEP": p.keep, "MEMBERS": p.group, "GROUP": GROUP}
    shared |= {"BM": config["BM"], "BN": config["BN"]}
    wide = triton.next_power_of_2(p.group)
    constants = {**shared, "PRECISION": precision(p.dtype), "WIDE": wide, "G": config["G"]}
    options = {"num_warps": config["warps"], "num_stages": config["stages"]}
    product = Launch(spmm_nm_kernel, (tiles,), numbers, constants, **options)
    grid = (tiles * (config["BM"] // _REPAIR_ROWS),)
    constants = {**shared, "ROWS": _REPAIR_ROWS, "E": max(1024 // config["BN"], 8)}
    repair = Launch(nm_repair_kernel, grid, numbers, constants, num_warps=4)
    steps = [Step(launch, (0, 1, 2, 3, 4, 5, 6)) for launch in (product, repair)]
    return Launches([((tiles,), torch.int8)], steps)


_m, _k, _n, _batch, _keep, _group, _groups, _itemsize = sizes("m k n batch keep group groups itemsize")
_bm, _bk, _g, _selects = sizes("BM BK G selects")

_stored = _m * _k * _keep / _group * (_itemsize + 1)
# a step's values are spread by selects of every place with every value
_spreading = _bm * _bk * _keep * 3 / _selects

SPMM_NM = Template(
    name="spmm_nm",
    op="spmm_nm",
    sources=(spmm_nm_kernel, nm_repair_kernel, spread, _put, tile_of, dot, flag, *FINISH),
    refuse=_refuse,
    space=_space,
    cost=Cost(
        bytes=_batch * (_stored + (_k + _m) * _n * _itemsize),
        launches=sympy.Integer(2),
        seconds=product_seconds(sympy.ceiling(_groups / _g) * _bk, _spreading),
    ),
    prepare=_prepare,
)
