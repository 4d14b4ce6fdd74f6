"""The gradients of attention over listed pairs: by queries with delta, and by keys and values, some lines a program."""

import sympy
import triton
import triton.language as tl

from sparsecomp.lowering.attention.element_attention import ElementAttention
from sparsecomp.lowering.attention.kernels.block_tiles import LOG2_E, shaped
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
def elements_by_query_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, out_ptr, logsumexp_ptr, grad_logsumexp_ptr, pointers_ptr, index_ptr, alibi_ptr,
    by_q_ptr, delta_ptr, HEADS, Q_LEN, K_LEN, scale, cap, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch,
    v_head, v_row, grad_batch, grad_head, grad_row, out_batch, out_head, out_row, by_batch, by_head, by_row, list_batch,
    list_head, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, CAPPED: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """BM queries of one head."""
    query = tl.program_id(0) * BM + tl.arange(0, BM)
    head, batch = (tl.program_id(1) % HEADS).to(tl.int64), (tl.program_id(1) // HEADS).to(tl.int64)
    place, depth, v_depth = tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BDV)
    q = own_rows(q_ptr + batch * q_batch + head * q_head, query, q_row, depth, Q_LEN, D)
    grad = own_rows(grad_ptr + batch * grad_batch + head * grad_head, query, grad_row, v_depth, Q_LEN, DV)
    out = own_rows(out_ptr + batch * out_batch + head * out_head, query, out_row, v_depth, Q_LEN, DV)
    inside = query < Q_LEN
    of_head = (batch * HEADS + head) * Q_LEN
    delta = tl.sum(grad * out, 1)
    if grad_logsumexp_ptr is not None:
        delta -= tl.load(grad_logsumexp_ptr + of_head + query, mask=inside, other=0.0)
    tl.store(delta_ptr + of_head + query, delta, mask=inside)
    logsumexp = tl.load(logsumexp_ptr + of_head + query, mask=inside, other=0.0)
    # of a query that keeps nothing: any finite number
    logsumexp = tl.where(logsumexp == float("-inf"), 0.0, logsumexp) * LOG2_E
    k_ptr += batch * k_batch + head // GROUP * k_head
    v_ptr += batch * v_batch + head // GROUP * v_head
    pointers_ptr += batch * list_batch + head * list_head
    begin = tl.load(pointers_ptr + query, mask=inside, other=0)
    end = tl.load(pointers_ptr + query + 1, mask=inside, other=0)
    slope = 0.0
    if BIASED:
        slope = tl.load(alibi_ptr + head) * LOG2_E

    acc = tl.zeros((BM, BN, BD), tl.float32)
    for start in range(0, tl.max(end - begin), BN):
        entry = begin[:, None] + start + place[None, :]
        there = entry < end[:, None]
        key = tl.load(index_ptr + entry, mask=there, other=0)
        k = gathered_rows(k_ptr, key, there, k_row, depth, D, BD)
        v = gathered_rows(v_ptr, key, there, v_row, v_depth, DV, BDV)
        score, slope_of_cap = shaped(
            tl.sum(q[:, None, :] * k, 2), scale * LOG2_E, cap, slope, query[:, None], key, CAPPED, BIASED
        )  # fmt: skip
        weight = tl.where(there, tl.math.exp2(score - logsumexp[:, None]), 0.0)
        by_score = weight * (tl.sum(grad[:, None, :] * v, 2) - delta[:, None])
        if CAPPED:
            by_score *= slope_of_cap
        acc += by_score[:, :, None] * k
    by_q = tl.sum(acc, 1) * scale
    store_own(by_q_ptr + batch * by_batch + head * by_head, by_q, query, by_row, depth, Q_LEN, D)


