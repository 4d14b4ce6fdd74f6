"""Every configuration of the kernels of attention over listed blocks on one case, to hold the estimates against.

Worker processes compile them side by side into Triton's cache; then one process times them.
"""

import multiprocessing
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.attention.cases import CASES, Case
from bench.timing import graph_ms
from sparsecomp.lowering.attention.block_attention import BLOCK_ATTENTION
from sparsecomp.lowering.attention.block_attention_gradients import ATTENTION_BY_KEY, ATTENTION_BY_QUERY
from sparsecomp.lowering.attention.problem import problem_of
from sparsecomp.lowering.cache.signature import device_of
from sparsecomp.lowering.tuning.ceilings import card_of
from sparsecomp.lowering.tuning.cost import seconds
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.lowering.tuning.trial import first_line
from sparsecomp.ops import block_attention
from sparsecomp.reference.attention.block_attention import Scoring
from sparsecomp.reference.attention.blocks import blocks_of

Row = dict[str, Any]
TIMED = ((0, (64, 64)), (2, (128, 128)), (2, (64, 64)))
"""Places of the cases that are timed, the short window and the long one of wide heads, and their blocks."""


def run(workers: int) -> Iterator[Row]:
    """A row a case, block and operation: milliseconds by configuration, the fastest first, and its estimate.

    Args:
        workers: processes that compile side by side.
    """
    jobs = [(place, block, share, workers) for place, block in TIMED for share in range(workers)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.starmap(_compile, jobs, chunksize=1)
    for place, block in TIMED:
        yield from _rows(CASES[place], block)


def _compile(place: int, block: tuple[int, int], share: int, workers: int) -> None:
    for operation, problem, tensors in _problems(CASES[place], block):
        for candidate in operation.candidates(problem, device_of(torch.device("cuda", 0)))[share::workers]:
            try:
                candidate.template.prepare(problem, candidate.config)(*tensors)
            except Exception as error:
                print(candidate.name, first_line(error), flush=True)


def _rows(case: Case, block: tuple[int, int]) -> Iterator[Row]:
    for operation, problem, tensors in _problems(case, block):
        times: dict[str, float] = {}
        estimates: dict[str, float] = {}
        for candidate in operation.candidates(problem, device_of(torch.device("cuda", 0))):
            estimates[str(candidate.config)] = seconds(candidate, problem, card_of(torch.device("cuda", 0))) * 1e3
            try:
                call = partial(candidate.template.prepare(problem, candidate.config), *tensors)
                times[str(candidate.config)] = graph_ms([call] * 3, 8)
            except Exception as error:
                print(candidate.name, first_line(error), flush=True)
        fastest = sorted(times, key=lambda name: times[name])
        print(f"{case.name} {block} {operation.name}", flush=True)
        for name in fastest[:8]:
            print(f"  {times[name]:8.4f} ms, estimate {estimates[name]:8.4f}: {name}", flush=True)
        first = min(times, key=lambda name: estimates[name])
        print(f"  first by estimate: {times[first]:8.4f} ms: {first}", flush=True)
        yield {"case": case.name, "block": block, "operation": operation.name,
               "ms": {name: [round(times[name], 4), round(estimates[name], 4)] for name in fastest}}  # fmt: skip


def _problems(case: Case, block: tuple[int, int]) -> Iterator[tuple[Operation[Any], Any, tuple[Tensor | None, ...]]]:
    """The three operations' problems of a case, with their operands."""
    q, k, v, grad = (one.detach() for one in case.operands())
    blocks = list(blocks_of(case.dense(), block)[4:])
    scoring = Scoring(case.depth**-0.5)
    out, logsumexp = block_attention(q, k, v, blocks_of(case.dense(), block))
    delta = (grad.float() * out.float()).sum(-1)
    by_q, by_k, by_v, result, sums = map(torch.empty_like, (q, k, v, out, logsumexp))
    yield (BLOCK_ATTENTION, problem_of(q, k, v, blocks, scoring, (q, k, v, result)),
           (q, k, v, *blocks[:5], None, None, None, result, sums))  # fmt: skip
    yield (ATTENTION_BY_QUERY, problem_of(q, k, v, blocks, scoring, (q, k, v, grad, out, by_q)),
           (q, k, v, grad, out, logsumexp, None, *blocks[:5], None, None, None, by_q,
            torch.empty_like(delta)))  # fmt: skip
    yield (ATTENTION_BY_KEY, problem_of(q, k, v, blocks, scoring, (q, k, v, grad, by_k, by_v)),
           (q, k, v, grad, logsumexp, delta, *blocks[5:], None, None, None, by_k, by_v))  # fmt: skip
