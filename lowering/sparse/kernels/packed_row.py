"""A layer of one row by a 2:4 weight with packed positions, or a pair of them.

A thread takes whole groups: a word of two values and one of four numbers of x, which it shifts by a position so that
what belongs to a value comes to the front. What is read of a step is read before the step in front of it is multiplied.
"""

import sympy
import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.sparse.kernels.epilogue import FINISH, FINISH_PAIR, finish, finish_pair
from sparsecomp.lowering.sparse.packed_linear import LANES, STEPS, PackedLinear
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template


@triton.jit
def _place(turn, step, member, BLOCKS: tl.constexpr, RUN: tl.constexpr, STEPS: tl.constexpr):
    """Where a step of some blocks side by side reads what is RUN wide in each of them."""
    return ((turn * BLOCKS + member // RUN) * STEPS + step) * RUN + member % RUN


@triton.jit
def _following(turn, step, last, STEPS: tl.constexpr):
    """Turn and step behind these; what is loaded behind the last turn is loaded in vain."""
    if step + 1 < STEPS:
        following = turn
    else:
        following = tl.minimum(turn + 1, last)
    return following, (step + 1) % STEPS


@triton.jit
def _load_groups(array_ptr, rows, group, groups, KIND: tl.constexpr, EVEN: tl.constexpr):
    """(rows, groups of a step) of an array with a number of type KIND for each group; 0 where there is none."""
    places = array_ptr.to(tl.pointer_type(KIND), bitcast=True) + rows.to(tl.int64)[:, None] * groups + group[None, :]
    if EVEN:
        found = tl.load(places)
    else:
        found = tl.load(places, mask=(group < groups)[None, :], other=0)
    return found


@triton.jit
def number_of(word, like_ptr):
    """The lowest 16 bits as a number, in float32."""
    return word.to(tl.int16).to(like_ptr.dtype.element_ty, bitcast=True).to(tl.float32)


@triton.jit
def _term(acc, value, word, like_ptr):
    """acc + value · the lowest number in `word`, unless the value is filler."""
    return tl.fma(value, tl.where(value != 0.0, number_of(word, like_ptr), 0.0), acc)


@triton.jit
def _terms(acc, values, positions, x, like_ptr):
    """acc + both values of each group times what of x belongs to them; shapes broadcast."""
    acc = _term(acc, number_of(values, like_ptr), x >> ((positions << 4) & 48).to(tl.int64), like_ptr)
    return _term(acc, number_of(values >> 16, like_ptr), x >> ((positions << 2) & 48).to(tl.int64), like_ptr)


@triton.jit
def row_sums(
    values_ptr, positions_ptr, x_ptr, rows, M, groups, words, turns,
    EVEN: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The sums of rows of a weight with x, BLOCKS blocks of columns at a time."""
    read = tl.minimum(rows, M - 1)
    lane = tl.arange(0, BLOCKS * LANES)
    everywhere = tl.zeros((ROWS,), tl.int32)  # read by each thread for itself, x lies among threads as values do
    acc = tl.zeros((ROWS, BLOCKS * LANES), tl.float32)
    first = _place(0, 0, lane, BLOCKS, LANES, STEPS)
    values = _load_groups(values_ptr, read, first, groups, tl.int32, EVEN)
    for turn in range(turns):
        word = turn * BLOCKS * LANES + lane
        positions = _load_groups(positions_ptr, read, word, words, tl.int32, EVEN)
        for step in tl.static_range(STEPS):
            group = _place(turn, step, lane, BLOCKS, LANES, STEPS)
            x = _load_groups(x_ptr, everywhere, group, groups, tl.int64, EVEN)
            next_turn, next_step = _following(turn, step, turns - 1, STEPS)
            behind = _place(next_turn, next_step, lane, BLOCKS, LANES, STEPS)
            ahead = _load_groups(values_ptr, read, behind, groups, tl.int32, EVEN)
            acc = _terms(acc, values, positions >> 4 * step, x, x_ptr)
            values = ahead
    return tl.sum(acc, 1)


ROW_SUMS = (row_sums, _place, _following, _load_groups, number_of, _term, _terms)
"""What gives the sums."""


@triton.jit
def packed_row_kernel(
    values_ptr, positions_ptr, other_values_ptr, other_positions_ptr, x_ptr, bias_ptr, other_bias_ptr, residual_ptr,
    out_ptr, M, groups, words, turns, out_b, out_m, out_n, res_b, res_m, res_n, scale,
    BIAS_ROWS: tl.constexpr, ACTIVATION: tl.constexpr, PAIR: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
    BLOCKS: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of the weight, or of each of a PAIR, times one row of x."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    one = tl.zeros((1,), tl.int32)
    mask = (rows < M)[:, None]
    total = row_sums(
        values_ptr, positions_ptr, x_ptr, rows, M, groups, words, turns, EVEN, ROWS, BLOCKS, LANES, STEPS
    )  # fmt: skip
    if PAIR:
        other = row_sums(
            other_values_ptr, other_positions_ptr, x_ptr, rows, M, groups, words, turns, EVEN, ROWS, BLOCKS, LANES,
            STEPS,
        )  # fmt: skip
        finish_pair(
            total[:, None], other[:, None], bias_ptr, other_bias_ptr, out_ptr, rows, one, mask, out_m, out_n, ACTIVATION
        )
    else:
        finish(
            total[:, None], bias_ptr, residual_ptr, out_ptr, 0, rows, one, mask,
            out_b, out_m, out_n, res_b, res_m, res_n, scale, BIAS_ROWS, ACTIVATION,
        )  # fmt: skip


def _refuse(problem: PackedLinear, device: Device) -> str | None:
    if problem.order != "lanes":
        return f"its positions lie by {problem.order}, not by lanes"
    return problem.refusal


def _usual_config(problem: PackedLinear) -> Config:
    """The best of all, or within 2 % of it, for 11008x4096, 4096x11008 and 28672x8192 (H200)."""
    blocks = min(triton.next_power_of_2(problem.turns), 4)
    return Config(ROWS=4 // blocks, BLOCKS=blocks, warps=1)


def _space(problem: PackedLinear, device: Device) -> list[Config]:
    """A thread has 4 to 16 groups of a step; the usual configuration comes first."""
    usual = _usual_config(problem)
    found = [
        Config(ROWS=rows, BLOCKS=blocks, warps=warps)
        for rows in (1, 2, 4, 8, 16) for blocks in (1, 2, 4) for warps in (1, 2, 4)
        if 4 * 32 * warps <= rows * blocks * LANES <= 16 * 32 * warps
        and blocks <= triton.next_power_of_2(problem.turns)
    ]  # fmt: skip
    return [usual, *(one for one in found if one != usual)]


def _prepare(problem: PackedLinear, config: Config) -> Launch:
    p, blocks = problem, config["BLOCKS"]
    numbers = (p.m, p.groups, LANES * p.turns, triton.cdiv(p.turns, blocks), *p.output.numbers)
    constants = {
        **p.output.constants, "PAIR": p.pair, "EVEN": p.groups % (blocks * LANES * STEPS) == 0, "ROWS": config["ROWS"],
        "BLOCKS": blocks, "LANES": LANES, "STEPS": STEPS,
    }  # fmt: skip
    return Launch(packed_row_kernel, (triton.cdiv(p.m, config["ROWS"]),), numbers, constants, num_warps=config["warps"])


_stored, _turns = sizes("stored_bytes turns")
_rows, _blocks, _warps = sizes("ROWS BLOCKS warps")
_usual_blocks = sympy.Piecewise((1, _turns < 2), (2, _turns < 3), (4, True))
_far = sum(abs(sympy.log(one)) for one in (_rows * _usual_blocks / 4, _blocks / _usual_blocks, _warps))

PACKED_ROW = Template(
    name="packed_row",
    op="packed_linear",
    sources=(
        packed_row_kernel, *ROW_SUMS, *FINISH, *FINISH_PAIR,
    ),
    refuse=_refuse,
    space=_space,
    # 17.2 us for 48 MiB and 65.6 us for 252 MiB (H200)
    cost=Cost(bytes=_stored * (1 + _far / 20), seconds=sympy.Float(3.4e-6)),
    prepare=_prepare,
)  # fmt: skip