@triton.jit
def elements_by_key_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, logsumexp_ptr, delta_ptr, pointers_ptr, index_ptr, alibi_ptr, by_k_ptr, by_v_ptr,
    HEADS, Q_LEN, K_LEN, scale, cap, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, grad_batch,
    grad_head, grad_row, by_k_batch, by_k_head, by_k_row, by_v_batch, by_v_head, by_v_row, list_batch, list_head,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, CAPPED: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """BM keys of one head of keys, which add up over all heads of queries that read it, one after another."""
    key = tl.program_id(0) * BM + tl.arange(0, BM)
    kv_heads = HEADS // GROUP
    kv_head, batch = (tl.program_id(1) % kv_heads).to(tl.int64), (tl.program_id(1) // kv_heads).to(tl.int64)
    place, depth, v_depth = tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BDV)
    k = own_rows(k_ptr + batch * k_batch + kv_head * k_head, key, k_row, depth, K_LEN, D)
    v = own_rows(v_ptr + batch * v_batch + kv_head * v_head, key, v_row, v_depth, K_LEN, DV)
    by_k = tl.zeros((BM, BN, BD), tl.float32)
    by_v = tl.zeros((BM, BN, BDV), tl.float32)
    for beside in range(GROUP):
        head = kv_head * GROUP + beside
        of_q, of_grad = q_ptr + batch * q_batch + head * q_head, grad_ptr + batch * grad_batch + head * grad_head
        of_head = (batch * HEADS + head) * Q_LEN
        own = pointers_ptr + batch * list_batch + head * list_head
        begin = tl.load(own + key, mask=key < K_LEN, other=0)
        end = tl.load(own + key + 1, mask=key < K_LEN, other=0)
        slope = 0.0
        if BIASED:
            slope = tl.load(alibi_ptr + head) * LOG2_E
        for start in range(0, tl.max(end - begin), BN):
            entry = begin[:, None] + start + place[None, :]
            there = entry < end[:, None]
            query = tl.load(index_ptr + entry, mask=there, other=0)
            q = gathered_rows(of_q, query, there, q_row, depth, D, BD)
            grad = gathered_rows(of_grad, query, there, grad_row, v_depth, DV, BDV)
            logsumexp = tl.load(logsumexp_ptr + of_head + query, mask=there, other=0.0)
            delta = tl.load(delta_ptr + of_head + query, mask=there, other=0.0)
            score, slope_of_cap = shaped(
                tl.sum(k[:, None, :] * q, 2), scale * LOG2_E, cap, slope, query, key[:, None], CAPPED, BIASED
            )  # fmt: skip
            # of a query whose scores are all -inf: any finite number
            logsumexp = tl.where(logsumexp == float("-inf"), 0.0, logsumexp) * LOG2_E
            weight = tl.where(there, tl.math.exp2(score - logsumexp), 0.0)
            by_score = weight * (tl.sum(v[:, None, :] * grad, 2) - delta)
            if CAPPED:
                by_score *= slope_of_cap
            by_k += by_score[:, :, None] * q
            by_v += weight[:, :, None] * grad
    of_k = by_k_ptr + batch * by_k_batch + kv_head * by_k_head
    store_own(of_k, tl.sum(by_k, 1) * scale, key, by_k_row, depth, K_LEN, D)
    of_v = by_v_ptr + batch * by_v_batch + kv_head * by_v_head
    store_own(of_v, tl.sum(by_v, 1), key, by_v_row, v_depth, K_LEN, DV)


def _prepare_by_query(problem: ElementAttention, config: Config) -> Launch:
    return _launch(elements_by_query_kernel, problem, config, problem.q_len, problem.heads)


def _prepare_by_key(problem: ElementAttention, config: Config) -> Launch:
    return _launch(elements_by_key_kernel, problem, config, problem.k_len, problem.heads // problem.group)


def _launch(kernel: object, problem: ElementAttention, config: Config, lines: int, heads: int) -> Launch:
    return Launch(
        kernel, (triton.cdiv(lines, config["BM"]), heads * problem.batch), problem.numbers(lines),
        element_constants(problem, config), num_warps=config["warps"], num_stages=config["stages"],
    )  # fmt: skip


_q_len, _k_len, _row, _column, _group = sizes("q_len k_len row column group")

ELEMENTS_BY_QUERY = Template(
    name="elements_by_query",
    op="elements_by_query",
    sources=(elements_by_query_kernel, gathered_rows, own_rows, store_own, shaped),
    space=lambda problem, device: element_space(problem, 16),
    cost=cost_by_elements(_q_len, _row, 3, sympy.Integer(1)),
    prepare=_prepare_by_query,
)
ELEMENTS_BY_KEY = Template(
    name="elements_by_key",
    op="elements_by_key",
    sources=(elements_by_key_kernel, gathered_rows, own_rows, store_own, shaped),
    space=lambda problem, device: element_space(problem, 8),
    cost=cost_by_elements(_k_len, _column, 4, _group),
    prepare=_prepare_by_key,
)
