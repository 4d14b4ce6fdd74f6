"""Attention over listed pairs with an online softmax, some queries a program."""

import sympy
import triton
import triton.language as tl

from sparsecomp.lowering.attention.element_attention import ElementAttention
from sparsecomp.lowering.attention.kernels.block_tiles import LN_2, LOG2_E, shaped
from sparsecomp.lowering.attention.kernels.element_tiles import (
    cost_by_elements,
    element_constants,
    element_space,
    gathered_rows,
    own_rows,
    store_own,
)
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.tuning.cost import sizes
from sparsecomp.lowering.tuning.template import Config, Template


@triton.jit
def element_attention_kernel(
    q_ptr, k_ptr, v_ptr, pointers_ptr, index_ptr, alibi_ptr, out_ptr, logsumexp_ptr, HEADS, Q_LEN, K_LEN, scale, cap,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row, list_batch,
    list_head, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, CAPPED: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """BM queries of one head."""
    query = tl.program_id(0) * BM + tl.arange(0, BM)
    head, batch = (tl.program_id(1) % HEADS).to(tl.int64), (tl.program_id(1) // HEADS).to(tl.int64)
    place, depth, v_depth = tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BDV)
    q = own_rows(q_ptr + batch * q_batch + head * q_head, query, q_row, depth, Q_LEN, D)
    k_ptr += batch * k_batch + head // GROUP * k_head
    v_ptr += batch * v_batch + head // GROUP * v_head
    pointers_ptr += batch * list_batch + head * list_head
    inside = query < Q_LEN
    begin = tl.load(pointers_ptr + query, mask=inside, other=0)
    end = tl.load(pointers_ptr + query + 1, mask=inside, other=0)
    slope = 0.0
    if BIASED:
        slope = tl.load(alibi_ptr + head) * LOG2_E

    acc = tl.zeros((BM, BN, BDV), tl.float32)
    total = tl.zeros((BM, BN), tl.float32)
    top = tl.full((BM, BN), float("-inf"), tl.float32)
    for start in range(0, tl.max(end - begin), BN):
        entry = begin[:, None] + start + place[None, :]
        there = entry < end[:, None]
        key = tl.load(index_ptr + entry, mask=there, other=0)
        k = gathered_rows(k_ptr, key, there, k_row, depth, D, BD)
        v = gathered_rows(v_ptr, key, there, v_row, v_depth, DV, BDV)
        score = tl.sum(q[:, None, :] * k, 2)
        score, _ = shaped(score, scale * LOG2_E, cap, slope, query[:, None], key, CAPPED, BIASED)
        score = tl.where(there, score, float("-inf"))
        higher = tl.maximum(top, score)
        # no score yet but -inf: any finite number in its place gives weights of zero
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.math.exp2(score - shift)
        shrink = tl.math.exp2(top - shift)
        total = total * shrink + weight
        acc = acc * shrink[:, :, None] + weight[:, :, None] * v
        top = higher

    greatest = tl.max(top, 1)
    shift = tl.where(greatest == float("-inf"), 0.0, greatest)
    share = tl.math.exp2(top - shift[:, None])
    total = tl.sum(total * share, 1)
    some = tl.where(total == 0.0, 1.0, total)
    out = tl.sum(acc * share[:, :, None], 1) / some[:, None]
    store_own(out_ptr + batch * out_batch + head * out_head, out, query, out_row, v_depth, Q_LEN, DV)
    sums = tl.where(total == 0.0, float("-inf"), (shift + tl.math.log2(some)) * LN_2)
    tl.store(logsumexp_ptr + (batch * HEADS + head) * Q_LEN + query, sums, mask=inside)


def _prepare(problem: ElementAttention, config: Config) -> Launch:
    p = problem
    grid = (triton.cdiv(p.q_len, config["BM"]), p.heads * p.batch)
    return Launch(
        element_attention_kernel, grid, p.numbers(p.q_len), element_constants(p, config), num_warps=config["warps"],
        num_stages=config["stages"],
    )  # fmt: skip


_q_len, _row = sizes("q_len row")

ELEMENT_ATTENTION = Template(
    name="element_attention",
    op="element_attention",
    sources=(element_attention_kernel, gathered_rows, own_rows, store_own, shaped),
    space=lambda problem, device: element_space(problem, 32),
    cost=cost_by_elements(_q_len, _row, 3, sympy.Integer(1)),
    prepare=_prepare,
)
