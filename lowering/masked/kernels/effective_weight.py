"""The effective weight in one pass, its inverse in another, and the pass that packs a mask for both.

A program takes rows of 32 neighbours, a word of the mask each. An element's place in theta is the number of pruned
elements before its word, plus those before it within the word, which a population count gives. Values are copied as
integers of their size, so that no dtype is rounded.
"""

import sympy
import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.masked.effective_weight import WORD, Merge, PackMask, Split
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template


@triton.jit
def pack_mask_kernel(mask_ptr, table_ptr, numel, words, ROWS: tl.constexpr):
    """Bits of a word in the table's first row, its pruned elements in the second, one place on."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    bit = tl.arange(0, 32)[None, :]
    local = row[:, None] * 32 + bit
    inside = local < tl.minimum(numel - first * 32, ROWS * 32).to(tl.int32)
    active = tl.load(mask_ptr + first * 32 + local, mask=inside, other=0) != 0
    word = tl.sum(active.to(tl.int32) << bit, 1)
    pruned = tl.sum((inside & ~active).to(tl.int32), 1)
    ok = row < words - first
    tl.store(table_ptr + first + row, word, mask=ok)
    tl.store(table_ptr + words + 2 + first + row, pruned, mask=ok)


@triton.jit
def places(table_ptr, first, words, ROWS: tl.constexpr):
    """Whether each element of rows of 32 is active, and its place in theta if it is not."""
    row = tl.arange(0, ROWS)
    ok = row < words - first
    word = tl.load(table_ptr + first + row, mask=ok, other=0).to(tl.uint32, bitcast=True)[:, None]
    before = tl.load(table_ptr + words + 1 + first + row, mask=ok, other=0)[:, None]
    bit = tl.arange(0, 32).to(tl.uint32)[None, :]
    one = tl.full((1, 1), 1, tl.uint32)
    active = ((word >> bit) & one) != 0
    lower = (one << bit) - one
    # ~word & lower: Triton before 3.9 does not interpret ~ of unsigned numbers
    n = (word & lower) ^ lower
    # the population count, in the form that compilers know
    n = n - ((n >> 1) & 0x55555555)
    n = (n & 0x33333333) + ((n >> 2) & 0x33333333)
    n = (n + (n >> 4)) & 0x0F0F0F0F
    n = (n * 0x01010101) >> 24
    return active, before + n.to(tl.int32)


@triton.jit
def merge_kernel(
    weight_ptr, theta_ptr, table_ptr, out_ptr, numel, pruned, words, ROWS: tl.constexpr, ACTIVE_ONLY: tl.constexpr
):
    """out = weight where the mask is set, the next of theta elsewhere; all bits (a NaN) if theta has another length."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    active, place = places(table_ptr, first, words, ROWS)
    local = tl.arange(0, ROWS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = local < tl.minimum(numel - first * 32, ROWS * 32).to(tl.int32)
    known = tl.load(table_ptr + 2 * tl.cast(words, tl.int64) + 1) == pruned
    limit = tl.where(known, pruned, 0)
    # whole vectors are faster than single elements, unless most of them are not needed
    wanted = inside & active if ACTIVE_ONLY else inside
    weight = tl.load(weight_ptr + first * 32 + local, mask=wanted, other=0)
    theta = tl.load(theta_ptr + place, mask=inside & ~active & (place < limit), other=-1)
    tl.store(out_ptr + first * 32 + local, tl.where(active, weight, theta), mask=inside)


@triton.jit
def split_kernel(whole_ptr, table_ptr, active_ptr, rest_ptr, numel, pruned, words, ROWS: tl.constexpr):
    """active = whole where the mask is set, else 0; rest = the others; all bits if it has another length."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    active, place = places(table_ptr, first, words, ROWS)
    local = tl.arange(0, ROWS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = local < tl.minimum(numel - first * 32, ROWS * 32).to(tl.int32)
    whole = tl.load(whole_ptr + first * 32 + local, mask=inside, other=0)
    if active_ptr is not None:
        tl.store(active_ptr + first * 32 + local, tl.where(active, whole, 0), mask=inside)
    if rest_ptr is not None:
        if tl.load(table_ptr + 2 * tl.cast(words, tl.int64) + 1) == pruned:
            tl.store(rest_ptr + place, whole, mask=inside & ~active)
        else:
            nothing = tl.zeros_like(whole) - 1
            tl.store(rest_ptr + first * 32 + local, nothing, mask=local < pruned - first * 32)


def _grid(numel: int, config: Config) -> tuple[int]:
    return (triton.cdiv(numel, WORD * config["ROWS"]),)


def _prepare_pack(problem: PackMask, config: Config) -> Launch:
    numbers, constants = (problem.numel, problem.words), {"ROWS": config["ROWS"]}
    return Launch(pack_mask_kernel, _grid(problem.numel, config), numbers, constants, num_warps=config["warps"])


def _prepare_merge(problem: Merge, config: Config) -> Launch:
    numbers = (problem.numel, problem.pruned, triton.cdiv(problem.numel, WORD))
    constants = {"ROWS": config["ROWS"], "ACTIVE_ONLY": bool(config["ACTIVE_ONLY"])}
    return Launch(merge_kernel, _grid(problem.numel, config), numbers, constants, num_warps=config["warps"])


def _prepare_split(problem: Split, config: Config) -> Launch:
    numbers = (problem.numel, problem.pruned, triton.cdiv(problem.numel, WORD))
    constants = {"ROWS": config["ROWS"]}
    return Launch(split_kernel, _grid(problem.numel, config), numbers, constants, num_warps=config["warps"])


def _tiles(problem: PackMask | Merge | Split, device: Device) -> list[Config]:
    """Eight to 32 elements a thread."""
    return [
        Config(ROWS=rows, warps=warps)
        for rows in (8, 16, 32, 64, 128) for warps in (1, 2, 4, 8) if 8 <= rows // warps <= 32
    ]  # fmt: skip


def _merge_space(problem: Merge, device: Device) -> list[Config]:
    tiles = _tiles(problem, device)
    # without the weight's inactive sectors there is something to save only where whole ones are inactive
    choices = (0, 1) if problem.pruned > 0.9 * problem.numel else (0,)
    return [Config(ACTIVE_ONLY=only, **tile) for only in choices for tile in tiles]


_numel, _pruned, _itemsize, _rows, _warps = sizes("numel pruned itemsize ROWS warps")
_active, _rest, _active_only, _bandwidth = sizes("active rest ACTIVE_ONLY bandwidth")

# blocks of 1024 elements by four warps keep enough loads in flight
_misfit = 1e-8 * abs(sympy.log(_rows / 32)) + 1e-8 * abs(sympy.log(_warps / 4))
_table = _numel / 4
# rows of theta begin and end within sectors of 32 bytes, which are written in parts: the fewer warps write beside each
# other, the sooner the parts meet in the cache (69, 102, 157 and 187 us for 8, 16, 32 and 64 rows of 4096x4096 float32)
_parts = _rest * _pruned * 5e-12 * abs(sympy.log(_rows / 8)) + 1e-8 * abs(sympy.log(_warps / (_rows / 8)))
# the chance that a sector of 32 bytes holds no active element
_untouched = (_pruned / _numel) ** (32 / _itemsize)

PACK_MASK = Template(
    name="pack_mask",
    op="pack_mask",
    sources=(pack_mask_kernel,),
    space=_tiles,
    cost=Cost(bytes=_numel + _table, seconds=_misfit),
    prepare=_prepare_pack,
)

MERGE = Template(
    name="merge_pruned",
    op="merge_pruned",
    sources=(merge_kernel, places),
    space=_merge_space,
    cost=Cost(
        bytes=_itemsize * (2 * _numel + _pruned) + _table,
        # single elements cost a twentieth more than vectors
        seconds=_misfit + _active_only * _numel * _itemsize * (0.1 - _untouched) / _bandwidth,
    ),
    prepare=_prepare_merge,
)

SPLIT = Template(
    name="split_pruned",
    op="split_pruned",
    sources=(split_kernel, places),
    space=_tiles,
    cost=Cost(
        bytes=_itemsize * ((1 + _active) * _numel + _rest * _pruned) + _table, seconds=_parts + (1 - _rest) * _misfit
    ),
    prepare=_prepare_split,
)
