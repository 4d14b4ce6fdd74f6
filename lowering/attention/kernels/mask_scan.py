"""Block lists of a mask on the device: what each block holds, a program a block, then the lists, a program a row."""

import torch
import triton
import triton.language as tl

from sparsecomp.lowering.attention.mask_scan import MaskScan
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.launch.sequence import Launches, Step, Workspace
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template
from sparsecomp.reference.attention.blocks import EMPTY, FULL, SURELY_ZERO

_FULL, _EMPTY, _LOWEST = tl.constexpr(FULL), tl.constexpr(EMPTY), tl.constexpr(SURELY_ZERO)
_COLUMNS = 1024
_ROWS = 4


@triton.jit
def tops_kernel(
    mask_ptr, top_ptr, HEADS, Q_LEN, K_LEN, batch_stride, head_stride, row_stride, column_stride, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of rows of numbers that are added: NaN if one of them keeps its pair, else the greatest."""
    tiles = tl.cdiv(Q_LEN, ROWS)
    rows = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    leading = (tl.program_id(0) // tiles).to(tl.int64)
    mask_ptr += leading // HEADS * batch_stride + leading % HEADS * head_stride
    row_ptrs = mask_ptr + rows.to(tl.int64)[:, None] * row_stride
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    alive = tl.zeros((ROWS,), tl.int32)
    for first in range(0, K_LEN, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        inside = (rows < Q_LEN)[:, None] & (columns < K_LEN)[None, :]
        added = tl.load(row_ptrs + columns.to(tl.int64)[None, :] * column_stride, mask=inside, other=float("-inf"))
        added = added.to(tl.float32)
        low = added <= _LOWEST  # NaN is not
        top = tl.maximum(top, tl.max(tl.where(low, added, float("-inf")), 1))
        alive = tl.maximum(alive, tl.max(tl.where(low, 0, 1), 1))
    top = tl.where(alive != 0, float("nan"), top)
    tl.store(top_ptr + leading * Q_LEN + rows, top, mask=rows < Q_LEN)


@triton.jit
def kinds_kernel(
    mask_ptr, top_ptr, kind_ptr, bits_ptr, k_bits_ptr, HEADS, Q_LEN, K_LEN, batch_stride, head_stride, row_stride,
    column_stride, Q_BLOCKS, K_BLOCKS, KEPT: tl.constexpr, ADDED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K:
    tl.constexpr,
):  # fmt: skip
    """FULL, EMPTY or the number of a block, and in the last case its bits in both directions."""
    number = tl.program_id(0).to(tl.int64)
    leading = number // (Q_BLOCKS * K_BLOCKS)
    row = (number // K_BLOCKS % Q_BLOCKS * BLOCK_Q).to(tl.int32) + tl.arange(0, BLOCK_Q)
    column = (number % K_BLOCKS * BLOCK_K).to(tl.int32) + tl.arange(0, BLOCK_K)
    mask_ptr += leading // HEADS * batch_stride + leading % HEADS * head_stride
    places = mask_ptr + row.to(tl.int64)[:, None] * row_stride + column.to(tl.int64)[None, :] * column_stride
    inside = (row < Q_LEN)[:, None] & (column < K_LEN)[None, :]
    if ADDED:
        added = tl.load(places, mask=inside, other=0.0).to(tl.float32)
        top = tl.load(top_ptr + leading * Q_LEN + row, mask=row < Q_LEN, other=0.0)[:, None]
        alike = (added == top) & (added > float("-inf"))
        kept = (tl.where(top != top, (added <= _LOWEST) == 0, alike)) & inside
        plain = kept & (added == 0.0)
    else:
        kept = ((tl.load(places, mask=inside, other=0) != 0) == KEPT) & inside
        plain = kept
    kept = kept.to(tl.int32)
    # both counts by one reduction
    counts = tl.sum(kept + plain.to(tl.int32) * 32768)
    some, whole = counts % 32768, counts // 32768
    partial = (some != 0) & (whole != BLOCK_Q * BLOCK_K)
    kind = tl.where(partial, number.to(tl.int32), tl.where(some != 0, _FULL, _EMPTY))
    tl.store(kind_ptr + number, kind)
    if partial:
        bit = tl.arange(0, 32)
        Q_WORDS: tl.constexpr = BLOCK_Q // 32
        K_WORDS: tl.constexpr = BLOCK_K // 32
        words = tl.sum(tl.reshape(kept, (BLOCK_Q, K_WORDS, 32)) << bit[None, None, :], 2)
        at = tl.arange(0, BLOCK_Q)[:, None] * K_WORDS + tl.arange(0, K_WORDS)[None, :]
        tl.store(bits_ptr + number * (BLOCK_Q * K_WORDS) + at, words)
        words = tl.sum(tl.reshape(kept, (Q_WORDS, 32, BLOCK_K)) << bit[None, :, None], 1)
        at = tl.arange(0, BLOCK_K)[None, :] * Q_WORDS + tl.arange(0, Q_WORDS)[:, None]
        tl.store(k_bits_ptr + number * (BLOCK_K * Q_WORDS) + at, words)


@triton.jit
def lists_kernel(
    kind_ptr, count_ptr, partial_ptr, index_ptr, tile_ptr, ROWS, COLUMNS, row_stride, column_stride, WIDE: tl.constexpr
):
    """A row of a map of kinds as a list: blocks kept in part, those kept whole, and behind its end the empty ones."""
    row, leading = tl.program_id(1), tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDE)
    inside = column < COLUMNS
    places = kind_ptr + leading * ROWS * COLUMNS + row * row_stride + column * column_stride
    kind = tl.load(places, mask=inside, other=_EMPTY)
    part, full = (kind >= 0).to(tl.int32), (kind == _FULL).to(tl.int32)
    rest = ((kind == _EMPTY) & inside).to(tl.int32)
    partial, count = tl.sum(part), tl.sum(part) + tl.sum(full)
    full_place, rest_place = partial + tl.cumsum(full, 0), count + tl.cumsum(rest, 0)
    place = tl.where(part != 0, tl.cumsum(part, 0), tl.where(full != 0, full_place, rest_place)) - 1
    listed = leading * ROWS + row
    tl.store(count_ptr + listed, count)
    tl.store(partial_ptr + listed, partial)
    tl.store(index_ptr + listed * COLUMNS + place, column, mask=inside)
    tl.store(tile_ptr + listed * COLUMNS + place, tl.maximum(kind, _FULL), mask=inside)


def _prepare(problem: MaskScan, config: Config) -> Launches:
    """Tensors are the mask and the ten of the lists."""
    p, leading = problem, problem.batch * problem.heads
    rows, columns = p.grid
    numbers = (p.heads, p.q_len, p.k_len, *p.strides)
    fixed = {"KEPT": p.kept, "ADDED": p.dtype != "bool", "BLOCK_Q": p.block_q, "BLOCK_K": p.block_k}
    kinds = Launch(kinds_kernel, (leading * rows * columns,), (*numbers, rows, columns), fixed)
    # heads of all batch entries, and tiles of a few queries, may be more than the second size of a grid can be
    by_query = Launch(lists_kernel, (leading, rows), (rows, columns, columns, 1), _wide(columns))
    by_key = Launch(lists_kernel, (leading, columns), (columns, rows, 1, columns), _wide(rows))
    workspaces: list[Workspace] = [((leading * rows * columns,), torch.int32)]
    kind, top, steps = 11, None, []
    if p.dtype != "bool":
        top = 12
        workspaces.append(((leading * p.q_len,), torch.float32))
        grid = (leading * triton.cdiv(p.q_len, _ROWS),)
        steps.append(Step(Launch(tops_kernel, grid, numbers, {"ROWS": _ROWS, "COLUMNS": _COLUMNS}), (0, top)))
    steps += [Step(kinds, (0, top, kind, 5, 10)), Step(by_query, (kind, 1, 2, 3, 4)), Step(by_key, (kind, 6, 7, 8, 9))]
    return Launches(workspaces, steps)


def _wide(columns: int) -> dict[str, int]:
    return {"WIDE": triton.next_power_of_2(columns)}


_batch, _heads, _q_len, _k_len, _itemsize, _reads = sizes("batch heads q_len k_len itemsize reads")
_block_q, _block_k, _processors = sizes("block_q block_k processors")

MASK_SCAN = Template(
    name="mask_scan",
    op="mask_scan",
    sources=(tops_kernel, kinds_kernel, lists_kernel),
    # a mask is read, and its bits are written in both directions; a program of a block took 0.95 us of a processor of
    # an H200 (masks of 4 and of 64 heads of 4096 tokens)
    cost=Cost(
        bytes=_batch * _heads * _q_len * _k_len * (_reads * _itemsize + 0.25), launches=_reads + 2,
        seconds=9.5e-7 * _batch * _heads * _q_len * _k_len / (_block_q * _block_k * _processors),
    ),
    prepare=_prepare,
)
